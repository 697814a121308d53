"""Advice for sites that keep their rows: the spread from one exchange of summaries, a short race judged by validation scores.

What ``advise`` does on a federation in one place, with two questions put to the sites instead: ``look`` for every site's own fit,
``play`` for a trial of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.advisor.advise import BLIND, GROUPED, GUESS, RACED, lams_of
from fedtailor.advisor.look import pull_of
from fedtailor.advisor.words import headline
from fedtailor.algorithms.settings import settings as settings_of
from fedtailor.errors import FedtailorError, InvalidData
from fedtailor.metrics.verdict import Candidate, Verdict, best_first, gains_of, judge, lead, unknown
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.trial import Trial, check, summary_of
from fedtailor.task.scores import Metric
from fedtailor.theory import heterogeneity
from fedtailor.theory.heterogeneity import Heterogeneity

Look = Callable[[], Mapping[str, Any]]
Play = Callable[[str, Trial], Mapping[str, Mapping[str, float]]]  # (label, trial) to every site's scores on validation rows
REGIMES = {"local": "local", "fedavg": "shared", "fedavgft": "between", "fedclup": "between", "hypcluster": "clusters"}


@dataclass(frozen=True, eq=False)
class Entrant:
    """A method that was tried: every site's loss and score on validation rows, in the order of the sites; NaN: no answer."""

    label: str
    trial: Trial
    losses: NDArray[np.float64]
    scores: NDArray[np.float64]
    rows: NDArray[np.float64]

    @property
    def loss(self) -> float:
        return float(np.nanmean(self.losses)) if np.isfinite(self.losses).any() else np.inf

    @property
    def candidate(self) -> Candidate:
        """Return what it is chosen by: the scores and validation rows of the sites that answered, and the loss."""
        return Candidate(self.scores, self.rows, self.loss)


def advise(agreed: Agreed, look: Look, play: Play, rounds: int | None = None) -> dict[str, Any]:
    """Return the advice as plain values; each method is tried for ``rounds`` (default: a fifth of those agreed on)."""
    check(agreed)
    rounds = rounds or max(1, round(agreed.options.rounds / 5))
    score = agreed.at_server().task.score
    estimate, theory, least, notes = _spread(agreed, look())
    entrants: list[Entrant] = []
    for label, trial in _trials(agreed, lams_of(theory, least) if estimate else list(BLIND), rounds):
        try:
            heard = play(label, trial)
        except FedtailorError as error:
            notes.append(f"{label} is out of the race: {error}.")
            continue
        entrants.append(_entrant(label, trial, heard, agreed.clients, score))
    if not entrants:
        raise InvalidData("no method could be tried; " + " ".join(notes))
    ranked = [entrants[place] for place in best_first([entrant.candidate for entrant in entrants], score)]
    return _advice(agreed, ranked, score, (estimate, theory), notes)


def _spread(agreed: Agreed, heard: Mapping[str, Any]) -> tuple[Heterogeneity | None, float | None, float | None, list[str]]:
    """Return (the spread, the lam it asks for, the least lam that its interval allows, notes)."""
    notes = [f"{name} says nothing of its fit: {said['error']}." for name, said in heard.items() if "error" in said]
    fits = [summary_of(said["fit"], said["arrays"]) for said in heard.values() if "error" not in said]
    try:
        estimate = heterogeneity.estimate([fit for fit, _ in fits])
    except FedtailorError as error:
        return None, None, None, [*notes, f"The spread could not be estimated: {error}."]
    sizes = [fit.n for fit, _ in fits]
    dispersion = float(np.average([value for _, value in fits], weights=sizes))
    theory = pull_of(estimate, sizes, dispersion, 0.0 if estimate.zero else estimate.r2)
    least = pull_of(estimate, sizes, dispersion, estimate.interval[1])
    return estimate, theory, least, [*notes, *([estimate.trusted] if estimate.trusted else [])]


