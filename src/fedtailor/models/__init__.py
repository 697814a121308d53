"""Networks by name, and as plain torch modules."""

from __future__ import annotations

import difflib
import math
import os
from typing import Any

import torch
from torch import nn

from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.models import options
from fedtailor.models.chain import channels_of
from fedtailor.models.cnn import PLANS, cnn, widths
from fedtailor.models.effnet import effnet
from fedtailor.models.linear import linear
from fedtailor.models.lstm import LSTM, lstm
from fedtailor.models.mlp import mlp
from fedtailor.models.resnet import PLANS as RESNETS
from fedtailor.models.resnet import resnet
from fedtailor.models.split import SplitLinear
from fedtailor.models.vit import vit

__all__ = ["LSTM", "SplitLinear", "build", "cnn", "effnet", "linear", "mlp", "names", "resnet", "vit"]

NUMBERS = {  # the meaning of the numbers after a network's name
    "mlp": "hidden widths, as 64,32",
    "split-linear": "how many features are shared",
    "lstm": "embedding and layers, as 8,256,256",
}


def names() -> tuple[str, ...]:
    images = (*(f"cnn{k}" for k in PLANS), *(f"resnet{k}" for k in RESNETS), "vit", "effnet-lite0")
    return ("linear", "split-linear", "mlp", *images, "lstm")


def options_of(name: str) -> str:
    """Return what may follow a network's name after a colon."""
    if takes_backbone(name):
        return options.spelled(_kind(name))
    if name in NUMBERS:
        return NUMBERS[name]
    return f"channels, as {','.join(map(str, widths(int(name[3:]))))}" if name.startswith("cnn") else ""


def takes_backbone(name: str) -> bool:
    """Return whether a network can start from a file of weights."""
    return _kind(name.partition(":")[0]) in options.WORDS


def _kind(name: str) -> str:
    return "resnet" if name.startswith("resnet") else name


def build(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    *,
    seed: int = 0,
    bias: bool = True,
    tokens: int = 0,
    per_position: bool = False,
    backbone: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Build the network ``name`` for inputs of ``shape``, with options after a colon: ``mlp:64,32`` sets the hidden widths,
    ``cnn2:16,32`` the channels, ``split-linear:4`` how many features are shared, ``lstm:8,256,256`` the embedding and the layers,
    ``resnet18:adapters,group`` what ``resnet`` takes. The seed fixes the start, or ``backbone`` does: a file of weights.

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
    if backbone is not None and not takes_backbone(name):
        able = ", ".join(n for n in names() if takes_backbone(n))
        raise InvalidArgument(f"the model {kind!r} takes no backbone; use one of {able}")
    if kind == "split-linear":
        if not option.isdigit():
            raise InvalidArgument(f"cannot read {name!r}; write for instance 'split-linear:4' for four shared features")
        if outputs != 2:
            raise InvalidArgument(f"split-linear is for two classes, not {outputs} outputs; use the model 'linear'")
        return SplitLinear(math.prod(shape), int(option))
    if option and kind == "linear":
        raise InvalidArgument(f"the model {kind!r} takes no option; write model={kind!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "linear":
            return linear(math.prod(shape), outputs, bias)
        if kind == "mlp":
            return mlp(math.prod(shape), outputs, _widths(name, option))
        if kind == "lstm":
            return lstm(name, option, tokens, outputs, per_position, longest=shape[0])
        if kind.startswith("cnn"):
            return cnn(int(kind[3:]), shape, outputs, _widths(name, option) if option else None)
        return _network(kind, shape, outputs, {**options.parse(name, _kind(kind), option), "backbone": backbone})


def _network(kind: str, shape: tuple[int, ...], outputs: int, settings: dict[str, Any]) -> nn.Module:
    channels = channels_of(kind, shape)
    if kind == "vit":
        return vit(outputs, shape=shape, **settings)
    if kind == "effnet-lite0":
        return effnet(outputs, channels=channels, **settings)
    return resnet(int(kind[6:]), outputs, channels=channels, **settings)


def _widths(name: str, option: str) -> tuple[int, ...]:
    if not option:
        return (64,)
    parts = option.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        usual = "mlp:64,32" if name.startswith("mlp") else "cnn2:16,32"
        raise InvalidArgument(f"cannot read the widths in {name!r}; write for instance {usual!r}")
    return tuple(int(part) for part in parts)
