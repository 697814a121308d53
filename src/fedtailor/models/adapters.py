"""Adapters: small modules inside a frozen network, started (nearly) as the identity, that are trained in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class SeriesAdapter(nn.Module):
    """The adapter a(x) = x + Conv1x1(Dropout(Norm(x))): channels out as in, no bias, no activation; weights start at N(0, 1e-8).

    It stands after a convolution and before its norm.
    """

    rows_apart = True

    def __init__(self, channels: int, norm: Callable[[int], nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.normal_(self.conv.weight, std=1e-4)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.conv(self.dropout(self.norm(input)))


class Bottleneck(nn.Module):
    """The adapter a(x) = x + up(relu(down(x))) with ``hidden`` units between; weights start at N(0, 1e-4), biases at zero."""

    rows_apart = True

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(features, hidden), nn.Linear(hidden, features)
        for layer in (self.down, self.up):
            nn.init.normal_(layer.weight, std=1e-2)
            nn.init.zeros_(layer.bias)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.up(torch.relu(self.down(input)))
