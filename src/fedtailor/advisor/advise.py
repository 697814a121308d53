"""``advise``: should these owners learn together, how much should each keep to itself, and with which method?

One exchange of fitted parameters says how far apart the clients are (their spread), and with it how much pooling theory would
ask for; a short race on validation rows decides between what is left. Test rows are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from fedtailor.advisor.advice import Advice
from fedtailor.advisor.look import Look, look, pull, pulls
from fedtailor.advisor.pilot import Budget, Entrant, Race, table, task_and_rows
from fedtailor.advisor.steps import four_digits, smoothness_of, training, work_of
from fedtailor.advisor.words import headline, words
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedavgft import FedAvgFT
from fedtailor.algorithms.fedclup import FedCLUP
from fedtailor.algorithms.hypcluster import HypCluster
from fedtailor.algorithms.local import Local
from fedtailor.data.federation import Federation
from fedtailor.engine.checked import taking
from fedtailor.engine.options import AdviceOptions
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.verdict import Lead, Verdict, judge, lead, unknown
from fedtailor.task import Task

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # multiples of the theory's lam that are tried in the race
UPWARDS = (1.0, 3.0, 9.0)  # multiples of the least lam that the interval of the spread allows, tried where it may be zero
BLIND = (0.01, 0.1, 1.0)  # lams tried where theory has none
WEAK, STRONG = 1e-4, 1e3  # a lam outside is as good as none, or as one model for all
FIT_STEPS = 20  # gradient steps that a client's own fit counts as
GROUPED, GUESS = 9, 3  # from so many clients on, so many groups are tried even if the fits are too noisy to show them
RACED = "It was raced for {} rounds with step sizes from the data, untuned; compare --tune --splits 10 is the longer test."
UNEVEN = 2.0  # ratio of the most to the fewest rows from which on a lam for every client is advised


@taking(AdviceOptions)
def advise(federation: Federation, model: str | nn.Module | Task = "linear", **settings: Any) -> Advice:
    """Advise these clients about this model, from their training and validation rows alone.

    The settings are those that the advised method would be trained with. What is frozen before the first layer that moves is
    computed once, and the spread is then of the features that it gives.
    """
    options = AdviceOptions.of(settings)
    if len(federation) < 2:
        raise InvalidData("there is one client only: nobody to learn together with; check which column names the clients")
    rounds, budget, work = options.rounds, Budget.of(options.budget), work_of(options)
    task, rows = task_and_rows(federation, model, options)
    smoothness = smoothness_of(task, rows)
    step = options.lr or (0.1 if smoothness is None else four_digits(np.clip(1 / smoothness, 1e-4, 2.0)))
    race = Race(task, rows, training(options), budget)

    race.enter("FedAvg", FedAvg(lr=step, **work))
    race.enter("Local", Local(lr=step, **work))
    first = budget.most(max(1, round(rounds / 5)), race.price("FedAvg"), 4)
    for label in ("FedAvg", "Local"):
        if not race.go(label, first):
            raise InvalidArgument(f"the budget {options.budget} does not pay for a round of FedAvg and of Local; give more")

    seen = look(task, rows, race.entrants["FedAvg"].state.shared["model"], options.seed)
    estimate = seen.heterogeneity
    race.steps += FIT_STEPS * len(rows) if estimate is not None else 0
    theory_lam = None if estimate is None else pull(estimate, rows, task, 0.0 if estimate.zero else estimate.r2)
    least_lam = None if estimate is None else pull(estimate, rows, task, estimate.interval[1])

    groups = seen.k if seen.k > 1 else GUESS if len(rows) >= GROUPED else None
    for label, method in _contenders(lams_of(theory_lam, least_lam), groups, step, smoothness, work).items():
        race.enter(label, method)
    _run(race, first, rounds)

    ranked = race.standing()
    if not ranked:
        raise InvalidArgument(f"every method diverges with lr={step:g}; give a smaller lr, or standardise the features")
    advice = _advice(race, ranked, seen, theory_lam, rounds)
    advice = replace(advice, headline=headline(advice.regime, advice.verdict))
    return replace(advice, text=words(advice, federation))


def _advice(race: Race, ranked: list[Entrant], seen: Look, theory_lam: float | None, rounds: int) -> Advice:
    """Return what the race and the look at the clients come to, without its words."""
    best, rows, estimate = ranked[0], race.federation, seen.heterogeneity
    lam, regime = _regime_of(best.algorithm)
    local = race.entrants["Local"]
    gains = dict(zip(rows.names, (best.scores - local.scores).tolist(), strict=True)) if len(local.scores) else {}
    uneven = rows.train.sizes.max() >= UNEVEN * rows.train.sizes.min()
    return Advice(
        algorithm=best.algorithm,
        collaborate=not isinstance(best.algorithm, Local),
        regime=regime,
        lam=lam,
        theory_lam=theory_lam,
        spread=None if estimate is None else estimate.r2,
        spread_interval=None if estimate is None else estimate.interval,
        heterogeneity=estimate,
        clusters=best.algorithm.k if isinstance(best.algorithm, HypCluster) else seen.k,
        groups=seen.groups,
        inside=seen.inside,
        lams=pulls(lam, rows) if regime == "between" and lam > 0 and uneven else {},
        steps_used=race.steps,
        rounds=rounds,
        bytes_total=race.price(best.label) * rounds,
        gains=gains,
        race=table(race),
        verdict=_verdict(race, ranked),
        lead=_lead(race),
        notes=(*seen.notes, *(f"{e.label} {e.diverged}: it is out of the race." for e in race.entrants.values() if e.diverged)),
    )


def _contenders(
    lams: Sequence[float], groups: int | None, step: float, smoothness: float | None, work: Mapping[str, Any]
) -> dict[str, Algorithm]:
    """Return what runs in the race beside FedAvg and Local: fine-tuning, a pull with every lam, and groups where there may be."""
    tuned = {f"finetune_{name}": value for name, value in work.items()}
    methods: dict[str, Algorithm] = {"FedAvgFT": FedAvgFT(lr=step, **work, **tuned)}
    for lam in lams:
        lr = step if smoothness is None else min(step, four_digits(1 / (smoothness + lam)))
        methods[f"FedCLUP lam={lam:.3g}"] = FedCLUP(lam=lam, lr=lr, **work)
    return methods if groups is None else {**methods, f"HypCluster k={groups}": HypCluster(k=groups, lr=step, **work)}


def lams_of(theory: float | None, least: float | None) -> list[float]:
    """Return the lams of the race: about the theory's; where the spread may be zero, from the least that its interval allows
    upwards."""
    if theory is None or least is None:
        return list(BLIND)
    lams = [theory * f for f in FACTORS] if np.isfinite(theory) else [least * f for f in UPWARDS]
    return sorted({four_digits(np.clip(lam, WEAK, STRONG)) for lam in lams})


def _verdict(race: Race, ranked: list[Entrant]) -> Verdict:
    """Return whether learning together helps on validation rows: the best method that does, against local training."""
    score, together = race.task.score, [e for e in ranked if not isinstance(e.algorithm, Local)]
    together = together or [e for e in race.entrants.values() if e.rounds and not e.diverged and e.label != "Local"]
    gains = race.gains(together[0].label, "Local") if together else None
    if gains is None:
        return unknown(ranked[0].label, score, "Whether learning together helps is not known: nothing stood beside Local.")
    how = RACED.format(together[0].rounds)
    return judge(together[0].label, gains, score, scale=abs(ranked[0].score), rows="validation", tuned=False, how=how)


def _lead(race: Race) -> Lead | None:
    """Return how far the best method is ahead of the next in the table, and how many rows would tell them apart."""
    rows = table(race)
    if len(rows) < 2:
        return None
    best, second = (str(row["method"]) for row in rows[:2])
    gains = race.gains(best, second)
    if gains is None:
        return None
    times = max(2, int(np.ceil((2 / max(gains.errors_ahead, 0.2)) ** 2)))
    more = f"about {times} times the validation rows, or a full comparison (fedtailor compare --tune)"
    return lead(second, gains, race.task.score, f"to know better would take {more}")


def _run(race: Race, first: int, rounds: int) -> None:
    """Run all for ``first`` rounds and stop those clearly behind; if several are left, run the best four for half the rounds."""
    for label, entrant in race.entrants.items():
        if not entrant.rounds:
            race.go(label, first)
    race.drop(keep=4)
    half = max(first, round(rounds / 2))
    ranked = race.standing()
    if len(ranked) > 1:
        for entrant in ranked:
            race.go(entrant.label, half)


def _regime_of(algorithm: Algorithm) -> tuple[float, str]:
    """Return (lam, regime) of a method, as ``Advice`` has them."""
    if isinstance(algorithm, Local):
        return 0.0, "local"
    if isinstance(algorithm, FedAvg):
        return float("inf"), "shared"
    if isinstance(algorithm, HypCluster):
        return float("inf"), "clusters"
    return (float(algorithm.lam) if isinstance(algorithm, FedCLUP) else 0.0), "between"
