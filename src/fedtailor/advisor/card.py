"""Cards: the facts of a method, found by running it on a small federation; nothing on a card is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor import tree
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed
from fedtailor.engine.base import NO_ROUND, Plan, born, one_thread
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, make_plan, play, run
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.laws.ground import BATCH, SEED, Ground, federation, network
from fedtailor.local.loop import Record, metered
from fedtailor.local.private import Private
from fedtailor.metrics.cost import probe, trained, wire_bytes
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Mean
from fedtailor.task import Task
from fedtailor.theory.rates import resolve

# what a method cannot run without, where it has no default
SETTINGS: dict[str, dict[str, Any]] = {"AL2SGD": {"mu": 0.1, "smoothness": 10.0}}
CLIENTS = 3  # facts are the same for all clients; a few show them
PUBLIC_ROWS = 8  # training rows that stand in for public ones where the federation has none


@dataclass(frozen=True)
class Parcel:
    """A tree that travels or is kept.

    ``bytes`` is its length as serialised, header included; ``models`` is the bytes of its tensors, as a multiple of those of
    the model (parameters and buffers).
    """

    branches: tuple[str, ...]
    bytes: int
    parameters: int
    models: float


@dataclass(frozen=True)
class Card:
    """The facts of a method on a model.

    ``sent_down`` and ``sent_up`` are one message to and from one client; ``kept`` is what a client stores between rounds.
    ``trained_parameters`` counts all descents of a round, or of the end if that is more (``metrics.cost.trained``); it is None
    where the meter saw none: the method steps by bare gradients, or trains nothing. ``trains_at_end`` says that ``personalize``
    changes what the client predicts with; ``trained_at_end`` counts the parameters it descends on, 0 where it only looks
    (neighbours, choice of a cluster).
    ``mean_only`` means that the server sees nothing but the mean of the uploads, so that secure aggregation is possible.
    ``private``: it runs with ``opt=ft.Private()``, on this model; the laws' network has group norm for this.
    """

    name: str
    model_parameters: int
    model_bytes: int
    stateful: bool
    sent_down: Parcel
    sent_up: Parcel
    kept: Parcel
    trained_parameters: int | None
    trains_at_end: bool
    trained_at_end: int
    works_for_new_client: bool
    mean_only: bool
    needs_public: bool
    needs_features: bool
    needs_validation: bool
    needs_everyone: bool
    roll_call: bool
    loop_only: bool
    private: bool

    def row(self) -> dict[str, Any]:
        """The card as plain values, ready for JSON."""
        out = asdict(self)
        for parcel in ("sent_down", "sent_up", "kept"):
            out[parcel]["branches"] = list(out[parcel]["branches"])
        return out

    def cells(self) -> dict[str, str]:
        """The card in words, for a table."""
        return {
            "method": self.name,
            "down": _models(self.sent_down),
            "up": _models(self.sent_up),
            "kept": _models(self.kept),
            "trained": "not seen" if self.trained_parameters is None else str(self.trained_parameters),
            "at the end": "trains" if self.trained_at_end else "prepares" if self.trains_at_end else "nothing",
            "newcomers": _yes(self.works_for_new_client),
            "mean only": _yes(self.mean_only),
            "private": _yes(self.private),
            "needs": ", ".join(self.needs()) or "nothing",
        }

    def needs(self) -> tuple[str, ...]:
        """What the method asks for beyond a model and training rows."""
        asked = {
            "public rows": self.needs_public,
            "features": self.needs_features,
            "validation rows": self.needs_validation,
            "all clients": self.needs_everyone,
            "roll call": self.roll_call,
            "loop engine": self.loop_only,
        }
        return tuple(what for what, needed in asked.items() if needed)


def card(algorithm: Algorithm, model: Any = None, data: Federation | None = None) -> Card:
    """The facts of ``algorithm`` on ``model`` and ``data``: the laws' small network and federation unless given."""
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(f"card needs an Algorithm, for instance ft.FedAvg(), not {algorithm!r}")
    with one_thread():
        ground = _ground(algorithm, network() if model is None else model, federation() if data is None else data)
        return _facts(ground, network(nn.GroupNorm(2, 6)) if model is None else model)


def cards() -> list[Card]:
    """A card for every registered method, on the laws' network."""
    return [card(example(method)) for method in METHODS]


def example(method: type[Algorithm]) -> Algorithm:
    """The method with its defaults, and a value for what has none."""
    return method(**SETTINGS.get(method.__name__, {}))


class Everyone(Ground):
    """The laws' ground with all its clients in every round: every method runs there."""

    @property
    def cohort(self) -> int:
        return len(self.plan.federation)


def _ground(algorithm: Algorithm, model: Any, data: Federation) -> Ground:
    """A few clients who take one step where they would take many; in float32, so that bytes are those of a run."""
    data = data.to(torch.float32)
    task = build_task(model, data, SEED, torch.float32, bias=True)
    if task.public is None:
        task = replace(task, public=data.train.x[:PUBLIC_ROWS])
    algorithm, _ = resolve(algorithm, task, data)
    plan = make_plan(algorithm, task, data.take(np.arange(min(CLIENTS, len(data)))), BATCH, SEED, "size")
    short = {phase: work if 0 in (work.steps, work.epochs) else work.taking(1) for phase, work in plan.feed.phases.items()}
    return Everyone("card", replace(plan, feed=Feed(plan.federation, short, BATCH, SEED)))


