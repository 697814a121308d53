"""How the server combines uploads: the mean streams, the other ways need all uploads side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.errors import InvalidArgument
from fedtailor.task.device import in_double


class Reduce(ABC):
    """Folds chunks of uploads (leaves [clients, ...]); ``finish`` gives what the server sees.

    ``places`` says where in the cohort the clients of a chunk stand; chunks may come in any order.
    """

    @property
    def streams(self) -> bool:
        """Return whether what is folded has one size, however many uploads are in it: it can be handed on from place to place."""
        return False

    @abstractmethod
    def start(self) -> Any: ...

    @abstractmethod
    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any: ...

    @abstractmethod
    def finish(self, state: Any) -> Any: ...


class Mean(Reduce):
    """Weighted mean, normalised over the cohort. Needs memory for one upload, whatever the number of clients."""

    @property
    def streams(self) -> bool:
        return True

    def start(self) -> Any:
        return None

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        for path, leaf in tree.items(uploads):
            if not leaf.is_floating_point():
                raise InvalidArgument(f"the upload {path!r} is of type {leaf.dtype} and cannot be averaged; upload floats")
        total, mass = state or (tree.map(lambda leaf: torch.zeros_like(leaf[0]), uploads), 0.0)
        for sum_, leaf in zip(tree.leaves(total), tree.leaves(uploads), strict=True):
            if len(weights) == 1:
                sum_.add_(leaf[0], alpha=float(weights[0]))
            else:
                sum_.add_(torch.tensordot(weights.to(leaf), leaf, 1))
        return total, mass + float(weights.sum())

    def finish(self, state: Any) -> Any:
        total, mass = state
        return tree.map(lambda leaf: leaf / mass, total)


class Even(Mean):
    """The mean without the run's weights, for uploads that bring their own (a sum, and what to divide it by)."""

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        return super().add(state, uploads, torch.ones_like(weights), places)


class Nothing(Reduce):
    """Keeps none of the uploads, where only the clients' own work matters (a trial, newcomers)."""

    def start(self) -> Any:
        return None

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        return None

    def finish(self, state: Any) -> Any:
        return None


class Stack(Reduce):
    """Uploads side by side, leaves [clients, ...], in the order of the clients."""

    def start(self) -> Any:
        return []

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        return [*state, (uploads, places)]

    def finish(self, state: Any) -> Any:
        order = torch.cat([places for _, places in state]).argsort()
        return tree.map(lambda *parts: torch.cat(parts)[order], *(uploads for uploads, _ in state))


class Median(Stack):
    """Coordinate-wise median (weights are not used): half the clients may be wrong."""

    def finish(self, state: Any) -> Any:
        return tree.map(lambda leaf: torch.quantile(leaf, 0.5, dim=0), super().finish(state))


@dataclass(frozen=True)
class Trimmed(Stack):
    """Coordinate-wise mean without the ``share`` largest and smallest values (weights are not used)."""

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise InvalidArgument(f"the share trimmed at either end must be in [0, 0.5), not {self.share}")

    def finish(self, state: Any) -> Any:
        def trim(leaf: Tensor) -> Tensor:
            cut = min(int(self.share * leaf.shape[0]), (leaf.shape[0] - 1) // 2)
            return leaf.sort(0).values[cut : leaf.shape[0] - cut].mean(0)

        return tree.map(trim, super().finish(state))


@dataclass(frozen=True)
class Krum(Stack):
    """The one upload that lies closest to its neighbours (Blanchard, El Mhamdi, Guerraoui and Stainer 2017).

    Weights are not used. It is the one with the smallest sum of squared distances to the n - ``wrong`` - 2 uploads nearest to
    it; of n uploads, ``wrong`` may be anything where n > 2 ``wrong`` + 2. None stands for as many as that allows.
    """

    wrong: int | None = None

    def finish(self, state: Any) -> Any:
        uploads = super().finish(state)
        flat = _flat(uploads)
        count = len(flat)
        wrong = max(0, (count - 3) // 2) if self.wrong is None else self.wrong
        if self.wrong is not None and count <= 2 * wrong + 2:
            raise InvalidArgument(
                f"Krum with {wrong} wrong uploads needs more than {2 * wrong + 2}, not {count}; ask more clients"
            )
        apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = apart.sort(1).values[:, 1 : max(1, count - wrong - 2) + 1].sum(1)  # the first is its own
        return tree.map(lambda leaf: leaf[int(near.argmin())], uploads)


@dataclass(frozen=True)
class GeometricMedian(Stack):
    """The point with the smallest weighted sum of distances to the uploads: less than half of the weight may be wrong.

    Found by Weiszfeld's iteration with distances of at least ``smooth`` times their median (Pillutla, Kakade and Harchaoui 2022,
    Algorithm 2).
    """

    steps: int = 100
    smooth: float = 1e-6

    def start(self) -> Any:
        return []

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        return [*state, (uploads, places, weights)]

    def finish(self, state: Any) -> Any:
        uploads = super().finish([(chunk, places) for chunk, places, _ in state])
        order = torch.cat([places for _, places, _ in state]).argsort()
        flat = _flat(uploads)
        weights = torch.cat([own for *_, own in state])[order].double().to(flat.device)
        point = flat.median(0).values  # a start that no minority can move far
        for _ in range(self.steps):
            apart = (flat - point).norm(dim=1)
            pull = weights / apart.clamp(min=float(self.smooth * apart.median()) or torch.finfo(flat.dtype).tiny)
            new = (pull / pull.sum()) @ flat
            if float((new - point).norm()) <= 1e-12 * (1 + float(point.norm())):
                break
            point = new
        return _unflat(point, uploads)


def _flat(uploads: Any) -> Tensor:
    """Return uploads [clients, ...] as one matrix [clients, numbers], in double precision."""
    for path, leaf in tree.items(uploads):
        if not leaf.is_floating_point():
            raise InvalidArgument(f"the upload {path!r} is of type {leaf.dtype} and has no distance to others; upload floats")
    return torch.cat([in_double(leaf.reshape(len(leaf), -1)) for leaf in tree.leaves(uploads)], 1)


def _unflat(point: Tensor, like: Any) -> Any:
    """Return a row of ``_flat`` as a tree."""
    parts = iter(point.split([leaf[0].numel() for leaf in tree.leaves(like)]))
    return tree.map(lambda leaf: next(parts).view(leaf.shape[1:]).to(leaf), like)


mean, stack, median, nothing = Mean(), Stack(), Median(), Nothing()
REDUCES: dict[str, Reduce] = {"mean": mean, "even": Even(), "stack": stack, "median": median, "trimmed": Trimmed()}
REDUCES |= {"krum": Krum(), "geometric-median": GeometricMedian()}


def named(reduce: str | Reduce) -> Reduce:
    """Return the reduce of this name; a ``Reduce`` is returned as it is."""
    if isinstance(reduce, Reduce):
        return reduce
    if reduce not in REDUCES:
        raise InvalidArgument(f"unknown reduce {reduce!r}; use one of {', '.join(REDUCES)}")
    return REDUCES[reduce]
