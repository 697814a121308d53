"""Federations from text: rows of token numbers, and the token to predict after a row or after every position of it.

With one label per row, rows are windows of full length. With one per position the text is cut into rows side by side: the
label of a position is the token after it, and a last row that is short is padded (token 0 in x, label -1 in y).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.federation import Federation
from fedtailor.data.keywords import keywords_of
from fedtailor.data.partition import check_positive_int
from fedtailor.data.pool import left_out, parts_of
from fedtailor.data.readers import files
from fedtailor.data.readers.files import Place
from fedtailor.data.vocabulary import LEVELS, Vocabulary, cut
from fedtailor.data.words import check_choice, listed, one_line, shown
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task.kinds import CLASSIFICATION, PAD

Windows = tuple[NDArray[np.int64], NDArray[np.int64]]
LENGTH = {"char": 80, "word": 20}  # positions of a row by default


@dataclass(frozen=True)
class TextOptions:
    """The options by which texts are cut into rows; see ``from_texts``."""

    level: str = "char"
    length: int | None = None
    vocabulary: int | None = None
    stride: int | None = None
    per_position: bool = True
    clients: int | None = None
    min_samples: int | None = None
    test_share: float = 0.2
    val_share: float = 0.1

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)
        if self.vocabulary is not None:
            check_positive_int("vocabulary", self.vocabulary)
        if not isinstance(self.per_position, bool):
            raise InvalidArgument(f"per_position must be true or false, not {self.per_position!r}")
        for name, value in (("length", self.positions), ("stride", self.step)):
            check_positive_int(name, value)

    @property
    def positions(self) -> int:
        """The number of positions in a row."""
        return LENGTH[self.level] if self.length is None else self.length

    @property
    def step(self) -> int:
        """The distance between the starts of two rows."""
        if self.stride is not None:
            return self.stride
        return self.positions if self.per_position else 20


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
    options = TextOptions(
        length=length,
        stride=stride,
        per_position=per_position,
        clients=clients,
        min_samples=min_samples,
        test_share=test_share,
        val_share=val_share,
    )
    return by_speaker("shakespeare", texts, vocabulary, options)


@keywords_of(TextOptions)
def from_texts(texts: Mapping[str, str], *, name: str = "texts", **options: Any) -> Federation:
    """Make a federation from one text per client: the next character (or word, with ``level="word"``) is to predict, at every
    position of a row of ``length`` (80 characters, 20 words), or with ``per_position=False`` after a full row.

    A text stays in order: the first part is for training, the last for testing. ``vocabulary`` keeps that many of the most
    frequent tokens of the *training* parts (default: every character; the words that occur twice); all others are one token
    <unk>. As in TensorFlow Federated's next-word task, <unk> is a class to the loss, but positions whose true token is <unk>
    are left out of the accuracy. ``clients`` keeps the longest texts.
    """
    chosen = TextOptions(**options)
    if not isinstance(texts, Mapping) or not all(isinstance(t, str) for pair in texts.items() for t in pair):
        raise InvalidData('texts must be a dict from client to text, for instance {"anna": "once upon a time ..."}')
    if not texts:
        raise InvalidData("there are no clients; give a dict from client to text")
    tokens = {client: cut(text, chosen.level) for client, text in texts.items()}
    first = parts_of(chosen.test_share, chosen.val_share)[0]
    known = Vocabulary.of(chosen.level, (piece[: round(first * len(piece))] for piece in tokens.values()), chosen.vocabulary)
    return by_speaker(name, texts, known, chosen)


@keywords_of(TextOptions)
def folder(path: str, **options: Any) -> Federation:
    """Read a directory with a .txt file per client, or a sub-directory of .txt files (joined in the order of their names)."""
    root = Path(path).expanduser().absolute()
    return from_texts(read_folder(root), name=f"text/{root.name}", **options)


def is_folder(root: Path) -> bool:
    """Return whether a directory holds texts and nothing else that could be data."""
    visible = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
    return bool(visible) and all(entry.is_file() and entry.suffix.lower() == ".txt" for entry in visible)


def read_folder(root: Path) -> dict[str, str]:
    paths_by_client: dict[str, list[Path]] = {}
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            paths_by_client[entry.name] = sorted(f for f in entry.iterdir() if f.suffix.lower() == ".txt")
        elif entry.suffix.lower() == ".txt":
            if entry.stem in paths_by_client:
                raise InvalidData(f"{root} has two entries for the client {shown(entry.stem)}; keep one")
            paths_by_client[entry.stem] = [entry]
    empty = [client for client, paths in paths_by_client.items() if not paths]
    if not paths_by_client or empty:
        problem = f"the folders {listed(empty)} hold no .txt file" if empty else "there is no .txt file"
        raise InvalidData(f"{root}: {problem}; give a .txt file per client, or a folder of them")
    return {client: "\n".join(_read(path) for path in paths) for client, paths in paths_by_client.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidData(f"{path} cannot be read as text in UTF-8 ({one_line(error)}); save it again as UTF-8") from error


def by_speaker(name: str, texts: Mapping[str, str], vocabulary: Vocabulary, options: TextOptions) -> Federation:
    """Make a client per text. A text is cut into parts before rows, so that no part sees another's tokens."""
    length, stride, per_position = options.positions, options.step, options.per_position
    shares = parts_of(options.test_share, options.val_share)
    order = (0, 2, 1) if len(shares) == 3 else (0, 1)  # in time: train, validation, test
    least = options.min_samples or 1
    pairs: list[list[Windows]] = [[] for _ in shares]
    names: list[str] = []
    too_short = 0
    for speaker in sorted(texts, key=lambda s: (-len(texts[s]), s)):
        if options.clients is not None and len(names) == options.clients:
            break
        codes = vocabulary.encode(texts[speaker])
        cuts = np.round(np.cumsum([shares[i] for i in order])[:-1] * len(codes)).astype(int)
        rows = positions if per_position else windows
        pieces = dict(zip(order, (rows(piece, length, stride) for piece in np.split(codes, cuts)), strict=True))
        testable = [bool(((y != PAD) & (y != _unknown(vocabulary))).any()) for _, y in pieces.values()]
        if not all(testable) or sum(len(y) for _, y in pieces.values()) < least:
            too_short += 1
            continue
        names.append(speaker)
        for i, piece in pieces.items():
            pairs[i].append(piece)
    unit = "characters" if vocabulary.level == "char" else "words"
    if not names:
        raise InvalidArgument(f"no text of {name} is long enough for rows of {length} {unit}; use a shorter length")
    classes: dict[str, Any] = {"task": CLASSIFICATION, "classes": vocabulary.tokens, "tokens": max(2, len(vocabulary))}
    fed = Federation.from_arrays(*pairs, names=names, name=name, **classes)
    notes = (*_notes(vocabulary, unit, length, stride, per_position), *left_out(too_short, least))
    return replace(fed, vocabulary=vocabulary, notes=notes)


