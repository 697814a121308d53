"""What every oracle shares: small problems, plans, and a comparison of a method's rounds with those of its transcription.

Float64. A transcription gets the row numbers and the cohorts that the package drew, nothing else. ``tests/oracles/METHOD.py``
is about the method in ``fedtailor/algorithms/METHOD.py``. It holds ``CASES``, and of the following what it needs:

- ``run(grad, clients, start, *, rounds, batches, cohorts, weights, **told)``: the transcription, which gives {"shared",
  "personal"} of every round: the model that the server sends (None: none), and the models that the clients predict with;
- ``follow(trial)``: the same list, where the transcription is called otherwise;
- ``agree(trial, seen, entry)``: what a round is compared by, where that is not (or not only) ``agree`` of this file;
- ``afterwards(trial, history)``: what must have happened for the comparison to say anything;
- tests of its own (``test_...``), which are collected like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

import fedtailor as ft
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.engine.base import NO_ROUND, Engine, Plan
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.engine.rounds import play
from fedtailor.engine.setup import cohort_of
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs.store import Store
from tests.make import seeded
from tests.oracles import networks, risks

D, K, SEED = 3, 3, 4
SIZES = (9, 14, 5, 11)
ENGINES: dict[str, Callable[[Plan], Engine]] = {"loop": lambda plan: LoopEngine(plan, workers=1), "vectorized": VectorizedEngine}
# a linear model with biases, flattened: where its weights stand, where its biases, and a split that keeps biases at home
WEIGHTS, BIASES = np.arange(K * D), np.arange(K * D, K * D + K)
SPLIT = {"shared_at": WEIGHTS, "personal_at": BIASES}

Rows = list[tuple[np.ndarray, np.ndarray]]


# -- what is trained ---------------------------------------------------------------------------------------------------
def rows(kind: str = "classification") -> Rows:
    """Four clients of different sizes, each farther from the origin; every class is at every client."""
    draw, clients = np.random.default_rng(7), []
    for i, n in enumerate(SIZES):
        x = draw.normal(size=(n, D)) + 0.4 * i
        if kind == "regression":
            clients.append((x, x @ draw.normal(size=D) + 0.1 * draw.normal(size=n)))
        else:
            clients.append((x, np.r_[0, 1, 2, draw.integers(0, K, n - K)]))
    return clients


def lacking(kind: str = "classification") -> Rows:
    """The same features, but one class is at the second client alone, and the third has but one."""
    kept = (2, K, 1, 2)
    return [(x, y % count) for (x, y), count in zip(rows(kind), kept, strict=True)]


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows, a model, and the same model as its transcription writes it.

    ``read`` makes of a client's logits on ``probe`` what ``answer`` makes of the transcription's model.
    """

    model: Callable[[], Any]
    gradient: Callable[..., Any]
    start: Callable[[ft.Task], Any]
    probe: np.ndarray
    answer: Callable[[Any], np.ndarray]
    read: Callable[[np.ndarray], np.ndarray] = np.asarray
    kind: str = "classification"
    bias: bool = True
    clients: Callable[[str], Rows] = rows
    val: Callable[[], Rows] | None = None
    public: Callable[[], np.ndarray] | None = None


def linear(gradient: Callable[..., Any], outputs: int, bias: bool, kind: str = "classification") -> Problem:
    """A linear model as one vector [weights, biases], which is read off the logits at zero and at the unit vectors."""

    def read(logits: np.ndarray) -> np.ndarray:
        weights = (logits[1:] - logits[0]).T.ravel()
        return np.concatenate([weights, logits[0]]) if bias else weights

    size = outputs * D + outputs * bias
    probe = np.concatenate([np.zeros((1, D)), np.eye(D)])
    return Problem(lambda: "linear", gradient, lambda task: np.zeros(size), probe, np.asarray, read, kind, bias)


