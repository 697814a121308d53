"""Binary logistic regression whose features are split: logit a'u + b'v, a shared by all, b personal (PARTIAL section 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument


class SplitLinear(nn.Module):
    """The first ``shared`` features meet u, the rest v (the group ``features``). Logits are (0, a'u + b'v); all start at zero."""

    groups = {"features": ("features",)}
    rows_apart = True

    def __init__(self, inputs: int, shared: int) -> None:
        super().__init__()
        if not 0 < shared < inputs:
            raise InvalidArgument(f"split-linear:{shared} does not split {inputs} features; use a number from 1 to {inputs - 1}")
        self.cut = shared
        self.common = nn.Linear(shared, 1, bias=False)
        self.features = nn.Linear(inputs - shared, 1, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(1)
        logit = self.common(rows[:, : self.cut]) + self.features(rows[:, self.cut :])
        return torch.cat([torch.zeros_like(logit), logit], 1)
