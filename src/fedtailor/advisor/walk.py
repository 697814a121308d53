"""The path over the lams: each is played from scratch (cold) for a few rounds, its end found from its neighbour's (warm)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.advisor import extrapolate
from fedtailor.advisor.tradeoff import Point, round_budget
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedclup import FedCLUP
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.engine.base import Engine
from fedtailor.engine.divergence import check_loss
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.rounds import play_on
from fedtailor.engine.state import State
from fedtailor.errors import Diverged, FedtailorError, InvalidArgument
from fedtailor.metrics.truth import fits
from fedtailor.task import Task
from fedtailor.theory.envelope import solve_path

PILOT = 0.2  # share of the rounds that is played from scratch for every lam, at least
COLD = 0.6  # share of a lam's budget that is spent on rounds from scratch
SEEN = 16  # last rounds, at most, from which the later ones are estimated
REST = 1e-4  # share of the way from the start that may be left when a run counts as at rest
CALM = 1e-3  # relative change of the validation loss over three rounds, where rounds are random
STEP = 0.02  # estimated rounds are measured this far apart, relative to their number
SOLVABLE = 1e8  # clients x parameters^3 up to which Problem (2) is solved exactly, for the error

Callback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class LamCurve:
    """The scores of one lam (None: the dynamic schedule) by rounds and bytes, as of a run from scratch, and where they end.

    The first ``measured`` rounds were played, those after them are estimated. ``end`` is the point the warm-started rounds came
    to, ``rested`` whether they came to rest there. ``rounds_used`` counts the rounds played for this lam, cold and warm.
    """

    lam: float | None
    algorithm: Algorithm
    curve: tuple[Point, ...]
    end: Point
    rounds_used: int
    measured: int
    rested: bool
    scores: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # of every client, at the end

    @property
    def estimated(self) -> bool:
        return self.curve[-1].round > self.measured

    def json(self) -> dict[str, Any]:
        return {
            "lam": self.lam,
            "settings": written(self.algorithm),
            "curve": [asdict(point) for point in self.curve],
            "end": {name: getattr(self.end, name) for name in ("val_score", "val_loss", "error")},
            "rounds_used": self.rounds_used,
            "measured": self.measured,
            "estimated": self.estimated,
        }


class Reading(NamedTuple):
    """The result of a round: predictions on the validation rows, in their order, and the clients' models if they are compared."""

    logits: Tensor
    models: Tensor | None

    def mixed(self, others: Sequence[Reading], shares: Tensor) -> Reading:
        """Return self + shares @ (others - self)."""

        def mix(own: Tensor | None, theirs: Sequence[Any]) -> Any:
            return None if own is None else own + torch.tensordot(shares.to(own), torch.stack(list(theirs)) - own, 1)

        return Reading(mix(self.logits, [o.logits for o in others]), mix(self.models, [o.models for o in others]))


@contextmanager
def _refusing_divergence(label: str) -> Iterator[None]:
    try:
        yield
    except Diverged as error:
        raise InvalidArgument(f"{label} diverges ({error})") from error