def network(model: Callable[[], Any]) -> Problem:
    """A network as a dict of arrays, compared by its logits."""
    probe = np.random.default_rng(3).normal(size=(25, D)) * 2
    answer = lambda weights: networks.predict(weights, probe)  # noqa: E731
    return Problem(model, networks.gradient, lambda task: arrays(task.init()), probe, answer)


def perceptron(*hidden: int) -> Problem:
    """A network without norms as one vector, the arrays of its layers one after the other; compared by its logits."""
    widths = (D, *hidden, K)
    shapes = [shape for d, k in pairwise(widths) for shape in ((k, d), (k,))]

    def layers(w: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(w, np.cumsum([np.prod(shape) for shape in shapes])[:-1])
        names = [f"{layer}.{leaf}" for layer in range(len(hidden) + 1) for leaf in ("weight", "bias")]
        return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def gradient(w: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        slope, _ = networks.gradient(layers(w), X, y)
        return in_a_row({name: slope[name] for name in layers(w)})

    named = network(lambda: f"mlp:{','.join(map(str, hidden))}")
    answer = lambda w: networks.predict(layers(w), named.probe)  # noqa: E731
    return replace(named, gradient=gradient, start=lambda task: in_a_row(arrays(task.init())), answer=answer)


REGRESSION = linear(risks.least_squares, 1, bias=False, kind="regression")
SOFTMAX = linear(risks.softmax, K, bias=False)
BIASED = linear(risks.softmax_with_bias, K, bias=True)
NETWORKS = {
    "linear": network(lambda: "linear"),
    "mlp": network(lambda: "mlp:6,5"),
    "normed": network(lambda: seeded(networks.normed, D, K)),
}
PERCEPTRON = perceptron(6, 5)


# -- cases -------------------------------------------------------------------------------------------------------------
class Setting(NamedTuple):
    """Rows in a batch (None: all), clients of a round, their weights, and the method's fields that say how long it trains."""

    batch: int | None
    cohort: int
    weights: str = "uniform"
    work: Mapping[str, Any] = {}


FULL_AND_BATCHES = (Setting(None, 4), Setting(None, 3, "size"), Setting(4, 3))
# A client of eleven rows has a last batch of one row, and none has one of two: a norm makes of two rows little more than the sign
# of their difference, and rounding errors grow a hundred thousandfold in six rounds
STEPS_AND_EPOCHS = (
    Setting(None, 4, "uniform", {"steps": 3}),
    Setting(None, 3, "size", {"steps": 3}),
    Setting(5, 3, "uniform", {"epochs": 2}),
    Setting(5, 4, "size", {"epochs": 2}),
)
# with ``lacking`` rows: in rounds 2 to 4 nobody has the third class, which was there before
SOMETIMES_LACKING = (*STEPS_AND_EPOCHS, Setting(5, 2, "uniform", {"epochs": 2}))
PLAIN_MEAN = (Setting(None, 4), Setting(None, 2), Setting(4, 3))  # where the paper's mean is plain


@dataclass(frozen=True, eq=False)
class Case:
    """A method, what its transcription is told of it, and the settings in which the two are compared."""

    method: Algorithm
    told: Mapping[str, Any] | Callable[[Trial], Mapping[str, Any]] = field(default_factory=dict)
    label: str = ""
    settings: tuple[Setting, ...] = FULL_AND_BATCHES
    problem: Problem = BIASED
    rounds: int = 5
    before: int = 0  # rounds of ours before the paper's first: a roll call
    tolerance: float = 1e-9
    learned: float = 0.05  # how far the first client's model must have gone, so that it is not the start that is compared
    shared: Callable[[Any], Any] = lambda shared: shared.get("model")  # the part of the shared tree that is "shared"
    one_model: bool = False  # the client's tree, or else the shared one, holds the model it predicts with: compare that too


def linear_cases(method: Algorithm, told: Mapping[str, Any]) -> tuple[Case, ...]:
    """Least squares on all rows and all clients, softmax regression on some: steps on all rows, epochs on batches."""
    steps, epochs = {"steps": 4}, {"epochs": 2}
    weights = ("uniform", "size")
    everyone = tuple(Setting(None, 4, w, steps) for w in weights)
    some = tuple(Setting(batch, 3, w, work) for batch, work in ((None, steps), (4, epochs)) for w in weights)
    return (
        Case(method, told, "regression", everyone, REGRESSION, one_model=True),
        Case(method, told, "softmax", some, SOFTMAX, one_model=True),
    )


@dataclass(frozen=True, eq=False)
class Trial:
    """A case in one of its settings."""

    oracle: ModuleType
    case: Case
    setting: Setting

    def __str__(self) -> str:
        method = " ".join(filter(None, (type(self.case.method).__name__, self.case.label)))
        batch = "all rows" if self.setting.batch is None else f"batches of {self.setting.batch}"
        return f"{method}, {batch}, {self.setting.cohort} clients, {self.setting.weights} weights"

    @cached_property
    def clients(self) -> Rows:
        return self.case.problem.clients(self.case.problem.kind)

    @cached_property
    def plan(self) -> Plan:
        return plan(replace(self.case.method, **self.setting.work), self.case.problem, self.setting)

    @property
    def start(self) -> Any:
        return self.case.problem.start(self.plan.task)

    def batches(self, t: int, i: int, phase: str) -> list[np.ndarray]:
        """The row numbers of a client's steps in the transcription's round ``t``."""
        feed, first = self.plan.feed, self.case.before
        if phase == "roll":
            return feed.rows(i, 0, "train")
        phase = feed.main_phase(phase)
        return feed.rows(i, NO_ROUND if phase == "personalize" else t + first, phase)

    def cohort(self, t: int) -> list[int]:
        plan = self.plan
        return cohort_of(plan.federation, plan.algorithm, self.setting.cohort, SEED, t + self.case.before).tolist()

    def round(self, t: int) -> Round:
        """What the method is told of round ``t``, with the randomness that it and the server share."""
        return self.plan.round(t, self.case.rounds + self.case.before, np.array(self.cohort(t)))

    def follow(self) -> list[dict[str, Any]]:
        """The transcription's rounds."""
        if hasattr(self.oracle, "follow"):
            return self.oracle.follow(self)
        told = self.case.told(self) if callable(self.case.told) else self.case.told
        return self.oracle.run(
            self.case.problem.gradient,
            self.clients,
            self.start,
            rounds=self.case.rounds,
            batches=self.batches,
            cohorts=self.cohort,
            weights=self.plan.weights,
            **told,
        )

    @property
    def last(self) -> bool:
        """Whether this is the last of its case's settings, which ``make test`` plays on every engine."""
        return self.setting is self.case.settings[-1]

    def check(self, engines: Iterable[str] = tuple(ENGINES)) -> list[dict[str, Any]]:
        """Return the transcription's rounds, which those of every engine agree with."""
        history = self.follow()
        agrees = getattr(self.oracle, "agree", agree)
        for name in engines:
            for seen, entry in zip(play_rounds(self, name), history, strict=True):
                agrees(self, seen, entry)
        getattr(self.oracle, "afterwards", learned)(self, history)
        return history


def plan(method: Algorithm, problem: Problem, setting: Setting) -> Plan:
    """The only place where oracles' plans are made."""
    clients = problem.clients(problem.kind)
    more = {name: make() for name, make in (("val", problem.val), ("public", problem.public)) if make is not None}
    federation = ft.Federation.from_arrays(clients, clients, **more)
    options = Options(batch_size=setting.batch, seed=SEED, dtype="float64", weights=setting.weights, bias=problem.bias)
    return prepare(method, federation, problem.model(), options).plan


# -- the comparison ----------------------------------------------------------------------------------------------------
class Seen(NamedTuple):
    """What an engine's round left behind, and every client's logits on the probe."""

    where: str
    engine: Engine
    shared: Any
    server: Any
    sent: Any  # what the server would send now (``engine.base.Sent``)
    store: Store
    logits: list[np.ndarray]

    def kept(self, client: int) -> Any:
        """The client's stored tree."""
        return ft.tree.map(lambda leaf: leaf[0].numpy(), self.store.get(np.array([client])))


def play_rounds(trial: Trial, engine: str) -> Iterator[Seen]:
    """The method's rounds on an engine, from the paper's first one on."""
    plan, ids = trial.plan, np.arange(len(trial.plan.federation))
    probe, store = torch.from_numpy(trial.case.problem.probe), Store(len(ids))
    running = ENGINES[engine](plan)
    start = plan.algorithm.init_server(plan.task)
    rounds = trial.case.rounds + trial.case.before
    for rnd, (shared, server) in play(running, *start, store, rounds, trial.setting.cohort):
        if rnd.number < trial.case.before:
            continue
        logits, sent = {}, plan.sent_after(shared, server, rnd.number + 1, rounds)
        for part, outputs in running.on_common(sent, ids, store, probe):
            logits |= {int(i): row.numpy() for i, row in zip(part, outputs, strict=True)}
        where = f"{engine} engine, round {rnd.number - trial.case.before}"
        yield Seen(where, running, shared, server, sent, store, [logits[int(i)] for i in ids])


def agree(trial: Trial, seen: Seen, entry: Mapping[str, Any]) -> None:
    """The shared model is the transcription's, and so is what every client predicts."""
    case, problem = trial.case, trial.case.problem
    model = case.shared(seen.shared)
    assert (model is None) == (entry["shared"] is None), seen.where
    if model is not None:
        ours = flat(model) if isinstance(entry["shared"], np.ndarray) else arrays(model)
        close(ours, entry["shared"], trial, "shared", seen)
    for i, theirs in enumerate(entry["personal"]):
        close(problem.read(seen.logits[i]), problem.answer(theirs), trial, f"client {i}", seen)
        if case.one_model:
            state = seen.engine.personal(seen.sent, i, seen.store)
            close(flat(state.get("model", model)), theirs, trial, f"client {i}'s model", seen)


def close(ours: Any, theirs: Any, trial: Trial, what: str, seen: Seen) -> None:
    apart = gap(ours, theirs)
    assert apart <= trial.case.tolerance, f"{what} is {apart:.2g} off: {seen.where}"


def learned(trial: Trial, history: list[dict[str, Any]]) -> None:
    """The first client's model has left the start."""
    assert gap(history[-1]["personal"][0], trial.start) > trial.case.learned


def gap(a: Any, b: Any) -> float:
    """The largest difference of two trees of arrays or tensors of one shape; nan where one is."""
    if isinstance(a, Mapping):
        assert set(a) == set(b)
        return float(np.max([gap(a[name], b[name]) for name in a], initial=0.0))
    if isinstance(a, list | tuple):
        return float(np.max([gap(x, y) for x, y in zip(a, b, strict=True)], initial=0.0))
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    assert a.shape == b.shape
    return float(np.abs(a - b).max(initial=0.0))


def flat(model: Mapping[str, torch.Tensor]) -> np.ndarray:
    """A linear model, or a part of it, as one vector."""
    return np.concatenate([model[name].numpy().ravel() for name in ("weight", "bias") if name in model])


def in_a_row(model: Mapping[str, Any]) -> np.ndarray:
    """A model's arrays, in the order of its names, as one vector."""
    return np.concatenate([np.asarray(value).ravel() for value in model.values()])


def arrays(model: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.items()}


# -- by name -----------------------------------------------------------------------------------------------------------
def stem(method: type[Algorithm]) -> str:
    """The name of the method's file, which is that of its oracle."""
    return method.__module__.rpartition(".")[2]


def oracle(method: type[Algorithm]) -> ModuleType | None:
    """The method's oracle, if it has one."""
    name = f"tests.oracles.{stem(method)}"
    return None if find_spec(name) is None else import_module(name)


def trials(module: ModuleType) -> list[Trial]:
    return [Trial(module, case, setting) for case in getattr(module, "CASES", ()) for setting in case.settings]
