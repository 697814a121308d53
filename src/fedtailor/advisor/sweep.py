"""``sweep``: what a stronger pull to the shared model buys, and what it costs in rounds and bytes.

FedCLUP over lam from almost local to almost one model. Separate runs would take lams x rounds; here every lam is begun cold for a
few rounds, and its end is found by going on from the end of the neighbouring lam. The rounds between are estimated from both
(``extrapolate``). What is said about a lam is thus always about a run from scratch. Test rows are never looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from torch import nn

from fedtailor.advisor.advise import VAL_SHARE
from fedtailor.advisor.pilot import with_validation
from fedtailor.advisor.steps import short, smoothness_of, work_of
from fedtailor.advisor.tradeoff import Fewest, Place, fewest, front, levels, settled
from fedtailor.advisor.walk import Callback, Curve, Ground, aims, along, most, schedule
from fedtailor.algorithms import FedAvg, FedCLUP, FedCLUPDynamic, Local
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.engine.base import one_thread
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.setup import DTYPES, build_task, check
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.client import score_name
from fedtailor.server.cohort import cohort_size
from fedtailor.task import Task

DECADES = (-4, 1)  # of the smoothness: the lams by themselves
FEW = 6  # rounds seen of a curve below which its estimate is rough


@dataclass(frozen=True, eq=False)
class Sweep:
    """The trade-off. ``path`` by rising lam; ``ends`` are training alone and one model for all, the limits of lam.

    ``front`` holds the points that no other lam beats in fewer bytes, ``fewest`` for every target the lam that reaches it first.
    ``rounds_used`` counts all rounds played except the dynamic schedule's, ``rounds_separate`` what a run for each lam takes.
    ``error`` is the mean squared distance of the clients' models to their ``error_of``: the true parameters (``"truth"``) or,
    where these are not known, Problem (2)'s exact solution at that lam (``"solution"``).
    """

    kind: str
    clients: int
    rounds: int
    path: tuple[Curve, ...]
    dynamic: Curve | None
    ends: Mapping[str, Mapping[str, float]]
    front: tuple[Place, ...]
    fewest: tuple[Fewest, ...]
    rounds_used: int
    rounds_separate: int
    error_of: str | None
    notes: tuple[str, ...] = ()
    text: str = field(default="", repr=False)

    @property
    def score(self) -> str:
        return score_name(self.kind)

    def json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "kind": self.kind,
            "score": self.score,
            "clients": self.clients,
            "rounds": self.rounds,
            "path": [curve.json() for curve in self.path],
            "dynamic": None if self.dynamic is None else self.dynamic.json(),
            "ends": {name: dict(end) for name, end in self.ends.items()},
            "front": [place._asdict() for place in self.front],
            "fewest": [row._asdict() for row in self.fewest],
            "rounds_used": self.rounds_used,
            "rounds_separate": self.rounds_separate,
            "share": self.rounds_used / self.rounds_separate,
            "error_of": self.error_of,
            "notes": list(self.notes),
        }

    def table(self) -> list[dict[str, Any]]:
        """A row per lam: its score after all rounds and at its end, the rounds and bytes that take its loss 95 % of the way."""
        rows = []
        for curve in (*self.path, *([] if self.dynamic is None else [self.dynamic])):
            at = settled(curve.curve)
            rows.append(
                {
                    "lam": "dynamic" if curve.lam is None else curve.lam,
                    f"val_{self.score}": curve.curve[-1].val_score,
                    f"end_{self.score}": curve.end.val_score,
                    **({} if self.error_of is None else {"error": curve.curve[-1].error}),
                    "settled": at.round,
                    "bytes": at.bytes,
                    "played": curve.rounds_used,
                    "estimated": "from round " + str(curve.measured + 1) if curve.estimated else "no",
                }
            )
        return rows


@one_thread()
def sweep(
    federation: Federation,
    model: str | nn.Module | Task = "linear",
    *,
    lams: int | Sequence[float] = 10,
    rounds: int = 50,
    targets: Sequence[float] | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    cohort: float | int = 1.0,
    seed: int = 0,
    weights: str = "uniform",
    bias: bool = True,
    dtype: str = "float32",
    dynamic: bool = True,
    backbone: str | os.PathLike[str] | None = None,
    callback: Callback | None = None,
) -> Sweep:
    """FedCLUP's score on validation rows against rounds and bytes, for lam from local to global.

    ``lams`` are the degrees, or how many (spread over the curvature of the clients' risks). ``rounds`` is how long a run for
    one lam would be, ``steps`` or ``epochs`` the work in a round (ten full-batch steps; two epochs where there are batches),
    ``lr`` the step size at lam = 0 (from the smoothness of a linear model, 0.1 otherwise; at lam it is 1/(1/lr + lam)).
    ``targets`` are the scores to reach in the fewest rounds. ``dynamic`` runs FedCLUPDynamic as well, for ``rounds`` rounds
    more. ``backbone`` is as for ``run``. ``callback`` is given a record per round played.
    """
    check(FedCLUP(), federation, rounds, batch_size, seed, "auto", None, dtype, weights, None, 0.0, "cpu")
    if len(federation) < 2:
        raise InvalidData("there is one client only: nobody to share with; check which column names the clients")
    wanted = None if targets is None else _targets(targets)
    work = work_of(batch_size, steps, epochs)
    rows = with_validation(federation.to(DTYPES[dtype]), VAL_SHARE, seed)
    task, rows, _ = after_prefix(build_task(model, rows, seed, DTYPES[dtype], bias, backbone), rows)
    assert rows.val is not None
    smoothness = smoothness_of(task, rows)
    bend = max(1 / _positive("lr", lr) if lr is not None else 0.0, smoothness or 0.0) or 10.0
    degrees = _degrees(lams, bend)
    ground = Ground(task, replace(rows, test=rows.val), batch_size, seed, weights, cohort_size(cohort, len(rows)), callback)
    goals, error_of = aims(task, rows, degrees, weights)

    def method(lam: float) -> FedCLUP:
        """Where L is known the server's step is that of the paper's experiments, 1/L_g; otherwise the server averages."""
        server = None if smoothness is None else (lam + bend) / (lam * bend)
        return FedCLUP(lam=lam, lr=short(1 / (bend + lam)), server_lr=server and short(server), **work)

    # one full-batch step is the pooled gradient: one model for all, without the drift of several
    ends = {"local": Local(lr=1 / bend, **work), "shared": FedAvg(lr=1 / bend, **({"steps": 1} if batch_size is None else work))}
    order = slice(None, None, 1 if smoothness is not None else -1)  # the local models of a network cannot be averaged
    found = along(ground, [method(lam) for lam in degrees[order]], dict(list(ends.items())[order]), rounds, goals)
    path = tuple(found.curves[order])
    growing = (
        schedule(ground, _growing(degrees, bend, work), rounds, goals.get(degrees[0]) if error_of == "truth" else None)
        if dynamic
        else None
    )

    higher = score_name(task.kind) == "acc"
    curves = {curve.lam: curve.curve for curve in path if curve.lam is not None}
    wanted = levels([points[-1].val_score for points in curves.values()], higher) if wanted is None else wanted
    result = Sweep(
        kind=task.kind,
        clients=len(rows),
        rounds=rounds,
        path=path,
        dynamic=growing,
        ends={name: {k: getattr(found.ends[name], k) for k in ("val_score", "val_loss")} for name in ends},
        front=tuple(front(curves, higher)),
        fewest=tuple(fewest(curves, wanted, higher)),
        rounds_used=found.rounds,
        rounds_separate=rounds * len(degrees),
        error_of=error_of,
        notes=_notes(path, ground),
    )
    return replace(result, text=_words(result))


def total(rounds: int, lams: int | Sequence[float], dynamic: bool) -> int:
    """Rounds that a sweep plays at most."""
    return most(rounds, lams if isinstance(lams, int) else len(set(lams))) + rounds * dynamic


# -- what is asked ---------------------------------------------------------------------------------------------------------
def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < np.inf:
        raise InvalidArgument(f"{name} must be a positive number, not {value!r}")
    return float(value)


def _degrees(lams: int | Sequence[float], bend: float) -> list[float]:
    """The lams, rising; a number of them is spread evenly in log over ``DECADES`` of the smoothness."""
    if isinstance(lams, (int, np.integer)) and not isinstance(lams, bool):
        if not 2 <= lams <= 1000:
            raise InvalidArgument(f"lams must be at least 2 (and at most 1000), or a list of positive numbers, not {lams}")
        return [short(lam) for lam in bend * np.logspace(*DECADES, int(lams))]
    if isinstance(lams, (str, bool)) or not isinstance(lams, (Sequence, np.ndarray)):
        raise InvalidArgument(f"lams must be a number of lams or a list of positive numbers, not {lams!r}")
    out = sorted({_positive("every lam", lam) for lam in lams})
    if len(out) < 2:
        raise InvalidArgument("a sweep needs two different lams at least; for one use ft.run(ft.FedCLUP(lam=...), ...)")
    return out


def _targets(targets: Sequence[float]) -> list[float]:
    if isinstance(targets, str) or not all(isinstance(t, Real) and np.isfinite(t) for t in targets):
        raise InvalidArgument(f"targets must be a list of finite numbers, not {targets!r}")
    return [float(target) for target in targets]


def _growing(lams: Sequence[float], bend: float, work: Mapping[str, Any]) -> FedCLUPDynamic:
    """The dynamic schedule: from the smallest lam up to the curvature, its step size safe all the way."""
    ceiling = max(lams[0], min(lams[-1], bend))
    factor = float(np.clip((lams[-1] / lams[0]) ** (1 / (len(lams) - 1)), 2, 4))
    return FedCLUPDynamic(lam=lams[0], factor=short(factor), ceiling=short(ceiling), lr=short(1 / (bend + ceiling)), **work)


# -- in words --------------------------------------------------------------------------------------------------------------
def _notes(path: Sequence[Curve], ground: Ground) -> tuple[str, ...]:
    out = []
    guessed = [curve.measured for curve in path if curve.estimated]
    if guessed:
        few = f"{min(guessed)}" if min(guessed) == max(guessed) else f"{min(guessed)} to {max(guessed)}"
        out.append(
            f"The curves of {len(guessed)} of {len(path)} lams were played from scratch for {few} rounds; their later rounds are "
            "estimated from these and from where the warm-started path ends."
        )
        if min(guessed) < FEW or ground.task.gradient is None or ground.batch_size is not None:
            why = "few rounds" if min(guessed) < FEW else "a network" if ground.task.gradient is None else "random batches"
            out.append(f"With {why} this estimate is rough; ft.run (fedtailor run fedclup) gives the curve of one lam exactly.")
    moving = sum(not curve.rested for curve in path)
    if moving:
        out.append(f"The ends of {moving} of {len(path)} lams had not come to rest; with more rounds they may move on.")
    return tuple(out)


def _words(found: Sweep) -> str:
    name = "accuracy" if found.score == "acc" else "mean squared error"
    sign = 1 if found.score == "acc" else -1
    share = found.rounds_used / found.rounds_separate
    best = max(found.path, key=lambda c: sign * c.curve[-1].val_score)
    local, shared = (found.ends[end]["val_score"] for end in ("local", "shared"))
    out = [
        f"{found.clients} clients, {len(found.path)} lams, {found.rounds_used} rounds played in place of {found.rounds_separate} "
        f"({share:.0%}).",
        f"Validation {name}: training alone {local:.4g}, one model for all {shared:.4g}; best after {found.rounds} rounds "
        f"{best.curve[-1].val_score:.4g} with {written(best.algorithm)}.",
    ]
    for row in found.fewest:
        if row.lam is None:
            out.append(f"Target {row.target:.4g}: not reached in {found.rounds} rounds.")
            continue
        free = "; training alone reaches it with no traffic" if sign * local >= sign * row.target else ""
        took = f"{row.rounds} round{'s' * (row.rounds != 1)}, {(row.bytes or 0) / 1e6:.3g} MB"
        out.append(f"Target {row.target:.4g}: lam = {row.lam:.3g}, {took}{free}.")
    if found.dynamic is not None:
        out.append(
            f"The dynamic schedule ({written(found.dynamic.algorithm)}) reaches {found.dynamic.end.val_score:.4g} in "
            f"{found.rounds} rounds, played in addition."
        )
    return "\n".join([*out, *found.notes, "Test rows were not looked at."])
