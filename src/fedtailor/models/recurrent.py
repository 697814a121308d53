"""Two versions of a recurrent layer, global g and local v, mixed state by state (FLOW's routing for LSTMs).

At every position both versions take a step: g from the mixed state, v from its own. A router reads what they make of it,
[embedding; h_g; c_g; h_v; c_v], and gives q = [q_0, q_1] of the global and of the local version. The mixed state
(q_0 h_g + q_1 h_v, q_0 c_g + q_1 c_v) takes the place of g's; v's stays its own. In the next layer g reads the mixed h, v its own
h. Since the router reads both steps, both versions run whatever it chooses: a hard choice saves no arithmetic here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.errors import ModelMismatch
from fedtailor.models.lstm import LSTMLayer, State, cell
from fedtailor.task import Block, Task
from fedtailor.task.layers import rehearsed

Weights = Mapping[str, Tensor]  # of a layer: weight_ih, weight_hh, bias_ih, bias_hh
Decide = Callable[[Tensor], Tensor]  # [rows, embedding + 4 hidden] to two scores, [rows, 2], of which q is the softmax
Between = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # what stands between two layers, for both streams


def mixed_recurrent(
    embedded: Tensor,
    ours: Sequence[Weights],
    theirs: Sequence[Weights],
    decide: Decide,
    *,
    hard: bool = False,
    between: Sequence[Between] = (),
) -> tuple[Tensor, Tensor]:
    """(the mixed h of the last layer [rows, positions, hidden], scores [rows, positions, layers, 2]).

    ``embedded`` [rows, positions, embedding] comes from one table for both versions; ``ours`` and ``theirs`` are the layers of g
    and v. ``hard`` takes each state of the version with the larger q, the global one on a tie. ``between`` has a function for
    every layer after the first.
    """
    mixed = own = embedded
    found = []
    for j, (g, v) in enumerate(zip(ours, theirs, strict=True)):
        if j and between:
            mixed, own = between[j - 1](mixed, own)
        mixed, own, scores = mixed_layer(embedded, mixed, own, g, v, decide, hard)
        found.append(scores)
    return mixed, torch.stack(found, 2)


def mixed_layer(
    embedded: Tensor, mixed: Tensor, own: Tensor, ours: Weights, theirs: Weights, decide: Decide, hard: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer on g's input ``mixed`` and v's input ``own``: (mixed h, v's h, scores), each [rows, positions, ...]."""
    gates = [_project(x, w).unbind(1) for x, w in ((mixed, ours), (own, theirs))]
    turned = [w["weight_hh"].t().contiguous() for w in (ours, theirs)]
    zero = mixed.new_zeros(len(mixed), turned[0].shape[0])
    state, apart = (zero, zero), (zero, zero)
    out: list[tuple[Tensor, Tensor, Tensor]] = []
    for seen, to_g, to_v in zip(embedded.unbind(1), *gates, strict=True):
        step, apart = cell(to_g, state, turned[0]), cell(to_v, apart, turned[1])
        scores = decide(torch.cat([seen, *step, *apart], -1))
        state = _mix(scores, step, apart, hard)
        out.append((state[0], apart[0], scores))
    first, second, third = (torch.stack(part, 1) for part in zip(*out, strict=True))
    return first, second, third


def _mix(scores: Tensor, ours: State, theirs: State, hard: bool) -> State:
    if hard:
        to_global = scores[:, :1] >= scores[:, 1:]
        h, c = (torch.where(to_global, a, b) for a, b in zip(ours, theirs, strict=True))
    else:
        q = torch.softmax(scores, -1)
        h, c = (q[:, :1] * a + q[:, 1:] * b for a, b in zip(ours, theirs, strict=True))
    return h, c


def _project(x: Tensor, w: Weights) -> Tensor:
    return F.linear(x, w["weight_ih"], w["bias_ih"] + w["bias_hh"])


@dataclass(frozen=True)
class Recurrent:
    """A model that begins with LSTM layers, the last modules of the blocks ``layers``; ``rest`` are the blocks after them.

    One table of embeddings (g's) serves both versions, and the rest is g's.
    """

    layers: tuple[Block, ...]
    rest: tuple[Block, ...]

    @property
    def inputs(self) -> int:
        """Numbers that the router reads at a position."""
        found = [block.last for block in self.layers]
        widths = sorted({layer.hidden for layer in found if isinstance(layer, LSTMLayer)})
        if len(widths) > 1:
            raise ModelMismatch(f"one router reads the states of all LSTM layers; give them one width, not {widths}")
        first = found[0]
        assert isinstance(first, LSTMLayer)
        return first.weight_ih.shape[1] + 4 * widths[0]

    def __call__(
        self,
        g: Mapping[str, Tensor],
        v: Mapping[str, Tensor],
        decide: Decide,
        x: Tensor,
        training: bool = False,
        hard: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(output of the mixed model on tokens x, scores [rows, positions, layers, 2])."""

        def between(block: Block) -> Between:
            def both(mixed: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
                with rehearsed():  # dropout with the same masks
                    theirs = block.lead({}, own, training)
                return block.lead({}, mixed, training), theirs

            return both

        out, scores = mixed_recurrent(
            self.layers[0].lead(g, x, training),
            [block.weights(g) for block in self.layers],
            [block.weights(v) for block in self.layers],
            decide,
            hard=hard,
            between=[between(block) for block in self.layers[1:]],
        )
        for block in self.rest:
            out = block(g, out, training)
        return out, scores


def recurrent(task: Task) -> Recurrent | None:
    """The task's LSTM layers, if it begins with some."""
    count = 0
    while count < len(task.blocks) and isinstance(task.blocks[count].last, LSTMLayer):
        count += 1
    return Recurrent(tuple(task.blocks[:count]), tuple(task.blocks[count:])) if count else None
