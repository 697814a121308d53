"""All clients of a chunk at once: padded, masked, bucketed by size, under ``torch.func.vmap``, on one thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

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
from fedtailor.task.device import backend, is_full

MEMORY = 256 * 2**20  # bytes of batches and models that a chunk may take on the CPU
SHARE, LEAST = 0.125, 16 * 2**20  # of another device's free memory, and what it may take at least (gradients take as much again)
WASTE = 1.5  # a bucket's longest client has at most this many times the work of its shortest
# what torch says where a method differentiates in a way that it cannot under vmap: by the tape, or forwards
UNMAPPED = ("inside of a function being transformed", "must implement the jvp function")


Out = TypeVar("Out")


@contextmanager
def explained(who: str) -> Iterator[None]:
    """Say what torch means where a random operation meets ``vmap``."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in UNMAPPED):
            first = str(error).splitlines()[0]
            raise InvalidArgument(f"{who} cannot be vectorized ({first}); use engine='loop' (auto does)") from error
        if "randomness" not in str(error):
            raise
        raise InvalidArgument(
            f"{who} draws from torch's generator, which clients that are computed at once would share; use engine='loop', or "
            "draw from the batch's key"
        ) from error


@dataclass
class Uploads:
    """A round's uploads as far as they have come in, reduced; ``places`` are those of the clients whose uploads arrive."""

    reduce: Reduce
    state: Any
    places: Mapping[int, int]
    lost: Ids

    def add(self, upload: Any, weights: Tensor, chunk: Ids) -> None:
        self.state = self.reduce.add(self.state, upload, weights, torch.tensor([self.places[int(c)] for c in chunk]))

    def end(self) -> Any:
        """Return what the server sees; None where no upload arrives."""
        return self.reduce.finish(self.state) if self.places else None