def _trials(agreed: Agreed, lams: list[float], rounds: int) -> list[tuple[str, Trial]]:
    """Return what is tried, with the step size and the local work of the method agreed on."""
    usual = settings_of(agreed.algorithm)
    work = {name: usual[name] for name in ("lr", "steps", "epochs") if usual.get(name) is not None}
    work = {name: value for name, value in work.items() if isinstance(value, int | float)}
    tune = {f"finetune_{name}": value for name, value in work.items() if name != "lr"}
    trials = [("Local", "local", work), ("FedAvg", "fedavg", work), ("FedAvgFT", "fedavgft", {**work, **tune})]
    trials += [(f"FedCLUP lam={lam:.3g}", "fedclup", {**work, "lam": lam}) for lam in lams]
    if len(agreed.clients) >= GROUPED:
        trials.append((f"HypCluster k={GUESS}", "hypcluster", {**work, "k": GUESS}))
    return [(label, Trial(method, settings, rounds)) for label, method, settings in trials]


def _entrant(label: str, trial: Trial, heard: Mapping[str, Mapping[str, float]], clients: Any, score: Metric) -> Entrant:
    def column(measure: str) -> NDArray[np.float64]:
        values = [heard.get(name, {}).get(measure) for name in clients]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    rows = np.nan_to_num(column("rows"), nan=1.0)
    return Entrant(label, trial, column("loss_personal"), column(f"{score.name}_personal"), rows)


def _verdict(ranked: list[Entrant], local: Entrant | None, score: Metric) -> Verdict:
    """Return whether learning together helps on validation rows: the best method that does, against local training."""
    together = next((entrant for entrant in ranked if entrant is not local), None)
    gains = None if together is None or local is None else gains_of(together.candidate, local.candidate, score)
    if together is None or gains is None:
        return unknown(ranked[0].label, score, "Whether learning together helps is not known: nothing stood beside Local.")
    how = RACED.format(together.trial.rounds)
    scale = float(np.nanmean(np.abs(together.scores)))
    return judge(together.label, gains, score, scale=scale, rows="validation", tuned=False, how=how)


def _advice(
    agreed: Agreed, ranked: list[Entrant], score: Metric, spread: tuple[Heterogeneity | None, float | None], notes: list[str]
) -> dict[str, Any]:
    best, (estimate, theory) = ranked[0], spread
    local = next((entrant for entrant in ranked if entrant.label == "Local"), None)
    gained = [] if local is None else score.gain(best.scores, local.scores).tolist()
    gains = {name: gain for name, gain in zip(agreed.clients, gained, strict=bool(gained)) if np.isfinite(gain)}
    rounds = best.trial.rounds
    verdict = _verdict(ranked, local, score)
    lines = [*_words_on_spread(estimate, theory), headline(REGIMES[best.trial.method], verdict), verdict.sentence]
    lines.append(
        f"Best of {len(ranked)} after {rounds} {'round' if rounds == 1 else 'rounds'}, on validation rows: {best.label}."
    )
    second = gains_of(best.candidate, ranked[1].candidate, score) if len(ranked) > 1 else None
    if second is not None:
        lines.append(lead(ranked[1].label, second, score).sentence)
    if gains and best is not local:
        lines.append(f"{sum(gain > 0 for gain in gains.values())} of {len(gains)} sites gain over training alone.")
    return {
        "method": best.trial.method,
        "settings": dict(best.trial.settings),
        "collaborate": best is not local,
        "regime": REGIMES[best.trial.method],
        "spread": None if estimate is None else estimate.r2,
        "spread_interval": None if estimate is None else list(estimate.interval),
        "r2": None if estimate is None else estimate.r2,  # its earlier name
        "r2_interval": None if estimate is None else list(estimate.interval),
        "theory_lam": None if theory is None or np.isinf(theory) else theory,
        "heterogeneity": None if estimate is None else estimate.json(),
        "race": [
            {"method": e.label, f"val_{score.name}": float(np.nanmean(e.scores)), "val_loss": e.loss, "rounds": e.trial.rounds}
            for e in ranked
        ],
        "gains": gains,
        "verdict": verdict.json(),
        "notes": notes,
        "text": "\n".join([*lines, *notes, "No row left its site, and test rows were not looked at."]),
    }


def _words_on_spread(estimate: Heterogeneity | None, theory: float | None) -> list[str]:
    if estimate is None or theory is None:
        return []
    low, high = estimate.interval
    size = f"spread {estimate.r2:.3g} (90 % interval {low:.3g} to {high:.3g})"
    apart = "How far apart they are is not distinguishable from zero" if estimate.zero else "The sites differ"
    amount = "one model for all" if np.isinf(theory) else f"lam about {theory:.3g}"
    return [f"{apart}: {size}; partial pooling by these numbers asks for {amount}."]
