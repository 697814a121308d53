"""The advice page in words: the sentence at the top, the facts, and what each picture shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtailor.report.draw import rounded
from fedtailor.report.evidence import number
from fedtailor.task.scores import ACCURACY, SCORES, Metric

CLEAR = 2.0  # standard errors from which on a lead is called clear

VERDICTS = {
    "local": "Do not learn together: train alone",
    "shared": "Learn together, with one model for all",
    "clusters": "Learn together, but inside the groups",
    "between": "Learn together, and let each client keep a model of its own",
}
REGIMES = {
    "local": "training alone is best",
    "shared": "one model for all is best",
    "clusters": "one model per group is best",
    "between": "personal models that lean on a shared one are best",
}
MEANINGS = {
    "spread": "(MINIMAX writes R²) mean squared distance of the clients' true parameters to their mean, estimated from the "
    "clients' own fits with the "
    "fits' noise taken off; the interval holds it about nine times in ten where clients have enough rows",
    "noise": "expected squared error of a client's own fit: how far apart fits would be if the clients were all alike",
    "lam": "how strongly a client's model is pulled to the shared one: 0 is training alone, infinity one model for all",
    "what pooling asks for": "the lam that partial pooling gives, (noise of a record) · (parameters) / (rows · spread)",
    "excess": "how much higher than at the best lam the mean validation loss is",
    "standard error": "of a difference paired over clients; two of them are taken as clear",
    "gradient steps": "steps of all clients together that were spent on finding this advice",
}


class Fact(NamedTuple):
    name: str
    value: str
    more: str = ""
    tile: bool = False


def sentence(advice: Mapping[str, Any]) -> str:
    """Say what to do, as HTML: verdict, method, lam."""
    method = escape(str(advice["algorithm"]).split("(")[0])
    lam = lam_of(advice)
    pulled = f", lam = {rounded(lam, 3)}" if lam is not None and 0 < lam < math.inf else ""
    headline = str(advice.get("headline") or VERDICTS[advice["regime"]]).removesuffix(".")
    return f"{escape(headline)}: <b>{method}{pulled}</b>."


def lam_of(advice: Mapping[str, Any]) -> float | None:
    """Return the advised lam, where the method has one (0 is training alone, infinity one model): FedAvgFT, for one, has none."""
    lam = number(advice.get("lam"))
    if advice["regime"] in ("shared", "clusters"):
        return math.inf
    if advice["regime"] == "local":
        return 0.0
    return lam if lam else None


def facts(advice: Mapping[str, Any]) -> list[Fact]:
    """Return the facts of the page: tiles first, then the rest."""
    return [*_heterogeneity(advice), *_method(advice), *_cost(advice)]


def _heterogeneity(advice: Mapping[str, Any]) -> list[Fact]:
    estimate = advice.get("heterogeneity") or {}
    r2 = number(advice.get("spread", advice.get("r2")))
    if not estimate and r2 is None:
        return [Fact("spread, how far apart the clients are", "not estimated", "", True)]
    low, high = (
        stated(end)
        for end in (advice.get("spread_interval") or advice.get("r2_interval") or estimate.get("interval") or (None, None))
    )
    zero = "not distinguishable from zero; " if estimate.get("zero") else ""
    noise, m, d = (number(estimate.get(key)) for key in ("noise", "m", "d"))
    ratio = f"the spread is {rounded(r2 / noise, 2)} times that" if noise and r2 is not None else ""
    about = f"{m or 0:g} clients with {d or 0:g} parameters each" if estimate else ""
    if left := len(estimate.get("left_out") or ()):
        about += f"; {left} with too little data left out"
    return [
        Fact("spread, how far apart the clients are", stated(r2), f"{zero}90 % interval {low} to {high}", True),
        Fact("noise of a client's own fit", stated(noise), ratio, True),
        *([Fact("the spread is about", about)] if about else []),
    ]


def _method(advice: Mapping[str, Any]) -> list[Fact]:
    lam = lam_of(advice)
    theory = advice.get("theory_lam")
    if number(theory) is not None:
        asked = f"partial pooling by the spread asks for {stated(theory)}"
    else:
        asked = "partial pooling by the spread asks for one model" if advice.get("heterogeneity") else ""
    value = "none" if lam is None else "∞, one model" if math.isinf(lam) else stated(lam)
    if lam is None:
        asked = "; ".join(filter(None, ["the method has no such pull", asked]))
    groups = number(advice.get("clusters")) or 1
    out = [
        Fact("lam, the pull to the shared model", value, asked, True),
        Fact("regime", str(advice["regime"]), REGIMES[advice["regime"]]),
        Fact("method", str(advice["algorithm"])),
    ]
    sizes = ""
    if groups > 1:
        members = list(advice.get("groups") or ())
        sizes = "of " + ", ".join(str(members.count(g)) for g in sorted(set(members) - {-1})) + " clients"
        rest = members.count(-1)
        sizes += f"; {rest} with too little data to tell" if rest else ""
    return [*out, Fact("groups far apart", "none found" if groups <= 1 else f"{groups:g}", sizes)]


def _cost(advice: Mapping[str, Any]) -> list[Fact]:
    rounds, sent, steps = (number(advice.get(key)) for key in ("rounds", "bytes_total", "steps_used"))
    values = [value for v in advice["gains"].values() if (value := number(v)) is not None]
    gain, lose = sum(v > 0 for v in values), sum(v < 0 for v in values)
    losers = f"{lose:,} {'loses' if lose == 1 else 'lose'}"
    who = [Fact("clients that gain over training alone", f"{gain:,} of {len(values):,}", losers, True)] if values else []
    return [
        Fact("to train it", "-" if rounds is None else f"{rounds:,.0f} rounds", f"about {traffic(sent)} in all", True),
        *who,
        Fact("how sure", *_confidence(advice), True),
        Fact("spent on this advice", "-" if steps is None else f"{steps:,.0f} gradient steps", "over all clients"),
    ]


def _confidence(advice: Mapping[str, Any]) -> tuple[str, str]:
    """Return whether the best is clearly ahead, and of what; an advice of an earlier version did not say it."""
    rows, known = advice["race"], advice.get("lead")
    if isinstance(known, Mapping):
        value = {"clear": "clearly ahead", "open": "not clearly ahead"}.get(str(known.get("outcome")), "too few clients to tell")
        ahead = number(known.get("errors_ahead"))
        return value, f"of {known.get('rival')}" + ("" if ahead is None else f": {rounded(ahead, 2)} standard errors")
    if len(rows) < 2:
        return "-", "there was no second method in the race"
    second = str(rows[1].get("method", "?"))
    ahead = lead(rows)
    if ahead is None:
        return "not known", f"the runner-up is {second}"
    value = "clearly ahead" if ahead > CLEAR else "not clearly ahead"
    return value, f"of {second}: {rounded(ahead, 2)} standard errors"


def lead(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the standard errors between the first and the second, where the race has them."""
    score = score_in(rows)
    key = f"val_{score.name}"
    first, second, se = (number(v) for v in (rows[0].get(key), rows[1].get(key), rows[1].get("se")))
    if first is None or second is None or not se:
        return None
    return score.gain(first, second) / se


