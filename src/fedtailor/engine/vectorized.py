"""All clients of a chunk at once: padded, masked, bucketed by size, under ``torch.func.vmap``, on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.data.split import Split
from fedtailor.engine.base import NO_ROUND, Engine, Ids, Predictions, row
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce

MEMORY = 256 * 2**20  # bytes of batches and models that a chunk may take
WASTE = 1.5  # a bucket's longest client has at most this many times the work of its shortest


class VectorizedEngine(Engine):
    name = "vectorized"

    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None) -> Any:
        plan, algorithm = self.plan, self.plan.algorithm
        ids = self.canonical(ids)
        place = {int(c): i for i, c in enumerate(ids)}
        reduce = reduce or plan.reducer(shared, rnd)
        state = reduce.start()
        for chunk in self._chunks(ids, shared, self._load(ids)):
            data = plan.feed.many(chunk, rnd.number)
            personal = self._state(shared, chunk, store, data)
            upload, personal = vmap(
                lambda own, mine: algorithm.client_update(plan.task, shared, own, plan.feed.guarded(mine), rnd),
                in_dims=(0, 1),
                randomness="different",
            )(personal, data)
            self.check_finite(chunk, rnd, upload=upload, personal=personal)
            store.put(chunk, personal)
            places = torch.tensor([place[int(c)] for c in chunk])
            state = reduce.add(state, upload, torch.from_numpy(plan.weights[chunk]), places)
        return reduce.finish(state)

    def _state(self, shared: Any, ids: Ids, store: Store, data: Any) -> Any:
        """Personal trees of a chunk, leaves [clients, ...]: stored, or born now."""
        known = store.born[ids]
        if known.all():
            return store.get(ids)
        task, algorithm, feed = self.plan.task, self.plan.algorithm, self.plan.feed
        new = vmap(lambda mine: algorithm.init_client(task, shared, feed.guarded(mine)), in_dims=1, randomness="different")(data)
        if not known.any():
            return new
        where = torch.from_numpy(np.flatnonzero(known))
        return tree.map(lambda fresh, old: fresh.clone().index_copy_(0, where, old), new, store.get(ids[known]))

    def _newborn(self, shared: Any, ids: Ids) -> Any:
        return self._state(shared, ids, Store(len(self.plan.federation)), self.plan.feed.many(ids, NO_ROUND))

    def _ready(self, shared: Any, ids: Ids, store: Store) -> Any:
        """Personal trees of a chunk, personalised, for predicting."""
        plan = self.plan
        if plan.stateless():
            return {}
        own = store.get(ids) if store.born[ids].all() else self._state(shared, ids, store, plan.feed.many(ids, NO_ROUND))
        if plan.personalizes():
            data = plan.feed.many(ids, NO_ROUND, "personalize")
            own = vmap(
                lambda p, mine: plan.algorithm.personalize(plan.task, shared, p, plan.feed.guarded(mine, "personalize")),
                in_dims=(0, 1),
                randomness="different",
            )(own, data)
        return own

    def _predict(self, shared: Any, personal: Any, x: Tensor, clients: int | None = None) -> Tensor:
        """Logits of all clients; ``clients`` is given where they share the rows ``x``."""

        def one(p: Any, rows: Tensor) -> Tensor:
            return self.plan.algorithm.predict(self.plan.task, shared, p, rows)

        if not tree.leaves(personal):
            if clients is not None:
                return (logits := one({}, x)).unsqueeze(0).expand(clients, *logits.shape)
            return vmap(lambda rows: one({}, rows), randomness="different")(x)
        return vmap(one, in_dims=(0, 0 if clients is None else None), randomness="different")(personal, x)

    @torch.no_grad()
    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, routes: bool = False) -> Iterator[Predictions]:
        plan = self.plan
        for chunk in self._chunks(ids, shared, split.sizes[ids] * self._answer_bytes(split.x) + self._load(ids)):
            own = self._ready(shared, chunk, store)
            x, y, mask = self.plan.feed.whole(split, chunk)
            mine = self._predict(shared, own, x)
            if not tree.leaves(shared):
                theirs = None
            else:
                theirs = mine if self.plan.stateless() else self._predict(shared, self._newborn(shared, chunk), x)
            q = None
            if routes:
                q = vmap(lambda p, rows: plan.algorithm.routes(plan.task, shared, p, rows), randomness="different")(own, x)
            yield Predictions(chunk, mine, theirs, y, mask, q)

    @torch.no_grad()
    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        load = np.full(len(ids), len(x) * self._answer_bytes(x)) + self._load(ids)
        for chunk in self._chunks(ids, shared, load):
            yield chunk, self._predict(shared, self._ready(shared, chunk, store), x, len(chunk))

    def personal(self, shared: Any, client: int, store: Store) -> Any:
        return tree.clone(row(self._ready(shared, np.array([client]), store), 0))  # the feed's space is used again

    def _load(self, ids: Ids) -> NDArray[np.int64]:
        """Bytes of a client's batches in a round."""
        feed = self.plan.feed
        width = np.minimum(feed.federation.train.sizes[ids], feed.batch_size or np.iinfo(np.int64).max)
        steps = np.ones_like(width) if feed.batch_size is None else feed.steps(ids, "train")
        x = feed.federation.train.x
        return width * (steps * _row_bytes(x) + self.plan.task.row_bytes * int(np.prod(x.shape[1:])))

    def _answer_bytes(self, x: Tensor) -> int:
        """Of a row and of two models' logits on it."""
        fed = self.plan.federation
        return _row_bytes(x) + 8 * fed.outputs * (x.shape[1] if fed.per_position else 1)

    def _chunks(self, ids: Ids, shared: Any, load: NDArray[np.int64]) -> Iterator[Ids]:
        """Ids by falling load, cut where the load falls by more than ``WASTE`` or memory is full."""
        state = 8 * sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(shared))
        order = np.lexsort((self.plan.federation.keys[ids], -load))
        ids, load = ids[order], load[order]
        start = 0
        while start < len(ids):
            room = max(1, int(MEMORY // max(1, load[start] + state)))
            similar = int(np.searchsorted(-load[start:], -load[start] / WASTE, "right"))
            stop = start + max(1, min(room, similar))
            yield ids[start:stop]
            start = stop


def _row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size() if len(x) else 0
