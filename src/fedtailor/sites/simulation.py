"""``engine="flower"``: a run whose clients are visited by messages, each by a client that has its state on its own disk.

The messages are those of a deployment; the server half is that of every engine (``engine.rounds``). What Flower adds, its nodes
and the processes they live in, is in ``sites/flower.py``; any other transport gives the same numbers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedtailor.algorithms.base import Round
from fedtailor.data.split import Split
from fedtailor.engine.base import NOBODY, Ids, Plan, Predictions, Sent, lift, one_thread, row
from fedtailor.engine.loop import LoopEngine, answer, visit
from fedtailor.engine.options import Options
from fedtailor.engine.pool import cores
from fedtailor.errors import FedtailorError, InvalidArgument, WorkerDied
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce
from fedtailor.sites.memory import BORN, Memory
from fedtailor.sites.processes import QUIET, need_flower
from fedtailor.sites.site import EVALUATE, TRAIN
from fedtailor.sites.wire import Parcel, round_facts, round_of

RUN = "run"
PARTS = ("test", "val")
# a cluster of its own: Ray else joins one that is named in a file of this machine, though it may have died
QUIET_RAY = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
PATIENCE = 86_400.0  # seconds for one exchange: a simulated client may take its time


@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a plan, which answer messages; the state of each is in a folder of its own below ``folder``."""

    plan: Plan
    folder: Path

    def memory(self, client: int) -> Memory:
        return Memory(self.folder / str(client))

    @one_thread()
    def answer(self, asked: Parcel) -> Parcel:
        """Return a client's reply; where it cannot be answered, one that says why."""
        said = {name: asked.facts[name] for name in ("client", "action")}
        try:
            client = self.plan.federation.positions[asked.facts["client"]]
            base, personal = self.memory(client).recall(asked.facts[RUN], asked.facts["version"])
            action = {TRAIN: self._train, EVALUATE: self._evaluate}[asked.facts["action"]]
            facts, content = action(client, asked, personal)
            return Parcel({**said, **facts, "base": base}, content)
        except FedtailorError as error:
            return Parcel({**said, "error": str(error)}, {})

    def _train(self, client: int, asked: Parcel, personal: Any) -> tuple[dict[str, Any], Any]:
        facts, sent = asked.facts, asked.tree
        rnd = round_of(facts["round"])
        upload, personal = visit(self.plan, (sent["shared"], rnd), client, sent["own"], personal)
        memory = self.memory(client)
        memory.keep(facts[RUN], facts["next"], personal)
        memory.forget(facts[RUN], facts["next"])
        return {"version": facts["next"]}, upload

    def _evaluate(self, client: int, asked: Parcel, personal: Any) -> tuple[dict[str, Any], Any]:
        sent, split = asked.tree, getattr(self.plan.federation, asked.facts["part"])
        x, common = split.client(client)[0], (sent["shared"], sent["newcomer"])
        own, shared, facts = answer(self.plan, common, client, sent["own"], personal, x, True, asked.facts["diagnose"])
        logits = {"personal": own, **({} if shared is None else {"shared": shared})}
        return {"version": asked.facts["version"]}, {"logits": logits, "facts": facts or {}}


class Transport(Protocol):
    """Carries messages to clients of a simulation and back, and can be closed."""

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Direct:
    """A transport within the process: messages are taken apart and put together again, but go nowhere."""

    clients: Clients

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]:
        return {
            name: Parcel.joined(*self.clients.answer(Parcel.joined(*parcel.split())).split()) for name, parcel in parcels.items()
        }

    def close(self) -> None:
        pass


