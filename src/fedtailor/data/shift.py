"""Shifted test images: seeded corruptions at five severities, on values in [0, 1]; and CIFAR-10.1.

The kinds are those of CIFAR-10-C that need no picture of frost or water; the strengths are our own. Blurs are given for 32
pixels and grow with larger pictures; blocks are a share of any picture. The same draw is used at every severity, only stronger.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.readers import files
from fedtailor.data.readers.fetch import missing
from fedtailor.errors import InvalidArgument, InvalidData, nearest

Draw = np.random.Generator
SIDE = 32  # pixels for which blurs are given
CIFAR10_1 = "cifar10.1"


def _normal(x: Tensor, draw: Draw) -> Tensor:
    return torch.from_numpy(draw.standard_normal(x.shape, np.float32)).to(x)


def _gaussian_noise(x: Tensor, strength: float, draw: Draw) -> Tensor:
    return x + strength * _normal(x, draw)


def _speckle_noise(x: Tensor, strength: float, draw: Draw) -> Tensor:
    return x + strength * x * _normal(x, draw)


def _shot_noise(x: Tensor, photons: float, draw: Draw) -> Tensor:
    return torch.from_numpy(draw.poisson(x.double().numpy() * photons) / photons).to(x)


def _impulse_noise(x: Tensor, share: float, draw: Draw) -> Tensor:
    hit, salt = (torch.from_numpy(draw.random(x.shape, np.float32)) for _ in range(2))
    return torch.where(hit < share, (salt < 0.5).to(x), x)


def _blurred(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve every channel with one kernel [k, k] of odd size; the border is repeated."""
    rows, channels, height, width = x.shape
    half = len(kernel) // 2
    wide = F.pad(x.reshape(rows * channels, 1, height, width), [half] * 4, mode="replicate")
    return F.conv2d(wide, kernel.to(x)[None, None]).reshape(x.shape)


def _scale(x: Tensor) -> float:
    return max(1.0, min(x.shape[-2:]) / SIDE)


def _grid(reach: float) -> Tensor:
    """Return squared distances to the center, [k, k], k odd and large enough for ``reach``."""
    side = torch.arange(-int(np.ceil(reach)), int(np.ceil(reach)) + 1, dtype=torch.float64)
    return side[:, None] ** 2 + side**2


def _gaussian_blur(x: Tensor, sigma: float, draw: Draw) -> Tensor:
    sigma *= _scale(x)
    kernel = torch.exp(-_grid(3 * sigma) / (2 * sigma**2))
    return _blurred(x, kernel / kernel.sum())


def _defocus_blur(x: Tensor, radius: float, draw: Draw) -> Tensor:
    radius *= _scale(x)
    kernel = (radius + 0.5 - _grid(radius + 0.5).sqrt()).clamp(0, 1)  # a disk whose rim fades
    return _blurred(x, kernel / kernel.sum())


def _contrast(x: Tensor, factor: float, draw: Draw) -> Tensor:
    middle = x.mean((-2, -1), keepdim=True)
    return middle + factor * (x - middle)


def _brightness(x: Tensor, amount: float, draw: Draw) -> Tensor:
    return x + amount


def _pixelate(x: Tensor, share: float, draw: Draw) -> Tensor:
    """Replace every pixel by the mean of its block; along a side of n pixels there are share * n blocks."""

    def averaging(side: int) -> Tensor:
        block = torch.arange(side) * max(1, round(share * side)) // side
        same = (block[:, None] == block).to(x)
        return same / same.sum(1, keepdim=True)

    return averaging(x.shape[-2]) @ x @ averaging(x.shape[-1])  # symmetric: blocks average among themselves


