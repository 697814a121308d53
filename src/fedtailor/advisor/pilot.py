"""A short race of methods on validation rows: all run a little, those clearly behind stop, the others run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedtailor.algorithms.base import Algorithm
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.engine.base import Engine, one_thread
from fedtailor.engine.divergence import check_loss
from fedtailor.engine.measure import evaluate
from fedtailor.engine.options import Options, Training
from fedtailor.engine.pieces import scored_by
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.rounds import play_on
from fedtailor.engine.setup import DTYPES, build_task
from fedtailor.engine.state import State
from fedtailor.errors import Diverged, InvalidArgument, InvalidData
from fedtailor.metrics.paired import Paired
from fedtailor.metrics.spread import weighted_mean
from fedtailor.metrics.verdict import Candidate, best_first, gains_of
from fedtailor.task import Task
from fedtailor.task.scores import Metric

VAL_SHARE = 0.2  # of the training rows, where there are no validation rows
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
BEHIND = 2.0  # standard errors of the paired difference beyond which a method is clearly behind


@dataclass
class Budget:
    """A budget: what a race may still cost, in rounds or in bytes; None: as much as it takes."""

    left: float | None = None
    in_bytes: bool = False

    @staticmethod
    def of(budget: int | str | None) -> Budget:
        """Return the budget of so many rounds, or of traffic such as "500kB"."""
        if budget is None:
            return Budget()
        if isinstance(budget, str):
            unit = next((unit for unit in UNITS if budget.endswith(unit)), "")
            number = budget.removesuffix(unit).strip()
            if unit and number.replace(".", "", 1).isdigit() and float(number) > 0:
                return Budget(float(number) * UNITS[unit], True)
            if number.isdigit() and int(number) > 0:
                return Budget(int(number))
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InvalidArgument(f"budget must be a number of rounds of at least 1, or traffic such as '5MB', not {budget!r}")
        return Budget(budget)

    def cost(self, rounds: int, price: int) -> int:
        return rounds * price if self.in_bytes else rounds

    def most(self, rounds: int, price: int, sharing: int) -> int:
        """Return the number of rounds, up to ``rounds``, that one of ``sharing`` equal shares of the budget pays for; at least
        one."""
        if self.left is None:
            return rounds
        return max(1, min(rounds, int(self.left // (sharing * max(1, self.cost(1, price))))))

    def pay(self, rounds: int, price: int) -> bool:
        """Pay for the rounds if there is enough left, and say whether there was."""
        if self.left is None:
            return True
        if self.cost(rounds, price) > self.left:
            return False
        self.left -= self.cost(rounds, price)
        return True


@dataclass(eq=False)
class Entrant:
    """A method in the race, with its state and its clients' scores on their validation rows (higher is better)."""

    label: str
    ready: Prepared
    engine: Engine
    state: State
    scores: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    rows: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # validation rows of each client
    rounds: int = 0
    stopped: bool = False
    diverged: str = ""  # when, and with which step size

    @property
    def algorithm(self) -> Algorithm:
        return self.ready.algorithm

    @property
    def score(self) -> float:
        """The clients' mean, with their weights in a verdict."""
        mean = weighted_mean(self.scores, self.rows) if len(self.scores) else None
        return -np.inf if mean is None else mean

    @property
    def loss(self) -> float:
        return float(self.losses.mean()) if len(self.losses) else np.inf

    def candidate(self, score: Metric) -> Candidate:
        """Return what it is chosen by."""
        return Candidate(score.merit(self.scores), self.rows, self.loss)


