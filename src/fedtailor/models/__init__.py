"""Networks by name, and as plain torch modules."""

from __future__ import annotations

import difflib
import math

import torch
from torch import nn

from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.models.cnn import PLANS, cnn
from fedtailor.models.linear import linear
from fedtailor.models.lstm import LSTM, lstm
from fedtailor.models.mlp import mlp
from fedtailor.models.split import SplitLinear

__all__ = ["LSTM", "SplitLinear", "build", "cnn", "linear", "mlp", "names"]


def names() -> tuple[str, ...]:
    return ("linear", "split-linear", "mlp", *(f"cnn{k}" for k in PLANS), "lstm")


def build(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    *,
    seed: int = 0,
    bias: bool = True,
    tokens: int = 0,
    per_position: bool = False,
) -> nn.Module:
    """The network ``name`` for inputs of ``shape``; ``mlp:64,32`` sets the hidden widths, ``split-linear:4`` how many
    features are shared, ``lstm:8,256,256`` the embedding and the layers. The seed fixes the start.

    ``tokens`` is the size of the vocabulary where inputs are tokens (0: they are numbers); ``per_position`` asks for outputs at
    every position."""
    kind, _, option = name.partition(":")
    if kind not in names():
        near = difflib.get_close_matches(kind, names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names())}, or a torch.nn.Module"
        raise InvalidArgument(f"unknown model {name!r}; {hint}")
    if bool(tokens) != (kind == "lstm"):
        rows = "rows of tokens" if tokens else "rows of numbers"
        raise ModelMismatch(f"the model {kind!r} does not read {rows}; use the model {'lstm' if tokens else 'linear'!r}")
    if kind == "split-linear":
        if not option.isdigit():
            raise InvalidArgument(f"cannot read {name!r}; write for instance 'split-linear:4' for four shared features")
        if outputs != 2:
            raise InvalidArgument(f"split-linear is for two classes, not {outputs} outputs; use the model 'linear'")
        return SplitLinear(math.prod(shape), int(option))
    if option and kind not in ("mlp", "lstm"):
        raise InvalidArgument(f"the model {kind!r} takes no option; write model={kind!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "linear":
            return linear(math.prod(shape), outputs, bias)
        if kind == "mlp":
            return mlp(math.prod(shape), outputs, _widths(name, option))
        if kind == "lstm":
            return lstm(name, option, tokens, outputs, per_position, longest=shape[0])
        return cnn(int(kind[3:]), shape, outputs)


def _widths(name: str, option: str) -> tuple[int, ...]:
    if not option:
        return (64,)
    parts = option.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidArgument(f"cannot read the hidden widths in {name!r}; write for instance 'mlp:64,32'")
    return tuple(int(part) for part in parts)
