"""Walking along the lams: every one begun cold for a few rounds, its end found from the end of its neighbour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.advisor import extrapolate
from fedtailor.advisor.tradeoff import Point, purse
from fedtailor.algorithms import FedAvg, FedCLUP
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.engine.base import Engine
from fedtailor.engine.run import State, choose_engine, play_on
from fedtailor.engine.setup import make_plan
from fedtailor.errors import Diverged, FedtailorError, InvalidArgument
from fedtailor.metrics.client import hits, score_name
from fedtailor.metrics.cost import probe
from fedtailor.metrics.truth import fits
from fedtailor.runs.store import Store
from fedtailor.task import Task
from fedtailor.theory.envelope import solve_path

PILOT = 0.2  # of the rounds: played from scratch for every lam at least
COLD = 0.6  # of what there is to spend on a lam
SEEN = 16  # rounds that the later ones are estimated from, at most
REST = 1e-4  # of the way from the start: what may be left of it when a run counts as come to rest
CALM = 1e-3  # relative change of the validation loss over three rounds, where rounds are random
STEP = 0.02  # estimated rounds are measured this far apart, relative to their number
SOLVABLE = 1e8  # clients x parameters^3 up to which Problem (2) is solved exactly, for the error

Callback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Curve:
    """One lam (None: the dynamic schedule): its score by rounds and bytes of a run from scratch, and where it ends.

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
    """What is kept of a round: predictions on the validation rows, in their order; the clients' models, if there is an aim."""

    logits: Tensor
    models: Tensor | None

    def mixed(self, others: Sequence[Reading], shares: Tensor) -> Reading:
        """self + shares @ (others - self)."""

        def mix(here: Tensor | None, there: Sequence[Any]) -> Any:
            return None if here is None else here + torch.tensordot(shares.to(here), torch.stack(list(there)) - here, 1)

        return Reading(mix(self.logits, [o.logits for o in others]), mix(self.models, [o.models for o in others]))


@dataclass(eq=False)
class Ground:
    """The federation, and how a method is played and measured on it: on validation rows."""

    task: Task
    rows: Federation
    batch_size: int | None
    seed: int
    weights: str
    size: int  # clients per round
    callback: Callback | None = None
    engine: str = "auto"
    origin: Tensor | None = None  # predictions of the untrained model

    def fresh(self, algorithm: Algorithm) -> State:
        return State(*algorithm.init_server(self.task), Store(len(self.rows)))

    def play(
        self, algorithm: Algorithm, state: State, rounds: int, label: str, aim: Tensor | None = None, rest: bool = True
    ) -> Iterator[tuple[Reading, Point, bool]]:
        """(reading, point, come to rest) before the first round and after each; ends after ``rounds``, or at rest."""
        plan = make_plan(algorithm, self.task, self.rows, self.batch_size, self.seed, self.weights)
        facts = probe(algorithm, self.task, plan.feed)
        sent = {name: facts[name] * self.size for name in ("bytes_down", "bytes_up")}
        state.records = []
        last: list[Reading] = []
        losses: list[float] = []
        engine, _ = choose_engine(self.engine, plan, state.shared, None, self.size, self.seed, None)
        self.engine = engine.name
        with engine:
            numbers = play_on(engine, state, rounds, self.size, self.seed)
            while True:
                done = len(state.records)
                now = self._read(engine, state, aim is not None)
                point = self.point(now, done, sum(sent.values()) * done, aim)
                if self.origin is None:
                    self.origin = now.logits
                if done and self.callback is not None:
                    score = {f"{score_name(self.task.kind)}_personal": point.val_score}
                    self.callback({"round": done - 1, "label": label, **sent, **score})
                last, losses = [*last[-2:], now], [*losses[-5:], point.val_loss]
                still = rest and self._rests(last, losses)
                yield now, point, still
                if still or not self._next(numbers, label):
                    return
                state.records.append({})

    @staticmethod
    def _next(numbers: Iterator[Any], label: str) -> bool:
        try:
            return next(numbers, None) is not None
        except Diverged as error:
            raise InvalidArgument(f"{label} diverges ({error}); give a smaller lr, or standardise the features") from error

    def _rests(self, last: Sequence[Reading], losses: Sequence[float]) -> bool:
        """Whether the rounds lead nowhere any more: predictions by their shrinking changes; the loss, where rounds are random."""
        if self.batch_size is not None or self.size < len(self.rows):
            if len(losses) < 6:
                return False
            before, now = float(np.mean(losses[:3])), float(np.mean(losses[3:]))
            return abs(now - before) <= CALM * abs(before)
        if len(last) < 3 or self.origin is None:
            return False
        return extrapolate.left(*(reading.logits for reading in last)) <= REST * float(torch.dist(last[-1].logits, self.origin))

    def _read(self, engine: Engine, state: State, models: bool) -> Reading:
        val = self.rows.val
        assert val is not None
        out: Tensor | None = None
        for ids, own, _, _, mask, _ in engine.predictions(state.shared, np.arange(len(self.rows)), state.store, val):
            if out is None:
                out = own.new_empty(len(val.y), *own.shape[2:])
            place = torch.from_numpy(val.offsets[ids])[:, None] + torch.arange(mask.shape[1])
            out[place[mask]] = own[mask]
        assert out is not None
        return Reading(out, self._models(state) if models else None)

    def _models(self, state: State) -> Tensor:
        """The clients' models, [clients, parameters] by name."""
        whole = tree.trainable(_whole(state, len(self.rows)))
        return torch.cat([whole[name].flatten(1).double() for name in sorted(whole)], 1)

    def point(self, reading: Reading, number: int, sent: int, aim: Tensor | None) -> Point:
        """Means over clients, each over its own validation rows."""
        val = self.rows.val
        assert val is not None
        rights = hits(self.task.kind, reading.logits, val.y).numpy()
        costs = self.task.example_loss(reading.logits, val.y).double().numpy()
        score, loss = (float(np.mean(np.add.reduceat(v, val.offsets[:-1]) / val.sizes)) for v in (rights, costs))
        error = None if aim is None or reading.models is None else float(((reading.models - aim) ** 2).sum(1).mean())
        return Point(number, int(sent), score, loss, error)


