"""How uploads become one: the mean streams, the others see the uploads side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.errors import InvalidArgument


class Reduce(ABC):
    """Folds chunks of uploads (leaves [clients, ...]); ``finish`` gives what the server sees.

    ``places`` says where in the cohort the clients of a chunk stand; chunks may come in any order.
    """

    @abstractmethod
    def start(self) -> Any: ...

    @abstractmethod
    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any: ...

    @abstractmethod
    def finish(self, state: Any) -> Any: ...


class Mean(Reduce):
    """Weighted mean, normalised over the cohort. Needs memory for one upload, whatever the number of clients."""

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


mean, stack, median, nothing = Mean(), Stack(), Median(), Nothing()
REDUCES: dict[str, Reduce] = {"mean": mean, "even": Even(), "stack": stack, "median": median, "trimmed": Trimmed()}


def named(reduce: str | Reduce) -> Reduce:
    """A reduce by name, or as it is."""
    if isinstance(reduce, Reduce):
        return reduce
    if reduce not in REDUCES:
        raise InvalidArgument(f"unknown reduce {reduce!r}; use one of {', '.join(REDUCES)}")
    return REDUCES[reduce]
