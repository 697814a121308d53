"""A linear map of the flattened input, started at zero."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear`` that flattens its input; as a task it has its gradient in closed form."""

    is_linear_task = True

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Module:
    module = Linear(inputs, outputs, bias=bias)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module
