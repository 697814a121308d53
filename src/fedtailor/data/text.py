"""Text as federations: rows of character numbers, the next character to predict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import files
from fedtailor.data.federation import Federation
from fedtailor.data.files import Place
from fedtailor.data.partition import whole
from fedtailor.data.pool import left_out, parts_of
from fedtailor.errors import InvalidArgument

Windows = tuple[NDArray[np.int64], NDArray[np.int64]]


def shakespeare(
    clients: int | None = 100,
    length: int = 80,
    stride: int = 20,
    min_samples: int | None = None,
    test_share: float = 0.2,
    val_share: float = 0.1,
    data_dir: Place | None = None,
) -> Federation:
    """Shakespeare's plays by role: 80 characters, and the next one to predict; the clients are the roles that speak most.

    A role's words stay in order: it trains on the first, and is judged on the last.
    """
    for name, value in (("length", length), ("stride", stride)):
        whole(name, value)
    return by_speaker("shakespeare", files.shakespeare(data_dir), clients, length, stride, min_samples, test_share, val_share)


def by_speaker(
    name: str,
    texts: dict[str, str],
    clients: int | None,
    length: int,
    stride: int,
    min_samples: int | None,
    test_share: float,
    val_share: float,
) -> Federation:
    """A client per text. It is cut in parts first and in windows then, so that no part sees another's characters."""
    alphabet = sorted(set("".join(texts.values())))
    number = {character: i for i, character in enumerate(alphabet)}
    shares = parts_of(test_share, val_share)
    order = (0, 2, 1) if len(shares) == 3 else (0, 1)  # in time: train, validation, test
    least = min_samples or 1
    pairs: list[list[Windows]] = [[] for _ in shares]
    names: list[str] = []
    few = 0
    for speaker in sorted(texts, key=lambda s: (-len(texts[s]), s)):
        if clients is not None and len(names) == clients:
            break
        codes = np.fromiter((number[c] for c in texts[speaker]), np.int64, len(texts[speaker]))
        cuts = np.round(np.cumsum([shares[i] for i in order])[:-1] * len(codes)).astype(int)
        pieces = dict(zip(order, (windows(piece, length, stride) for piece in np.split(codes, cuts)), strict=True))
        if any(not len(y) for _, y in pieces.values()) or sum(len(y) for _, y in pieces.values()) < least:
            few += 1
            continue
        names.append(speaker)
        for i, piece in pieces.items():
            pairs[i].append(piece)
    if not names:
        raise InvalidArgument(f"no text of {name} is long enough for windows of {length} characters; use a shorter length")
    fed = Federation.from_arrays(*pairs, names=names, task="classification", name=name, classes=alphabet, tokens=True)
    notes = (f"Rows are {length} characters, every {stride} characters; the last part of each text is for testing.",)
    return replace(fed, notes=(*notes, *left_out(few, least)))


def windows(codes: NDArray[np.int64], length: int, stride: int) -> Windows:
    """(rows of ``length`` numbers, the number that follows each)."""
    starts = np.arange(0, len(codes) - length, stride)
    return codes[starts[:, None] + np.arange(length)], codes[starts + length]
