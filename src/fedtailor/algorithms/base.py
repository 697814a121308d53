"""The interface of a method: six pure functions over trees, hyper-parameters in the fields.

**shared** goes down to every client of the round; **upload** comes back; **personal** never leaves the client;
**server** never leaves the server. A delta is new - old, always.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.batches import Work
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, Optimizer, Private, Schedule
from fedtailor.local.schedule import at
from fedtailor.server.reduce import Reduce, named
from fedtailor.task import Task
from fedtailor.tree import BUFFER

Tree = Any


@dataclass(frozen=True)
class Round:
    """What everyone knows about the round under way.

    ``mass`` is (clients/cohort) * (sum of the cohort's weights p_i): one unless weights and turnout are both uneven.
    """

    number: int = 0
    rounds: int = 1
    clients: int = 1
    cohort: int = 1
    mass: float = 1.0
    weights: Tensor = field(default_factory=lambda: torch.ones(1))  # of the cohort, in its order, summing to one
    seed: int = 0

    @property
    def turnout(self) -> float:
        return self.cohort / self.clients

    def uniform(self, name: str, number: int | None = None) -> float:
        """A number in [0, 1) that everyone draws alike, from (seed, name, round): a shared coin."""
        word = rng.mix(self.seed, rng.purpose(name), self.number if number is None else number)
        return float(word >> np.uint64(11)) / 2**53


@dataclass(frozen=True)
class Limit:
    """A reduction that must hold: with ``change`` this method is ``equals`` (fields they have in common carried over).

    ``compares`` says what coincides: ``personal`` (every client's predictions) or ``shared``. ``exact`` asks for equal bits.
    """

    change: Mapping[str, Any]
    equals: str
    compares: str = "personal"
    exact: bool = True
    also: Mapping[str, Any] = field(default_factory=dict)  # fields set on the other method


def param(default: Any, **bounds: float) -> Any:
    """A field with bounds: ``ge``, ``gt``, ``le``, ``lt``. None is let through where it is the default."""
    return field(default=default, metadata=bounds)


def words_of(f: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The words that a field of type ``Literal["one", "other"]`` may hold; none for other fields."""
    kind = str(f.type).removeprefix("typing.")
    return ast.literal_eval(f"({kind[8:-1]},)") if kind.startswith("Literal[") and kind.count("[") == 1 else ()


_RULES = {
    "ge": (lambda v, b: v >= b, "at least"),
    "gt": (lambda v, b: v > b, "greater than"),
    "le": (lambda v, b: v <= b, "at most"),
    "lt": (lambda v, b: v < b, "less than"),
}


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A federated method. State is only ever in the arguments; a subclass is final.

    ``lr`` may be a schedule; ``steps`` or ``epochs`` is local work per round (one epoch if neither is given); ``opt``
    holds momentum, weight decay or Adam; ``radius`` projects local iterates on a ball about zero after every step.
    """

    lr: float | Schedule = param(0.1, gt=0)
    steps: int | Literal["theory"] | None = param(None, ge=1)  # "theory" where the method's paper gives step sizes
    epochs: int | None = param(None, ge=1)
    opt: Optimizer = field(default_factory=SGD)
    radius: float | None = param(None, gt=0)

    reduce: ClassVar[Any] = "mean"  # or "stack" where the server must see uploads one by one, or a server.reduce.Reduce
    roll_call: ClassVar[bool] = False  # True: round 0 visits every client
    needs_everyone: ClassVar[bool] = False  # True: a round is of all clients; partial turnout is refused
    has_theory: ClassVar[bool] = False  # True: steps="theory" is resolved before the run (theory/rates.py)
    words: ClassVar[Mapping[str, str]] = {}  # the word a field may hold in place of a number (theory/rates.py)
    limits: ClassVar[tuple[Limit, ...]] = ()
    reads_rows: ClassVar[bool] = False  # True: looks at x itself, not only through the task, also where first layers are frozen
    leak: ClassVar[str | None] = None  # what it does with rows that no private optimiser covers: refused under privacy

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__doc__ is None:  # a method's file is its documentation
            cls.__doc__ = sys.modules[cls.__module__].__doc__

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if (choice := words_of(f)) and value not in choice:
                raise InvalidArgument(f"{type(self).__name__}: {f.name} must be one of {', '.join(choice)}, not {value!r}")
            if not f.metadata or (value is None and f.default is None) or isinstance(value, Schedule):
                continue
            if f.name == "steps" and isinstance(value, str):
                continue  # judged below
            if isinstance(value, str) and value == self.words.get(f.name):
                continue
            whole = "int" in str(f.type) and "float" not in str(f.type)
            if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or not math.isfinite(value):
                kind = "a whole number" if whole else "a number"
                kind += f" or {self.words[f.name]!r}" if f.name in self.words else ""
                raise InvalidArgument(f"{type(self).__name__}: {f.name} must be {kind}, not {value!r}")
            for rule, bound in f.metadata.items():
                holds, words = _RULES[rule]
                if not holds(value, bound):
                    raise InvalidArgument(f"{type(self).__name__}: {f.name} must be {words} {bound}, not {value!r}")
        if isinstance(self.steps, str) and (self.steps != "theory" or not self.has_theory):
            known = "a whole number or 'theory'" if self.has_theory else "a whole number"
            raise InvalidArgument(f"{type(self).__name__}: steps must be {known}, not {self.steps!r}")
        if not isinstance(self.opt, Optimizer):
            raise InvalidArgument(
                f"{type(self).__name__}: opt must be an optimizer such as ft.SGD(momentum=0.9), not {self.opt!r}"
            )
        if self.opt.lr != type(self.opt)().lr or self.opt.radius is not None:
            name = type(self).__name__
            raise InvalidArgument(f"{name}: give lr and radius to the method, for instance ft.{name}(lr=0.5), not to opt")
        fields = {f.name for f in dataclasses.fields(self)}
        for steps in (name for name in fields if name.endswith("steps")):
            epochs = steps.removesuffix("steps") + "epochs"
            if epochs in fields and getattr(self, steps) is not None and getattr(self, epochs) is not None:
                raise InvalidArgument(f"{type(self).__name__}: give {steps} or {epochs}, not both")

    # -- what an engine needs to know before it calls -------------------------------------------------------------
    def work(self) -> Mapping[str, Work]:
        """Local work by phase: ``train`` for ``client_update``, ``personalize``, and any further phase (``data[name]``)."""
        return {"train": amount(self.steps, self.epochs)}

    def reducer(self, task: Task, shared: Tree, rnd: Round) -> Reduce:
        """How the round's uploads become one: ``reduce``, unless a method makes more of them as they come in."""
        return named(self.reduce)

    def measures(self, server: Tree, rnd: Round) -> Mapping[str, float]:
        """Numbers about the round that the server knows, for the history."""
        return {}

    def silent(self, rnd: Round) -> bool:
        """True for a round in which nothing needs to travel; its bytes are not counted."""
        return False

    def looks(self, rnd: Round) -> bool:
        """False for a round in which no client looks at its rows: it costs no privacy."""
        return True

    def privately(self, opt: Optimizer) -> Optimizer:
        """Another optimiser than ``opt``, private where ``opt`` is."""
        return self.opt.around(opt) if isinstance(self.opt, Private) else opt

    def optimizer(self, rnd: Round | None = None, lr: float | Schedule | None = None) -> Optimizer:
        """``opt`` with the round's step size: of the method's ``lr`` unless another is given.

        Outside the rounds (``personalize``) a schedule counts as at its start.
        """
        if isinstance(self.lr, str):
            raise InvalidArgument("the theory's step sizes are known only once there are data; use ft.run")
        return self.opt.using(at(self.lr if lr is None else lr, rnd.number if rnd else 0), self.radius)

    # -- the six methods --------------------------------------------------------------------------------------------
    @abstractmethod
    def init_server(self, task: Task) -> tuple[Tree, Tree]:
        """(shared, server) before the first round."""

    def init_client(self, task: Task, shared: Tree, data: Any) -> Tree:
        """The personal state of a client that is sampled for the first time; {} = stateless."""
        return {}

    @abstractmethod
    def client_update(self, task: Task, shared: Tree, personal: Tree, data: Any, rnd: Round) -> tuple[Tree, Tree]:
        """(upload, personal) after local work."""

    @abstractmethod
    def server_update(self, task: Task, shared: Tree, server: Tree, upload: Tree, rnd: Round) -> tuple[Tree, Tree]:
        """(shared, server) for the next round; ``upload`` is what ``reduce`` made of the cohort's."""

    def personalize(self, task: Task, shared: Tree, personal: Tree, data: Any) -> Tree:
        """What a client prepares before it predicts; never uploaded, never kept for the next round."""
        return personal

    @abstractmethod
    def predict(self, task: Task, shared: Tree, personal: Tree, x: Tensor) -> Tensor:
        """Logits (or the prediction, in regression) of a client."""

    # -- where rows choose between models ---------------------------------------------------------------------------
    @property
    def routed(self) -> bool:
        """True where every row is sent along paths of its own; ``routes`` then says how."""
        return False

    def routes(self, task: Task, shared: Tree, personal: Tree, x: Tensor) -> Tensor:
        """q [rows, routes, 2]: the probabilities of the shared and of the personal path with which a client predicts ``x``."""
        raise InvalidArgument(f"{type(self).__name__} does not send rows along paths; use predict")


def names_of(task: Task, parts: str | Sequence[str]) -> frozenset[str]:
    """The parameters (and buffers) of the named parts: groups of the task, modules, or single parameters, by exact name."""
    found: set[str] = set()
    for part in (parts,) if isinstance(parts, str) else parts:
        inside = [name for name in task.names if name == part or name.removeprefix(BUFFER).startswith(f"{part}.")]
        if part not in task.groups and not inside:
            groups = ", ".join(group for group, names in task.groups.items() if names)
            raise InvalidArgument(f"the model has no group or module {part!r}; its groups are {groups or 'none'}")
        found.update(task.groups.get(part, inside))
    return frozenset(found)


def amount(steps: int | str | None, epochs: int | None, default: int = 1, same_batch: bool = False) -> Work:
    """Work from the two fields; ``default`` epochs if neither is given."""
    if steps is None and epochs is None:
        epochs = default
    if isinstance(steps, str):
        raise InvalidArgument("the theory's steps are known only once there are data; use ft.run")
    return Work(steps, epochs, same_batch)