# -- captions: the first goes above the picture, the rest below -----------------------------------------------------------
def bound_words(advice: Mapping[str, Any], curves: Mapping[str, Any]) -> list[str]:
    best, within = _best(curves)
    first = f"Solved exactly at every lam and judged on validation rows, the loss is least at {best}"
    first += f"; {within}." if within else "."
    out = [first + _advised(advice, curves)]
    bound, constants = curves.get("bound"), curves.get("constants")
    if bound and constants:
        out.append(
            "(a) Theorem 1 (CLUP) bounds the expected squared distance of a client's model to its true parameters by the lower "
            "of two branches, the one that grows with lam (what sharing costs a client unlike the others) and the one that falls "
            "(what it gains); the second says nothing until lam is large. Look at where they fall and rise, not at their height: "
            f"the constants are worst cases (mu = {stated(constants.get('mu'))}, L = {stated(constants.get('L'))}, rho² = "
            f"{stated(constants.get('rho2'))}, spread = {stated(constants.get('R2'))}, the mean over clients), estimated, "
            "so the lines are no guarantee." + _height(advice, bound)
        )
    measured = curves["measured"]
    if measured.get("distance"):
        count = number((measured.get("distance_of") or [None])[0])
        who = "the clients" if count is None else f"{count:,.0f} clients with rows to spare"
        out.append(f"(a, green) The same squared distance, estimated without bias from training rows alone, mean over {who}.")
    if measured.get("true"):
        out.append("(a, dotted) The distance to the true parameters, which these generated data know.")
    elif bound and not measured.get("distance"):
        out.append("The distance itself cannot be measured here, only bounded.")
    two = bound or measured.get("true") or measured.get("distance")
    out.append(
        f"{'(b) Another quantity: the' if two else 'The'} mean validation loss of the exact solution of Problem (2), minus that "
        "at the best lam (ringed); the band is the standard error of that difference, paired over clients. Where the band "
        "touches zero, lam cannot be told from the best."
    )
    if (decay := number(curves.get("weight_decay"))) is not None and decay > 0:
        out.append(
            f"The clients' risks are not strongly convex by themselves, so a weight decay of {stated(decay)} is added to "
            "everything in this picture (and not to the advised method)."
        )
    return out


