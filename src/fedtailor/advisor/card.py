"""Cards: the facts of a method, found by running it on a small federation; nothing on a card is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor import tree
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.federation import Federation
from fedtailor.engine.base import NO_ROUND, Plan, Sent, born, one_thread
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.rounds import play
from fedtailor.engine.run import run
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged, InvalidArgument, InvalidData
from fedtailor.laws.ground import BATCH, ROUNDS, SEED, Case, federation, network
from fedtailor.local.meter import Meter, metered
from fedtailor.local.private import Private
from fedtailor.metrics.cost import probe, train_once, wire_bytes
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Mean
from fedtailor.sites.agreed import Agreed, Rows
from fedtailor.task import Task

OPTIONS = Options(batch_size=BATCH, seed=SEED)
CLIENTS = 3  # the facts are the same for all clients, so a few are enough
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

    ``sent_down`` and ``sent_up`` go to and from one client in a round; ``kept`` is what a client stores between rounds.
    ``trained_parameters`` counts all descents of a round, or of the end if that is more (``Meter.trained``); it is None
    where the meter saw none: the method steps by bare gradients, or trains nothing. ``trains_at_end`` says that ``personalize``
    changes what the client predicts with; ``trained_at_end`` counts the parameters it descends on, 0 where it only looks
    (neighbours, choice of a cluster).
    ``mean_only`` means that the server sees nothing but the mean of the uploads, so that secure aggregation is possible.
    ``private``: it runs with ``opt=ft.Private()``, on this model; the laws' network has group norm for this.
    ``not_at_sites`` says why it cannot run across real sites; None where it can.
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
    not_at_sites: str | None

    def row(self) -> dict[str, Any]:
        """Return the card as plain values, ready for JSON."""
        out = asdict(self)
        for parcel in ("sent_down", "sent_up", "kept"):
            out[parcel]["branches"] = list(out[parcel]["branches"])
        return out

    def cells(self) -> dict[str, str]:
        """Return the card in words, for a table."""
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
            "at sites": _yes(self.not_at_sites is None),
            "needs": ", ".join(self.needs()) or "nothing",
        }

    def needs(self) -> tuple[str, ...]:
        """Return what the method asks for beyond a model and training rows."""
        needs = {
            "public rows": self.needs_public,
            "features": self.needs_features,
            "validation rows": self.needs_validation,
            "all clients": self.needs_everyone,
            "roll call": self.roll_call,
            "loop engine": self.loop_only,
        }
        return tuple(need for need, asked in needs.items() if asked)


def card(algorithm: Algorithm, model: Any = None, data: Federation | None = None) -> Card:
    """Return the facts of ``algorithm`` on ``model`` and ``data``: the laws' small network and federation unless given."""
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(f"card needs an Algorithm, for instance ft.FedAvg(), not {algorithm!r}")
    with one_thread():
        case = _case(algorithm, network() if model is None else model, federation() if data is None else data)
        return _facts(case, network(nn.GroupNorm(2, 6)) if model is None else model)


@cache
def cards() -> tuple[Card, ...]:
    """Return a card for every method of ours, on the laws' network; made once in a process."""
    return tuple(card(method.example()) for method in METHODS)


class FullTurnout(Case):
    """A case of the laws with all its clients in every round, so that every method runs."""

    @property
    def cohort(self) -> int:
        return len(self.plan.federation)


def _case(algorithm: Algorithm, model: Any, data: Federation) -> Case:
    """Return the method on a few clients, with one step where it takes many; in float32, so that bytes are those of a run."""
    data = data.take(np.arange(min(CLIENTS, len(data))))
    if data.public is None:
        data = replace(data, public=data.train.x[:PUBLIC_ROWS])
    ready = prepare(algorithm, data, model, OPTIONS)
    plan = ready.plan
    phases = {phase: work if 0 in (work.steps, work.epochs) else work.taking(1) for phase, work in plan.feed.phases.items()}
    return FullTurnout("card", replace(ready, plan=replace(plan, feed=plan.feed.like(phases))))