@dataclass(eq=False)
class Runner:
    """Plays methods on a federation and measures them on its validation rows."""

    task: Task
    rows: Federation
    options: Options
    callback: Callback | None = None
    origin: Tensor | None = None  # predictions of the untrained model

    @property
    def random(self) -> bool:
        """Return whether a round takes some of the rows or some of the clients, so that rounds differ by chance."""
        return self.options.batch_size is not None or self.options.size(len(self.rows)) < len(self.rows)

    def fresh(self, algorithm: Algorithm) -> State:
        return self.prepared(algorithm).start()

    def prepared(self, algorithm: Algorithm) -> Prepared:
        return prepare(algorithm, self.rows, self.task, self.options)

    def play(
        self, algorithm: Algorithm, state: State, rounds: int, label: str, reference: Tensor | None = None, rest: bool = True
    ) -> Iterator[tuple[Reading, Point, bool]]:
        """Yield (reading, point, come to rest) before the first round and after each; ends after ``rounds``, or at rest."""
        ready = self.prepared(algorithm)
        sent = {name: ready.facts[name] * ready.size for name in ("bytes_down", "bytes_up")}
        state.records, total = [], 0
        state.sent = ready.plan.sent_after(state.shared, state.server, 0, rounds)
        last: list[Reading] = []
        losses: list[float] = []
        engine, _ = ready.engine(state)
        self.options = self.options.but(engine=engine.name)  # the same one for all lams
        with engine:
            played = play_on(engine, state, rounds, ready.size)
            rnd: Round | None = None
            while True:
                done = len(state.records)
                reading = self._read(engine, state, reference is not None)
                point = self.point(reading, done, total, reference)
                if rnd is not None:
                    with _refusing_divergence(label):
                        check_loss(engine, state.sent, state.store, np.array([point.val_loss]), rnd)
                if self.origin is None:
                    self.origin = reading.logits
                if done and self.callback is not None:
                    score = {f"{self.task.score.name}_personal": point.val_score}
                    self.callback({"round": done - 1, "label": label, **sent, **score})
                last, losses = [*last[-2:], reading], [*losses[-5:], point.val_loss]
                rests = rest and self._rests(last, losses)
                yield reading, point, rests
                if rests:
                    return
                with _refusing_divergence(label):
                    rnd = next(played, None)
                if rnd is None:
                    return
                state.records.append({})
                total += 0 if algorithm.silent(rnd) else sum(sent.values())

    def _rests(self, last: Sequence[Reading], losses: Sequence[float]) -> bool:
        """Return whether the rounds lead nowhere any more: predictions by their shrinking changes; the loss, where rounds are
        random."""
        if self.random:
            if len(losses) < 6:
                return False
            before, now = float(np.mean(losses[:3])), float(np.mean(losses[3:]))
            return abs(now - before) <= CALM * abs(before)
        if len(last) < 3 or self.origin is None:
            return False
        way = float(torch.dist(last[-1].logits, self.origin))
        return extrapolate.distance_left(*(reading.logits for reading in last)) <= REST * way

    def _read(self, engine: Engine, state: State, models: bool) -> Reading:
        val = self.rows.val
        assert val is not None
        out: Tensor | None = None
        for ids, personal, _, _, mask, _ in engine.predictions(state.sent, np.arange(len(self.rows)), state.store, val):
            if out is None:
                out = personal.new_empty(len(val.y), *personal.shape[2:])
            place = torch.from_numpy(val.offsets[ids])[:, None] + torch.arange(mask.shape[1])
            out[place[mask]] = personal[mask]
        assert out is not None
        return Reading(out, self._models(state) if models else None)

    def _models(self, state: State) -> Tensor:
        """Return the clients' models, [clients, parameters] by name."""
        models = tree.trainable(_client_models(state, len(self.rows)))
        return torch.cat([models[name].flatten(1).double() for name in sorted(models)], 1)

    def scores(self, reading: Reading) -> NDArray[np.float64]:
        """Return every client's score on its validation rows; NaN where it has none."""
        val, measure = self.rows.val, self.task.score.clients
        assert val is not None
        if measure is None:
            rights = self.task.kind.hits(reading.logits, val.y).numpy()
            return np.add.reduceat(rights, val.offsets[:-1]) / val.sizes
        out = np.full(len(val.sizes), np.nan)
        for i, (start, end) in enumerate(itertools.pairwise(val.offsets)):
            real = torch.ones(1, int(end - start), dtype=torch.bool)
            score = measure(reading.logits[start:end].unsqueeze(0), val.y[start:end].unsqueeze(0), real)
            out[i] = np.nan if score is None else score[0]
        return out

    def point(self, reading: Reading, number: int, sent: int, reference: Tensor | None) -> Point:
        """Means over clients, each over its own validation rows."""
        val = self.rows.val
        assert val is not None
        costs = self.task.example_loss(reading.logits, val.y).double().numpy()
        loss = float(np.mean(np.add.reduceat(costs, val.offsets[:-1]) / val.sizes))
        score = float(np.nanmean(self.scores(reading)))
        error = None if reference is None or reading.models is None else float(((reading.models - reference) ** 2).sum(1).mean())
        return Point(number, int(sent), score, loss, error)


