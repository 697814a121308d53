"""``sweep``: what a stronger pull to the shared model buys, and what it costs in rounds and bytes.

FedCLUP over lam from almost local to almost one model. Separate runs would take lams x rounds; here every lam is begun cold for a
few rounds, and its end is found by going on from the end of the neighbouring lam. The rounds between are estimated from both
(``extrapolate``). What is said about a lam is thus always about a run from scratch. Another method that has a lam is played from
scratch for all rounds of every lam: of its ends nothing is known. Test rows are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedtailor.advisor.pilot import task_and_rows
from fedtailor.advisor.steps import four_digits, smoothness_of, training, work_of
from fedtailor.advisor.tradeoff import Fewest, Place, fewest, front, levels, settled
from fedtailor.advisor.walk import (
    Callback,
    LamCurve,
    LamPath,
    Runner,
    most_rounds,
    play_from_scratch,
    play_path,
    references,
    walk_path,
)
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedclup import FedCLUP
from fedtailor.algorithms.fedclup_dynamic import FedCLUPDynamic
from fedtailor.algorithms.local import Local
from fedtailor.algorithms.settings import build, find, slug, written
from fedtailor.data.federation import Federation
from fedtailor.engine.base import one_thread
from fedtailor.engine.checked import taking
from fedtailor.engine.options import SweepOptions
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.paired import paired
from fedtailor.metrics.verdict import Candidate, Verdict, best_first, judge, unknown
from fedtailor.task import Kind, Task
from fedtailor.task.scores import Metric

DECADES = (-4, 1)  # powers of ten, times the smoothness, between which lams are spread unless given
SWEPT = "lam was swept on these rows and nothing else was tuned; compare --tune --splits 10 is the longer test."
IN_FULL = "Every lam and both ends were played from scratch for {} rounds; nothing is estimated."
FEW = 6  # rounds played of a curve below which its estimate is rough


@dataclass(frozen=True, eq=False)
class Sweep:
    """The trade-off. ``path`` by rising lam; ``ends`` are training alone and one model for all, the limits of lam.

    ``front`` holds the points that no other lam beats in fewer bytes, ``fewest`` for every target the lam that reaches it first.
    ``rounds_used`` counts all rounds played except the dynamic schedule's, ``rounds_separate`` what a run for each lam takes.
    ``error`` is the mean squared distance of the clients' models to their ``error_of``: the true parameters (``"truth"``) or,
    where these are not known, Problem (2)'s exact solution at that lam (``"solution"``).
    """

    kind: Kind
    score_by: Metric
    clients: int
    rounds: int
    path: tuple[LamCurve, ...]
    dynamic: LamCurve | None
    ends: Mapping[str, Mapping[str, float]]
    front: tuple[Place, ...]
    fewest: tuple[Fewest, ...]
    rounds_used: int
    rounds_separate: int
    error_of: str | None
    notes: tuple[str, ...] = ()
    text: str = field(default="", repr=False)
    verdict: Verdict | None = None
    best: float | None = None  # the lam that the verdict and the words are about

    @property
    def score(self) -> str:
        return self.score_by.name

    def json(self) -> dict[str, Any]:
        """Return the same as plain values."""
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
            "best": self.best,
            "rounds_used": self.rounds_used,
            "rounds_separate": self.rounds_separate,
            "share": self.rounds_used / self.rounds_separate,
            "error_of": self.error_of,
            "notes": list(self.notes),
            "verdict": None if self.verdict is None else self.verdict.json(),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row per lam: its score after all rounds and at its end, the rounds and bytes that take its loss 95 % of the
        way."""
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


