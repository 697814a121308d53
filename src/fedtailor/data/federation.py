"""Federation: the clients' data, each split kept as one block of rows and the offsets of the clients in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.schema import Schema
from fedtailor.data.tokens import count_tokens
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task.losses import PAD

if TYPE_CHECKING:
    import pandas as pd

Pairs = Sequence[tuple[ArrayLike | Tensor, ArrayLike | Tensor]]
KINDS = ("classification", "regression", "multilabel")


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of all clients, one after another: x [rows, ...], y [rows], [rows, outputs] or [rows, positions], offsets
    [clients + 1].

    ``kinds`` [rows] says which rows follow the law of all clients, where rows were generated from two laws (see ``instances``).
    """

    x: Tensor
    y: Tensor
    offsets: NDArray[np.int64]
    kinds: Tensor | None = None

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """(x, y) of the i-th client, counted from 0."""
        if not -len(self.sizes) <= i < len(self.sizes):
            raise InvalidArgument(f"no client {i}; there are {len(self.sizes)}, counted from 0")
        i %= len(self.sizes)
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.x[rows], self.y[rows]

    def take(self, clients: NDArray[np.int64]) -> Split:
        rows = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in clients]
        index = torch.from_numpy(np.concatenate(rows))
        kinds = None if self.kinds is None else self.kinds[index]
        return Split(self.x[index], self.y[index], np.concatenate([[0], np.cumsum(self.sizes[clients])]), kinds)


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients with their train, test and (optional) validation rows.

    ``truth`` holds the true parameters of every client where the data were generated from them, ``public`` unlabelled rows
    that everyone may see. A client's randomness derives from its name, so listing the clients in another order changes
    nothing. ``classes`` names the labels, ``schema`` turns new rows of the table it came from into features, ``notes`` says
    in sentences what was assumed or changed on the way, and ``recipe`` holds the options that make the same federation again
    (None where it was made from arrays). ``facts`` holds one number per client, by the fact's name (see ``with_facts``).
    ``tokens`` is the size of the vocabulary where x holds tokens (else 0), ``vocabulary`` says what they stand for.
    """

    train: Split
    test: Split
    val: Split | None = None
    public: Tensor | None = None
    names: tuple[str, ...] = ()
    kind: str = "classification"
    labels: int = 0
    truth: Sequence[Mapping[str, Tensor]] | None = None
    name: str = "arrays"
    classes: tuple[str, ...] = ()
    schema: Schema | None = None
    notes: tuple[str, ...] = ()
    recipe: Mapping[str, Any] | None = None
    facts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    tokens: int = 0
    vocabulary: Vocabulary | None = None
    precision: torch.dtype = torch.float32  # of masks and facts where x holds tokens

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        shape = tuple(self.train.x.shape[1:])
        what = f"{self.labels} classes" if self.kind == "classification" else self.kind
        rows = f"{len(self.train.y)} train and {len(self.test.y)} test rows of shape {shape}"
        return f"Federation({self.name!r}: {len(self)} clients, {rows}, {what})"

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """One word per client, from its name."""
        return np.fromiter((rng.purpose(name) for name in self.names), np.uint64, len(self.names))

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Clients in canonical order (by key): what is drawn or summed over clients goes by it."""
        return np.argsort(self.keys, kind="stable")

    @property
    def per_position(self) -> bool:
        """Is there a label for every position of a row?"""
        return self.kind == "classification" and self.train.y.dim() == 2

    @cached_property
    def outputs(self) -> int:
        """How many numbers a model must give per row (or position)."""
        if self.kind == "classification":
            return self.labels
        return 1 if self.train.y.dim() == 1 else int(np.prod(self.train.y.shape[1:]))

    def index(self, client: int | str) -> int:
        """Position of a client given by position or by name."""
        if isinstance(client, str):
            if client not in self.names:
                more = ", ..." if len(self.names) > 8 else ""
                raise InvalidArgument(f"no client {client!r}; the clients are {', '.join(self.names[:8])}{more}")
            return self.names.index(client)
        if not -len(self) <= client < len(self):
            raise InvalidArgument(f"no client {client}; there are {len(self)}, counted from 0")
        return int(client) % len(self)

    def take(self, clients: Sequence[int] | NDArray[np.int64]) -> Federation:
        """A federation of these clients only, names kept."""
        which = np.asarray(clients, np.int64)
        return replace(
            self,
            train=self.train.take(which),
            test=self.test.take(which),
            val=None if self.val is None else self.val.take(which),
            names=tuple(self.names[i] for i in which),
            truth=None if self.truth is None else [self.truth[i] for i in which],
            facts={name: values[which] for name, values in self.facts.items()},
        )

    def with_facts(self, **facts: ArrayLike | Mapping[str, float]) -> Federation:
        """The same clients, with a number each: in their order, or by their names.

        A method finds the number of its client in ``data["facts"][name]``, a tensor of one element.
        """
        return replace(self, facts={**self.facts, **{name: _fact(name, value, self.names) for name, value in facts.items()}})

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Federation:
        """Floating features (and regression targets) in ``dtype``."""

        def cast(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype) if t.is_floating_point() else t.to(device)

        def split(s: Split) -> Split:
            return Split(cast(s.x), cast(s.y), s.offsets, s.kinds)

        truth = None if self.truth is None else [{k: cast(v) for k, v in t.items()} for t in self.truth]
        return replace(
            self,
            train=split(self.train),
            test=split(self.test),
            val=None if self.val is None else split(self.val),
            public=None if self.public is None else cast(self.public),
            truth=truth,
            precision=dtype,
        )

    def as_task(self, kind: str) -> Federation:
        """The same rows with their targets read as ``kind``."""
        if kind not in KINDS:
            raise InvalidArgument(f"unknown task {kind!r}; use one of {', '.join(KINDS)}")
        if kind == self.kind:
            return self
        splits = {what: getattr(self, what) for what in ("train", "test", "val") if getattr(self, what) is not None}
        new = {what: replace(s, y=_targets(what, s, kind, self.names, bool(self.tokens))) for what, s in splits.items()}
        return replace(self, train=new["train"], test=new["test"], val=new.get("val"), kind=kind, labels=_labels(kind, new))

    @staticmethod
    def from_arrays(
        train: Pairs,
        test: Pairs,
        val: Pairs | None = None,
        public: ArrayLike | Tensor | None = None,
        *,
        names: Sequence[str] | None = None,
        task: str | None = None,
        truth: Sequence[Any] | None = None,
        name: str = "arrays",
        classes: Sequence[str] = (),
        tokens: bool | int = False,
        resize: bool = False,
    ) -> Federation:
        """From one (x, y) pair per client and split, NumPy or torch.

        The task is guessed from y unless given: whole numbers are classes 0..C-1, floats are regression (unless all are 0
        or 1), a matrix of 0 and 1 is multi-label. ``classes`` names them, also those of which nobody here has a row. ``resize``
        brings public images to the size of the clients', and ``notes`` says so.

        Whole numbers in x become floats unless they are ``tokens``: True, or how many there are (numbered from 0). Then y may
        have a label for every position, the shape of x, with -1 where a row is padded; the loss and the accuracy of a client are
        the means over the positions that are not.
        """
        return _from_arrays(train, test, val, public, names, task, truth, name, classes, tokens, resize)

    @staticmethod
    def from_table(
        source: pd.DataFrame | str | PathLike[str],
        *,
        client: str,
        label: str,
        features: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        split: str | None = None,
        task: str | None = None,
        standardize: str = "pooled",
        missing: str = "fill",
        min_samples: int | None = None,
        test_share: float = 0.25,
        val_share: float = 0.15,
        seed: int = 0,
        name: str | None = None,
        standardize_label: bool = False,
    ) -> Federation:
        """From a DataFrame or a .csv, .tsv (plain or .gz) or .parquet file with a row per example; ``client`` names the column
        that says whose it is.

        Numbers stay numbers, text becomes one feature per category of the training rows, dates become days; ``notes`` says
        what was assumed and ``schema`` reads new rows the same way. Every client's rows are split at random, class by class,
        unless the column ``split`` says train, val or test. ``missing`` is ``fill``, ``drop`` (the rows) or ``refuse``;
        ``standardize`` is ``pooled``, ``client`` or ``none``; clients with fewer than ``min_samples`` rows are left out.
        """
        from fedtailor.data.tables import Options, from_table

        options = Options(
            features=features,
            drop=drop,
            split=split,
            task=task,
            standardize=standardize,
            missing=missing,
            min_samples=min_samples,
            test_share=test_share,
            val_share=val_share,
            seed=seed,
            name=name,
            standardize_label=standardize_label,
        )
        return from_table(source, client, label, options)

    @staticmethod
    def from_folder(
        path: str | PathLike[str],
        *,
        label: str | None = None,
        features: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        split: str | None = None,
        task: str | None = None,
        standardize: str = "pooled",
        missing: str = "fill",
        min_samples: int | None = None,
        test_share: float = 0.25,
        val_share: float = 0.15,
        seed: int = 0,
        name: str | None = None,
        standardize_label: bool = False,
        image_size: int | tuple[int, int] | None = None,
    ) -> Federation:
        """From a folder with an entry per client: a table (``label`` names its column), a sub-folder of tables (named train,
        val and test to fix the split), a .npz file with x and y (or x_train, y_train, x_test, y_test), or a sub-folder with a
        folder of images per class (resized to ``image_size``). Tables are read as by ``from_table``; arrays and images are used
        as they are.
        """
        from fedtailor.data.tables import Options, from_folder

        options = Options(
            features=features,
            drop=drop,
            split=split,
            task=task,
            standardize=standardize,
            missing=missing,
            min_samples=min_samples,
            test_share=test_share,
            val_share=val_share,
            seed=seed,
            name=name,
            standardize_label=standardize_label,
            image_size=image_size,
        )
        return from_folder(path, label, options)

    @staticmethod
    def from_texts(
        texts: Mapping[str, str],
        *,
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
        """From one text per client: the next character (or ``level="word"``: word) is to predict, at every position of a row of
        ``length`` (80 characters, 20 words), or with ``per_position=False`` after a row that is full.

        A text stays in order: the first part is for training, the last for testing. ``vocabulary`` keeps that many of the most
        frequent tokens of the *training* parts (default: every character; the words that occur twice); all others are one token
        <unk>. As in TensorFlow Federated's next-word task, <unk> is a class to the loss, but positions whose true token is <unk>
        are left out of the accuracy. ``clients`` keeps the longest texts.
        """
        from fedtailor.data.text import from_texts

        return from_texts(
            texts, level, length, vocabulary, stride, per_position, clients, min_samples, test_share, val_share, name
        )

    @staticmethod
    def load(name: str, **options: Any) -> Federation:
        """A data set by name; see ``fedtailor.data.sources``."""
        from fedtailor.data.sources import load

        return load(name, **options)


def _from_arrays(
    train: Pairs,
    test: Pairs,
    val: Pairs | None,
    public: Any,
    names: Sequence[str] | None,
    task: str | None,
    truth: Sequence[Any] | None,
    name: str,
    classes: Sequence[str],
    tokens: bool | int,
    resize: bool,
) -> Federation:
    if task is not None and task not in KINDS:
        raise InvalidArgument(f"unknown task {task!r}; use one of {', '.join(KINDS)}")
    if not isinstance(train, Sequence) or not isinstance(test, Sequence):
        raise InvalidData("train and test must be lists with one pair (x, y) per client; for a dict, give its values and names=")
    if len(train) == 0:
        raise InvalidData("there are no clients; give train=[(x, y), ...] with one pair per client")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise InvalidData("names must be strings (a number counts clients from 0); use names=[str(n) for n in names]")
    names = tuple(names) if names is not None else tuple(str(i) for i in range(len(train)))
    if len(set(names)) != len(names):
        twice = next(n for n in names if list(names).count(n) > 1)
        raise InvalidData(f"two clients are called {twice!r}; give every client a name of its own")
    for what, part in (("names", names), ("test", test), ("val", val), ("truth", truth)):
        if part is not None and len(part) != len(train):
            raise InvalidData(f"{what} has {len(part)} entries but train has {len(train)} clients; give one for each")
    worded = tokens is not False
    splits = {"train": _join("train", train, names, worded), "test": _join("test", test, names, worded)}
    if val is not None:
        splits["val"] = _join("val", val, names, worded)
    for what, split in splits.items():
        _check_alike(what, split, splits["train"])
    size = count_tokens({what: (s.x, s.offsets) for what, s in splits.items()}, tokens, names) if worded else 0
    kind = task or _guess([split.y for split in splits.values()], splits["train"].x.shape if worded else None)
    splits = {what: Split(s.x, _targets(what, s, kind, names, worded), s.offsets) for what, s in splits.items()}
    labels = _labels(kind, splits)
    if kind == "classification" and classes:
        if labels > max(2, len(classes)):
            raise InvalidData(f"the labels go up to {labels - 1} but there are {len(classes)} classes; name them all")
        labels = max(2, len(classes))
    elif kind == "classification":
        _warn_of_gaps(labels, splits)
    rows, notes = (None, ()) if public is None else _public(public, splits["train"].x, resize)
    return Federation(
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        public=rows,
        names=names,
        kind=kind,
        labels=labels,
        truth=None if truth is None else [_truth(t, kind, labels) for t in truth],
        name=name,
        classes=tuple(classes),
        tokens=size,
        notes=notes,
    )


def _fact(name: str, value: Any, clients: Sequence[str]) -> NDArray[np.float64]:
    """One finite number per client, in the clients' order."""
    if isinstance(value, Mapping):
        known = set(clients)
        for client in (*value, *clients):
            if client not in known or client not in value:
                wrong = "is no client of this federation" if client not in known else "is missing"
                raise InvalidData(f"{name}: {client!r} {wrong}; give one number for each of its {len(clients)} clients")
        value = [value[client] for client in clients]
    try:
        numbers = np.array(value.tolist() if isinstance(value, Tensor) else value, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"{name} does not hold numbers; give one number per client") from error
    if numbers.shape != (len(clients),):
        raise InvalidData(f"{name} has shape {numbers.shape} but there are {len(clients)} clients; give one number per client")
    if not np.isfinite(numbers).all():
        client = clients[int(np.flatnonzero(~np.isfinite(numbers))[0])]
        raise InvalidData(f"{name} of client {client} is not finite (NaN or infinity); give a number")
    return numbers


def _public(value: Any, x: Tensor, resize: bool) -> tuple[Tensor, tuple[str, ...]]:
    from fedtailor.data.public import fitted

    rows = _tensor("public", value)
    rows = rows if rows.is_floating_point() else rows.to(x.dtype)
    notes: tuple[str, ...] = ()
    if rows.shape[1:] != x.shape[1:]:
        if not resize:
            have, want = tuple(rows.shape[1:]), tuple(x.shape[1:])
            raise InvalidData(
                f"public rows have shape {have} but the clients' have {want}; they must be the same (images: resize=True)"
            )
        rows, done = fitted(rows, x)
        notes = (f"The public rows are {done.removeprefix(', ')}.",)
    if not bool(torch.isfinite(rows).all()):
        raise InvalidData("public has a value that is not finite (NaN or infinity); fill or drop it")
    return rows, notes


def _truth(value: Any, kind: str, labels: int) -> Mapping[str, Tensor]:
    """A model by name, or the weights of a linear one. A binary w is the softmax (-w/2, w/2), which starts from zero reach."""
    if isinstance(value, Mapping):
        return {k: torch.as_tensor(np.asarray(v)) for k, v in value.items()}
    weight = torch.as_tensor(np.asarray(value))
    if weight.dim() == 1:
        weight = weight.unsqueeze(0)
    if kind == "classification" and labels == 2 and len(weight) == 1:
        weight = torch.cat([-weight / 2, weight / 2])
    return {"weight": weight}


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_complex():
            raise InvalidData(f"{what} holds complex values; give real numbers, for instance x.abs() or torch.view_as_real(x)")
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidData(f"{what} has rows of different lengths; give every row the same number of features") from error
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"{what} holds {array.dtype} values; give numbers (encode categories as 0, 1, 2, ...)")
    if array.dtype == np.uint16 or array.dtype == np.uint32 or array.dtype == np.uint64:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def _join(split: str, pairs: Pairs, names: Sequence[str], tokens: bool) -> Split:
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    sizes: list[int] = []
    for client, pair in zip(names, pairs, strict=True):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidData(f"{split} of client {client} is not a pair (x, y); give [(x, y), ...], one pair per client")
        x, y = _tensor(f"{split} x of client {client}", pair[0]), _tensor(f"{split} y of client {client}", pair[1])
        if x.dim() < 2:
            raise InvalidData(
                f"{split} x of client {client} has shape {tuple(x.shape)}; give rows by features, for instance x.reshape(-1, 1)"
            )
        if y.dim() == 0 or len(x) != len(y):
            raise InvalidData(
                f"{split} of client {client} has {len(x)} rows of x but y of shape {tuple(y.shape)}; give one y per row"
            )
        if len(y) == 0:
            raise InvalidData(f"client {client} has no {split} rows; leave the client out or give it rows")
        if y.dim() == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if xs and (x.shape[1:] != xs[0].shape[1:] or y.shape[1:] != ys[0].shape[1:]):
            raise InvalidData(
                f"{split} of client {client} has rows of shape {tuple(x.shape[1:])} with targets {tuple(y.shape[1:])}, client "
                f"{names[0]} has {tuple(xs[0].shape[1:])} with {tuple(ys[0].shape[1:])}; all clients need the same"
            )
        if xs and (x.is_floating_point() != xs[0].is_floating_point() or y.is_floating_point() != ys[0].is_floating_point()):
            raise InvalidData(
                f"{split} of client {client} has types ({x.dtype}, {y.dtype}), client {names[0]} ({xs[0].dtype}, {ys[0].dtype}); "
                "convert them to the same"
            )
        xs.append(x)
        ys.append(y)
        sizes.append(len(y))
    joined, targets = torch.cat(xs), torch.cat(ys)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    for what, values in (("x", joined), ("y", targets)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values.reshape(len(values), -1)).all(1)).nonzero()[0, 0])
            client = names[int(np.searchsorted(offsets, bad, "right")) - 1]
            raise InvalidData(
                f"{split} {what} of client {client} has a value that is not finite (NaN or infinity); fill or drop it"
            )
    if not joined.is_floating_point():
        joined = joined.to(torch.int64 if tokens else torch.float32)
    return Split(joined, targets, offsets)