def _facts(case: Case, without_batch_norm: Any) -> Card:
    plan, model = case.plan, case.plan.task.init()
    end, seen = case.by_the_book()
    first, last = seen[0], seen[-1]
    in_round = train_once(plan).meter
    sent = plan.sent_after(end["shared"], end["server"], ROUNDS, ROUNDS)
    ready, at_end = _personalized(plan, sent.to(last["client"]), last["personal"], last["client"])
    messages = [step for step in seen if (step["client"], step["round"]) == (first["client"], first["round"])]
    return Card(
        name=type(plan.algorithm).__name__,
        model_parameters=tree.size(tree.trainable(model)),
        model_bytes=wire_bytes({"model": model}),
        stateful=bool(tree.leaves(first["born"]) or tree.leaves(last["personal"])),
        sent_down=_parcel([step["received"] for step in messages], model),
        sent_up=_parcel([step["upload"] for step in messages], model),
        kept=_parcel([last["personal"]], model),
        trained_parameters=max(in_round.trained, at_end) or None,
        trains_at_end=not _equal(ready, last["personal"]),
        trained_at_end=at_end,
        works_for_new_client=_works(lambda: _newcomer(plan, sent.newcomer)),
        mean_only=isinstance(plan.reducer(end["shared"], plan.round(0, 1, np.array([0]))), Mean),
        needs_public=_needs(plan, replace(plan.task, public=None)),
        needs_features=_needs(plan, replace(plan.task, features=None)),
        needs_validation=_needs(plan, federation=replace(plan.federation, val=None)),
        needs_everyone=plan.algorithm.needs_everyone or _refuses(lambda: _one_of_many(plan)),
        roll_call=bool(plan.algorithm.roll_call),
        loop_only=not _works(lambda: _vectorized(case)),
        private=not _refuses(lambda: _privately(plan, without_batch_norm)),
        not_at_sites=_across_sites(case.ready),
    )


def _personalized(plan: Plan, shared: Any, personal: Any, client: int) -> tuple[Any, int]:
    """Return what a client predicts with, and how many parameters it trained for that (to scan the data is not yet to train)."""
    meter = Meter()
    with metered(meter):
        ready = plan.algorithm.personalize(plan.task, shared, personal, plan.feed.one(client, NO_ROUND, "personalize"))
    steps = plan.feed.steps(np.array([client]), plan.feed.main_phase("personalize"))
    return ready, meter.descents.count if steps.any() else 0


def _parcel(messages: list[Any], model: Any) -> Parcel:
    """Return the messages of all exchanges of a round, added up."""
    branches = tuple(dict.fromkeys(name for message in messages for name, branch in message.items() if tree.leaves(branch)))
    parameters, payload = (sum(map(count, messages)) for count in (tree.size, _payload))
    return Parcel(branches, sum(map(wire_bytes, messages)), parameters, payload / _payload(model))


def _payload(message: Any) -> int:
    """Bytes of the tensors alone, without the header that says what they are."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(message))


def _equal(a: Any, b: Any) -> bool:
    if tree.shapes(a) != tree.shapes(b):
        return False
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


# -- attempts: what works, what is refused ----------------------------------------------------------------------------
def _works(attempt: Callable[[], object]) -> bool:
    """Return whether it runs without an error; ``Diverged`` is passed on, since it says nothing about that."""
    try:
        attempt()
    except Diverged:
        raise
    except Exception:  # vmap, and a method met unprepared, fail in many ways
        return False
    return True


def _refuses(attempt: Callable[[], object]) -> bool:
    """Return whether it raises ``InvalidArgument``."""
    try:
        attempt()
    except InvalidArgument:
        return True
    return False


def _needs(plan: Plan, task: Task | None = None, federation: Federation | None = None) -> bool:
    """Return whether the method, which runs on the plan, refuses a task or a federation that lacks something."""
    lacking = replace(plan, task=task or plan.task, feed=plan.feed.like(federation=federation))
    return _refuses(lambda: probe(lacking))


def _one_of_many(plan: Plan) -> None:
    """Play a round of one client."""
    shared, server = plan.algorithm.init_server(plan.task)
    next(play(LoopEngine(plan, workers=1), shared, server, Store(len(plan.federation)), 1, 1))


def _newcomer(plan: Plan, shared: Any) -> None:
    """Predict with a client that was just initialised, without a local step."""
    x, _ = plan.federation.test.client(0)
    plan.algorithm.predict(plan.task, shared, born(plan, shared, 0, NO_ROUND), x)


def _vectorized(case: Case) -> None:
    """Play the rounds on the vectorized engine, with all clients' predictions after each."""
    engine, clients = VectorizedEngine(case.plan), np.arange(len(case.plan.federation))

    def watch(rnd: Round, sent: Sent, store: Store) -> None:
        for _ in engine.predictions(sent, clients, store, case.plan.federation.test):
            pass

    case.played(engine, watch)


def _privately(plan: Plan, model: Any) -> None:
    """Run a round, and measure it, with clipped and noisy gradients."""
    run(replace(plan.algorithm, opt=Private()), plan.federation, model, OPTIONS, rounds=1, engine="loop", workers=1)


def _across_sites(ready: Prepared) -> str | None:
    """Return why the method is refused across sites, by preparing it as a server and as a site would, each without the rest."""
    rows = replace(ready.federation, facts={})
    try:
        agreed = Agreed(ready.asked, ready.model, OPTIONS, rows.names, Rows.of(rows))
        server = agreed.at_server()
        for exchange in range(server.algorithm.exchanges):
            agreed.upload_like(server, exchange)
        agreed.at_site(rows.take([0]))
    except (InvalidArgument, InvalidData) as error:
        return str(error)
    return None


def _models(parcel: Parcel) -> str:
    return f"{parcel.models:.2f}" if parcel.branches else "-"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
