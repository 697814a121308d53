"""Text as federations: rows of token numbers; the token after a row to predict, or the one after every position of it.

With one label per row, rows are windows of full length. With one per position the text is cut into rows side by side: the
label of a position is the token after it, and a last row that is short is padded (token 0 in x, label -1 in y).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import files
from fedtailor.data.federation import Federation
from fedtailor.data.files import Place
from fedtailor.data.partition import whole
from fedtailor.data.pool import left_out, parts_of
from fedtailor.data.vocabulary import LEVELS, Vocabulary, cut
from fedtailor.data.words import check_choice, listed, one_line, shown
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task.losses import PAD

Windows = tuple[NDArray[np.int64], NDArray[np.int64]]
LENGTH = {"char": 80, "word": 20}  # positions of a row unless told


def shakespeare(
    clients: int | None = 100,
    length: int = 80,
    stride: int | None = None,
    per_position: bool = False,
    min_samples: int | None = None,
    test_share: float = 0.2,
    val_share: float = 0.1,
    data_dir: Place | None = None,
) -> Federation:
    """Shakespeare's plays by role: 80 characters, and the next one to predict; the clients are the roles that speak most.

    A role's words stay in order: it trains on the first, and is judged on the last. A row begins every ``stride`` characters
    (default 20). With ``per_position`` the next character is to predict at every position, and rows lie side by side.
    """
    texts = files.shakespeare(data_dir)
    vocabulary = Vocabulary("char", tuple(sorted(set("".join(texts.values())))))
    return by_speaker("shakespeare", texts, vocabulary, clients, length, stride, per_position, min_samples, test_share, val_share)


def from_texts(
    texts: Mapping[str, str],
    level: str = "char",
    length: int | None = None,
    vocabulary: int | None = None,
    stride: int | None = None,
    per_position: bool = True,
    clients: int | None = None,
    min_samples: int | None = None,
    test_share: float = 0.2,
    val_share: float = 0.1,
    name: str = "texts",
) -> Federation:
    """See ``Federation.from_texts``."""
    check_choice("level", level, LEVELS)
    if not isinstance(texts, Mapping) or not all(isinstance(t, str) for pair in texts.items() for t in pair):
        raise InvalidData('texts must be a dict from client to text, for instance {"anna": "once upon a time ..."}')
    if not texts:
        raise InvalidData("there are no clients; give a dict from client to text")
    if vocabulary is not None:
        whole("vocabulary", vocabulary)
    length = LENGTH[level] if length is None else length
    tokens = {client: cut(text, level) for client, text in texts.items()}
    first = parts_of(test_share, val_share)[0]
    known = Vocabulary.of(level, (piece[: round(first * len(piece))] for piece in tokens.values()), vocabulary)
    return by_speaker(name, texts, known, clients, length, stride, per_position, min_samples, test_share, val_share)


def folder(
    path: str,
    level: str = "char",
    length: int | None = None,
    vocabulary: int | None = None,
    stride: int | None = None,
    per_position: bool = True,
    clients: int | None = None,
    min_samples: int | None = None,
    test_share: float = 0.2,
    val_share: float = 0.1,
) -> Federation:
    """A directory with a .txt file per client, or a sub-directory of .txt files (joined in the order of their names)."""
    root = Path(path).expanduser().absolute()
    made = from_texts(
        read_folder(root), level, length, vocabulary, stride, per_position, clients, min_samples, test_share, val_share
    )
    return replace(made, name=f"text/{root.name}")


def is_folder(root: Path) -> bool:
    """Does a directory hold texts and nothing else that could be data?"""
    visible = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
    return bool(visible) and all(entry.is_file() and entry.suffix.lower() == ".txt" for entry in visible)


def read_folder(root: Path) -> dict[str, str]:
    found: dict[str, list[Path]] = {}
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            found[entry.name] = sorted(f for f in entry.iterdir() if f.suffix.lower() == ".txt")
        elif entry.suffix.lower() == ".txt":
            if entry.stem in found:
                raise InvalidData(f"{root} has two entries for the client {shown(entry.stem)}; keep one")
            found[entry.stem] = [entry]
    empty = [client for client, paths in found.items() if not paths]
    if not found or empty:
        what = f"the folders {listed(empty)} hold no .txt file" if empty else "there is no .txt file"
        raise InvalidData(f"{root}: {what}; give a .txt file per client, or a folder of them")
    return {client: "\n".join(_read(path) for path in paths) for client, paths in found.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidData(f"{path} cannot be read as text in UTF-8 ({one_line(error)}); save it again as UTF-8") from error


def by_speaker(
    name: str,
    texts: Mapping[str, str],
    vocabulary: Vocabulary,
    clients: int | None,
    length: int,
    stride: int | None,
    per_position: bool,
    min_samples: int | None,
    test_share: float,
    val_share: float,
) -> Federation:
    """A client per text. It is cut in parts first and in rows then, so that no part sees another's tokens."""
    stride = (length if per_position else 20) if stride is None else stride
    for what, value in (("length", length), ("stride", stride)):
        whole(what, value)
    if not isinstance(per_position, bool):
        raise InvalidArgument(f"per_position must be true or false, not {per_position!r}")
    shares = parts_of(test_share, val_share)
    order = (0, 2, 1) if len(shares) == 3 else (0, 1)  # in time: train, validation, test
    least = min_samples or 1
    pairs: list[list[Windows]] = [[] for _ in shares]
    names: list[str] = []
    few = 0
    for speaker in sorted(texts, key=lambda s: (-len(texts[s]), s)):
        if clients is not None and len(names) == clients:
            break
        codes = vocabulary.encode(texts[speaker])
        cuts = np.round(np.cumsum([shares[i] for i in order])[:-1] * len(codes)).astype(int)
        rows = positions if per_position else windows
        pieces = dict(zip(order, (rows(piece, length, stride) for piece in np.split(codes, cuts)), strict=True))
        judged = [bool(((y != PAD) & (y != _unknown(vocabulary))).any()) for _, y in pieces.values()]
        if not all(judged) or sum(len(y) for _, y in pieces.values()) < least:
            few += 1
            continue
        names.append(speaker)
        for i, piece in pieces.items():
            pairs[i].append(piece)
    unit = "characters" if vocabulary.level == "char" else "words"
    if not names:
        raise InvalidArgument(f"no text of {name} is long enough for rows of {length} {unit}; use a shorter length")
    options: dict[str, Any] = {"task": "classification", "classes": vocabulary.tokens, "tokens": max(2, len(vocabulary))}
    fed = Federation.from_arrays(*pairs, names=names, name=name, **options)
    return replace(
        fed, vocabulary=vocabulary, notes=(*_notes(vocabulary, unit, length, stride, per_position), *left_out(few, least))
    )


