"""Resizing of images to the shape of others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedtailor.errors import InvalidData


def fitted(rows: Tensor, like: Tensor) -> tuple[Tensor, str]:
    """Return rows in the shape of ``like``'s, and what was done: images are resized, and converted between grey and color."""
    have, want = tuple(rows.shape[1:]), tuple(like.shape[1:])
    if have == want:
        return rows, ""
    if len(have) not in (2, 3) or len(want) not in (2, 3):
        raise InvalidData(
            f"public rows have shape {have} but the clients' have {want}, and only images can be resized; give rows of that shape"
        )
    x = rows if len(have) == 3 else rows.unsqueeze(1)
    channels, size = (want[0] if len(want) == 3 else 1), list(want[-2:])
    changes = []
    if x.shape[1] != channels:
        if {x.shape[1], channels} != {1, 3}:
            raise InvalidData(f"public images have {x.shape[1]} channels but the clients' have {channels}; give as many")
        x = x.mean(1, keepdim=True) if channels == 1 else x.expand(-1, 3, -1, -1)
        changes.append("made grey" if channels == 1 else "in three equal colours")
    if list(x.shape[-2:]) != size:
        changes.append(f"resized from {x.shape[2]}x{x.shape[3]} to {size[0]}x{size[1]}")
        x = F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
    return x.reshape(len(x), *want).contiguous(), f", {' and '.join(changes)}" if changes else ""
