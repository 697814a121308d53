"""Small convolutional networks: 2 convolutions (CLUP on MNIST), 3 (CIFAR-10) and 5 (EMNIST).

3x3 convolutions with padding 1, ReLU, 2x2 max pooling, then 128 hidden units. The paper fixes the widths of the first
only; the other two are ours. ``cnn2:16,32`` sets other widths, one for each convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument, ModelMismatch

# channels of each convolution; "pool" halves height and width
PLANS: dict[int, tuple[int | str, ...]] = {
    2: (32, "pool", 64, "pool"),
    3: (32, "pool", 64, "pool", 64, "pool"),
    5: (32, 32, "pool", 64, 64, "pool", 128, "pool"),
}


class Image(nn.Module):
    """(n, h, w) or (n, c, h, w) to (n, c, h, w)."""

    rows_apart = True

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: Tensor) -> Tensor:
        return input.reshape(-1, *self.shape)


def widths(convolutions: int) -> list[int]:
    """Return the default channels of each convolution."""
    return [entry for entry in PLANS[convolutions] if not isinstance(entry, str)]


def cnn(convolutions: int, shape: tuple[int, ...], outputs: int, channels: Sequence[int] | None = None) -> nn.Sequential:
    """Build a network for inputs of ``shape`` ([channels,] height, width); ``channels`` has a number for each convolution."""
    if len(shape) not in (2, 3) or min(shape[-2:]) < 4:
        raise ModelMismatch(
            f"cnn{convolutions} needs images of shape (height, width) or (channels, height, width), at least 4x4, "
            f"not {tuple(shape)}; reshape the features or use the model 'mlp'"
        )
    full = (1, *shape) if len(shape) == 2 else tuple(shape)
    layers: list[nn.Module] = [Image(full)]  # type: ignore[arg-type]
    default, inputs = widths(convolutions), full[0]
    if channels is not None and len(channels) != len(default):
        raise InvalidArgument(
            f"cnn{convolutions} has {len(default)} convolutions and {len(channels)} widths were given; write for instance "
            f"'cnn{convolutions}:{','.join(map(str, default))}'"
        )
    remaining = iter(channels or default)
    for entry in PLANS[convolutions]:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2, ceil_mode=True))  # keeps a last odd row: 7 -> 4
        else:
            width = next(remaining)
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
    layers.append(nn.Flatten())
    with torch.no_grad():
        flat = nn.Sequential(*layers)(torch.zeros(1, *full)).shape[1]
    network = nn.Sequential(*layers, nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, outputs))
    network.channels_last = True  # type: ignore[assignment]
    return network