@taking(SweepOptions)
@one_thread()
def sweep(
    federation: Federation,
    model: str | nn.Module | Task = "linear",
    *,
    method: str | type[Algorithm] = FedCLUP,
    callback: Callback | None = None,
    **settings: Any,
) -> Sweep:
    """Return the score on validation rows against rounds and bytes, for lam from local to global.

    A number of ``lams`` is spread over the curvature of the clients' risks. ``lr`` is the step size at lam = 0 (from the
    smoothness of a linear model, 0.1 otherwise); at lam it is 1/(1/lr + lam). ``dynamic`` costs ``rounds`` rounds more.
    ``method`` is FedCLUP, whose path is walked along; another one that has a lam, by its class or name, is played in full for
    each, which costs ``rounds`` rounds per lam and as many for each end, and has no dynamic schedule. ``callback`` is given a
    record per round played.
    """
    options, kind = SweepOptions.of(settings), _swept(method)
    training_options = training(options)
    if len(federation) < 2:
        raise InvalidData("there is one client only: nobody to share with; check which column names the clients")
    rounds, targets, work = options.rounds, None if options.targets is None else _targets(options.targets), work_of(options)
    task, rows = task_and_rows(federation, model, options)
    assert rows.val is not None
    smoothness = smoothness_of(task, rows)
    curvature = max(1 / options.lr if options.lr is not None else 0.0, smoothness or 0.0) or 10.0
    steps = _Steps(_degrees(options.lams, curvature), curvature, smoothness is not None, work)
    ends = steps.ends(training_options.batch_size is None)
    runner = Runner(task, replace(rows, test=rows.val), training_options, callback)
    dynamic, error_of = None, None
    if kind is FedCLUP:
        walked, dynamic, error_of = _walked(runner, rows, steps, ends, options)
    else:
        walked = play_path(runner, {lam: build(kind, steps.at(lam)) for lam in steps.lams}, ends, rounds)
    path = tuple(sorted(walked.curves, key=lambda curve: curve.lam or 0.0))

    higher = task.score.higher
    curves = {curve.lam: curve.curve for curve in path if curve.lam is not None}
    targets = levels([points[-1].val_score for points in curves.values()], higher) if targets is None else targets
    result = Sweep(
        kind=task.kind,
        score_by=task.score,
        clients=len(rows),
        rounds=rounds,
        path=path,
        dynamic=dynamic,
        ends={name: {k: getattr(walked.ends[name], k) for k in ("val_score", "val_loss")} for name in ends},
        front=tuple(front(curves, higher)),
        fewest=tuple(fewest(curves, targets, higher)),
        rounds_used=walked.rounds,
        rounds_separate=rounds * len(steps.lams),
        error_of=error_of,
        notes=_notes(path, runner) if kind is FedCLUP else (IN_FULL.format(rounds),),
        best=best_of(path, rows.val.sizes, task.score).lam,
        verdict=_verdict(path, walked.scores.get("local"), rows.val.sizes, task.score),
    )
    return replace(result, text=_words(result))


def _walked(
    runner: Runner, rows: Federation, steps: _Steps, ends: Mapping[str, Algorithm], options: SweepOptions
) -> tuple[LamPath, LamCurve | None, str | None]:
    """Return FedCLUP's path over lam, the dynamic schedule's curve if it is wanted, and what the clients' errors are to."""
    compared, error_of = references(runner.task, rows, steps.lams, runner.options.weights)
    order = slice(None, None, 1 if steps.is_known else -1)  # the local models of a network cannot be averaged
    methods = [steps.clup(lam) for lam in steps.lams][order]
    walked = walk_path(runner, methods, dict([*ends.items()][order]), options.rounds, compared)
    if not options.dynamic:
        return walked, None, error_of
    truth = compared.get(steps.lams[0]) if error_of == "truth" else None
    return walked, play_from_scratch(runner, steps.dynamic(), options.rounds, "dynamic", reference=truth), error_of


def total(options: SweepOptions, method: str | type[Algorithm] = FedCLUP) -> int:
    """Return the rounds that a sweep plays at most."""
    lams = options.lams if isinstance(options.lams, int) else len(set(options.lams))
    if _swept(method) is not FedCLUP:
        return options.rounds * (lams + 2)
    return most_rounds(options.rounds, lams) + options.rounds * options.dynamic


# -- checked settings -------------------------------------------------------------------------------------------------------
def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < np.inf:
        raise InvalidArgument(f"{name} must be a positive number, not {value!r}")
    return float(value)


def _swept(method: str | type[Algorithm]) -> type[Algorithm]:
    """Return the class of a method that has a lam to sweep."""
    kind = find(method) if isinstance(method, str) else method
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise InvalidArgument(f"method must be the class or the name of a method, as ft.Ditto or 'ditto', not {kind!r}")
    if "lam" not in [f.name for f in fields(kind)]:
        raise InvalidArgument(f"{slug(kind)} cannot be swept: it has no setting lam; use compare --tune with a --grid of another")
    return kind


def _degrees(lams: int | Sequence[float], curvature: float) -> list[float]:
    """Return the lams, rising; a number of them is spread evenly in log over ``DECADES`` of the smoothness."""
    if isinstance(lams, (int, np.integer)) and not isinstance(lams, bool):
        if not 2 <= lams <= 1000:
            raise InvalidArgument(f"lams must be at least 2 (and at most 1000), or a list of positive numbers, not {lams}")
        return [four_digits(lam) for lam in curvature * np.logspace(*DECADES, int(lams))]
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


