"""The interface of a method: six pure functions over trees, hyper-parameters in the fields.

**shared** goes down to every client of the round, beside it what is for one client only (``downlink``); **upload** comes back;
**personal** never leaves the client; **server** never leaves the server. A delta is new - old, always.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.algorithms import origin
from fedtailor.data import rng
from fedtailor.data.batches import Work
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, Optimizer, Schedule
from fedtailor.local.schedule import Lambda, at
from fedtailor.server.reduce import Reduce, named
from fedtailor.task import Task
from fedtailor.tree import BUFFER

Tree = Any
RECEIVED = "received:"  # beside a client's personal tree: what the server sends to this client only


@dataclass(frozen=True)
class Round:
    """The facts that everyone knows about the round under way.

    ``mass`` is (clients/cohort) * (sum of the cohort's weights p_i): one unless weights and turnout are both uneven.
    ``weights`` and ``ranks`` are of the cohort's members, in the order in which uploads are stacked. A rank is a client's place
    in an order of all clients that does not depend on how they are listed: a server may keep leaves [clients, ...] by it, from
    its first ``server_update`` on. ``lost`` are the ranks of those who trained and whose upload does not arrive (in the round's
    last exchange); they are not counted in ``cohort``. A client finds its own rank in ``data["client"]``, a
    tensor of one element.
    """

    number: int
    rounds: int
    clients: int
    cohort: int
    mass: float
    weights: Tensor  # summing to one
    ranks: Tensor
    seed: int
    exchange: int  # which of the round's exchanges (``Algorithm.exchanges``) this is, counted from 0
    lost: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # see above

    @property
    def turnout(self) -> float:
        return self.cohort / self.clients

    def uniform(self, name: str, number: int | None = None) -> float:
        """Return a number in [0, 1) that is the same for everyone, drawn from (seed, name, round): a shared coin."""
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
    """Return a field with bounds: ``ge``, ``gt``, ``le``, ``lt``. None is let through where it is the default."""
    return field(default=default, metadata=bounds)


def words_of(f: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the words that a field of type ``Literal["one", "other"]`` may hold; none for other fields."""
    kind = str(f.type).removeprefix("typing.")
    return ast.literal_eval(f"({kind[8:-1]},)") if kind.startswith("Literal[") and kind.count("[") == 1 else ()


# the order of the families in lists and tables; a family that is not here comes after them
FAMILIES = (
    "alone",
    "one model for all",
    "the shared model, adapted",
    "a personal model tied to the shared one",
    "part of the model personal",
    "a model made for each client",
    "clusters",
    "layers chosen by each client",
    "layers chosen for each row",
    "around another method",
)
_RULES = {
    "ge": (lambda v, b: v >= b, "at least"),
    "gt": (lambda v, b: v > b, "greater than"),
    "le": (lambda v, b: v <= b, "at most"),
    "lt": (lambda v, b: v < b, "less than"),
}


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A federated method. State is only ever in the arguments; a subclass is final.

    ``lr`` may be a schedule, or a function of the round or of (round, step); ``steps`` or ``epochs`` is local work per round (one
    epoch if neither is given); ``opt`` holds momentum, weight decay or Adam; ``radius`` projects local iterates on a ball about
    zero after every step.

    Facts that are class variables here, and those derived from the functions (``stateless``, ``personalizes``, ``has_downlink``),
    are read from instances: a method around another may answer with properties.
    """

    lr: float | Schedule = param(0.1, gt=0)
    steps: int | Literal["theory"] | None = param(None, ge=1)  # "theory" where the method's paper gives step sizes
    epochs: int | None = param(None, ge=1)
    opt: Optimizer = field(default_factory=SGD)
    radius: float | None = param(None, gt=0)

    reduce: ClassVar[Any] = "mean"  # or "stack" where the server must see uploads one by one, or a server.reduce.Reduce
    exchanges: ClassVar[int] = 1  # how often a round's cohort goes down and up, with the same data each time
    roll_call: ClassVar[bool] = False  # True: round 0 visits every client
    needs_everyone: ClassVar[bool] = False  # True: a round is of all clients; partial turnout is refused
    has_theory: ClassVar[bool] = False  # True: steps="theory" is allowed, and ``resolve`` puts numbers in its place
    words: ClassVar[Mapping[str, str]] = {}  # the word a field may hold in place of a number
    limits: ClassVar[tuple[Limit, ...]] = ()
    reads_rows: ClassVar[bool] = False  # True: looks at x itself, not only through the task, also where first layers are frozen
    leak: ClassVar[str | None] = None  # what it does with rows that no private optimiser covers: refused under privacy
    family: ClassVar[str] = "others"  # which methods it stands with in lists and tables (``FAMILIES``)
    yardstick: ClassVar[str | None] = None  # "alone" or "together": what reports measure the other methods against

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__doc__ is None:  # a method's file is its documentation
            cls.__doc__ = sys.modules[cls.__module__].__doc__
        origin.remember(cls)  # to be defined is to be known

    def __post_init__(self) -> None:
        if callable(self.lr) and not isinstance(self.lr, Schedule):
            object.__setattr__(self, "lr", Lambda(self.lr))
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
            is_integer = "int" in str(f.type) and "float" not in str(f.type)
            if isinstance(value, bool) or not isinstance(value, Integral if is_integer else Real) or not math.isfinite(value):
                kind = "a whole number" if is_integer else "a number"
                kind += f" or {self.words[f.name]!r}" if f.name in self.words else ""
                raise InvalidArgument(f"{type(self).__name__}: {f.name} must be {kind}, not {value!r}")
            for rule, bound in f.metadata.items():
                holds, words = _RULES[rule]
                if not holds(value, bound):
                    raise InvalidArgument(f"{type(self).__name__}: {f.name} must be {words} {bound}, not {value!r}")
        if isinstance(self.steps, str) and (self.steps != "theory" or not self.has_theory):
            allowed = "a whole number or 'theory'" if self.has_theory else "a whole number"
            raise InvalidArgument(f"{type(self).__name__}: steps must be {allowed}, not {self.steps!r}")
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

    @classmethod
    def example(cls) -> Self:
        """Return the method with its defaults, and with a value for every setting that has none; cards and laws run it."""
        return cls()

    # -- what an engine needs to know before it calls -------------------------------------------------------------
    def work(self) -> Mapping[str, Work]:
        """Local work by phase: ``train`` for ``client_update``, ``personalize``, and any further phase (``data[name]``)."""
        return {"train": amount(self.steps, self.epochs)}

    def resolve(self, problem: Any) -> tuple[Algorithm, Any]:
        """Return (the method with numbers for what it leaves to the theory or to the data, the constants behind them or None).

        ``problem`` (theory/resolve.py) has the task, the federation and the run's options, and gives the papers' constants.
        """
        return self, None

    def reducer(self, task: Task, shared: Tree, rnd: Round) -> Reduce:
        """Return how the uploads of the round are combined: ``reduce``, unless a method processes them as they come in."""
        return named(self.reduce)

    def measures(self, server: Tree, rnd: Round) -> Mapping[str, float]:
        """Numbers about the round that the server knows, for the history."""
        return {}

    @property
    def personalizes(self) -> bool:
        """True where a client prepares something before it predicts."""
        return type(self).personalize is not Algorithm.personalize

    @property
    def has_downlink(self) -> bool:
        """True where the server sends different things to different clients."""
        return type(self).downlink is not Algorithm.downlink

    @property
    def stateless(self) -> bool:
        """True where everyone predicts with the shared model: no state, nothing to prepare, nothing sent to one client only."""
        return type(self).init_client is Algorithm.init_client and not (self.personalizes or self.has_downlink)

    def silent(self, rnd: Round) -> bool:
        """True for a round in which nothing needs to travel; its bytes are not counted."""
        return False

    def looks(self, rnd: Round) -> bool:
        """False for a round in which no client looks at its rows: it costs no privacy."""
        return True

    def stages(self) -> Sequence[int]:
        """Return the rounds from which a client works in another way; privacy observes its use of rows anew from each."""
        return (0,)

    def privately(self, opt: Optimizer) -> Optimizer:
        """Another optimiser than ``opt``, private where ``opt`` is."""
        return self.opt.around(opt)

    def optimizer(self, rnd: Round | None = None, lr: float | Schedule | None = None) -> Optimizer:
        """``opt`` with the step size of the round, from the method's ``lr`` unless another is given.

        Outside the rounds (``personalize``) a schedule has its first value.
        """
        if isinstance(self.lr, str):
            raise InvalidArgument("the theory's step sizes are known only once there are data; use ft.run")
        return self.opt.using(at(self.lr if lr is None else lr, rnd.number if rnd else 0), self.radius)

    # -- the six methods --------------------------------------------------------------------------------------------
    @abstractmethod
    def init_server(self, task: Task) -> tuple[Tree, Tree]:
        """Return (shared, server) before the first round."""

    def init_client(self, task: Task, shared: Tree, data: Any) -> Tree:
        """Return the personal state of a client that is sampled for the first time; {} = stateless."""
        return {}

    @abstractmethod
    def client_update(self, task: Task, shared: Tree, personal: Tree, data: Any, rnd: Round) -> tuple[Tree, Tree]:
        """Return (upload, personal) after local work."""

    @abstractmethod
    def server_update(self, task: Task, shared: Tree, server: Tree, upload: Tree, rnd: Round) -> tuple[Tree, Tree]:
        """Return (shared, server) for the next round; ``upload`` is what ``reduce`` made of the cohort's."""

    def downlink(self, task: Task, shared: Tree, server: Tree, clients: Tensor | None, rnd: Round) -> Tree:
        """Return what single clients receive beside ``shared``: leaves [len(clients), ...], ``clients`` being ranks (see
        ``Round``).

        None stands for a client outside the federation: leaves without that axis. {} is nothing. The functions of a client
        (``init_client``, ``client_update``, ``personalize``, ``predict``) see ``{**shared, **own}`` as their ``shared``.
        """
        return {}

    def personalize(self, task: Task, shared: Tree, personal: Tree, data: Any) -> Tree:
        """Return the personal state with which a client predicts; it is never uploaded and not kept for the next round."""
        return personal

    @abstractmethod
    def predict(self, task: Task, shared: Tree, personal: Tree, x: Tensor) -> Tensor:
        """Logits (or the prediction, in regression) of a client."""

    # -- diagnostics beside the predictions --------------------------------------------------------------------------
    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of the facts that ``diagnose`` gives."""
        return ()

    def diagnose(self, task: Task, shared: Tree, personal: Tree, x: Tensor) -> dict[str, Tensor]:
        """Facts by name about every row of ``x``, [rows, ...], with the state that a client predicts with."""
        return {}

    def condense(self, seen: Seen) -> dict[str, Any]:
        """Return what the summary keeps of the test rows' diagnostics: plain values, under names of the method's own."""
        return {}

    @classmethod
    def figures(cls, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return how a report shows what ``condense`` kept (``report/diagnostics.py``)."""
        return []


@dataclass(frozen=True, eq=False)
class Seen:
    """The answers that were seen on the test rows of some clients.

    ``rows`` has the method's diagnostics by name, rows of all clients one after another. ``spread`` condenses numbers
    [rows, places] to means and quantiles, over all rows and by which of a client's two models is right. ``work`` are the
    multiply-adds of a prediction, by the personal and by the shared model.
    """

    task: Task
    shared: Tree
    clients: int
    rows: Mapping[str, NDArray[np.float64]]
    spread: Callable[[NDArray[np.float64]], dict[str, Any]]
    work: Mapping[str, int]


def opened(shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
    """Return (``shared``, ``personal``) as ``predict`` takes them, from a tree that may hold what the client received
    (``RECEIVED``)."""
    if RECEIVED not in personal:
        return shared, personal
    return {**shared, **personal[RECEIVED]}, {name: branch for name, branch in personal.items() if name != RECEIVED}


def names_of(task: Task, parts: str | Sequence[str]) -> frozenset[str]:
    """Return the parameters (and buffers) of the named parts: groups of the task, modules, or single parameters, by exact
    name."""
    selected: set[str] = set()
    for part in (parts,) if isinstance(parts, str) else parts:
        inside = [name for name in task.names if name == part or name.removeprefix(BUFFER).startswith(f"{part}.")]
        if part not in task.groups and not inside:
            groups = ", ".join(group for group, names in task.groups.items() if names)
            raise InvalidArgument(f"the model has no group or module {part!r}; its groups are {groups or 'none'}")
        selected.update(task.groups.get(part, inside))
    return frozenset(selected)


def amount(steps: int | str | None, epochs: int | None, default: int | Work = 1, same_batch: bool = False) -> Work:
    """Return the work that the two fields ask for; if neither is given, ``default``: so many epochs, or the work itself."""
    if steps is None and epochs is None:
        if isinstance(default, Work):
            return default
        epochs = default
    if isinstance(steps, str):
        raise InvalidArgument("the theory's steps are known only once there are data; use ft.run")
    return Work(steps, epochs, same_batch)