def _unknown(vocabulary: Vocabulary) -> int:
    return PAD if vocabulary.unknown is None else vocabulary.unknown


def _notes(vocabulary: Vocabulary, unit: str, length: int, stride: int, per_position: bool) -> list[str]:
    said = [f"Rows are {length} {unit}, every {stride} {unit}; the last part of each text is for testing."]
    if per_position:
        said.append(f"What comes next is to predict at every position; accuracy and loss are means over {unit}, not over rows.")
    if vocabulary.unknown is not None:
        said.append(
            f"The vocabulary is {len(vocabulary) - 1:,} {unit} of the training texts and {vocabulary.tokens[vocabulary.unknown]} "
            "for all others, which counts in the loss; as a target it is left out of the accuracy."
        )
    return said


def windows(codes: NDArray[np.int64], length: int, stride: int) -> Windows:
    """(rows of ``length`` numbers, the number that follows each)."""
    starts = np.arange(0, len(codes) - length, stride)
    return codes[starts[:, None] + np.arange(length)], codes[starts + length]


def positions(codes: NDArray[np.int64], length: int, stride: int) -> Windows:
    """(rows of ``length`` numbers, for each the number that follows); what is past the end is 0 in x and padding in y."""
    starts = np.arange(0, max(0, len(codes) - 1), stride)
    place = starts[:, None] + np.arange(length)
    real = place < len(codes) - 1
    place = np.where(real, place, 0)
    return np.where(real, codes[place], 0), np.where(real, codes[place + 1] if len(codes) > 1 else 0, PAD)
