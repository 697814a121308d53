"""Fully connected network with ReLU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (64,)) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
