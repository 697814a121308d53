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
    global_layers: Sequence[Weights],
    local_layers: Sequence[Weights],
    decide: Decide,
    *,
    hard: bool = False,
    between: Sequence[Between] = (),
) -> tuple[Tensor, Tensor]:
    """Return the mixed h of the last layer [rows, positions, hidden], and scores [rows, positions, layers, 2].

    ``embedded`` [rows, positions, embedding] comes from one table for both versions; ``global_layers`` are those of g,
    ``local_layers`` those of v. ``hard`` takes each state of the version with the larger q, the global one on a tie.
    ``between`` has a function for every layer after the first.
    """
    mixed = own = embedded
    all_scores = []
    for j, (g, v) in enumerate(zip(global_layers, local_layers, strict=True)):
        if j and between:
            mixed, own = between[j - 1](mixed, own)
        mixed, own, scores = mixed_layer(embedded, mixed, own, g, v, decide, hard)
        all_scores.append(scores)
    return mixed, torch.stack(all_scores, 2)


def mixed_layer(
    embedded: Tensor, mixed: Tensor, own: Tensor, g: Weights, v: Weights, decide: Decide, hard: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer on g's input ``mixed`` and v's input ``own``; return mixed h, v's h and scores, [rows, positions, ...]."""
    gates = [_project(x, w).unbind(1) for x, w in ((mixed, g), (own, v))]
    transposed = [w["weight_hh"].t().contiguous() for w in (g, v)]
    zero = mixed.new_zeros(len(mixed), transposed[0].shape[0])
    mixed_state, local_state = (zero, zero), (zero, zero)
    out: list[tuple[Tensor, Tensor, Tensor]] = []
    for at_position, to_g, to_v in zip(embedded.unbind(1), *gates, strict=True):
        global_state, local_state = cell(to_g, mixed_state, transposed[0]), cell(to_v, local_state, transposed[1])
        scores = decide(torch.cat([at_position, *global_state, *local_state], -1))
        mixed_state = _mix(scores, global_state, local_state, hard)
        out.append((mixed_state[0], local_state[0], scores))
    first, second, third = (torch.stack(part, 1) for part in zip(*out, strict=True))
    return first, second, third


def _mix(scores: Tensor, global_state: State, local_state: State, hard: bool) -> State:
    if hard:
        to_global = scores[:, :1] >= scores[:, 1:]
        h, c = (torch.where(to_global, a, b) for a, b in zip(global_state, local_state, strict=True))
    else:
        q = torch.softmax(scores, -1)
        h, c = (q[:, :1] * a + q[:, 1:] * b for a, b in zip(global_state, local_state, strict=True))
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
        """The number of inputs that the router reads at a position."""
        layers = [block.last for block in self.layers]
        widths = sorted({layer.hidden for layer in layers if isinstance(layer, LSTMLayer)})
        if len(widths) > 1:
            raise ModelMismatch(f"one router reads the states of all LSTM layers; give them one width, not {widths}")
        first = layers[0]
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
        """Return the output of the mixed model on tokens x, and scores [rows, positions, layers, 2]."""

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
    """Return the task's LSTM layers, or None if it does not begin with any."""
    count = 0
    while count < len(task.blocks) and isinstance(task.blocks[count].last, LSTMLayer):
        count += 1
    return Recurrent(tuple(task.blocks[:count]), tuple(task.blocks[count:])) if count else None