def _advised(advice: Mapping[str, Any], curves: Mapping[str, Any]) -> str:
    """Say what the exact solution shows of the advised lam, where that is clearly not the best."""
    lam, measured = lam_of(advice), curves["measured"]
    if lam is None or advice["regime"] == "clusters":
        return ""
    if 0 < lam < math.inf:
        near = min(range(len(measured["lam"])), key=lambda i: abs(math.log(measured["lam"][i] / lam)))
        excess, se = number(measured["excess"][near]), number(measured["se"][near])
    else:
        end = curves["ends"]["local" if lam == 0 else "shared"]
        excess, se = number(end["excess"]), number(end["se"])
    if excess is None or se is None or excess <= se:
        return ""
    return (
        f" At the advised lam it is {rounded(excess, 3)} ± {rounded(se, 2)} higher: the race tried other values of lam, and "
        "methods that do not solve to the end."
    )


def _height(advice: Mapping[str, Any], bound: Mapping[str, Any]) -> str:
    """Say how many times the error of a client's own fit the bound is, at its best lam."""
    least = min((value for v in bound["bound"] if (value := number(v)) is not None), default=None)
    noise = number((advice.get("heterogeneity") or {}).get("noise"))
    if least is None or not noise:
        return ""
    return f" At its lowest the bound is {rounded(least / noise, 2)} times the noise of a client's own fit."


def _best(curves: Mapping[str, Any]) -> tuple[str, str]:
    """Return the best lam in words, and the range of those within one standard error of it."""
    measured, ends = curves["measured"], curves["ends"]
    rows = [(0.0, ends["local"]["excess"], ends["local"]["se"])]
    rows += list(zip(measured["lam"], measured["excess"], measured["se"], strict=True))
    rows.append((math.inf, ends["shared"]["excess"], ends["shared"]["se"]))
    known = [(lam, e, number(s) or 0.0) for lam, e, s in rows if number(e) is not None]
    if not known:
        return "no lam that could be scored", ""
    best = min(known, key=lambda row: row[1])[0]
    close = [lam for lam, e, s in known if e <= s]
    word = {0.0: "lam = 0, training alone", math.inf: "lam = ∞, one model for all"}.get(best, f"lam = {lam_text(best)}")
    if len(close) < 2:
        return word, ""
    return word, f"from {lam_text(min(close))} to {lam_text(max(close))} it is within a standard error of that"


def map_words(advice: Mapping[str, Any], rows: float, edge: float, width: float) -> tuple[str, str]:
    estimate = advice["heterogeneity"]
    r2 = number(estimate.get("r2")) or 0.0
    if r2 > 0:
        level = rows * edge / r2
        first = (
            f"With a spread of {stated(r2)}, training alone and one model for all would be level at about "
            f"{rounded(level, 2)} training rows per client; there are {rounded(rows, 3)}. "
            "With fewer rows sharing pays more, with more rows it pays less."
        )
    else:
        first = (
            "No difference between the clients shows above the noise of their fits, so nothing speaks against one model; "
            f"the interval still allows a spread up to {stated((estimate.get('interval') or (None, None))[1])}."
        )
    if estimate.get("zero") and r2 > 0:
        first += " But the spread is not distinguishable from zero."
    here = "shared" if edge >= width * r2 else "local" if edge * width <= r2 else "between"
    if not estimate.get("zero") and {here, advice["regime"]} == {"local", "shared"}:
        first += (
            " The race on validation rows says otherwise, and the advice follows it: parameters may lie far apart in directions "
            "that matter little for predictions, or the spread may be off."
        )
    caption = (
        "MINIMAX: one model for all is the better end while the spread (its R²) is below c m/N, training alone above it. The "
        "dashed line is that "
        f"edge, with c such that here the spread equals what sharing saves a client in noise ({stated(edge)}); within a "
        "factor of "
        f"{width:g} of it both ends have the same rate and something between may beat them. The point is this federation, the "
        "bar the 90 % interval of the spread; an arrow to the edge of the picture means that zero cannot be ruled out."
    )
    return first, caption


