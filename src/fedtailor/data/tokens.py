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


def count_tokens(parts: Mapping[str, Rows], tokens: bool | int, names: Sequence[str]) -> int:
    """Return the size of the vocabulary: ``tokens`` if it is a number, else one more than the largest token."""
    if tokens is not True and (not isinstance(tokens, (int, np.integer)) or tokens < 2):
        raise InvalidArgument(f"tokens={tokens!r} must be true, or the size of the vocabulary, at least 2")
    largest = 0
    for part, (x, offsets) in parts.items():
        if x.is_floating_point():
            raise InvalidData(f"{part} x holds {x.dtype} values; tokens are whole numbers, give an array of integers")
        if not x.shape[1]:
            raise InvalidData(f"{part} x has empty sequences, shape {tuple(x.shape)}; give every row at least one token")
        largest = max(largest, int(x.max()))
        wrong = (x < 0) | (x >= (largest + 1 if tokens is True else int(tokens)))
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            client = names[int(np.searchsorted(offsets, place[0], "right")) - 1]
            upper = "up" if tokens is True else f"to {int(tokens) - 1} (tokens={int(tokens)})"
            raise InvalidData(f"{part} x of client {client} holds the token {int(x[place])}; tokens are numbers from 0 {upper}")
    return max(2, largest + 1) if tokens is True else int(tokens)


def as_tokens(rows: Any, vocabulary: int, longest: int) -> Tensor:
    """Return new rows for a model of tokens, checked, as int64. They may be shorter than those it was trained on."""
    values = rows if isinstance(rows, Tensor) else torch.tensor(np.asarray(rows))
    tokens = values.to(torch.int64)
    if tokens.dim() != 2 or not 0 < tokens.shape[1] <= longest:
        raise ModelMismatch(
            f"rows have shape {tuple(tokens.shape[1:])} but the model takes sequences of 1 to {longest} tokens; cut or split them"
        )
    wrong = (tokens != values) | (tokens < 0) | (tokens >= vocabulary)
    if bool(wrong.any()):
        value = values[tuple(wrong.nonzero()[0].tolist())].item()
        raise ModelMismatch(f"{value} is not a token of this model; give whole numbers from 0 to {vocabulary - 1}")
    return tokens
