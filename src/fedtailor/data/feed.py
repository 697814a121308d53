"""Feed: hands an engine the data of one client (``one``) or of many, stacked and padded (``many``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.augment import Augment
from fedtailor.data.batches import Batches, Work, indices, poisson, step_keys
from fedtailor.data.federation import Federation
from fedtailor.data.guard import Guard
from fedtailor.data.split import Split
from fedtailor.task.device import CPU, backend, moved

Phases = Mapping[str, Work]
Paces = Callable[[int], NDArray[np.float64] | None]  # of a round: the share of its steps that each client manages (None: all)


class Feed:
    """The data of a run, by (round, client, phase). ``round`` is -1 where there is none (personalising at the end).

    ``sampling`` is ``shuffle`` (epochs of permuted rows) or ``poisson`` (every row for itself). With a ``guard`` the data are for
    private descents only: ``one`` gives them guarded, those of ``many`` are to be guarded (``guarded``) inside vmap. ``augment``
    changes the rows of every batch, ``paces`` leaves slow clients the first of their steps.

    What it hands out is on ``device``, wherever the federation is. A step's key stays on the CPU in ``one``, where a single
    number goes with tensors of any device.
    """

    def __init__(
        self,
        federation: Federation,
        phases: Phases,
        batch_size: int | None,
        seed: int,
        sampling: str = "shuffle",
        guard: Guard | None = None,
        augment: Augment | None = None,
        paces: Paces | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.federation, self.phases, self.batch_size, self.seed = federation, phases, batch_size, seed
        self.sampling, self.guard, self.augment, self.paces = sampling, guard, augment, paces
        self._space: dict[tuple[str, torch.Size], Tensor] = {}

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of masks, counts and facts: that of the features, or the run's where these are tokens."""
        x = self.federation.train.x
        return x.dtype if x.is_floating_point() else self.federation.precision

    def like(
        self,
        phases: Phases | None = None,
        federation: Federation | None = None,
        guard: Guard | None = None,
        device: torch.device | None = None,
    ) -> Feed:
        """Return this feed with other work, other clients, another guard or on another device."""
        return Feed(
            federation or self.federation,
            phases or self.phases,
            self.batch_size,
            self.seed,
            self.sampling,
            guard or self.guard,
            self.augment,
            self.paces if federation is None or device is not None else None,
            device or self.device,
        )

    def here(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of this feed."""
        return tensor if self.device.type == "cpu" else moved(tensor, self.device)

    def guarded(self, data: Any, phase: str = "train") -> Any:
        """Return one client's data as a method may see them."""
        return data if self.guard is None else self.guard.over(data, self.main_phase(phase))

    def expected(self, clients: NDArray[np.int64], phase: str) -> NDArray[np.float64]:
        """Return the mean number of rows in a batch; a client smaller than a batch uses all its rows."""
        sizes = self.phases[phase].rows(self.federation.train.sizes[clients])
        return (sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)).astype(np.float64)

    def keys(self, clients: NDArray[np.int64], round: int, phase: str) -> NDArray[np.uint64]:
        """Return a word per client that its batches are drawn by: one that nobody else can know where chance is to hide rows."""
        if self.guard is not None and self.sampling == "poisson":
            return rng.mix(self.guard.secret.word(phase, round), self.federation.keys[clients])
        return rng.mix(self.seed, rng.purpose(phase), np.int64(round), self.federation.keys[clients])

    def rows(self, client: int, round: int, phase: str) -> list[NDArray[np.int64]]:
        """Return the row numbers of each step of one client: what an independent implementation needs to follow a run."""
        index, _ = self._index(np.array([client]), round, phase)
        return [row[row >= 0] for row in index[0]]

    def steps(self, clients: NDArray[np.int64], phase: str, round: int = -1) -> NDArray[np.int64]:
        """Return how many steps each client takes: without a round, if it is not slow."""
        counts = self.phases[phase].count(self.federation.train.sizes[clients], self.batch_size)
        paces = None if self.paces is None or round < 0 else self.paces(round)
        return counts if paces is None else np.ceil(paces[clients] * counts - 1e-9).astype(np.int64)

    def _index(self, clients: NDArray[np.int64], round: int, phase: str) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        keys, work = self.keys(clients, round, phase), self.phases[phase]
        part_keys = None
        if work.part is not None:
            round_key = (np.int64(round),) if work.redraw else ()
            part_keys = rng.mix(self.seed, rng.purpose("part"), *round_key, self.federation.keys[clients])
        draw = poisson if self.sampling == "poisson" else indices
        index, counts = draw(keys, self.federation.train.sizes[clients], work, self.batch_size, part_keys)
        if self.paces is not None and ((fewer := self.steps(clients, phase, round)) < counts).any():
            index = index[:, : int(fewer.max(initial=0))]
            index = np.where((np.arange(index.shape[1]) < fewer[:, None])[:, :, None], index, -1)
        return index, keys

    def _rows(self, clients: NDArray[np.int64], phase: str) -> Tensor:
        """Return how many rows of each client the phase uses, in the dtype of the features."""
        return self.here(torch.as_tensor(self.phases[phase].rows(self.federation.train.sizes[clients]), dtype=self._dtype))

    def notes(self) -> list[str]:
        """Return what a reader should know about how the clients' rows are used."""
        equal_weight = (
            "under privacy every sequence counts alike, whatever its length: rows are clipped by the mean over their positions"
        )
        notes = [equal_weight] if self.guard is not None and self.federation.per_position else []
        sizes = self.federation.train.sizes
        parts = [work for work in self.phases.values() if work.part not in (None, (0, 1))]
        small = np.zeros(len(sizes), bool)
        for work in parts:
            small |= work.rows(sizes) == sizes
        if not small.any():
            return notes
        ids = np.flatnonzero(small)
        shown = ", ".join(self.federation.names[i] for i in ids[:5]) + (", ..." if len(ids) > 5 else "")
        subject = "1 client has" if len(ids) == 1 else f"{len(ids)} clients have"
        return [*notes, f"{subject} too few rows to be split in two, and all rows are used in both parts: {shown}"]

    def main_phase(self, phase: str) -> str:
        """Return the phase itself if it is declared; a method without ``personalize`` work gets its training work."""
        return phase if phase in self.phases else "train"

    def _extras(self, phase: str) -> list[str]:
        """Return the further phases of a main one: those named ``personalize:...`` for ``personalize``, others for ``train``."""
        more = [name for name in self.phases if name not in ("train", "personalize")]
        return [name for name in more if name.startswith("personalize:") == (phase == "personalize")]

    def one(self, client: int, round: int, phase: str = "train") -> Any:
        """Return one client's ``Batches``, guarded where there is a guard."""
        phase = self.main_phase(phase)
        x, y = map(self.here, self.federation.train.client(client))
        more: dict[str, Any] = {name: self._batches(x, y, client, round, name) for name in self._extras(phase)}
        more["client"] = self.here(torch.from_numpy(self.federation.ranks[client : client + 1]))
        if self.federation.val is not None:
            vx, vy = map(self.here, self.federation.val.client(client))
            more["val"] = {"x": vx, "y": vy, "mask": torch.ones(len(vy), dtype=self._dtype, device=self.device)}
        if self.federation.facts:
            more["facts"] = self._facts(np.array([client]))
        return self.guarded(self._batches(x, y, client, round, phase, more), phase)

    def _batches(self, x: Tensor, y: Tensor, client: int, round: int, phase: str, more: Any = None) -> Batches:
        index, keys = self._index(np.array([client]), round, phase)
        more = {"rows": self._rows(np.array([client]), phase), **(more or {})}
        expected = float(self.expected(np.array([client]), phase)[0]) if self.sampling == "poisson" else None
        weights = self.federation.train.weights
        own = None if weights is None else self.here(weights[slice(*self.federation.train.offsets[client : client + 2].tolist())])
        return Batches(x, y, index[0], step_keys(keys, index.shape[1])[0], more, self._dtype, expected, own, self.augment)

    def many(self, clients: NDArray[np.int64], round: int, phase: str = "train") -> dict[str, Any]:
        """Return leaves [steps, clients, batch, ...]: the client axis is second, so that a step is one contiguous block.

        Buffers are reused from call to call: use what this returns before calling again.
        """
        phase = self.main_phase(phase)
        data: dict[str, Any] = self._padded(clients, round, phase)
        data["client"] = self.here(torch.from_numpy(self.federation.ranks[clients])).unsqueeze(0)  # clients second
        for name in self._extras(phase):
            data[name] = self._padded(clients, round, name)
        if self.federation.val is not None:
            x, y, mask = map(self.here, self.whole(self.federation.val, clients))
            data["val"] = {
                "x": x.movedim(0, 1),
                "y": y.movedim(0, 1),
                "mask": mask.to(self._dtype).movedim(0, 1),
            }  # clients second
        if self.federation.facts:
            data["facts"] = {name: values.unsqueeze(0) for name, values in self._facts(clients).items()}  # clients second
        return data

    def _facts(self, clients: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the clients' facts by name, in the dtype of the features."""
        facts = self.federation.facts.items()
        return {name: self.here(torch.as_tensor(values[clients], dtype=self._dtype)) for name, values in facts}

    def _padded(self, clients: NDArray[np.int64], round: int, phase: str) -> dict[str, Tensor]:
        index, keys = self._index(clients, round, phase)
        train = self.federation.train
        steps = index.shape[1]
        once = steps > 0 and index.strides[1] == 0 and self.augment is None  # the same rows in every step: gather them once
        index = np.ascontiguousarray((index[:, :1] if once else index).transpose(1, 0, 2))  # [steps, clients, batch]
        real = index >= 0
        # padding repeats the client's own first row, so that no other client's rows are ever read
        rows = np.where(real, index, 0) + train.offsets[clients][:, None]
        mask = self.here(torch.from_numpy(real)).to(self._dtype)
        parts = {"x": self._gather(f"x/{phase}", train.x, rows), "y": self._gather(f"y/{phase}", train.y, rows), "mask": mask}
        words = step_keys(keys, steps).T  # [steps, clients]
        if self.augment is not None:
            parts["x"] = self._augmented(parts["x"], np.broadcast_to(words[:, :, None], index.shape), np.where(real, index, 0))
        if train.weights is not None:
            parts["weight"] = self._gather(f"weight/{phase}", train.weights, rows)
        wide = {name: part.expand(steps, *part.shape[1:]) for name, part in parts.items()}
        wide["rows"] = self._rows(clients, phase).unsqueeze(0)  # clients second
        wide["key"] = self.here(torch.from_numpy(np.ascontiguousarray(words)))
        if self.sampling == "poisson":  # an empty batch is a step as well; 0 where there is no step
            real_steps = np.arange(steps)[:, None] < self.steps(clients, phase, round)
            wide["expected"] = self.here(torch.from_numpy(real_steps * self.expected(clients, phase)))
        return wide

    def _augmented(self, x: Tensor, words: NDArray[np.int64], number: NDArray[np.int64]) -> Tensor:
        """Return gathered rows [steps, clients, batch, ...], changed as each step asks."""
        assert self.augment is not None
        return self.augment(x.flatten(0, 2), words.reshape(-1), number.reshape(-1)).view(x.shape)

    def _gather(self, name: str, source: Tensor, rows: NDArray[np.int64]) -> Tensor:
        shape = torch.Size((rows.size, *source.shape[1:]))
        space = self._space.get((name, shape))
        if space is None:
            for old in [k for k in self._space if k[0] == name]:
                del self._space[old]
            pinned = source.device.type == "cpu" and backend(self.device).pins
            space = self._space[name, shape] = source.new_empty(shape, pin_memory=pinned)
        torch.index_select(source, 0, torch.from_numpy(rows.reshape(-1)).to(source.device), out=space)
        return self.here(space).view(*rows.shape, *source.shape[1:])

    @staticmethod
    def whole(split: Split, clients: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows of a split: x, y, mask [clients, rows, ...], padded with the client's first row."""
        sizes = split.sizes[clients]
        column = np.arange(int(sizes.max(initial=1)))
        real = column < sizes[:, None]
        rows = torch.from_numpy(np.where(real, column, 0) + split.offsets[clients][:, None])
        return split.x[rows], split.y[rows], torch.from_numpy(real)