def race_words(advice: Mapping[str, Any]) -> tuple[str, str]:
    rows, known = advice["race"], advice.get("lead")
    score = score_in(rows)
    key = f"val_{score.name}"
    first = f"{rows[0].get('method', '?')} leads with {score.with_article} of {stated(rows[0].get(key))}."
    if len(rows) > 1:
        ahead = number(known.get("errors_ahead")) if isinstance(known, Mapping) else lead(rows)
        sure = "" if ahead is None else f", {rounded(ahead, 2)} standard errors {'behind' if ahead >= 0 else 'ahead'}"
        first += f" {rows[1].get('method', '?')} follows with {stated(rows[1].get(key))}{sure}."
    bars = any(number(row.get("se")) for row in rows)
    caption = f"Mean over clients; {'higher' if score.higher else 'lower'} is better."
    caption += " The bar is the standard error of the method's difference to the first, paired over clients." if bars else ""
    caption += " Methods within a standard error of the best score are ordered by their loss." if bars else ""
    caption += " Hollow marks stopped early, clearly behind or not among the best, so their scores are those after fewer rounds."
    return first, caption


def sweep_words(sweep: Mapping[str, Any]) -> tuple[str, str]:
    path = sweep.get("path") or ()
    used, apart, share = (number(sweep.get(key)) for key in ("rounds_used", "rounds_separate", "share"))
    first = f"{len(path)} values of lam were tried, each begun where the one before had ended."
    if used is not None and apart is not None:
        part = f" ({100 * share:.0f} %)" if share is not None else ""
        first += f" That took {used:,.0f} rounds in all, where separate runs would have taken {apart:,.0f}{part}."
    caption = (
        "A line per lam, from orange (close to training alone) to blue (close to one model). Rings are the Pareto front: no "
        "other lam has a better score for as few rounds or bytes. Look for the ring where the line flattens: beyond it, "
        "traffic buys little. Dotted levels are training alone and one model for all."
    )
    if sweep.get("dynamic"):
        caption += " Dashed: the schedule that changes lam on the way."
    return first, caption


def gain_words(advice: Mapping[str, Any], names: Sequence[str], values: NDArray[np.float64]) -> tuple[str, str]:
    known = values[np.isfinite(values)]
    gain, lose = int((known > 0).sum()), int((known < 0).sum())
    level = len(known) - gain - lose
    if not gain and not lose:
        why = "training alone is the advice" if advice["regime"] == "local" else "the scores are the same"
        return f"Nobody gains or loses: {why}.", ""
    order = np.argsort(np.where(np.isfinite(values), values, np.inf))
    first = (
        f"{gain:,} of {len(known):,} clients gain, {lose:,} {'loses' if lose == 1 else 'lose'}, {level:,} "
        f"{'is' if level == 1 else 'are'} level; the plain mean of their gains is {stated(float(known.mean()))}."
    )
    losers = [names[i] for i in order[:5] if values[i] < 0]
    if losers:
        first += f" {'Those who lose most' if lose > 5 else 'Loses' if lose == 1 else 'Those who lose'}: {', '.join(losers)}."
    rise = score_in(advice["race"]).improvement
    caption = f"Per client, the {rise} on its own validation rows by the advised method, sorted; hollow bars lose."
    caption += " A client has few validation rows, so single bars are noisy; look at how many lie on either side."
    if len(known) > 240:
        caption += " Of the sorted clients, 240 evenly spaced ones are drawn."
    return first, caption


def score_in(rows: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the score by which a race was judged."""
    return next((score for score in SCORES.values() if any(f"val_{score.name}" in row for row in rows)), ACCURACY)


def traffic(sent: float | None) -> str:
    """Return bytes as text, in a unit that suits them."""
    if sent is None:
        return "-"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if sent >= size:
            return f"{rounded(sent / size, 3)} {unit}"
    return f"{sent:,.0f} bytes"


def lam_text(lam: Any) -> str:
    """Return a lam as text, as it is or as JSON holds it: infinity is null there."""
    value = number(lam)
    return "∞" if value is None else rounded(value, 3)


def stated(value: Any) -> str:
    """Return a number as text, or "unknown"."""
    known = number(value)
    return "unknown" if known is None else rounded(known)
