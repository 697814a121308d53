"""A short race of methods on validation rows: all run a little, those clearly behind stop, the others run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.algorithms.base import Algorithm
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.engine.base import Engine, one_thread
from fedtailor.engine.measure import Columns, evaluate
from fedtailor.engine.run import State, choose_engine, play_on
from fedtailor.engine.setup import make_plan
from fedtailor.errors import Diverged, InvalidArgument, InvalidData
from fedtailor.metrics.client import score_name
from fedtailor.metrics.cost import probe
from fedtailor.runs.store import Store
from fedtailor.task import Task

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
BEHIND = 2.0  # standard errors of the paired difference beyond which a method is clearly behind


@dataclass
class Purse:
    """What a race may still cost: rounds, bytes, or nothing to mind (None)."""

    left: float | None = None
    in_bytes: bool = False

    @staticmethod
    def of(budget: int | str | None) -> Purse:
        """From a number of rounds, or traffic such as "500kB"."""
        if budget is None:
            return Purse()
        if isinstance(budget, str):
            unit = next((unit for unit in UNITS if budget.endswith(unit)), "")
            number = budget.removesuffix(unit).strip()
            if unit and number.replace(".", "", 1).isdigit() and float(number) > 0:
                return Purse(float(number) * UNITS[unit], True)
            if number.isdigit() and int(number) > 0:
                return Purse(int(number))
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InvalidArgument(f"budget must be a number of rounds of at least 1, or traffic such as '5MB', not {budget!r}")
        return Purse(budget)

    def cost(self, rounds: int, price: int) -> int:
        return rounds * price if self.in_bytes else rounds

    def most(self, rounds: int, price: int, sharing: int) -> int:
        """As many of the rounds as a share of the purse pays for, but one."""
        if self.left is None:
            return rounds
        return max(1, min(rounds, int(self.left // (sharing * max(1, self.cost(1, price))))))

    def pay(self, rounds: int, price: int) -> bool:
        """True, and the rounds are paid for, if there is enough left."""
        if self.left is None:
            return True
        if self.cost(rounds, price) > self.left:
            return False
        self.left -= self.cost(rounds, price)
        return True


@dataclass(eq=False)
class Entrant:
    """A method in the race: where it is, and what its clients score on their validation rows (higher is better)."""

    label: str
    algorithm: Algorithm
    engine: Engine
    state: State
    scores: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    rounds: int = 0
    out: bool = False

    @property
    def score(self) -> float:
        return float(self.scores.mean()) if len(self.scores) else -np.inf

    @property
    def loss(self) -> float:
        return float(self.losses.mean()) if len(self.losses) else np.inf


class Race:
    """Runs methods on a federation whose validation rows judge them; the test rows are not there at all."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        batch_size: int | None,
        seed: int,
        rounds: int,
        weights: str,
        purse: Purse | None = None,
    ) -> None:
        assert federation.val is not None
        self.task, self.seed, self.rounds, self.batch_size, self.weights = task, seed, rounds, batch_size, weights
        self.purse = purse or Purse()
        self.federation = replace(federation, test=federation.val)
        self.entrants: dict[str, Entrant] = {}
        self.steps = 0  # gradient steps of all clients so far

    def enter(self, label: str, algorithm: Algorithm) -> None:
        plan = make_plan(algorithm, self.task, self.federation, self.batch_size, self.seed, self.weights)
        state = State(*algorithm.init_server(self.task), Store(len(self.federation)))
        engine, _ = choose_engine("auto", plan, state.shared, 1, len(self.federation), self.seed, None)
        self.entrants[label] = Entrant(label, algorithm, engine, state)

    def price(self, label: str) -> int:
        """Bytes of a round of all clients."""
        who = self.entrants[label]
        facts = probe(who.algorithm, self.task, who.engine.plan.feed)
        return (facts["bytes_down"] + facts["bytes_up"]) * len(self.federation)

    @one_thread()
    def go(self, label: str, rounds: int) -> bool:
        """Run a method until it has played ``rounds``, and judge it; False if the purse does not pay for that."""
        who = self.entrants[label]
        if rounds <= who.rounds:
            return True
        if not self.purse.pay(rounds - who.rounds, self.price(label) if self.purse.in_bytes else 1):
            return False
        plan = who.engine.plan
        each = sum(int(plan.feed.steps(np.arange(len(self.federation)), phase).sum()) for phase in plan.feed.phases)
        try:
            for rnd in play_on(who.engine, who.state, self.rounds, len(self.federation), self.seed):
                who.state.records.append({})
                self.steps += each
                if rnd.number + 1 >= rounds:
                    break
            _, clients = evaluate(who.engine, who.state.shared, who.state.store)
        except Diverged:
            who.out = True
            who.scores, who.losses = np.zeros(0), np.zeros(0)
            return True
        who.rounds = rounds
        who.scores, who.losses = _scores(self.task.kind, clients), clients["loss_personal"]
        return True

    def standing(self) -> list[Entrant]:
        """Those still in the race that have run, the best first: by their loss, which says more than accuracy on few rows."""
        return sorted((e for e in self.entrants.values() if e.rounds and not e.out), key=lambda e: (e.loss, -e.score))

    def behind(self, label: str, best: str) -> float:
        """How many standard errors a method's loss is behind another's, paired over clients."""
        apart = self.entrants[label].losses - self.entrants[best].losses
        error = apart.std(ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else np.inf
        return float(apart.mean() / error) if error > 0 else float(np.sign(apart.mean()) * (np.inf if apart.mean() else 0))

    def drop(self, keep: int) -> None:
        """Stop those clearly behind the best, and all but the best ``keep``."""
        ranked = self.standing()
        for place, entrant in enumerate(ranked):
            if place >= keep or self.behind(entrant.label, ranked[0].label) > BEHIND:
                entrant.out = True


def _scores(kind: str, clients: Columns) -> NDArray[np.float64]:
    values = clients[f"{score_name(kind)}_personal"]
    return -values if kind == "regression" else values


def with_validation(federation: Federation, share: float, seed: int) -> Federation:
    """The federation itself if it has validation rows; otherwise a share of every client's training rows is set apart."""
    if federation.val is not None:
        return federation
    sizes = federation.train.sizes
    if sizes.min() < 2:
        name = federation.names[int(sizes.argmin())]
        raise InvalidData(
            f"client {name} has one training row: none can be set apart to judge on; leave the client out or give val="
        )
    kept: list[NDArray[np.int64]] = []
    apart: list[NDArray[np.int64]] = []
    for i, name in enumerate(federation.names):
        rows = federation.train.offsets[i] + rng.generator(seed, "validation", rng.purpose(name)).permutation(int(sizes[i]))
        count = min(max(1, round(share * int(sizes[i]))), int(sizes[i]) - 1)
        apart.append(np.sort(rows[:count]))
        kept.append(np.sort(rows[count:]))
    return replace(federation, train=_pick(federation.train, kept), val=_pick(federation.train, apart))


def _pick(split: Split, rows: list[NDArray[np.int64]]) -> Split:
    index = np.concatenate(rows)
    return Split(split.x[index], split.y[index], np.concatenate([[0], np.cumsum([len(r) for r in rows])]))


def table(race: Race) -> list[Mapping[str, Any]]:
    """What the race has shown, the best first; those that stopped early after the others. ``se`` is the standard error of the
    difference to the first, paired over clients."""
    rows = sorted((e for e in race.entrants.values() if e.rounds), key=lambda e: (e.out, e.loss, -e.score))
    name = score_name(race.task.kind)
    sign = -1 if race.task.kind == "regression" else 1
    return [
        {
            "method": e.label,
            f"val_{name}": sign * e.score,
            "se": _error(rows[0], e),
            "val_loss": e.loss,
            "rounds": e.rounds,
        }
        for e in rows
    ]


def _error(first: Entrant, other: Entrant) -> float | None:
    if other is first or len(other.scores) != len(first.scores) or len(first.scores) < 2:
        return None
    return float((first.scores - other.scores).std(ddof=1) / np.sqrt(len(first.scores)))
