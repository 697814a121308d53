"""A small vision transformer: patches, pre-norm attention and MLP, layer norm throughout, so that no row sees another.

With ``adapters`` every layer has two bottlenecks, on the output of the attention and on that of the MLP, each before its residual
is added (Houlsby et al. 2019); PERADA gives no shape for its transformer's. What then trains is the group ``adapter``: the
bottlenecks, the layer norms (of the layers that have adapters, and the last) and the head.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.models.adapters import Bottleneck
from fedtailor.models.backbone import load
from fedtailor.models.chain import Chain, Image, adapted


class Attention(nn.Module):
    """Softmax attention written out: no state, no draw, and the same arithmetic with or without vmap."""

    rows_apart = True

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, input: Tensor) -> Tensor:
        rows, tokens, dim = input.shape
        parts = self.qkv(input).reshape(rows, tokens, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # (rows, heads, tokens, dim/heads) each
        share = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(dim // self.heads), -1)
        return self.proj((share @ v).transpose(1, 2).reshape(rows, tokens, dim))


class Embed(nn.Module):
    """Patches as tokens, a class token in front, a learned place for each."""

    rows_apart = True

    def __init__(self, channels: int, patch: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(channels * patch * patch, dim)
        self.token = nn.Parameter(torch.zeros(1, dim))
        self.place = nn.Parameter(0.02 * torch.randn(tokens + 1, dim))

    def forward(self, input: Tensor) -> Tensor:
        rows, channels, height, width = input.shape
        cut = input.reshape(rows, channels, height // self.patch, self.patch, width // self.patch, self.patch)
        tokens = self.proj(cut.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, channels * self.patch**2))
        return torch.cat([self.token.expand(rows, 1, -1), tokens], 1) + self.place


class Layer(nn.Module):
    rows_apart = True

    def __init__(self, dim: int, heads: int, hidden: int | None, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)
        self.adapter1: nn.Module = nn.Identity() if hidden is None else Bottleneck(dim, hidden)
        self.adapter2: nn.Module = nn.Identity() if hidden is None else Bottleneck(dim, hidden)

    def forward(self, input: Tensor) -> Tensor:
        x = input + self.drop(self.adapter1(self.attention(self.norm1(input))))
        return x + self.drop(self.adapter2(self.mlp(self.norm2(x))))


class First(nn.Module):
    """The class token."""

    rows_apart = True

    def forward(self, input: Tensor) -> Tensor:
        return input[:, 0]


class ViT(Chain):
    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        patch: int,
        dim: int,
        heads: int,
        hidden: int,
        dropout: float,
        adapt: Sequence[bool],
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.image = Image()
        self.embed = Embed(channels, patch, dim, (height // patch) * (width // patch))
        self.layers = nn.Sequential(*(Layer(dim, heads, hidden if adapted else None, dropout) for adapted in adapt))
        self.norm, self.first, self.head = nn.LayerNorm(dim), First(), nn.Linear(dim, classes)
        self.inner = tuple(f"layers.{i}" for i in range(len(adapt)))
        self.blocks = ("image", "embed", *self.inner, "norm", "first", "head")
        norms = [f"{path}.norm{k}" for path in self.with_adapters(adapt) for k in (1, 2)]
        self.groups = {"adapter": (*self.paths(Bottleneck), *norms, "norm", "head"), "head": ("head",)}


def vit(
    classes: int,
    *,
    shape: tuple[int, ...] = (3, 32, 32),
    patch: int | None = None,
    dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    adapters: bool = False,
    last: int | None = None,
    hidden: int = 16,
    dropout: float = 0.0,
    train: str | None = None,
    backbone: str | os.PathLike[str] | None = None,
) -> ViT:
    """Build a ViT for images of ``shape``, with square patches of ``patch`` pixels (4, or 16 from 128 pixels on).

    ``hidden`` is the width inside an adapter; ``last``, ``train`` and ``backbone`` as in ``resnet``. Weight names are our own."""
    full = (1, *shape) if len(shape) == 2 else tuple(shape)
    if len(full) != 3:
        raise ModelMismatch(f"vit needs images of shape (height, width) or (channels, height, width), not {tuple(shape)}")
    patch = patch or (16 if min(full[1:]) >= 128 else 4)
    if any(side % patch for side in full[1:]):
        fits = ", ".join(str(p) for p in range(1, min(full[1:]) + 1) if not (full[1] % p or full[2] % p))
        raise ModelMismatch(f"patches of {patch} do not cut images of {full[1]}x{full[2]}; use a patch of {fits}")
    if dim % heads:
        raise InvalidArgument(f"dim must be a multiple of heads; {dim} is none of {heads}")
    if not 0 <= dropout < 1:
        raise InvalidArgument(f"dropout must be in [0, 1), not {dropout!r}")
    net = ViT(classes, (full[0], full[1], full[2]), patch, dim, heads, hidden, dropout, adapted(depth, adapters, last))
    net.train_only(train or ("adapter" if adapters else "all"), last)
    return load(net, backbone)
