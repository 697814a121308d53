"""A file of weights for others to read: safetensors, with facts about them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor

ALIGN = 8  # bytes: where safetensors lets the tensors begin


def pack(weights: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return the bytes of the file, the same for the same arguments (the library itself writes facts in random order)."""
    data = save({name: value.contiguous() for name, value in weights.items()})
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": dict(facts), **json.loads(data[8 : 8 + length])}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGN)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]