@dataclass(frozen=True)
class _Steps:
    """The methods of a sweep: their step sizes are safe where no client's risk is curved by more than ``curvature``, which is L
    where it ``is_known``."""

    lams: Sequence[float]
    curvature: float
    is_known: bool
    work: Mapping[str, Any]

    def at(self, lam: float) -> dict[str, Any]:
        """Return the settings of a method at lam."""
        return {"lam": lam, "lr": four_digits(1 / (self.curvature + lam)), **self.work}

    def clup(self, lam: float) -> FedCLUP:
        """Return FedCLUP; where L is known the server's step is that of the paper's experiments, 1/L_g; otherwise it averages."""
        server = four_digits((lam + self.curvature) / (lam * self.curvature)) if self.is_known else None
        return FedCLUP(server_lr=server, **self.at(lam))

    def dynamic(self) -> FedCLUPDynamic:
        """Return the dynamic schedule: from the smallest lam up to the curvature, its step size safe all the way."""
        lams, ceiling = self.lams, max(self.lams[0], min(self.lams[-1], self.curvature))
        factor, lr = (lams[-1] / lams[0]) ** (1 / (len(lams) - 1)), four_digits(1 / (self.curvature + ceiling))
        growth: dict[str, Any] = {"factor": four_digits(np.clip(factor, 2, 4)), "ceiling": four_digits(ceiling)}
        return FedCLUPDynamic(lam=lams[0], lr=lr, **growth, **self.work)

    def ends(self, all_rows: bool) -> dict[str, Algorithm]:
        """Return the limits of lam. One step on ``all_rows`` is the pooled gradient: one model for all, without the drift of
        several."""
        lr = 1 / self.curvature
        return {"local": Local(lr=lr, **self.work), "shared": FedAvg(lr=lr, **({"steps": 1} if all_rows else self.work))}


# -- in words --------------------------------------------------------------------------------------------------------------
def _notes(path: Sequence[LamCurve], runner: Runner) -> tuple[str, ...]:
    out = []
    played = [curve.measured for curve in path if curve.estimated]
    if played:
        few = f"{min(played)}" if min(played) == max(played) else f"{min(played)} to {max(played)}"
        out.append(
            f"The curves of {len(played)} of {len(path)} lams were played from scratch for {few} rounds; their later rounds are "
            "estimated from these and from where the warm-started path ends."
        )
        if min(played) < FEW or runner.task.gradient is None or runner.options.batch_size is not None:
            why = "few rounds" if min(played) < FEW else "a network" if runner.task.gradient is None else "random batches"
            out.append(f"With {why} this estimate is rough; ft.run (fedtailor run fedclup) gives the curve of one lam exactly.")
    moving = sum(not curve.rested for curve in path)
    if moving:
        out.append(f"The ends of {moving} of {len(path)} lams had not come to rest; with more rounds they may move on.")
    return tuple(out)


def _verdict(path: Sequence[LamCurve], local: NDArray[np.float64] | None, rows: NDArray[Any], score: Metric) -> Verdict:
    """Return whether pulling the clients together helps on validation rows: the lam that ends best, against training alone."""
    best = best_of(path, rows, score)
    label = f"{type(best.algorithm).__name__} lam={best.lam:.3g}"
    if local is None or not (np.isfinite(best.scores) & np.isfinite(local)).any():
        return unknown(label, score, "Whether learning together helps is not known: no client could be compared with Local.")
    gains = paired(score, best.scores, local, np.asarray(rows, np.float64))
    return judge(label, gains, score, scale=abs(best.end.val_score), rows="validation", tuned=False, how=SWEPT)


def best_of(path: Sequence[LamCurve], rows: NDArray[Any], score: Metric) -> LamCurve:
    """Return the lam that ends best (``best_first``)."""
    sizes = np.asarray(rows, np.float64)
    return path[best_first([Candidate(curve.scores, sizes, curve.end.val_loss) for curve in path], score)[0]]


def _words(swept: Sweep) -> str:
    score = swept.score_by
    share = swept.rounds_used / swept.rounds_separate
    best = next(curve for curve in swept.path if curve.lam == swept.best)
    local, shared = (swept.ends[end]["val_score"] for end in ("local", "shared"))
    out = [
        f"{swept.clients} clients, {len(swept.path)} lams, {swept.rounds_used} rounds played"
        + (f" in place of {swept.rounds_separate} ({share:.0%})." if share < 1 else "."),
        f"Validation {score.words}: training alone {local:.4g}, one model for all {shared:.4g}; best at its end "
        f"{best.end.val_score:.4g} with {written(best.algorithm)}.",
    ]
    for row in swept.fewest:
        if row.lam is None:
            out.append(f"Target {row.target:.4g}: not reached and kept in {swept.rounds} rounds.")
            continue
        free = "; training alone reaches it with no traffic" if score.gain(local, row.target) >= 0 else ""
        took = f"{row.rounds} round{'s' * (row.rounds != 1)}, {(row.bytes or 0) / 1e6:.3g} MB"
        out.append(f"Target {row.target:.4g}: lam = {row.lam:.3g}, {took}{free}.")
    if swept.dynamic is not None:
        out.append(
            f"The dynamic schedule ({written(swept.dynamic.algorithm)}) reaches {swept.dynamic.end.val_score:.4g} in "
            f"{swept.rounds} rounds, played in addition."
        )
    said = [] if swept.verdict is None else [swept.verdict.sentence]
    return "\n".join([*said, *out, *swept.notes, "Test rows were not looked at."])
