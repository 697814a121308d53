"""The one loop of local training, and the ways in which it sees a client's data.

A view gives batches and says how the parameters are read and written in a step: ``Walked`` is one client with real batches,
``Followed`` the same where somebody differentiates through the steps, ``Padded`` a client under ``vmap`` whose padded steps
change nothing, ``Stacked`` all clients of a chunk. Any gradient goes with any view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.data.secret import Use
from fedtailor.local.gradients import Source
from fedtailor.local.optim import Optimizer, State
from fedtailor.local.penalty import Penalty, add_gradient, aligned

LEAVES = ("x", "y", "mask", "key", "weight", "expected")  # the tensors of a batch
Batch = Mapping[str, Tensor]
Grads = Sequence[Tensor | None]
Branch = Grads | None
Terms = tuple[float | Tensor, Branch, Branch]  # a penalty's pull, center and slope, leaf by leaf


class Point:
    """Parameters on their way, as a list of leaves and as a tree. They move in place, or a step puts new ones here."""

    def __init__(self, like: Any, leaves: list[Tensor]) -> None:
        self.like = like
        self.put(leaves)

    def put(self, leaves: list[Tensor]) -> None:
        self.leaves, self.tree = leaves, tree.refill(self.like, iter(leaves))


class Descent:
    """What moves, by which gradient, penalty and optimiser; ``state`` is the optimiser's, made at the first step."""

    def __init__(self, source: Source, point: Point, opt: Optimizer, penalty: Penalty, use: Use) -> None:
        self.point, self.opt, self.gradient = point, opt, opt.gradient(source, use)
        self.terms: Terms = (penalty.pull, aligned(penalty.center, source.like), aligned(penalty.slope, source.like))
        self.buffers, self.rates = source.buffers, source.paces
        self.state: State = []


def take_steps(descents: Sequence[Descent], view: Walked) -> None:
    """Take one step of each descent on every batch, in order, each from where the one before it left the parameters."""
    moving = [descent for descent in descents if any(descent.rates)]
    for k, (place, batch) in enumerate(view.steps() if moving else ()):
        for d in moving:
            leaves, terms = view.read(d, place)
            grads = add_gradient(d.gradient(leaves, batch), leaves, d.buffers, d.rates, *terms, plain=view.stacked)
            leaves, memory = view.open(d, place, leaves, grads)
            view.optimizer(d, place).step_(leaves, grads, memory, k, d.buffers, d.rates, stacked=view.stacked)
            del grads  # freed before the next backward pass, which reuses the memory
            view.close(d, place, leaves, memory)


@dataclass(frozen=True)
class Walked:
    """One client, real batches: steps in place. A place tells a view what to read and write in a step."""

    data: Any
    stacked: ClassVar[bool] = False

    def steps(self) -> Iterator[tuple[Any, Batch]]:
        """Yield (place, batch) for every step."""
        return ((None, batch) for batch in self.data.batches())

    def read(self, descent: Descent, place: Any) -> tuple[list[Tensor], Terms]:
        """Return the leaves of this step's clients, and the penalty on them."""
        return descent.point.leaves, descent.terms

    def optimizer(self, descent: Descent, place: Any) -> Optimizer:
        """Return the optimiser with the step sizes of this step's clients."""
        return descent.opt

    def open(self, descent: Descent, place: Any, leaves: list[Tensor], grads: Grads) -> tuple[list[Tensor], State]:
        """Return leaves and memory that the optimizer may write to."""
        descent.state = descent.state or descent.opt.init(leaves)
        return leaves, descent.state

    def close(self, descent: Descent, place: Any, leaves: list[Tensor], memory: State) -> None:
        """Store what the optimizer wrote, unless it wrote in place."""


class Followed(Walked):
    """One client whose steps are part of a function that is being differentiated: a step is taken on copies."""

    def open(self, descent: Descent, place: Any, leaves: list[Tensor], grads: Grads) -> tuple[list[Tensor], State]:
        fresh = [
            p if not rate else p.clone() if g is None else torch.zeros_like(g) + p  # as widely batched as the gradient
            for g, p, rate in zip(grads, leaves, descent.rates, strict=True)
        ]
        descent.state = descent.state or descent.opt.init(fresh)
        return fresh, [[m.clone() for m in memory] for memory in descent.state]

    def close(self, descent: Descent, place: Any, leaves: list[Tensor], memory: State) -> None:
        descent.state = memory
        descent.point.put(leaves)


