"""Rows of tokens: whole numbers from 0 up to the size of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.errors import InvalidArgument, InvalidData, ModelMismatch

Rows = tuple[Tensor, NDArray[np.int64]]  # tokens, and the offsets of the clients in them


def count_tokens(parts: Mapping[str, Rows], given: bool | int, names: Sequence[str]) -> int:
    """The size of the vocabulary: as given, or one more than the largest token; refuses what cannot be."""
    if given is not True and (not isinstance(given, (int, np.integer)) or given < 2):
        raise InvalidArgument(f"tokens={given!r} must be true, or the size of the vocabulary, at least 2")
    largest = 0
    for what, (x, offsets) in parts.items():
        if x.is_floating_point():
            raise InvalidData(f"{what} x holds {x.dtype} values; tokens are whole numbers, give an array of integers")
        if not x.shape[1]:
            raise InvalidData(f"{what} x has empty sequences, shape {tuple(x.shape)}; give every row at least one token")
        largest = max(largest, int(x.max()))
        wrong = (x < 0) | (x >= (largest + 1 if given is True else int(given)))
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            client = names[int(np.searchsorted(offsets, place[0], "right")) - 1]
            most = "up" if given is True else f"to {int(given) - 1} (tokens={int(given)})"
            raise InvalidData(f"{what} x of client {client} holds the token {int(x[place])}; tokens are numbers from 0 {most}")
    return max(2, largest + 1) if given is True else int(given)


def as_tokens(rows: Any, vocabulary: int, longest: int) -> Tensor:
    """New rows for a model of tokens: checked, as int64. They may be shorter than those it was trained on."""
    found = rows if isinstance(rows, Tensor) else torch.tensor(np.asarray(rows))
    whole = found.to(torch.int64)
    if whole.dim() != 2 or not 0 < whole.shape[1] <= longest:
        raise ModelMismatch(
            f"rows have shape {tuple(whole.shape[1:])} but the model takes sequences of 1 to {longest} tokens; cut or split them"
        )
    wrong = (whole != found) | (whole < 0) | (whole >= vocabulary)
    if bool(wrong.any()):
        value = found[tuple(wrong.nonzero()[0].tolist())].item()
        raise ModelMismatch(f"{value} is not a token of this model; give whole numbers from 0 to {vocabulary - 1}")
    return whole
