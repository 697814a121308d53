"""Residual networks of basic blocks: 18 and 34 layers, and two narrow ones of 8 and 14 layers for small images.

Names are torchvision's (conv1, bn1, layer1.0.conv1, ..., fc), so that its weights fit. With ``adapters`` every block has two,
after each convolution and before its norm; the shortcut and the stem have none. What then trains and travels is the group
``adapter``: the adapters, the norms of blocks and stem (not those of shortcuts), and the head. The paper (PERADA) does not speak
of the dropout inside an adapter; 0.3 is what its authors ran. ``last`` freezes the stem and all but the last so many blocks, with
adapters (Ruckle et al. 2021 drop those of the first layers) or without: the frozen output is then computed once for every row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument
from fedtailor.models.adapters import SeriesAdapter
from fedtailor.models.backbone import load
from fedtailor.models.chain import Chain, Image, Mean, adapted, norm_of

# blocks per stage, width of the first stage, stem
PLANS: dict[int, tuple[tuple[int, ...], int, str]] = {
    8: ((1, 1, 1), 16, "small"),
    14: ((2, 2, 2), 16, "small"),
    18: ((2, 2, 2, 2), 64, "imagenet"),
    34: ((3, 4, 6, 3), 64, "imagenet"),
}
STEMS = ("imagenet", "small")


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with padding that keeps the size, started as in He et al. 2015."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class BasicBlock(nn.Module):
    rows_apart = True

    def __init__(self, inputs: int, width: int, stride: int, norm: str, dropout: float | None) -> None:
        super().__init__()
        make = norm_of(norm)
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = make(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = make(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(conv(inputs, width, 1, stride), make(width))
        self.adapter1: nn.Module = nn.Identity() if dropout is None else SeriesAdapter(width, make, dropout)
        self.adapter2: nn.Module = nn.Identity() if dropout is None else SeriesAdapter(width, make, dropout)

    def forward(self, input: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.adapter1(self.conv1(input))))
        return torch.relu(self.bn2(self.adapter2(self.conv2(x))) + self.downsample(input))


class ResNet(Chain):
    def __init__(
        self, layers: int, classes: int, channels: int, stem: str, norm: str, width: int, dropout: float, adapt: Sequence[bool]
    ) -> None:
        super().__init__()
        # a shortcut's 1x1 convolution by twos with fewer channels crashes torch 2.13 in this layout (oneDNN, backward pass)
        self.channels_last = width >= 8
        self.image = Image()
        self.conv1 = conv(channels, width, 7, 2) if stem == "imagenet" else conv(channels, width, 3)
        self.bn1 = norm_of(norm)(width)
        self.relu = nn.ReLU()
        chain = ["image", "conv1", "bn1", "relu"]
        if stem == "imagenet":
            self.maxpool = nn.MaxPool2d(3, 2, padding=1)
            chain.append("maxpool")
        inputs, adapters = width, iter(adapt)
        for stage, count in enumerate(PLANS[layers][0], 1):
            outputs = width * 2 ** (stage - 1)
            blocks = []
            for i in range(count):
                stride = 2 if i == 0 and stage > 1 else 1
                blocks.append(BasicBlock(inputs, outputs, stride, norm, dropout if next(adapters) else None))
                inputs = outputs
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            chain += [f"layer{stage}.{i}" for i in range(count)]
        self.avgpool = Mean()
        self.fc = nn.Linear(inputs, classes)
        self.blocks = (*chain, "avgpool", "fc")
        self.inner = self.paths(BasicBlock)
        norms = [f"{path}.{n}" for path in self.with_adapters(adapt) for n in ("bn1", "bn2")]
        self.groups = {"adapter": (*self.paths(SeriesAdapter), "bn1", *norms, "fc"), "head": ("fc",)}


def resnet(
    layers: int,
    classes: int,
    *,
    channels: int = 3,
    stem: str | None = None,
    norm: str = "batch",
    adapters: bool = False,
    last: int | None = None,
    dropout: float = 0.3,
    train: str | None = None,
    width: int | None = None,
    backbone: str | os.PathLike[str] | None = None,
) -> ResNet:
    """Build a ResNet. ``stem`` is ``imagenet`` (7x7 by twos, max pooling; default for 18 and 34 layers) or ``small`` (3x3).

    ``train`` is what moves: ``all``, the group ``adapter`` (the default if there are adapters) or ``head``; the rest is frozen.
    ``last`` freezes all but the last so many blocks. ``dropout`` is that inside the adapters.
    ``backbone`` is a file of weights to start from (safetensors, or torch's .pt).
    """
    if layers not in PLANS:
        raise InvalidArgument(f"there is no resnet of {layers} layers here; use one of {', '.join(map(str, PLANS))}")
    stem = PLANS[layers][2] if stem is None else stem
    if stem not in STEMS:
        raise InvalidArgument(f"stem must be one of {', '.join(STEMS)}, not {stem!r}")
    if not 0 <= dropout < 1:
        raise InvalidArgument(f"dropout must be in [0, 1), not {dropout!r}")
    adapt = adapted(sum(PLANS[layers][0]), adapters, last)
    net = ResNet(layers, classes, channels, stem, norm, width or PLANS[layers][1], dropout, adapt)
    net.train_only(train or ("adapter" if adapters else "all"), last)
    return load(net, backbone)
