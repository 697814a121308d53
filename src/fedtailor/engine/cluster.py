"""``engine="ray"``: shards of clients on the nodes of a cluster, each with its rows and personal states.

In a round a node is sent the shared tree once; where uploads are averaged, one sum is handed on from node to node. Methods that
need every upload (side by side, medians) have them sent here. A node that is lost loses the personal states of its
clients: they are taken from the last backup, and what they did since then is done again, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.data.secret import Secret
from fedtailor.data.split import Split
from fedtailor.engine.base import NOBODY, Ids, Plan, Predictions, Sent, lift
from fedtailor.engine.crew import Calls, Crew, Here
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.options import Options
from fedtailor.engine.shards import Asked, Order, Places, Shard, inner_of, is_alone, on_disk, part_of, parts_of
from fedtailor.errors import InvalidArgument, WorkerDied
from fedtailor.runs.store import Store
from fedtailor.server.crowd import NoisyMean
from fedtailor.server.reduce import Mean, Nothing, Reduce
from fedtailor.task.device import size

PARTS = ("train", "test", "val")
TRIES = 3  # times that a shard may be lost without a round in between
BACKUP = 20  # rounds after which personal states are fetched, where no checkpoint did so


class RemoteStore(Store):
    """The personal states of all clients, which are where their shards are; here is only who was born."""

    def __init__(self, engine: ClusterEngine, number: int) -> None:
        super().__init__(len(engine.plan.federation))
        self.engine: ClusterEngine | None = engine
        self.number = number
        self._bytes = 0  # of one client's state, once seen

    def put(self, ids: Ids, personal: Any) -> None:
        if self.engine is None:
            super().put(ids, personal)
        elif len(ids):
            self.engine.place(self.number, ids, personal)
            self.came_about(ids)

    def came_about(self, ids: Ids) -> None:
        """Take note that clients have new states where their shards are."""
        self.born[ids] = self.changed[ids] = True

    def get(self, ids: Ids) -> Any:
        return super().get(ids) if self.engine is None else self.engine.fetch(self.number, ids)

    def like(self) -> Store:
        return super().like() if self.engine is None else self.engine.hold(super().like())

    @property
    def bytes(self) -> int:
        return super().bytes if self.engine is None else self._bytes * int(self.born.sum())

    def dump(self, ids: Ids | None = None) -> Any:
        if self.engine is None:
            return super().dump(ids)
        asked = np.flatnonzero(self.born) if ids is None else ids
        dumped = {"ids": torch.from_numpy(asked), "rows": self.get(asked) if len(asked) else {}}
        if len(asked):
            self._bytes = size(*tree.leaves(dumped["rows"])) // len(asked)
        if ids is None:
            self.engine.backed_up(self.number, dumped)
        return dumped

    def come_home(self) -> None:
        """Fetch all states: the nodes are about to be left."""
        dumped = self.dump()
        self.engine = None
        self.fill(dumped)


class ClusterEngine(LoopEngine):
    """Visits clients where their shards are. What one client predicts on rows that are no client's own is computed here."""

    name = "ray"

    def __init__(self, plan: Plan, crew: Crew, places: Places, inner: str) -> None:
        super().__init__(plan, workers=1)
        self.crew: Crew | None = crew
        self.places, self.inner = places, inner
        self._stores: list[RemoteStore] = []
        self._backups: dict[int, Any] = {}
        self._log: list[tuple[Any, int, dict[int, Order]]] = []  # what was worked since the last backup, if states depend on it
        self._tries = dict.fromkeys(range(crew.count), 0)
        self._is_broken = False  # a shard cannot be rebuilt, and with it its states

    def close(self) -> None:
        """Leave the cluster; what is asked for later is computed here, from the states as they are now."""
        if self.crew is not None:
            crew = self.crew
            try:
                for store in () if self._is_broken else self._stores[-1:]:
                    store.come_home()
            finally:
                self.crew = None
                crew.close()

    # -- personal states
    def hold(self, store: Store) -> Store:
        """Return a store whose states are with the shards, filled from one that is here."""
        if self.crew is None or (isinstance(store, RemoteStore) and store.engine is self):
            return store
        held = RemoteStore(self, len(self._stores))
        self._stores.append(held)
        self._log = []
        held.fill(store.dump())
        held.dump()
        return held

    def place(self, number: int, ids: Ids, personal: Any) -> None:
        """Send states to the shards of their clients."""
        calls = {}
        for shard, own in self.places.by_shard(ids).items():
            index = torch.from_numpy(np.flatnonzero(self.places.shard[ids] == shard))
            calls[shard] = (number, self.places.local[own], tree.map(lambda leaf: leaf[index], personal))  # noqa: B023
        self._call("put", None, calls)

    def fetch(self, number: int, ids: Ids) -> Any:
        """Return the states of clients, in the order of ``ids``."""
        by_shard = self.places.by_shard(ids)
        calls = {shard: (number, self.places.local[own]) for shard, own in by_shard.items()}
        found = self._call("get", None, calls)
        order = torch.from_numpy(
            np.concatenate([np.flatnonzero(self.places.shard[ids] == shard) for shard in by_shard]).argsort()
        )
        return tree.map(lambda *parts: torch.cat(parts)[order], *(found[shard] for shard in by_shard))

    def backed_up(self, number: int, dumped: Any) -> None:
        """Keep states on disk here, so that a lost shard can be rebuilt from them."""
        self._backups[number] = {"ids": dumped["ids"], "rows": on_disk(dumped["rows"])}
        self._log = []

    # -- calls, and shards that are lost
    def _call(self, method: str, common: Any, calls: Calls) -> dict[int, Any]:
        """Return the results of a method of some shards; those that are lost are started again and asked once more."""
        assert self.crew is not None
        done: dict[int, Any] = {}
        left = dict(calls)
        while left:
            results, lost = self.crew.each(method, common, left)
            done |= results
            left = {shard: left[shard] for shard in lost}
            for shard in lost:
                self._revive(shard)
        return done

    def _revive(self, shard: int) -> None:
        """Start a shard again from the last backup, and let it do what it has done since."""
        assert self.crew is not None
        rebuilt = False
        while not rebuilt:
            self._tries[shard] += 1
            if self._tries[shard] > TRIES:
                self._is_broken = True
                raise WorkerDied(
                    f"a part of the clients was lost {TRIES} times in one round, most often for lack of memory; use more nodes, "
                    "or fewer workers= on each"
                )
            self.crew.replace(shard)
            rebuilt = not any(self.crew.each(method, common, {shard: call})[1] for method, common, call in self._past(shard))

    def _past(self, shard: int) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """Yield the calls that bring a shard to where it was: (method, what all were sent, its arguments)."""
        for number, dumped in self._backups.items():
            known = dumped["ids"].numpy()
            here = np.isin(known, self.places.members[shard])
            if here.any():
                index = torch.from_numpy(np.flatnonzero(here))
                rows = tree.map(lambda leaf: leaf[index], dumped["rows"])  # noqa: B023
                yield "put", None, (number, self.places.local[known[here]], rows)
        for common, number, orders in self._log:
            if shard in orders:
                yield "work", common, (number, orders[shard])

    # -- rounds
    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None, lost: Ids = NOBODY) -> Any:
        if not isinstance(store, RemoteStore):
            held = self.hold(store)
            upload = self.round(shared, ids, rnd, held, reduce, lost)
            store.put(ids, held.get(ids))
            return upload
        ids, sent = self.plan.canonical(ids), self.sent(shared)
        arrives = ~np.isin(ids, lost)
        given = reduce is not None or self.plan.crowd is not None
        reduce = reduce or self.plan.reducer(sent.shared, rnd)
        self._count_down(sent, ids)
        common, orders = (sent.shared, self._newcomer(sent), rnd), self._orders(sent, ids, rnd, lost)
        up = self._call("work", common, {shard: (store.number, order) for shard, order in orders.items()})
        self.traffic.up += sum(up.values())
        store.came_about(ids)
        out = self._reduced(reduce, given, common, store.number, orders) if arrives.any() else None
        self._tries = dict.fromkeys(self._tries, 0)
        if not self.plan.algorithm.stateless:
            self._log.append((common, store.number, orders))
            if len(self._log) >= BACKUP * self.plan.algorithm.exchanges:
                store.dump()
        return out

    def _orders(self, sent: Sent, ids: Ids, rnd: Round, lost: Ids) -> dict[int, Order]:
        """Return every shard's part of a round."""
        arrives = ~np.isin(ids, lost)
        place = dict(zip(ids[arrives].tolist(), range(len(ids)), strict=False))
        paces = None if self.plan.feed.paces is None else self.plan.feed.paces(rnd.number)
        orders = {}
        for shard, own in self.places.by_shard(ids).items():
            gone = own[np.isin(own, lost)]
            places = np.array([place[client] for client in own.tolist() if client in place], np.int64)
            pace = None if paces is None else paces[self.places.members[shard]]
            orders[shard] = Order(self._asked(sent, own), self.places.local[gone], places, pace)
        return orders

    def _reduced(self, reduce: Reduce, given: bool, common: Any, number: int, orders: Mapping[int, Order]) -> Any:
        """Return a round's uploads reduced: by a sum that is handed on along the ring, or here, where all are needed.

        A way of reducing that was not ``given`` is the method's own, which shards can make."""
        assert self.crew is not None
        if isinstance(reduce, Nothing):
            return None
        if not isinstance(reduce, Mean) and (given or not reduce.streams):
            found = self._uploads(common, number, orders)
            state = reduce.start()
            for shard in sorted(found):
                for upload in found[shard]:
                    state = reduce.add(state, *upload)
            return reduce.finish(state)
        while True:
            state, gone = self.crew.chain(sorted(orders), blind(reduce) if isinstance(reduce, Mean) else None)
            if not gone:
                return reduce.finish(state)
            self._repeat(gone, common, number, orders)

    def _uploads(self, common: Any, number: int, orders: Mapping[int, Order]) -> dict[int, Any]:
        assert self.crew is not None
        while True:
            found, gone = self.crew.each("uploads", None, dict.fromkeys(orders, ()))
            if not gone:
                return found
            self._repeat(gone, common, number, orders)

    def _repeat(self, gone: Sequence[int], common: Any, number: int, orders: Mapping[int, Order]) -> None:
        """Let shards that were lost within a round do their part of it again."""
        for shard in gone:
            self._revive(shard)
            if shard in orders:
                self._call("work", common, {shard: (number, orders[shard])})

    def _asked(self, sent: Sent, ids: Ids) -> Asked:
        own: Any = {}
        if self.plan.algorithm.has_downlink:  # as one machine asks for it: the last digits may depend on it
            each = [lift(sent.own_of(client)) for client in ids.tolist()]
            own = tree.map(lambda *parts: torch.cat(parts), *each)
        return Asked(self.places.local[ids], own)

    def _newcomer(self, sent: Sent) -> Any:
        return sent.own(None) if self.plan.algorithm.has_downlink else {}

    # -- predictions
    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, diagnose: bool = False) -> Iterator[Predictions]:
        part = next((name for name in PARTS if getattr(self.plan.federation, name) is split), None)
        if part is None or self.crew is None or not isinstance(store, RemoteStore):  # no client's own rows, or nobody to ask
            yield from super().predictions(shared, ids, self._known(store), split, diagnose)
            return
        sent = self.sent(shared)
        common, by_shard = (sent.shared, self._newcomer(sent)), self.places.by_shard(ids)
        calls = {shard: (store.number, self._asked(sent, own), part, diagnose) for shard, own in by_shard.items()}
        found = self._call("predictions", common, calls)
        answers = [
            answer._replace(ids=self.places.members[shard][answer.ids]) for shard, some in found.items() for answer in some
        ]
        if self.inner == "loop":  # in the order of one machine
            rank = {client: place for place, client in enumerate(ids.tolist())}
            answers.sort(key=lambda answer: rank[int(answer.ids[0])])
        yield from answers

    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        if self.crew is None or not isinstance(store, RemoteStore):
            yield from super().on_common(shared, ids, store, x)
            return
        sent, by_shard = self.sent(shared), self.places.by_shard(ids)
        calls = {shard: (store.number, self._asked(sent, own)) for shard, own in by_shard.items()}
        found = self._call("on_common", (sent.shared, self._newcomer(sent), x), calls)
        answers = [(self.places.members[shard][some], logits) for shard, each in found.items() for some, logits in each]
        if self.inner == "loop":
            rank = {client: place for place, client in enumerate(ids.tolist())}
            answers.sort(key=lambda answer: rank[int(answer[0][0])])
        yield from answers

    def rows(self, split: Split, places: Ids) -> tuple[Tensor, Tensor]:
        part = next((name for name in PARTS if getattr(self.plan.federation, name) is split), None)
        if part is None or not self._is_away:
            return super().rows(split, places)
        owners = np.searchsorted(split.offsets, places, "right") - 1
        calls, order = {}, []
        for shard in np.unique(self.places.shard[owners]).tolist():
            here = np.flatnonzero(self.places.shard[owners] == shard)
            clients = owners[here]
            calls[shard] = (part, self.places.local[clients], places[here] - split.offsets[clients])
            order.append(here)
        found = self._call("rows", None, calls)
        back = torch.from_numpy(np.concatenate(order).argsort())
        x, y = (torch.cat([found[shard][side] for shard in calls])[back] for side in (0, 1))
        return x, y

    @property
    def _is_away(self) -> bool:
        """Return whether clients' rows are with the shards alone."""
        return self.crew is not None and self.plan.federation.shards is not None

    def _trees(self, shared: Any, ids: Ids, store: RemoteStore) -> dict[int, Any]:
        """Return the trees with which clients predict, made where their rows are."""
        sent, by_shard = self.sent(shared), self.places.by_shard(ids)
        calls = {shard: (store.number, self._asked(sent, own)) for shard, own in by_shard.items()}
        found = self._call("personal", (sent.shared, self._newcomer(sent)), calls)
        return {client: one for shard, own in by_shard.items() for client, one in zip(own.tolist(), found[shard], strict=True)}

    def personal(self, shared: Any, client: int, store: Store) -> Any:
        if not self._is_away or not isinstance(store, RemoteStore):
            return super().personal(shared, client, store)
        return self._trees(shared, np.array([client]), store)[client]

    def newborn(self, shared: Any, client: int = 0) -> Any:
        if not self._is_away:
            return super().newborn(shared, client)
        sent, shard = self.sent(shared), int(self.places.shard[client])
        return self._call("newborn", (sent.shared, self._newcomer(sent)), {shard: (int(self.places.local[client]),)})[shard]

    def personal_chunks(self, shared: Any, store: Store) -> Iterator[tuple[Ids, Any]]:
        if self._is_away and isinstance(store, RemoteStore):
            trees = self._trees(shared, np.arange(len(self.plan.federation)), store)
            yield from ((np.array([client]), lift(trees[client])) for client in sorted(trees))
            return
        yield from super().personal_chunks(shared, self._known(store))

    def _known(self, store: Store) -> Store:
        """Return a store whose states are here: fetched in one go, not one by one."""
        if self.crew is None or not isinstance(store, RemoteStore):
            return store
        here = Store(store.clients)
        here.fill(store.dump())
        return here