class VectorizedEngine(Engine):
    name = "vectorized"
    most = sys.maxsize  # clients at once; fewer once the device was out of memory

    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None, lost: Ids = NOBODY) -> Any:
        with explained(f"{type(self.plan.algorithm).__name__} or its model"):
            return self._round(shared, ids, rnd, store, reduce, lost)

    def _round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None, lost: Ids) -> Any:
        ids, sent = self.plan.canonical(ids), self.sent(shared)
        feed, sum_up = self.plan.feed_of(rnd), self.begin(sent, ids, rnd, lost, reduce)

        def visit(chunk: Ids) -> tuple[Any, Any]:
            data, own = feed.many(chunk, rnd.number), sent.own(chunk)
            personal = self.state(sent.shared, own, chunk, store, data)
            return self.work(sent.shared, own, personal, data, rnd)

        for chunk, (upload, personal) in self.fitting(self.chunks(ids, sent, self.load(ids)), visit):
            self.take(sum_up, chunk, upload, personal, rnd, store)
        return sum_up.end()

    def fitting(self, chunks: Iterable[Ids], compute: Callable[[Ids], Out]) -> Iterator[tuple[Ids, Out]]:
        """Yield every chunk with what it comes to; where the device's memory is too small for one, in halves from then on.

        ``compute`` must change nothing that lasts: it is called again for the halves.
        """
        for chunk in chunks:
            waiting = [chunk]
            while waiting:
                part = waiting.pop(0)
                done: list[Out] = []
                try:
                    done.append(compute(part))
                except RuntimeError as error:
                    if not is_full(error):
                        raise
                    if len(part) == 1:
                        raise InvalidArgument(
                            f"{self.plan.device} has too little memory for one client; use a smaller batch_size or device='cpu'"
                        ) from error
                if done:  # after the except clause, where the error no longer keeps tensors alive
                    yield part, done[0]
                    continue
                backend(self.plan.device).release()
                self.most = len(part) // 2
                rest = np.concatenate([part, *waiting])
                waiting = [rest[start : start + self.most] for start in range(0, len(rest), self.most)]

    def work(self, shared: Any, own: Any, personal: Any, data: Any, rnd: Round) -> tuple[Any, Any]:
        """Return (uploads, personal trees) of a chunk after its round, leaves [clients, ...]."""
        plan, feed = self.plan, self.plan.feed_of(rnd)
        return vmap(
            lambda received, old, mine: plan.algorithm.client_update(
                plan.task, joined(shared, received), old, feed.guarded(mine), rnd
            ),
            in_dims=(0, 0, 1),
            randomness="error",
        )(own, personal, data)

    def begin(self, sent: Sent, ids: Ids, rnd: Round, lost: Ids, reduce: Reduce | None = None) -> Uploads:
        """Return the uploads of a round before the first of them has come in; ``ids`` are in the canonical order."""
        self._count_down(sent, ids)
        reduce = reduce or self.plan.reducer(sent.shared, rnd)
        return Uploads(reduce, reduce.start(), {int(c): i for i, c in enumerate(ids[~np.isin(ids, lost)])}, lost)

    def take(self, uploads: Uploads, chunk: Ids, upload: Any, personal: Any, rnd: Round, store: Store) -> None:
        """Check what a chunk has come to, store its personal state and add its uploads to the others."""
        self.check_finite(chunk, rnd, upload=upload, personal=personal)
        store.put(chunk, personal)
        if len(uploads.lost):
            arrives = np.flatnonzero(~np.isin(chunk, uploads.lost))
            if not len(arrives):
                return
            chunk, upload = chunk[arrives], tree.map(lambda leaf: leaf[torch.from_numpy(arrives)], upload)
        self._count_up(upload)
        uploads.add(upload, torch.from_numpy(self.plan.weights[chunk]), chunk)

    def state(self, shared: Any, own: Any, ids: Ids, store: Store, data: Any = None) -> Any:
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
        personal = self.state(shared, own, ids, store)
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

        def predict(chunk: Ids) -> Predictions:
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
            answers = self.out(mine)
            common = answers if theirs is mine else None if theirs is None else self.out(theirs)
            return Predictions(chunk, answers, common, y.cpu(), mask, None if facts is None else self.out(facts))

        load = split.sizes[ids] * self._answer_bytes(split.x) + self.load(ids)
        yield from (made for _, made in self.fitting(self.chunks(ids, sent, load), predict))

    @torch.no_grad()
    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        load = np.full(len(ids), len(x) * self._answer_bytes(x)) + self.load(ids)
        sent, x = self.sent(shared), self.plan.feed.here(x)

        def predict(chunk: Ids) -> Tensor:
            own = sent.own(chunk)
            return self.out(self._predict(sent.shared, own, self._ready(sent.shared, own, chunk, store), x, len(chunk)))

        yield from self.fitting(self.chunks(ids, sent, load), predict)

    def personal(self, shared: Any, client: int, store: Store) -> Any:
        sent, one = self.sent(shared), np.array([client])
        own = sent.own(one)
        ready = labelled(self._ready(sent.shared, own, one, store), own)
        return self.out(tree.clone(row(ready, 0)))  # the feed's space is used again

    @torch.no_grad()
    def personal_chunks(self, shared: Any, store: Store) -> Iterator[tuple[Ids, Any]]:
        sent, ids = self.sent(shared), np.arange(len(self.plan.federation))

        def ready(chunk: Ids) -> Any:
            own = sent.own(chunk)
            return self.out(tree.clone(labelled(self._ready(sent.shared, own, chunk, store), own)))

        yield from self.fitting(self.chunks(ids, sent, self.load(ids)), ready)

    def load(self, ids: Ids) -> NDArray[np.int64]:
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

    def chunks(self, ids: Ids, sent: Sent, load: NDArray[np.int64]) -> Iterator[Ids]:
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
            stop = start + max(1, min(room, similar, self.most))
            yield ids[start:stop]
            start = stop


def chunk_bytes(device: torch.device) -> int:
    """Return the bytes of batches and models that a chunk may take on a device."""
    return MEMORY if device.type == "cpu" else max(LEAST, int(SHARE * backend(device).free(device)))


def _row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size() if len(x) else 0