def _jpeg(x: Tensor, quality: float, draw: Draw) -> Tensor:
    image = files.module("PIL.Image")
    if x.shape[1] not in (1, 3):
        raise InvalidArgument(f"jpeg is for images with 1 or 3 channels, not {x.shape[1]}; use another corruption")
    out = np.empty((len(x), *x.shape[2:], x.shape[1]), np.uint8)
    for i, pixels in enumerate((x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()):
        packed = io.BytesIO()
        image.fromarray(pixels[..., 0] if x.shape[1] == 1 else pixels).save(packed, "JPEG", quality=int(quality))
        out[i] = np.asarray(image.open(packed)).reshape(out.shape[1:])
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(x) / 255


# the function, and its strength at severities 1 to 5
CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float, Draw], Tensor], tuple[float, ...]]] = {
    "gaussian-noise": (_gaussian_noise, (0.04, 0.07, 0.11, 0.16, 0.24)),
    "shot-noise": (_shot_noise, (250, 100, 45, 20, 9)),
    "speckle-noise": (_speckle_noise, (0.08, 0.15, 0.23, 0.33, 0.48)),
    "impulse-noise": (_impulse_noise, (0.01, 0.03, 0.06, 0.11, 0.20)),
    "gaussian-blur": (_gaussian_blur, (0.4, 0.6, 0.8, 1.1, 1.5)),
    "defocus-blur": (_defocus_blur, (0.6, 0.9, 1.3, 1.8, 2.5)),
    "contrast": (_contrast, (0.75, 0.55, 0.40, 0.27, 0.15)),
    "brightness": (_brightness, (0.06, 0.12, 0.18, 0.25, 0.35)),
    "pixelate": (_pixelate, (0.85, 0.70, 0.55, 0.42, 0.30)),
    "jpeg": (_jpeg, (60, 40, 25, 15, 8)),
}


def corrupted(x: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt images in [0, 1], [rows, channels, height, width] or [rows, height, width], at a severity of 1 to 5."""
    if kind not in CORRUPTIONS:
        raise InvalidArgument(f"unknown corruption {kind!r}; {nearest(kind, CORRUPTIONS, 'the corruptions are')}")
    if isinstance(severity, bool) or severity not in range(1, 6):
        raise InvalidArgument(f"the severity of a corruption is 1, 2, 3, 4 or 5, not {severity!r}")
    if x.dim() not in (3, 4) or not x.is_floating_point():
        raise InvalidArgument(
            f"corruptions are for images, and these rows have shape {tuple(x.shape[1:])}; load the set as images"
        )
    if len(x) and (float(x.min()) < 0 or float(x.max()) > 1):
        raise InvalidData(f"corruptions are for values in [0, 1], and these go from {float(x.min()):g} to {float(x.max()):g}")
    make, strengths = CORRUPTIONS[kind]
    wide = x if x.dim() == 4 else x.unsqueeze(1)
    return make(wide, strengths[severity - 1], rng.generator(seed, f"corruption {kind}")).clamp(0, 1).reshape(x.shape)


def corrupt(federation: Federation, kind: str, severity: int, seed: int = 0) -> Federation:
    """Return the same clients with their test images corrupted; training and validation images stay as they are."""
    test = federation.test
    new = replace(test, x=corrupted(test.x, kind, severity, seed))
    note = f"The test images are corrupted: {kind}, severity {severity} of 5."
    name = f"{federation.name}/{kind}:{severity}"
    return replace(federation, test=new, notes=(*federation.notes, note), name=name, recipe=None)


def parse(spec: str) -> tuple[str, int]:
    """Read ``contrast:3`` as (kind, severity); the severity is 3 if none is written."""
    kind, colon, text = spec.partition(":")
    if kind not in CORRUPTIONS:
        known = [*CORRUPTIONS, CIFAR10_1]
        raise InvalidArgument(f"unknown shift {spec!r}; {nearest(kind, known, 'write KIND:SEVERITY, and the kinds are')}")
    if colon and text not in tuple("12345"):
        raise InvalidArgument(f"the severity of a corruption is 1, 2, 3, 4 or 5, not {text!r}; write for instance {kind}:3")
    return kind, int(text or 3)


def cifar10_1(data_dir: files.Place | None = None, version: str = "v6") -> tuple[NDArray[Any], files.Labels]:
    """Read CIFAR-10.1's images (floats in [0, 1], channels first) and labels, from its two .npy files in cifar10.1/."""
    folder = files.root(data_dir) / CIFAR10_1
    paths = files.present(folder, *(f"cifar10.1_{version}_{content}.npy" for content in ("data", "labels")))
    if paths is None:
        raise missing(CIFAR10_1, folder, f"cifar10.1_{version}_data.npy and cifar10.1_{version}_labels.npy")
    x, y = files.read_pair(*paths)
    return x.astype(np.float32) / 255, y
