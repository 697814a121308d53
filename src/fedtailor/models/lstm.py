"""Recurrent networks on tokens: embedding, LSTM layers, a head at the last position or at every position.

An LSTM layer starts every batch from zero state. Where nothing transforms the call it is torch's fused kernel; under
``vmap`` and ``grad``, which cannot enter that kernel, it is the same arithmetic written out step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument, ModelMismatch

CHARACTERS = 256  # vocabularies up to this size are taken for characters: 8 numbers each; words have 32
State = tuple[Tensor, Tensor]  # h and c, [rows, hidden]
SAVED = 16  # numbers per unit and position that a training step saves for its backward pass

FUSED = ("cpu", "cuda", "mps")  # devices with a kernel for a whole layer


class Embedding(nn.Embedding):
    """``nn.Embedding`` that refuses rows longer than ``longest`` (None: any)."""

    longest: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        if input.is_floating_point() or input.dim() != 2:
            raise ModelMismatch(f"an lstm reads rows of tokens (whole numbers), not {input.dtype} of shape {tuple(input.shape)}")
        if self.longest is not None and not 0 < input.shape[1] <= self.longest:
            raise ModelMismatch(f"rows have {input.shape[1]} tokens but the model takes 1 to {self.longest}; cut them")
        return super().forward(input)


class LSTMLayer(nn.Module):
    """One layer with the parameters of ``nn.LSTM``: gates in the order input, forget, cell, output; two bias vectors."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map [rows, positions, inputs] to [rows, positions, hidden]."""
        if transformed() or input.device.type not in FUSED:
            return sweep(self.project(input), self.weight_hh)
        zero = input.new_zeros(1, input.shape[0], self.hidden)
        flat: list[Tensor] = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        return torch.lstm(input, (zero, zero), flat, True, 1, 0.0, self.training, False, True)[0]

    def project(self, input: Tensor) -> Tensor:
        """Return the input's part of the gates, by one product for all positions."""
        return F.linear(input, self.weight_ih, self.bias_ih + self.bias_hh)


def sweep(gates: Tensor, weight: Tensor) -> Tensor:
    """Run the recurrence over [rows, positions, 4 hidden] from zero state; return hidden states [rows, positions, hidden]."""
    transposed = weight.t().contiguous()
    zero = gates.new_zeros(len(gates), len(transposed))
    state, out = (zero, zero), []
    for gates_now in gates.unbind(1):
        state = cell(gates_now, state, transposed)
        out.append(state[0])
    return torch.stack(out, 1)


def cell(gates: Tensor, state: State, transposed: Tensor) -> State:
    """Take one step: return (h, c) from the input's part of the gates and the state before; ``transposed`` is W_hh'."""
    h, c = state
    i, f, g, o = torch.addmm(gates, h, transposed).chunk(4, -1)
    c = torch.addcmul(i.sigmoid() * g.tanh(), f.sigmoid(), c)
    return o.sigmoid() * c.tanh(), c


def transformed() -> bool:
    """Return whether this runs inside ``torch.func``'s vmap, grad or the like, or under a dispatch mode (a counter of
    operations)."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0


class Last(nn.Module):
    """The state at the last position."""

    def forward(self, input: Tensor) -> Tensor:
        return input[:, -1]


class LSTM(nn.Module):
    """Tokens [rows, positions] to logits: [rows, outputs], or [rows, positions, outputs] where ``per_position``.

    ``hidden`` has a width per layer, ``dense`` the widths of linear maps between the last layer and the head (without an
    activation). Groups: embedding, head. Blocks: the LSTM layers (the first with the embedding), the dense maps, the head.
    """

    groups = {"embedding": ("embedding",), "head": ("head",)}

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        embedding: int = 8,
        hidden: Sequence[int] = (64,),
        dense: Sequence[int] = (),
        *,
        per_position: bool = False,
        dropout: float = 0.0,
        longest: int | None = None,
    ) -> None:
        super().__init__()
        if vocabulary < 1 or not hidden or min(embedding, outputs, *hidden, *dense) < 1:
            raise InvalidArgument("an lstm needs a vocabulary, an embedding and at least one layer, each of at least 1")
        self.embedding = Embedding(vocabulary, embedding)
        self.embedding.longest = longest
        widths = (embedding, *hidden)
        self.layers = nn.ModuleList(LSTMLayer(*pair) for pair in pairwise(widths))
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in hidden)  # after each layer
        self.read = nn.Identity() if per_position else Last()
        widths = (hidden[-1], *dense)
        self.dense = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], outputs)

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        after = [f"dropouts.{i}" for i in range(len(self.layers))]
        first = ("embedding", "layers.0")
        more = [(after[i - 1], f"layers.{i}") for i in range(1, len(self.layers))]
        flat = [f"dense.{i}" for i in range(len(self.dense))] + ["head"]
        return (first, *more, (after[-1], "read", flat[0]), *((name,) for name in flat[1:]))

    @property
    def row_bytes(self) -> int:
        """The approximate bytes that a position of a row takes in a training step, in single precision."""
        units = sum(layer.hidden for layer in self.layers)  # type: ignore[misc]
        return 4 * (SAVED * units + 2 * self.head.out_features)

    def forward(self, input: Tensor) -> Tensor:
        values = self.embedding(input)
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            values = dropout(layer(values))
        values = self.read(values)
        for dense in self.dense:
            values = dense(values)
        return self.head(values)


def lstm(name: str, option: str, vocabulary: int, outputs: int, per_position: bool, longest: int | None) -> LSTM:
    """Read ``lstm``, ``lstm:128`` (a layer of 128), ``lstm:8,256,256`` (embedding 8, two layers of 256), ``lstm:96,670/96``
    (embedding 96, a layer of 670, a linear map to 96)."""
    first, slash, last = option.partition("/")
    numbers = [part.strip() for part in first.split(",")] if option else []
    flat = [part.strip() for part in last.split(",")] if slash else []
    if not all(part.isdigit() and int(part) > 0 for part in (*numbers, *flat)):
        raise InvalidArgument(
            f"cannot read {name!r}; write for instance 'lstm:128' (units), 'lstm:8,256,256' (embedding, then the units of each "
            "layer) or 'lstm:96,670/96' (and a linear map)"
        )
    widths = [int(part) for part in numbers] or [64]
    embedding = widths.pop(0) if len(widths) > 1 else 8 if vocabulary <= CHARACTERS else 32
    dense = [int(part) for part in flat]
    return LSTM(vocabulary, outputs, embedding, widths, dense, per_position=per_position, longest=longest)