class MessageEngine(LoopEngine):
    """Visits clients by messages. What one client predicts on another's rows is computed here: no site would be asked for it."""

    name = "flower"

    def __init__(self, plan: Plan, clients: Clients, transport: Transport) -> None:
        super().__init__(plan, workers=1)
        self.clients, self.transport = clients, transport
        self._open = True
        self.versions = np.full(len(plan.federation), BORN)  # of every client's state, as the server knows it
        self._known: Store | None = None
        self._stores = 0

    def close(self) -> None:
        """End the simulation; what is asked for later is computed here."""
        if self._open:
            self._open = False
            self.transport.close()
            shutil.rmtree(self.clients.folder.parent, ignore_errors=True)

    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None, lost: Ids = NOBODY) -> Any:
        ids, sent = self.plan.canonical(ids), self.sent(shared)
        self._meet(store)
        weights, arrives = torch.from_numpy(self.plan.weights[ids]), ~np.isin(ids, lost)
        order = np.cumsum(arrives) - 1  # places among those that arrive
        reduce = reduce or self.plan.reducer(sent.shared, rnd)
        state = reduce.start()
        self._count_down(sent, ids)
        upcoming = int(self.versions.max()) + 1
        known = round_facts(rnd)
        parcels = [self._parcel(TRAIN, c, sent, {}, round=known, next=upcoming) for c in ids.tolist()]
        for place, (client, reply) in enumerate(zip(ids.tolist(), self._ask(parcels), strict=True)):
            one = ids[place : place + 1]
            upload, personal = lift(reply.tree), lift(self.clients.memory(client).recall(self._run, upcoming)[1])
            self.check_finite(one, rnd, upload=upload, personal=personal)
            store.put(one, personal)
            self.versions[client] = upcoming
            if arrives[place]:
                self._count_up(upload)
                state = reduce.add(state, upload, weights[place : place + 1], torch.tensor([order[place]]))
        return reduce.finish(state) if arrives.any() else None

    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, diagnose: bool = False) -> Iterator[Predictions]:
        part = next((name for name in PARTS if getattr(self.plan.federation, name) is split), None)
        if part is None or not self._open:  # rows that no client has, or nobody to ask
            yield from super().predictions(shared, ids, store, split, diagnose)
            return
        self._meet(store)
        sent = self.sent(shared)
        newcomer = {"newcomer": sent.own(None)}
        parcels = [self._parcel(EVALUATE, c, sent, newcomer, part=part, diagnose=diagnose) for c in ids.tolist()]
        for client, reply in zip(ids.tolist(), self._ask(parcels), strict=True):
            y, logits = split.client(client)[1], lift(reply.tree["logits"])
            mask = torch.ones(1, len(y), dtype=torch.bool)
            facts = lift(reply.tree["facts"]) if diagnose else None
            yield Predictions(np.array([client]), logits["personal"], logits.get("shared"), y[None], mask, facts)

    @property
    def _run(self) -> str:
        return f"{RUN}-{self._stores}"

    def _meet(self, store: Store) -> None:
        """Give the clients the states in a store that they have not seen: that of a run which goes on."""
        if store is self._known:
            return
        self._known, self._stores = store, self._stores + 1
        self.versions[:] = np.where(store.born, BORN + 1, BORN)
        for client in np.flatnonzero(store.born).tolist():
            self.clients.memory(client).keep(self._run, BORN + 1, row(store.get(np.array([client])), 0))

    def _parcel(self, action: str, client: int, sent: Sent, more: Mapping[str, Any], **facts: Any) -> Parcel:
        known = {"action": action, "client": self.plan.federation.names[client], RUN: self._run}
        own = sent.own_of(client) if self.plan.algorithm.has_downlink else {}
        return Parcel({**known, "version": int(self.versions[client]), **facts}, {"shared": sent.shared, "own": own, **more})

    def _ask(self, parcels: list[Parcel]) -> list[Parcel]:
        """Return the replies, in order. In a simulation nobody is away: whatever goes wrong ends the run."""
        replies = self.transport.ask({parcel.facts["client"]: parcel for parcel in parcels}, PATIENCE)
        good = []
        for parcel in parcels:
            name = parcel.facts["client"]
            reply = replies.get(name, "did not answer")
            wrong = reply if isinstance(reply, str) else reply.facts.get("error")
            if wrong is None and not isinstance(reply, str) and reply.facts["base"] != parcel.facts["version"]:
                wrong = f"has version {reply.facts['base']} of its state, not {parcel.facts['version']}"
            if wrong is not None or isinstance(reply, str):
                raise WorkerDied(f"client {name} of the simulation: {wrong}")
            good.append(reply)
        return good


def engine(plan: Plan, options: Options) -> MessageEngine:
    """Return the engine over Flower's simulation, started; to close it ends the simulation and removes the clients' folders."""
    need_flower()
    os.environ.update({**QUIET, **QUIET_RAY})  # before flwr is imported, which reads them then
    from fedtailor.sites.flower import Simulation

    if find_spec("ray") is None:
        raise InvalidArgument('a simulation by Flower needs the package ray: pip install "fedtailor[flower]"')
    folder = Path(tempfile.mkdtemp(prefix="fedtailor-"))
    clients = Clients(plan, folder / "clients")
    try:
        transport = Simulation(clients, folder, options.workers or cores())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return MessageEngine(plan, clients, transport)