class Padded(Followed):
    """A client under ``vmap``: a step is taken on copies, which count where it is more than padding."""

    def steps(self) -> Iterator[tuple[Any, Batch]]:
        names = [name for name in LEAVES if name in self.data]
        for k in range(self.data["mask"].shape[0]):
            batch = {name: self.data[name][k] for name in names}
            # a Poisson sample may be real and have no row
            yield batch["expected"] > 0 if "expected" in batch else batch["mask"].any(), batch

    def close(self, descent: Descent, place: Any, leaves: list[Tensor], memory: State) -> None:
        state = zip(memory, descent.state, strict=True)
        descent.state = [[torch.where(place, n, o) for n, o in zip(new, old, strict=True)] for new, old in state]
        pairs = zip(leaves, descent.point.leaves, strict=True)
        descent.point.put([old if new is old else torch.where(place, new, old) for new, old in pairs])


class Stacked(Walked):
    """All clients of a chunk, tensors [clients, steps, ...]: a step is taken in place by those that still have work.

    They are a prefix where they come with most work first, as the engine sorts them, and then the arithmetic is on views.
    """

    stacked = True

    def steps(self) -> Iterator[tuple[Any, Batch]]:
        """Yield (which clients, their batch) for every step in which a client has a row; None stands for all clients, and the
        mask is left out where all rows are real.

        With Poisson samples a step may be real and have no row.
        """
        data = {name: value.movedim(0, 1) for name, value in self.data.items()}  # [steps, clients, ...]
        genuine = data["mask"] > 0  # [steps, clients, batch]
        counts, (clients, widest) = genuine.sum(-1), genuine.shape[1:]
        busy = data["expected"] > 0 if "expected" in data else counts > 0
        place = torch.arange(1, widest + 1, device=genuine.device)
        last = (genuine * place).amax(-1) if widest else counts  # one past the last real row
        if not len(counts):
            return
        ordered = (busy[:, 1:] <= busy[:, :-1]).all()
        facts = [busy.sum(1), last.amax(1), counts.masked_fill(~busy, widest).amin(1), ordered.expand(len(counts))]
        known = torch.stack(facts, 1).tolist()  # a device is asked once for all steps
        prefix = bool(known[0][-1])
        who = busy if prefix else busy.cpu()
        for k, (size, rows, least, _) in enumerate(known):
            if not size:
                continue
            selected: Any = None if size == clients else slice(0, size) if prefix else who[k].nonzero()[:, 0].to(busy.device)
            batch = {name: value[k] if selected is None else value[k][selected] for name, value in data.items()}
            if rows < widest:
                batch.update({name: batch[name][:, :rows] for name in ("x", "y", "mask", "weight") if name in batch})
            if least == rows:
                del batch["mask"]
            yield selected, batch

    def read(self, descent: Descent, place: Any) -> tuple[list[Tensor], Terms]:
        leaves, (pull, *branches) = descent.point.leaves, descent.terms
        if place is None:
            return leaves, descent.terms
        center, slope = (b if b is None else [None if t is None else t[place] for t in b] for b in branches)
        return [p[place] for p in leaves], (pull[place] if isinstance(pull, Tensor) and pull.dim() else pull, center, slope)

    def optimizer(self, descent: Descent, place: Any) -> Optimizer:
        opt = descent.opt
        return opt if place is None or not isinstance(opt.lr, Tensor) else opt.using(opt.lr[place], opt.radius)

    def open(self, descent: Descent, place: Any, leaves: list[Tensor], grads: Grads) -> tuple[list[Tensor], State]:
        descent.state = descent.state or descent.opt.init(descent.point.leaves)
        return leaves, descent.state if place is None else [[m[place] for m in memory] for memory in descent.state]

    def close(self, descent: Descent, place: Any, leaves: list[Tensor], memory: State) -> None:
        if not isinstance(place, Tensor):  # views, which were written to in place
            return
        for i, rate in enumerate(descent.rates):
            if rate:
                pairs = zip([descent.point.leaves[i], *descent.state[i]], [leaves[i], *memory[i]], strict=True)
                for whole, part in pairs:
                    whole[place] = part


def copied(leaf: Tensor, channels_last: bool = False) -> Tensor:
    """Return a copy of a leaf that steps can change in place."""
    wide = channels_last and leaf.dim() == 4
    return leaf.detach().clone(memory_format=torch.channels_last if wide else torch.contiguous_format)
