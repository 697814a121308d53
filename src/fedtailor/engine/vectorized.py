"""All clients of a chunk at once: padded, masked, bucketed by size, under ``torch.func.vmap``, on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.data.split import Split
from fedtailor.engine.base import NO_ROUND, NOBODY, UNREAD, Engine, Ids, Predictions, Sent, joined, labelled, row
from fedtailor.errors import InvalidArgument
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce
from fedtailor.task.device import backend

MEMORY = 256 * 2**20  # bytes of batches and models that a chunk may take on the CPU
SHARE, LEAST = 0.125, 16 * 2**20  # of another device's free memory, and what it may take at least (gradients take as much again)
WASTE = 1.5  # a bucket's longest client has at most this many times the work of its shortest


@contextmanager
def explained(who: str) -> Iterator[None]:
    """Say what torch means where a random operation meets ``vmap``."""
    try:
        yield
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise InvalidArgument(
            f"{who} draws from torch's generator, which clients that are computed at once would share; use engine='loop', or "
            "draw from the batch's key"
        ) from error


class VectorizedEngine(Engine):
    name = "vectorized"

    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None, lost: Ids = NOBODY) -> Any:
        with explained(f"{type(self.plan.algorithm).__name__} or its model"):
            return self._round(shared, ids, rnd, store, reduce, lost)

    def _round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None, lost: Ids) -> Any:
        plan, algorithm = self.plan, self.plan.algorithm
        ids, sent = plan.canonical(ids), self.sent(shared)
        feed = plan.feed_of(rnd)
        place = {int(c): i for i, c in enumerate(ids[~np.isin(ids, lost)])}
        reduce = reduce or plan.reducer(sent.shared, rnd)
        state = reduce.start()
        self._count_down(sent, ids)
        for chunk in self._chunks(ids, sent, self._load(ids)):
            data, own = feed.many(chunk, rnd.number), sent.own(chunk)
            personal = self._state(sent.shared, own, chunk, store, data)
            upload, personal = vmap(
                lambda received, old, mine: algorithm.client_update(
                    plan.task, joined(sent.shared, received), old, feed.guarded(mine), rnd
                ),
                in_dims=(0, 0, 1),
                randomness="error",
            )(own, personal, data)
            self.check_finite(chunk, rnd, upload=upload, personal=personal)
            store.put(chunk, personal)
            if len(lost):
                arrives = np.flatnonzero(~np.isin(chunk, lost))
                if not len(arrives):
                    continue
                chunk, upload = chunk[arrives], tree.map(lambda leaf: leaf[torch.from_numpy(arrives)], upload)  # noqa: B023
            self._count_up(upload)
            places = torch.tensor([place[int(c)] for c in chunk])
            state = reduce.add(state, upload, torch.from_numpy(plan.weights[chunk]), places)
        return reduce.finish(state) if place else None

    def _state(self, shared: Any, own: Any, ids: Ids, store: Store, data: Any = None) -> Any:
        """Return the personal trees of a chunk, leaves [clients, ...]: stored, or born now (on ``data``, gathered if need be)."""
        known = store.born[ids]
        if known.all():
            return store.get(ids)
        new = self._born(shared, own, ids, data)
        if not known.any():
            return new
        where = self.plan.here(torch.from_numpy(np.flatnonzero(known)))
        return tree.map(lambda fresh, old: fresh.clone().index_copy_(0, where, old), new, store.get(ids[known]))

    def _born(self, shared: Any, own: Any, ids: Ids, data: Any = None) -> Any:
        """Return newcomers' personal trees; without ``data``, it is gathered only if ``init_client`` looks at them."""
        task, algorithm, feed = self.plan.task, self.plan.algorithm, self.plan.feed
        if data is None:
            with suppress(Exception):  # whatever else goes wrong does so again below
                if tree.leaves(own):
                    return vmap(lambda received: algorithm.init_client(task, joined(shared, received), UNREAD))(own)
                alike = algorithm.init_client(task, shared, UNREAD)
                return tree.map(lambda leaf: leaf.expand(len(ids), *leaf.shape), alike)
            data = feed.many(ids, NO_ROUND)
        return vmap(
            lambda received, mine: algorithm.init_client(task, joined(shared, received), feed.guarded(mine)),
            in_dims=(0, 1),
            randomness="error",
        )(own, data)

    def _ready(self, shared: Any, own: Any, ids: Ids, store: Store) -> Any:
        """Return the personal trees of a chunk, personalised, for predicting."""
        plan = self.plan
        if plan.algorithm.stateless:
            return {}
        personal = self._state(shared, own, ids, store)
        if plan.algorithm.personalizes:
            data = plan.feed.many(ids, NO_ROUND, "personalize")
            personal = vmap(
                lambda received, old, mine: plan.algorithm.personalize(
                    plan.task, joined(shared, received), old, plan.feed.guarded(mine, "personalize")
                ),
                in_dims=(0, 0, 1),
                randomness="error",
            )(own, personal, data)
        return personal

    def _predict(self, shared: Any, own: Any, personal: Any, x: Tensor, clients: int | None = None) -> Tensor:
        """Return the logits of all clients; ``clients`` is their number where they share the rows ``x``."""

        def one(received: Any, state: Any, rows: Tensor) -> Tensor:
            return self.plan.algorithm.predict(self.plan.task, joined(shared, received), state, rows)

        if not tree.leaves(personal) and not tree.leaves(own):
            if clients is not None:
                return (logits := one({}, {}, x)).unsqueeze(0).expand(clients, *logits.shape)
            return vmap(lambda rows: one({}, {}, rows), randomness="error")(x)
        return vmap(one, in_dims=(0, 0, 0 if clients is None else None), randomness="error")(own, personal, x)

    @torch.no_grad()
    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, diagnose: bool = False) -> Iterator[Predictions]:
        plan, sent = self.plan, self.sent(shared)
        for chunk in self._chunks(ids, sent, split.sizes[ids] * self._answer_bytes(split.x) + self._load(ids)):
            own = sent.own(chunk)
            personal = self._ready(sent.shared, own, chunk, store)
            x, y, mask = self.plan.feed.whole(split, chunk)
            x = self.plan.feed.here(x)
            mine = self._predict(sent.shared, own, personal, x)
            theirs = None
            if tree.leaves(sent.newcomer):
                if plan.algorithm.stateless:
                    theirs = mine
                else:
                    theirs = self._predict(sent.newcomer, {}, self._born(sent.newcomer, {}, chunk), x)
            facts = None
            if diagnose:
                facts = vmap(
                    lambda received, p, rows: plan.algorithm.diagnose(plan.task, joined(sent.shared, received), p, rows),
                    randomness="error",
                )(own, personal, x)
            theirs, facts = (None if part is None else self.out(part) for part in (theirs, facts))
            yield Predictions(chunk, self.out(mine), theirs, y.cpu(), mask, facts)

    @torch.no_grad()
    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        load = np.full(len(ids), len(x) * self._answer_bytes(x)) + self._load(ids)
        sent, x = self.sent(shared), self.plan.feed.here(x)
        for chunk in self._chunks(ids, sent, load):
            own = sent.own(chunk)
            yield chunk, self.out(self._predict(sent.shared, own, self._ready(sent.shared, own, chunk, store), x, len(chunk)))

    def personal(self, shared: Any, client: int, store: Store) -> Any:
        sent, one = self.sent(shared), np.array([client])
        own = sent.own(one)
        ready = labelled(self._ready(sent.shared, own, one, store), own)
        return self.out(tree.clone(row(ready, 0)))  # the feed's space is used again

    @torch.no_grad()
    def personal_chunks(self, shared: Any, store: Store) -> Iterator[tuple[Ids, Any]]:
        sent, ids = self.sent(shared), np.arange(len(self.plan.federation))
        for chunk in self._chunks(ids, sent, self._load(ids)):
            own = sent.own(chunk)
            yield chunk, self.out(tree.clone(labelled(self._ready(sent.shared, own, chunk, store), own)))

    def _load(self, ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of each client's batches in a round."""
        feed = self.plan.feed
        width = np.minimum(feed.federation.train.sizes[ids], feed.batch_size or np.iinfo(np.int64).max)
        steps = np.ones_like(width) if feed.batch_size is None else feed.steps(ids, "train")
        x = feed.federation.train.x
        return width * (steps * _row_bytes(x) + self.plan.task.row_bytes * int(np.prod(x.shape[1:])))

    def _answer_bytes(self, x: Tensor) -> int:
        """Return the bytes of a row and of two models' logits on it."""
        fed = self.plan.federation
        return _row_bytes(x) + 8 * fed.outputs * (x.shape[1] if fed.per_position else 1)

    def _chunks(self, ids: Ids, sent: Sent, load: NDArray[np.int64]) -> Iterator[Ids]:
        """Yield ids by falling load, cut where the load falls by more than ``WASTE`` or memory is full."""
        message = sent.to(int(ids[0])) if len(ids) else {}
        state = 8 * sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(message))
        order = np.lexsort((self.plan.federation.keys[ids], -load))
        ids, load = ids[order], load[order]
        most = chunk_bytes(self.plan.device)
        start = 0
        while start < len(ids):
            room = max(1, int(most // max(1, load[start] + state)))
            similar = int(np.searchsorted(-load[start:], -load[start] / WASTE, "right"))
            stop = start + max(1, min(room, similar))
            yield ids[start:stop]
            start = stop


def chunk_bytes(device: torch.device) -> int:
    """Return the bytes of batches and models that a chunk may take on a device."""
    return MEMORY if device.type == "cpu" else max(LEAST, int(SHARE * backend(device).free(device)))


def _row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size() if len(x) else 0
