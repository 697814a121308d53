"""``advise``: should these owners learn together, how much should each keep to itself, and with which method?

One exchange of fitted parameters says how far apart the clients are (R^2), and with it how much pooling theory would ask for; a
short race on validation rows decides between what is left. Test rows are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor.advisor.pilot import Race, table, with_validation
from fedtailor.algorithms import FedAvg, FedAvgFT, FedCLUP, HypCluster, Local
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.engine.setup import DTYPES, build_task, make_plan
from fedtailor.errors import FedtailorError, InvalidArgument, InvalidData
from fedtailor.metrics.client import score_name
from fedtailor.metrics.cost import probe
from fedtailor.task import Task
from fedtailor.theory import clusters as grouping
from fedtailor.theory import heterogeneity
from fedtailor.theory.constants import constants
from fedtailor.theory.heterogeneity import Heterogeneity

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # of the theory's lam, tried in the race
UPWARDS = (1.0, 3.0, 9.0)  # of the least lam that the interval of R^2 allows, where R^2 may be zero
BLIND = (0.01, 0.1, 1.0)  # lams tried where theory has none
WEAK, STRONG = 1e-4, 1e3  # a lam outside is as good as none, or as one model for all
VAL_SHARE = 0.2
LARGEST = 150  # parameters of the clients' own fits; beyond, their covariances take longer than the race
FIT_STEPS = 20  # gradient steps that a client's own fit is counted for


@dataclass(frozen=True, eq=False)
class Advice:
    """What to do, and why. ``algorithm`` is ready for ``ft.run``; ``text`` says it all in words.

    ``regime`` is ``local``, ``shared``, ``between`` or ``clusters``; ``lam`` the pull towards the shared model (0 alone, infinity
    one model), ``steps_used`` gradient steps spent on finding out, over all clients.
    """

    algorithm: Algorithm
    collaborate: bool
    regime: str
    lam: float
    theory_lam: float | None
    r2: float | None
    r2_interval: tuple[float, float] | None
    heterogeneity: Heterogeneity | None
    clusters: int
    groups: tuple[int, ...]
    steps_used: int
    rounds: int
    bytes_total: int
    gains: Mapping[str, float]
    race: list[Mapping[str, Any]]
    text: str = ""
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"Advice({written(self.algorithm)}, regime={self.regime!r}, collaborate={self.collaborate})"

    def json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "algorithm": written(self.algorithm),
            "collaborate": self.collaborate,
            "regime": self.regime,
            "lam": None if np.isinf(self.lam) else self.lam,
            "theory_lam": None if self.theory_lam is None or np.isinf(self.theory_lam) else self.theory_lam,
            "r2": self.r2,
            "r2_interval": None if self.r2_interval is None else list(self.r2_interval),
            "heterogeneity": None if self.heterogeneity is None else self.heterogeneity.json(),
            "clusters": self.clusters,
            "groups": list(self.groups),
            "steps_used": self.steps_used,
            "rounds": self.rounds,
            "bytes_total": self.bytes_total,
            "gains": dict(self.gains),
            "race": list(self.race),
            "notes": list(self.notes),
            "text": self.text,
        }


def advise(
    federation: Federation,
    model: str | nn.Module | Task = "linear",
    *,
    rounds: int = 50,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    budget: int | None = None,
    weights: str = "uniform",
    bias: bool = True,
    dtype: str = "float32",
) -> Advice:
    """Advice for these clients and this model, from their training and validation rows alone.

    ``rounds``, ``batch_size``, ``steps`` or ``epochs`` and ``lr`` are what the advised method would be trained with (by default
    ten full-batch steps per round with the step size of the smoothness; two epochs where there are batches). ``budget`` limits
    the rounds of the race, summed over its methods.
    """
    if len(federation) < 2:
        raise InvalidData("there is one client only: nobody to learn together with; check which column names the clients")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InvalidArgument(f"rounds must be a whole number of at least 1, not {rounds!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise InvalidArgument(f"budget must be a number of rounds of at least 1, not {budget!r}")
    rows = with_validation(federation.to(DTYPES[dtype]), VAL_SHARE, seed)
    task = build_task(model, rows, seed, DTYPES[dtype], bias)
    work = _work(batch_size, steps, epochs)
    smoothness = _smoothness(task, rows)
    step = lr if lr is not None else 0.1 if smoothness is None else float(np.clip(1 / smoothness, 1e-4, 2.0))
    race = Race(task, rows, batch_size, seed, rounds, weights)
    notes: list[str] = []

    race.enter("Local", Local(lr=step, **work))
    race.enter("FedAvg", FedAvg(lr=step, **work))
    first = max(1, round(rounds / 5))
    if budget is not None:
        first = max(1, min(first, budget // 4))
    race.go("FedAvg", first)
    race.go("Local", first)

    found, groups, said = _look(task, rows, race, seed)
    notes += said
    race.steps += FIT_STEPS * len(rows) if found is not None else 0
    theory = None if found is None else pull(found, rows, task, 0.0 if found.zero else found.r2)
    least = None if found is None else pull(found, rows, task, found.interval[1])
    k = max(groups) + 1 if groups else 1

    race.enter("FedAvgFT", FedAvgFT(lr=step, **work, **{f"finetune_{name}": value for name, value in work.items()}))
    for lam in _lams(theory, least):
        safe = step if smoothness is None else min(step, 1 / (smoothness + lam))
        race.enter(f"FedCLUP lam={lam:.3g}", FedCLUP(lam=lam, lr=safe, **work))
    if k > 1:
        race.enter(f"HypCluster k={k}", HypCluster(k=k, lr=step, **work))
    _run(race, first, rounds, budget)

    ranked = race.standing()
    if not ranked:
        raise InvalidArgument(f"every method diverges with lr={step:g}; give a smaller lr, or standardise the features")
    best = ranked[0]
    lam, regime = _place(best.algorithm)
    alone = race.entrants["Local"]
    gains = dict(zip(rows.names, (best.scores - alone.scores).tolist(), strict=True)) if len(alone.scores) else {}
    facts = probe(best.algorithm, task, make_plan(best.algorithm, task, rows, batch_size, seed, weights).feed)
    advice = Advice(
        algorithm=best.algorithm,
        collaborate=not isinstance(best.algorithm, Local),
        regime=regime,
        lam=lam,
        theory_lam=theory,
        r2=None if found is None else found.r2,
        r2_interval=None if found is None else found.interval,
        heterogeneity=found,
        clusters=k,
        groups=groups,
        steps_used=race.steps,
        rounds=rounds,
        bytes_total=int((facts["bytes_down"] + facts["bytes_up"]) * len(rows) * rounds),
        gains=gains,
        race=table(race),
        notes=tuple(notes),
    )
    return replace(advice, text=_words(advice, race, federation))


def pull(found: Heterogeneity, federation: Federation, task: Task, r2: float) -> float:
    """The lam that partial pooling asks for: (noise of a record) d / (n R^2).

    A client's fit scatters about its truth with the covariance (dispersion / n) H^-1, the truths about their mean with R^2 / d in
    each direction; the posterior mean is the minimiser of the risk + lam/2 |w - g|^2 with this lam, whatever the curvature H.
    """
    if r2 <= 0:
        return float("inf")
    n = float(1 / np.mean(1 / federation.train.sizes))
    dispersion = 1.0 if task.kind != "regression" else _residual(federation)
    return float(dispersion * found.d / (n * r2))


def _residual(federation: Federation) -> float:
    """Mean squared residual of the clients' own least-squares fits, with the degrees of freedom taken off."""
    total = rows = 0.0
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        design = torch.cat([x.flatten(1).double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
        target = y.double().reshape(len(y), -1)
        if len(x) > design.shape[1]:
            rest = target - design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
            total += float((rest**2).sum()) / target.shape[1]
            rows += len(x) - design.shape[1]
    return total / rows if rows else float(federation.train.y.double().var())


def _work(batch_size: int | None, steps: int | None, epochs: int | None) -> dict[str, Any]:
    if steps is not None and epochs is not None:
        raise InvalidArgument("give steps or epochs, not both")
    if steps is None and epochs is None:
        return {"steps": 10} if batch_size is None else {"epochs": 2}
    return {"steps": steps} if steps is not None else {"epochs": epochs}


def _smoothness(task: Task, federation: Federation) -> float | None:
    """L of the clients' risks for a linear model, otherwise None."""
    return None if task.gradient is None else constants(task, federation, 1e-3).smoothness


def _look(task: Task, federation: Federation, race: Race, seed: int) -> tuple[Heterogeneity | None, tuple[int, ...], list[str]]:
    """(R^2, the group of every client, what to say): on the rows for a linear model, otherwise on FedAvg's last layer."""
    notes: list[str] = []
    seen, linear = federation, task
    try:
        if task.gradient is None:
            leader = race.entrants["FedAvg"]
            seen = heterogeneity.on_features(task, leader.state.shared["model"], federation)
            linear = heterogeneity.linear_task(seen)
            notes.append(
                "How far the clients are apart is measured in the last layer, on the features that a short FedAvg learned."
            )
        size = int(np.prod(seen.train.x.shape[1:])) * max(1, seen.outputs - (seen.kind == "classification"))
        if size > LARGEST:
            return (
                None,
                (),
                [*notes, f"R² is not estimated: {size} parameters are too many for the fits; the race decides alone."],
            )
        received = heterogeneity.summaries(linear, seen, seed=seed)
        found = heterogeneity.estimate(received)
        groups = grouping.find(received, seed=seed)
    except FedtailorError as error:
        return None, (), [*notes, f"R² could not be estimated: {error}."]
    if found.trusted:
        notes.append(found.trusted)
    if groups.k == 1:
        return found, (), notes
    of = dict(zip(groups.names, groups.labels, strict=True))
    return found, tuple(int(of.get(name, -1)) for name in federation.names), notes  # -1: too little data to tell


def _lams(theory: float | None, least: float | None) -> list[float]:
    """The lams of the race: about the theory's; where R^2 may be zero, from the least that its interval allows upwards."""
    if theory is None or least is None:
        return list(BLIND)
    about = [theory * f for f in FACTORS] if np.isfinite(theory) else [least * f for f in UPWARDS]
    return sorted({float(np.clip(lam, WEAK, STRONG)) for lam in about})


def _run(race: Race, first: int, rounds: int, budget: int | None) -> None:
    """Everyone a little, those clearly behind stop, the best three to half the rounds; it ends when one is clearly ahead."""
    left = 10**9 if budget is None else budget - 2 * first
    for label, entrant in race.entrants.items():
        if not entrant.rounds and left >= first:
            race.go(label, first)
            left -= first
    race.drop(keep=4)
    half = max(first, round(rounds / 2))
    ranked = race.standing()
    if len(ranked) > 1 and half > first:
        for entrant in ranked:
            if left >= half - first:
                race.go(entrant.label, half)
                left -= half - first


def _place(algorithm: Algorithm) -> tuple[float, str]:
    if isinstance(algorithm, Local):
        return 0.0, "local"
    if isinstance(algorithm, FedAvg):
        return float("inf"), "shared"
    if isinstance(algorithm, HypCluster):
        return float("inf"), "clusters"
    return (float(algorithm.lam) if isinstance(algorithm, FedCLUP) else 0.0), "between"


def _words(advice: Advice, race: Race, federation: Federation) -> str:
    name = "accuracy" if score_name(race.task.kind) == "acc" else "mean squared error"
    out = [f"{len(federation)} clients, {len(federation.train.y)} training rows."]
    if advice.heterogeneity is not None:
        low, high = advice.heterogeneity.interval
        size = f"R² = {advice.heterogeneity.r2:.3g} (90 % interval {low:.3g} to {high:.3g})"
        noise = f"the noise of a client's own fit is {advice.heterogeneity.noise:.3g}"
        if advice.heterogeneity.zero:
            out.append(f"How far apart they are is not distinguishable from zero: {size}; {noise}.")
        else:
            out.append(f"They differ: {size}, squared distance of their true parameters to the mean; {noise}.")
    if advice.theory_lam is not None:
        word = "one model for all" if np.isinf(advice.theory_lam) else f"lam about {advice.theory_lam:.3g}"
        out.append(f"Partial pooling by these numbers asks for {word}.")
    if advice.clusters > 1:
        sizes = ", ".join(str(advice.groups.count(g)) for g in range(advice.clusters))
        out.append(f"They fall into {advice.clusters} groups far apart, of {sizes} clients.")
    verdict = {
        "local": "Do not learn together: training alone is best here.",
        "shared": "Learn together, one model for all.",
        "clusters": "Learn together, but inside the groups.",
        "between": "Learn together, and let each keep a model of its own.",
    }
    out.append(verdict[advice.regime])
    out.append(f"Use {written(advice.algorithm)}: {advice.rounds} rounds, about {advice.bytes_total / 1e6:.2f} MB in all.")
    out += _who(advice, name) if advice.collaborate and advice.gains else []
    out += _how_sure(advice, race) if len(advice.race) > 1 else []
    out.append(f"{advice.steps_used:,} gradient steps were spent on this, over all clients; test rows were not looked at.")
    return "\n".join([*out, *advice.notes])


def _who(advice: Advice, name: str) -> list[str]:
    """Whom it helps and whom it hurts, on validation rows."""
    better = sum(gain > 0 for gain in advice.gains.values())
    worse = [client for _, client in sorted((gain, client) for client, gain in advice.gains.items() if gain < 0)]
    losers = f" ({', '.join(worse[:5])}{', ...' if len(worse) > 5 else ''})" if worse else ""
    mean = float(np.mean(list(advice.gains.values())))
    change = f"{name} {'rises' if name == 'accuracy' else 'falls'} by {mean:.3g} on average"
    return [f"On validation rows {better} clients gain over training alone and {len(worse)} lose{losers}; {change}."]


def _how_sure(advice: Advice, race: Race) -> list[str]:
    second = advice.race[1]["method"]
    ahead = race.behind(second, advice.race[0]["method"])
    if ahead > 2:
        return [f"It is clearly ahead of {second} ({ahead:.1f} standard errors)."]
    times = int(np.ceil((2 / max(ahead, 0.2)) ** 2))
    more = f"about {times} times the validation rows, or a full comparison (fedtailor compare --tune)"
    return [f"It is not clearly ahead of {second} ({ahead:.1f} standard errors); to know better would take {more}."]