def _facts(ground: Ground, without_batch_norm: Any) -> Card:
    plan, model = ground.plan, ground.plan.task.init()
    in_rounds: Record = {}
    with metered(in_rounds):
        end, seen = ground.by_the_book()
    first, last = seen[0], seen[-1]
    ready, at_end = _personalized(plan, end["shared"], last["personal"], last["client"])
    return Card(
        name=type(plan.algorithm).__name__,
        model_parameters=tree.size(tree.trainable(model)),
        model_bytes=wire_bytes({"model": model}),
        stateful=bool(tree.leaves(first["born"]) or tree.leaves(last["personal"])),
        sent_down=_parcel(first["shared"], model),
        sent_up=_parcel(first["upload"], model),
        kept=_parcel(last["personal"], model),
        trained_parameters=max(trained(in_rounds), at_end) or None,
        trains_at_end=not _equal(ready, last["personal"]),
        trained_at_end=at_end,
        works_for_new_client=_works(lambda: _newcomer(plan, end["shared"])),
        mean_only=isinstance(plan.reducer(end["shared"], Round()), Mean),
        needs_public=_needs(plan, replace(plan.task, public=None)),
        needs_features=_needs(plan, replace(plan.task, features=None)),
        needs_validation=_needs(plan, federation=replace(plan.federation, val=None)),
        needs_everyone=plan.algorithm.needs_everyone or _refuses(lambda: _one_of_many(plan)),
        roll_call=bool(plan.algorithm.roll_call),
        loop_only=not _works(lambda: _vectorized(ground)),
        private=not _refuses(lambda: _privately(plan, without_batch_norm)),
    )


def _personalized(plan: Plan, shared: Any, personal: Any, client: int) -> tuple[Any, int]:
    """What a client predicts with, and how many parameters it trained for that (to scan the data is not yet to train)."""
    found: Record = {}
    with metered(found):
        ready = plan.algorithm.personalize(plan.task, shared, personal, plan.feed.one(client, NO_ROUND, "personalize"))
    steps = plan.feed.steps(np.array([client]), plan.feed.main_phase("personalize"))
    return ready, sum(count for (kind, *_), count in found.items() if kind == "descend") if steps.any() else 0


def _parcel(message: Any, model: Any) -> Parcel:
    branches = tuple(name for name, branch in message.items() if tree.leaves(branch))
    return Parcel(branches, wire_bytes(message), tree.size(message), _payload(message) / _payload(model))


def _payload(message: Any) -> int:
    """Bytes of the tensors alone, without the header that says what they are."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(message))


def _equal(a: Any, b: Any) -> bool:
    if tree.shapes(a) != tree.shapes(b):
        return False
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


# -- attempts: what works, what is refused ----------------------------------------------------------------------------
def _works(attempt: Callable[[], object]) -> bool:
    """Whether it runs without an error; numbers that are not finite are no answer."""
    try:
        attempt()
    except Diverged:
        raise
    except Exception:  # vmap, and a method met unprepared, fail in many ways
        return False
    return True


def _refuses(attempt: Callable[[], object]) -> bool:
    """Whether it is refused with a reason."""
    try:
        attempt()
    except InvalidArgument:
        return True
    return False


def _needs(plan: Plan, task: Task | None = None, federation: Federation | None = None) -> bool:
    """Whether the method, which runs on the plan, refuses a task or a federation that lacks something."""
    feed = plan.feed.like(federation=federation)
    return _refuses(lambda: probe(plan.algorithm, task or plan.task, feed))


def _one_of_many(plan: Plan) -> None:
    """A round of one client."""
    shared, server = plan.algorithm.init_server(plan.task)
    next(play(LoopEngine(plan, workers=1), shared, server, Store(len(plan.federation)), 1, 1, SEED))


def _newcomer(plan: Plan, shared: Any) -> None:
    """A client that was just born predicts, with no local step."""
    x, _ = plan.federation.test.client(0)
    plan.algorithm.predict(plan.task, shared, born(plan, shared, 0, NO_ROUND), x)


def _vectorized(ground: Ground) -> None:
    """The rounds, and everybody's predictions after each, on the vectorized engine."""
    engine, clients = VectorizedEngine(ground.plan), np.arange(len(ground.plan.federation))

    def watch(rnd: Round, shared: Any, store: Store) -> None:
        for _ in engine.predictions(shared, clients, store, ground.plan.federation.test):
            pass

    ground.played(engine, watch)


def _privately(plan: Plan, model: Any) -> None:
    """A round, the end and the measures with clipped and noisy gradients."""
    task = replace(build_task(model, plan.federation, SEED, torch.float32, bias=True), public=plan.task.public)
    algorithm = replace(plan.algorithm, opt=Private())
    run(algorithm, plan.federation, task, rounds=1, batch_size=BATCH, engine="loop", workers=1)


def _models(parcel: Parcel) -> str:
    return f"{parcel.models:.2f}" if parcel.branches else "-"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