def _check_alike(what: str, split: Split, train: Split) -> None:
    if split.x.shape[1:] != train.x.shape[1:] or split.y.shape[1:] != train.y.shape[1:]:
        raise InvalidData(
            f"{what} has rows of shape {tuple(split.x.shape[1:])} with targets {tuple(split.y.shape[1:])} but train has "
            f"{tuple(train.x.shape[1:])} with {tuple(train.y.shape[1:])}; they must be the same"
        )


def _guess(targets: Sequence[Tensor], sequences: torch.Size | None) -> str:
    if sequences is not None and targets[0].shape == sequences and not targets[0].is_floating_point():
        return "classification"
    binary = all(bool(((y == 0) | (y == 1)).all()) for y in targets)
    if targets[0].dim() > 1:
        return "multilabel" if binary else "regression"
    return "regression" if targets[0].is_floating_point() and not binary else "classification"


def _warn_of_gaps(labels: int, splits: Mapping[str, Split]) -> None:
    seen = np.unique(np.concatenate([split.y.unique().numpy() for split in splits.values()]))
    seen = seen[seen != PAD]
    if len(seen) < labels and not (labels == 2 and len(seen) == 1):
        missing = np.setdiff1d(np.arange(labels), seen)
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        text = f"{labels} classes are assumed but no client has a row of class {shown}; number the classes from 0 without gaps"
        warnings.warn(text, stacklevel=4)