def flat(model: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([model[name].flatten().double() for name in sorted(model)])


def aims(task: Task, rows: Federation, lams: Sequence[float], weights: str) -> tuple[dict[float, Tensor], str | None]:
    """For every lam the models [clients, parameters] that the error is the distance to, and what they are."""
    start = tree.trainable(task.init())
    if rows.truth is not None and fits(task, rows.truth[0]):
        models = torch.stack([flat({k: t.get(k, torch.zeros_like(v)) for k, v in start.items()}) for t in rows.truth])
        return dict.fromkeys(lams, models), "truth"
    if task.gradient is None or len(rows) * float(tree.size(start)) ** 3 > SOLVABLE:
        return {}, None
    try:
        found = solve_path(task, rows, lams, weights=weights)
    except FedtailorError:  # no unique minimum, or none that is certain
        return {}, None
    return {lam: torch.stack([flat(m) for m in s.models]) for lam, s in zip(lams, found, strict=True)}, "solution"


# -- the path --------------------------------------------------------------------------------------------------------------
@dataclass
class Walked:
    """What was found on the way, and the rounds it took."""

    curves: list[Curve]
    ends: dict[str, Point]
    rounds: int = 0


def _pilot(rounds: int) -> int:
    return max(1, round(PILOT * rounds))


def most(rounds: int, lams: int) -> int:
    """The rounds that may be played: the purse, or what a few rounds of each take if that is more."""
    return max(purse(rounds, lams), (lams - 1) * (_pilot(rounds) + 1) + 3)


def along(
    ground: Ground, methods: Sequence[FedCLUP], ends: Mapping[str, Algorithm], rounds: int, goals: Mapping[float, Tensor]
) -> Walked:
    """The curve of every method, in their order, and the ends of the path: ``ends`` names first the one beside the first method.

    The first method is played from scratch to its end. Each further one is played from scratch for a few rounds; if it has not
    come to rest, its end is looked for from the state that the one before ended with. No more than ``purse`` rounds are played.
    """
    pilot, count, names = _pilot(rounds), len(methods), list(ends)
    left = most(rounds, count)
    found = Walked([], {})
    state: State | None = None
    for place, method in enumerate(methods):
        lam, after = float(method.lam), count - 1 - place
        aim, label = goals.get(lam), f"lam={lam:.3g}"
        reserve = after * (pilot + 1) + (2 if place == 0 else 1)  # what comes after needs this at least
        share = (left - reserve) // (after + 2)
        cold = min(rounds, left - reserve if state is None else max(pilot, int(COLD * share)))
        begun = ground.fresh(method)
        points: list[Point] = []
        seen: deque[Reading] = deque(maxlen=SEEN)
        for reading, point, rests in ground.play(method, begun, cold, label, aim):
            points.append(point)
            seen.append(reading)
            end = Arrived(begun, reading, point, rests)
        measured = used = len(points) - 1
        if state is not None and not end.rests:
            end = arrive(ground, method, state, max(1, (left - used - reserve) // (after + 2)), f"{label}, warm", aim)
            used += len(end.state.records)
            points += _between(ground, list(seen), end, points, rounds, aim)
        state = end.state
        found.curves.append(Curve(lam, method, tuple(points), end.point, used, measured, end.rests))
        left, found.rounds = left - used, found.rounds + used
        if place == 0 or not after:
            name = names[0 if place == 0 else 1]
            limit = arrive(ground, ends[name], state, max(1, (left - reserve + 1) // (after + 1)), name)
            found.ends[name] = limit.point
            left, found.rounds = left - len(limit.state.records), found.rounds + len(limit.state.records)
    return found


class Arrived(NamedTuple):
    """Where some rounds have led."""

    state: State
    reading: Reading
    point: Point
    rests: bool


def arrive(ground: Ground, method: Algorithm, start: State, rounds: int, label: str, aim: Tensor | None = None) -> Arrived:
    """Play on from (a copy of) another method's state: its shared model, its clients' models."""
    state = ground.fresh(method)
    if state.shared:
        state.shared = tree.clone(start.shared)
    if not isinstance(method, FedAvg):
        state.store.put(np.arange(len(ground.rows)), {"model": _whole(start, len(ground.rows))})
    *_, (reading, point, rests) = ground.play(method, state, rounds, label, aim)
    return Arrived(state, reading, point, rests)


def _whole(state: State, clients: int) -> dict[str, Tensor]:
    """Every client's model, stacked; a client that was not there yet has the shared one."""
    ids = np.flatnonzero(state.store.born)
    stored = state.store.get(ids)["model"] if len(ids) else {}
    out = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), state.shared["model"])
    for name, leaf in stored.items():
        out[name][torch.from_numpy(ids)] = leaf
    return out


def _between(
    ground: Ground, seen: Sequence[Reading], end: Arrived, points: Sequence[Point], rounds: int, aim: Tensor | None
) -> list[Point]:
    """The rounds that were not played, estimated from those that were and the end; none is better than all that was measured."""
    last, measured = points[-1], [*points, end.point]
    shares = extrapolate.ahead(torch.stack([r.logits.flatten() for r in seen]), end.reading.logits.flatten(), rounds - last.round)
    least = min(point.val_loss for point in measured)
    scores = [point.val_score for point in measured]
    best = (min(scores), np.inf) if ground.task.kind == "regression" else (-np.inf, max(scores))
    out, number = [], last.round
    while number < rounds:
        number = min(rounds, max(number + 1, round(number * (1 + STEP))))
        reading = end.reading.mixed(seen, torch.from_numpy(shares[number - last.round - 1]))
        there = ground.point(reading, number, last.bytes // last.round * number, aim)
        score, loss = float(np.clip(there.val_score, *best)), max(there.val_loss, least)
        out.append(replace(there, val_score=score, val_loss=loss))
    return out


def schedule(ground: Ground, method: Algorithm, rounds: int, aim: Tensor | None) -> Curve:
    """A method that is played from scratch for all the rounds."""
    state = ground.fresh(method)
    points = [point for _, point, _ in ground.play(method, state, rounds, "dynamic", aim, rest=False)]
    return Curve(None, method, tuple(points), points[-1], rounds, rounds, False)
