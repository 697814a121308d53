"""``advise``: should these owners learn together, how much should each keep to itself, and with which method?

One exchange of fitted parameters says how far apart the clients are (R^2), and with it how much pooling theory would ask for; a
short race on validation rows decides between what is left. Test rows are never looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from fedtailor.advisor.look import look, pull, pulls
from fedtailor.advisor.pilot import Purse, Race, table, with_validation
from fedtailor.advisor.steps import short, smoothness_of, work_of
from fedtailor.advisor.words import words
from fedtailor.algorithms import FedAvg, FedAvgFT, FedCLUP, HypCluster, Local
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.setup import DTYPES, build_task, make_plan
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.cost import probe
from fedtailor.task import Task
from fedtailor.theory.heterogeneity import Heterogeneity

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # of the theory's lam, tried in the race
UPWARDS = (1.0, 3.0, 9.0)  # of the least lam that the interval of R^2 allows, where R^2 may be zero
BLIND = (0.01, 0.1, 1.0)  # lams tried where theory has none
WEAK, STRONG = 1e-4, 1e3  # a lam outside is as good as none, or as one model for all
VAL_SHARE = 0.2
FIT_STEPS = 20  # gradient steps that a client's own fit is counted for
GROUPED, GUESS = 9, 3  # from so many clients on, so many groups are tried even if the fits are too noisy to show them
UNEVEN = 2.0  # times as many rows as another client: a lam for every client is worth saying


@dataclass(frozen=True, eq=False)
class Advice:
    """What to do, and why. ``algorithm`` is ready for ``ft.run``; ``text`` says it all in words.

    ``regime`` is ``local``, ``shared``, ``between`` or ``clusters``; ``lam`` the pull towards the shared model (0 alone, infinity
    one model), ``steps_used`` gradient steps spent on finding out, over all clients. ``lams`` has a lam for every client where
    they have very different amounts of data: ``FedCLUP(lam="client")`` on ``federation.with_facts(lam=advice.lams)``.
    ``inside`` says for every group how far apart its clients are and how much they should share.
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
    inside: tuple[Mapping[str, Any], ...]
    lams: Mapping[str, float]
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
            "inside": [dict(group) for group in self.inside],
            "lams": dict(self.lams),
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
    budget: int | str | None = None,
    weights: str = "uniform",
    bias: bool = True,
    dtype: str = "float32",
    backbone: str | os.PathLike[str] | None = None,
) -> Advice:
    """Advice for these clients and this model, from their training and validation rows alone.

    ``rounds``, ``batch_size``, ``steps`` or ``epochs`` and ``lr`` are what the advised method would be trained with (by default
    ten full-batch steps per round with the step size of the smoothness; two epochs where there are batches). ``budget`` limits
    what the race may cost over all its methods: a number of rounds, or traffic such as ``"5MB"``. ``backbone`` is as for ``run``;
    what is frozen before the first layer that moves is computed once, and R² is then of the features that it gives.
    """
    if len(federation) < 2:
        raise InvalidData("there is one client only: nobody to learn together with; check which column names the clients")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InvalidArgument(f"rounds must be a whole number of at least 1, not {rounds!r}")
    purse = Purse.of(budget)
    rows = with_validation(federation.to(DTYPES[dtype]), VAL_SHARE, seed)
    task, rows, _ = after_prefix(build_task(model, rows, seed, DTYPES[dtype], bias, backbone), rows)
    work = work_of(batch_size, steps, epochs)
    smoothness = smoothness_of(task, rows)
    step = lr if lr is not None else 0.1 if smoothness is None else short(np.clip(1 / smoothness, 1e-4, 2.0))
    race = Race(task, rows, batch_size, seed, rounds, weights, purse)

    race.enter("FedAvg", FedAvg(lr=step, **work))
    race.enter("Local", Local(lr=step, **work))
    first = purse.most(max(1, round(rounds / 5)), race.price("FedAvg"), 4)
    for label in ("FedAvg", "Local"):
        if not race.go(label, first):
            raise InvalidArgument(f"the budget {budget} does not pay for a round of FedAvg and of Local; give more")

    seen = look(task, rows, race.entrants["FedAvg"].state.shared["model"], seed)
    found = seen.found
    race.steps += FIT_STEPS * len(rows) if found is not None else 0
    theory = None if found is None else pull(found, rows, task, 0.0 if found.zero else found.r2)
    least = None if found is None else pull(found, rows, task, found.interval[1])

    race.enter("FedAvgFT", FedAvgFT(lr=step, **work, **{f"finetune_{name}": value for name, value in work.items()}))
    for lam in _lams(theory, least):
        safe = step if smoothness is None else min(step, short(1 / (smoothness + lam)))
        race.enter(f"FedCLUP lam={lam:.3g}", FedCLUP(lam=lam, lr=safe, **work))
    if seen.k > 1 or len(rows) >= GROUPED:
        k = seen.k if seen.k > 1 else GUESS
        race.enter(f"HypCluster k={k}", HypCluster(k=k, lr=step, **work))
    _run(race, first, rounds)

    ranked = race.standing()
    if not ranked:
        raise InvalidArgument(f"every method diverges with lr={step:g}; give a smaller lr, or standardise the features")
    best = ranked[0]
    lam, regime = _place(best.algorithm)
    alone = race.entrants["Local"]
    gains = dict(zip(rows.names, (best.scores - alone.scores).tolist(), strict=True)) if len(alone.scores) else {}
    uneven = rows.train.sizes.max() >= UNEVEN * rows.train.sizes.min()
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
        clusters=best.algorithm.k if isinstance(best.algorithm, HypCluster) else seen.k,
        groups=seen.groups,
        inside=seen.inside,
        lams=pulls(lam, rows) if regime == "between" and lam > 0 and uneven else {},
        steps_used=race.steps,
        rounds=rounds,
        bytes_total=int((facts["bytes_down"] + facts["bytes_up"]) * len(rows) * rounds),
        gains=gains,
        race=table(race),
        notes=seen.notes,
    )
    return replace(advice, text=words(advice, race, federation))


def _lams(theory: float | None, least: float | None) -> list[float]:
    """The lams of the race: about the theory's; where R^2 may be zero, from the least that its interval allows upwards."""
    if theory is None or least is None:
        return list(BLIND)
    about = [theory * f for f in FACTORS] if np.isfinite(theory) else [least * f for f in UPWARDS]
    return sorted({short(np.clip(lam, WEAK, STRONG)) for lam in about})


def _run(race: Race, first: int, rounds: int) -> None:
    """Everyone a little, those clearly behind stop, the best four to half the rounds; it ends when one is clearly ahead."""
    for label, entrant in race.entrants.items():
        if not entrant.rounds:
            race.go(label, first)
    race.drop(keep=4)
    half = max(first, round(rounds / 2))
    ranked = race.standing()
    if len(ranked) > 1:
        for entrant in ranked:
            race.go(entrant.label, half)


def _place(algorithm: Algorithm) -> tuple[float, str]:
    if isinstance(algorithm, Local):
        return 0.0, "local"
    if isinstance(algorithm, FedAvg):
        return float("inf"), "shared"
    if isinstance(algorithm, HypCluster):
        return float("inf"), "clusters"
    return (float(algorithm.lam) if isinstance(algorithm, FedCLUP) else 0.0), "between"