class Race:
    """Runs methods on a federation whose validation rows judge them; the test rows are not there at all."""

    def __init__(self, task: Task, federation: Federation, options: Options, budget: Budget | None = None) -> None:
        assert federation.val is not None
        self.task, self.options = task, options.but(workers=1)
        self.budget = budget or Budget()
        self.federation = replace(federation, test=federation.val)
        self.entrants: dict[str, Entrant] = {}
        self.steps = 0  # gradient steps of all clients so far

    def enter(self, label: str, algorithm: Algorithm) -> None:
        ready = prepare(algorithm, self.federation, self.task, self.options)
        state = ready.start()
        self.entrants[label] = Entrant(label, ready, ready.engine(state)[0], state)

    def price(self, label: str) -> int:
        """Bytes of a round of all clients."""
        facts = self.entrants[label].ready.facts
        return (facts["bytes_down"] + facts["bytes_up"]) * len(self.federation)

    @one_thread()
    def go(self, label: str, rounds: int) -> bool:
        """Run a method until it has played ``rounds``, and judge it; False if the budget does not pay for that."""
        entrant = self.entrants[label]
        if rounds <= entrant.rounds:
            return True
        if not self.budget.pay(rounds - entrant.rounds, self.price(label) if self.budget.in_bytes else 1):
            return False
        plan = entrant.engine.plan
        steps_per_round = sum(int(plan.feed.steps(np.arange(len(self.federation)), phase).sum()) for phase in plan.feed.phases)
        try:
            for rnd in play_on(entrant.engine, entrant.state, self.options.rounds, len(self.federation)):
                entrant.state.records.append({})
                self.steps += steps_per_round
                if rnd.number + 1 >= rounds:
                    break
            _, clients = evaluate(entrant.engine, entrant.state.sent, entrant.state.store)
            check_loss(entrant.engine, entrant.state.sent, entrant.state.store, clients["loss_personal"], rnd)
        except Diverged as error:
            entrant.stopped, entrant.diverged = True, error.brief
            entrant.scores, entrant.losses = np.zeros(0), np.zeros(0)
            return True
        entrant.rounds = rounds
        score = self.task.score
        entrant.scores, entrant.losses = score.merit(clients[f"{score.name}_personal"]), clients["loss_personal"]
        entrant.rows = clients["rows"]
        return True

    def standing(self) -> list[Entrant]:
        """Return those still in the race that have run, the best first: by the score; the loss, which says more on few rows,
        chooses among those within a standard error of the best score."""
        return ranked([e for e in self.entrants.values() if e.rounds and not e.stopped], self.task.score)

    def gains(self, label: str, rival: str) -> Paired | None:
        """Compare two methods that have run, by the score of the race; None where no client has it for both."""
        return _gains(self.entrants[label], self.entrants[rival], self.task.score)

    def behind(self, label: str, best: str) -> float:
        """Return how many standard errors a method is behind another, paired over clients."""
        gains = self.gains(best, label)
        return 0.0 if gains is None else gains.errors_ahead

    def drop(self, keep: int) -> None:
        """Stop those clearly behind the best, and all but the best ``keep``."""
        ranked = self.standing()
        for rank, entrant in enumerate(ranked):
            if rank >= keep or self.behind(entrant.label, ranked[0].label) > BEHIND:
                entrant.stopped = True


def task_and_rows(federation: Federation, model: str | nn.Module | Task, options: Training) -> tuple[Task, Federation]:
    """Return (the task that moves, the rows as the frozen first layers leave them), with validation rows to judge on."""
    if federation.train.weights is not None:
        raise InvalidArgument(
            "advise and sweep count all rows alike, in the estimate of the spread and in their step sizes, and these rows have "
            "weights; use compare --tune, which weighs them, or leave the weights out"
        )
    dtype = DTYPES[options.dtype]
    rows = with_validation(federation.to(dtype), VAL_SHARE, options.seed)
    task = build_task(model, rows, options.seed, dtype, options.bias, options.backbone)
    task, rows, _ = after_prefix(scored_by(task, rows, options.score), rows)
    return task, rows


def with_validation(federation: Federation, share: float, seed: int) -> Federation:
    """Return the federation itself if it has validation rows; otherwise a share of every client's training rows is set apart."""
    if federation.val is not None:
        return federation
    sizes = federation.train.sizes
    if sizes.min() < 2:
        name = federation.names[int(sizes.argmin())]
        raise InvalidData(
            f"client {name} has one training row: none can be set apart to judge on; leave the client out or give val="
        )
    training_rows: list[NDArray[np.int64]] = []
    validation_rows: list[NDArray[np.int64]] = []
    for i, name in enumerate(federation.names):
        rows = federation.train.offsets[i] + rng.generator(seed, "validation", rng.purpose(name)).permutation(int(sizes[i]))
        count = min(max(1, round(share * int(sizes[i]))), int(sizes[i]) - 1)
        validation_rows.append(np.sort(rows[:count]))
        training_rows.append(np.sort(rows[count:]))
    return replace(federation, train=_split_of(federation.train, training_rows), val=_split_of(federation.train, validation_rows))


def _split_of(split: Split, rows: list[NDArray[np.int64]]) -> Split:
    index = np.concatenate(rows)
    return Split(split.x[index], split.y[index], np.concatenate([[0], np.cumsum([len(r) for r in rows])]))


def table(race: Race) -> list[Mapping[str, Any]]:
    """Return a row per method that has run, the best first, those that stopped early last. ``se`` is the standard error of the
    difference to the first, paired over clients."""
    score = race.task.score
    known = [e for e in race.entrants.values() if e.rounds and not e.diverged]
    rows = [e for stopped in (False, True) for e in ranked([e for e in known if e.stopped is stopped], score)]
    return [
        {
            "method": e.label,
            f"val_{score.name}": score.merit(e.score),
            "se": _standard_error(rows[0], e, score),
            "val_loss": e.loss,
            "rounds": e.rounds,
        }
        for e in rows
    ]


def _standard_error(first: Entrant, other: Entrant, score: Metric) -> float | None:
    gains = None if other is first else _gains(first, other, score)
    return None if gains is None or gains.clients < 2 else gains.error


def ranked(entrants: Sequence[Entrant], score: Metric) -> list[Entrant]:
    """Return the best first (``best_first``)."""
    return [entrants[place] for place in best_first([e.candidate(score) for e in entrants], score)]


def _gains(ours: Entrant, theirs: Entrant, score: Metric) -> Paired | None:
    return gains_of(ours.candidate(score), theirs.candidate(score), score)