def blind(reduce: Mean) -> Mean:
    """Return a mean without the secret behind its noise, which is added here, to the sum."""
    if not isinstance(reduce, NoisyMean):
        return reduce
    return replace(reduce, crowd=replace(reduce.crowd, secret=Secret.from_seed(0)))


def shards_of(plan: Plan, options: Options, count: int) -> tuple[Places, str, int]:
    """Return (where clients are, in up to ``count`` shards; the engine that these run; the parts of the ring)."""
    if plan.host is not None:
        raise InvalidArgument("engine='ray' computes on the CPUs of its nodes; use device='cpu'")
    inner, parts = inner_of(plan, options.on_nodes), parts_of(len(plan.federation))
    return (
        Places.of(plan.federation.keys, min(count, len(plan.federation), parts if inner == "vectorized" else count)),
        inner,
        parts,
    )


def here(plan: Plan, options: Options, count: int) -> ClusterEngine:
    """Return the engine with all shards in this process: what nodes would compute, without any."""
    places, inner, parts = shards_of(plan, options, count)
    crew = Here([Shard(part_of(plan, members), inner, parts) for members in places.members])
    return ClusterEngine(plan, crew, places, inner)


def engine(plan: Plan, options: Options) -> ClusterEngine:
    """Return the engine over the nodes of a cluster, connected; to close it leaves the cluster."""
    if is_alone():
        return here(plan, options, 1)
    from fedtailor.engine.nodes import Nodes, connect

    with connect(options) as session:
        places, inner, parts = shards_of(plan, options, session.cpus)
        recipes = [(part_of(plan, members), inner, parts) for members in places.members]
        return ClusterEngine(plan, Nodes(session, recipes), places, inner)