def _unknown(vocabulary: Vocabulary) -> int:
    return PAD if vocabulary.unknown is None else vocabulary.unknown


def _notes(vocabulary: Vocabulary, unit: str, length: int, stride: int, per_position: bool) -> list[str]:
    notes = [f"Rows are {length} {unit}, every {stride} {unit}; the last part of each text is for testing."]
    if per_position:
        notes.append(f"What comes next is to predict at every position; accuracy and loss are means over {unit}, not over rows.")
    if vocabulary.unknown is not None:
        notes.append(
            f"The vocabulary is {len(vocabulary) - 1:,} {unit} of the training texts and {vocabulary.tokens[vocabulary.unknown]} "
            "for all others, which counts in the loss; as a target it is left out of the accuracy."
        )
    return notes


def windows(codes: NDArray[np.int64], length: int, stride: int) -> Windows:
    """Return rows of ``length`` numbers, and the number that follows each row."""
    starts = np.arange(0, len(codes) - length, stride)
    return codes[starts[:, None] + np.arange(length)], codes[starts + length]


def positions(codes: NDArray[np.int64], length: int, stride: int) -> Windows:
    """Return rows of ``length`` numbers, and the number after every position; past the end x is 0 and y padding."""
    starts = np.arange(0, max(0, len(codes) - 1), stride)
    place = starts[:, None] + np.arange(length)
    real = place < len(codes) - 1
    place = np.where(real, place, 0)
    return np.where(real, codes[place], 0), np.where(real, codes[place + 1] if len(codes) > 1 else 0, PAD)