def flat(model: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([model[name].flatten().double() for name in sorted(model)])


def references(task: Task, rows: Federation, lams: Sequence[float], weights: str) -> tuple[dict[float, Tensor], str | None]:
    """Return, for every lam, the models [clients, parameters] that the error is the distance to, and what they are."""
    start = tree.trainable(task.init())
    if rows.truth is not None and fits(task, rows.truth[0]):
        models = torch.stack([flat({k: t.get(k, torch.zeros_like(v)) for k, v in start.items()}) for t in rows.truth])
        return dict.fromkeys(lams, models), "truth"
    if task.gradient is None or len(rows) * float(tree.size(start)) ** 3 > SOLVABLE:
        return {}, None
    try:
        solutions = solve_path(task, rows, lams, weights=weights)
    except FedtailorError:  # no unique minimum, or none that is certain
        return {}, None
    return {lam: torch.stack([flat(m) for m in s.models]) for lam, s in zip(lams, solutions, strict=True)}, "solution"


# -- the path --------------------------------------------------------------------------------------------------------------
@dataclass
class LamPath:
    """The curves of the path, its two ends, and the rounds that were played."""

    curves: list[LamCurve]
    ends: dict[str, Point]
    rounds: int = 0
    scores: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # of every client, at the two ends


def _pilot(rounds: int) -> int:
    return max(1, round(PILOT * rounds))


def most_rounds(rounds: int, lams: int) -> int:
    """Return the rounds that may be played: the budget, or what a few rounds of each lam take if that is more."""
    return max(round_budget(rounds, lams), (lams - 1) * (_pilot(rounds) + 1) + 3)


def walk_path(
    runner: Runner, methods: Sequence[FedCLUP], ends: Mapping[str, Algorithm], rounds: int, references: Mapping[float, Tensor]
) -> LamPath:
    """Return the curve of every method, in their order, and the ends of the path: ``ends`` names first the one beside the first
    method.

    The first method is played from scratch to its end. Each further one is played from scratch for a few rounds; if it has not
    come to rest, its end is looked for from the state that the one before ended with. No more than ``most_rounds`` are played.
    """
    pilot, count, names = _pilot(rounds), len(methods), list(ends)
    left = most_rounds(rounds, count)
    walked = LamPath([], {})
    state: State | None = None
    for position, method in enumerate(methods):
        lam, after = float(method.lam), count - 1 - position
        reference, label = references.get(lam), f"lam={lam:.3g}"
        reserve = after * (pilot + 1) + (2 if position == 0 else 1)  # what comes after needs this at least
        share = (left - reserve) // (after + 2)
        cold = min(rounds, left - reserve if state is None else max(pilot, int(COLD * share)))
        begun = runner.fresh(method)
        points: list[Point] = []
        seen: deque[Reading] = deque(maxlen=SEEN)
        for reading, point, rests in runner.play(method, begun, cold, label, reference):
            points.append(point)
            seen.append(reading)
            end = Arrived(begun, reading, point, rests)
        measured = used = len(points) - 1
        if state is not None and not end.rests:
            end = arrive(runner, method, state, max(1, (left - used - reserve) // (after + 2)), f"{label}, warm", reference)
            used += len(end.state.records)
            points += _estimated_points(runner, list(seen), end, points, rounds, reference)
        state = end.state
        scores = runner.scores(end.reading)
        walked.curves.append(LamCurve(lam, method, tuple(points), end.point, used, measured, end.rests, scores))
        left, walked.rounds = left - used, walked.rounds + used
        if position == 0 or not after:
            name = names[0 if position == 0 else 1]
            limit = arrive(runner, ends[name], state, max(1, (left - reserve + 1) // (after + 1)), name)
            walked.ends[name], walked.scores[name] = limit.point, runner.scores(limit.reading)
            left, walked.rounds = left - len(limit.state.records), walked.rounds + len(limit.state.records)
    return walked


class Arrived(NamedTuple):
    """The state, the reading and the point after some rounds, and whether they came to rest."""

    state: State
    reading: Reading
    point: Point
    rests: bool


def arrive(runner: Runner, method: Algorithm, start: State, rounds: int, label: str, reference: Tensor | None = None) -> Arrived:
    """Play on from (a copy of) another method's state: its shared model, its clients' models."""
    state = runner.fresh(method)
    if state.shared:
        state.shared = tree.clone(start.shared)
    if not isinstance(method, FedAvg):
        state.store.put(np.arange(len(runner.rows)), {"model": _client_models(start, len(runner.rows))})
    *_, (reading, point, rests) = runner.play(method, state, rounds, label, reference)
    return Arrived(state, reading, point, rests)


def _client_models(state: State, clients: int) -> dict[str, Tensor]:
    """Return every client's model, stacked; a client that has not taken part yet has the shared one."""
    ids = np.flatnonzero(state.store.born)
    stored = state.store.get(ids)["model"] if len(ids) else {}
    out = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), state.shared["model"])
    for name, leaf in stored.items():
        out[name][torch.from_numpy(ids)] = leaf
    return out


def _estimated_points(
    runner: Runner, seen: Sequence[Reading], end: Arrived, points: Sequence[Point], rounds: int, reference: Tensor | None
) -> list[Point]:
    """Return the points of the rounds not played, estimated from those played and from the end; none is better than all
    measured."""
    last, measured = points[-1], [*points, end.point]
    shares = extrapolate.ahead(torch.stack([r.logits.flatten() for r in seen]), end.reading.logits.flatten(), rounds - last.round)
    least = min(point.val_loss for point in measured)
    scores = [point.val_score for point in measured]
    best = (-np.inf, max(scores)) if runner.task.score.higher else (min(scores), np.inf)
    out, number = [], last.round
    while number < rounds:
        number = min(rounds, max(number + 1, round(number * (1 + STEP))))
        reading = end.reading.mixed(seen, torch.from_numpy(shares[number - last.round - 1]))
        point = runner.point(reading, number, last.bytes // last.round * number, reference)
        score, loss = float(np.clip(point.val_score, *best)), max(point.val_loss, least)
        out.append(replace(point, val_score=score, val_loss=loss))
    return out


def play_from_scratch(
    runner: Runner, method: Algorithm, rounds: int, label: str, lam: float | None = None, reference: Tensor | None = None
) -> LamCurve:
    """Return the curve of a method that is played from scratch for all the rounds."""
    points: list[Point] = []
    last: Reading | None = None
    for last, point, _ in runner.play(method, runner.fresh(method), rounds, label, reference, rest=False):  # noqa: B007
        points.append(point)
    assert last is not None
    return LamCurve(lam, method, tuple(points), points[-1], rounds, rounds, False, runner.scores(last))


def play_path(runner: Runner, methods: Mapping[float, Algorithm], ends: Mapping[str, Algorithm], rounds: int) -> LamPath:
    """Return the curve of every method, by its lam, and the ends of the path, all of them played from scratch: this needs to know
    nothing of the methods."""
    curves = [play_from_scratch(runner, method, rounds, f"lam={lam:.3g}", lam) for lam, method in methods.items()]
    limits = {name: play_from_scratch(runner, method, rounds, name) for name, method in ends.items()}
    points, scores = ({name: getattr(limit, part) for name, limit in limits.items()} for part in ("end", "scores"))
    return LamPath(curves, points, rounds * (len(methods) + len(ends)), scores)