def _labels(kind: str, splits: Mapping[str, Split]) -> int:
    if kind == "classification":
        return max(2, int(max(split.y.max() for split in splits.values())) + 1)
    return int(np.prod(splits["train"].y.shape[1:])) if kind == "multilabel" else 0


def _targets(what: str, split: Split, kind: str, names: Sequence[str], tokens: bool) -> Tensor:
    y = split.y
    if kind == "regression":
        return y if y.is_floating_point() else y.to(torch.float32)
    if kind == "multilabel":
        if y.dim() < 2 or not bool(((y == 0) | (y == 1)).all()):
            raise InvalidData(f"{what} y is not a matrix of 0 and 1; multi-label targets need one column per label")
        return y.to(torch.float32)
    if y.dim() > 1 and not (tokens and y.shape == split.x.shape):
        raise InvalidData(f"{what} y has {y.dim()} axes; class labels need one number per row (or task='multilabel')")
    whole = y.to(torch.int64)
    wrong = (whole != y) | (whole < (PAD if y.dim() > 1 else 0))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InvalidData(
            f"{what} y of client {_owner(split, place[0], names)} holds the label {y[place].item()}; classes are whole numbers "
            "from 0 (use sklearn.preprocessing.LabelEncoder, or task='regression')"
        )
    if y.dim() > 1 and bool((empty := (whole == PAD).all(1)).any()):
        client = _owner(split, int(empty.nonzero()[0, 0]), names)
        raise InvalidData(f"{what} of client {client} has an empty sequence (every label is -1, padding); leave that row out")
    return whole


def _owner(split: Split, row: int, names: Sequence[str]) -> str:
    return names[int(np.searchsorted(split.offsets, row, "right")) - 1]
