"""Federation: the clients' data, each split kept as one block of rows and the offsets of the clients in it."""

from __future__ import annotations

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
from fedtailor.data.arrays import (
    Pairs,
    check_alike,
    fact,
    guess,
    join,
    labels_of,
    public_rows,
    targets_of,
    truth_of,
    warn_of_gaps,
)
from fedtailor.data.schema import Schema
from fedtailor.data.split import Split
from fedtailor.data.tokens import count_tokens
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("classification", "regression", "multilabel")


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
        return replace(self, facts={**self.facts, **{name: fact(name, value, self.names) for name, value in facts.items()}})

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
        new = {what: replace(s, y=targets_of(what, s, kind, self.names, bool(self.tokens))) for what, s in splits.items()}
        return replace(self, train=new["train"], test=new["test"], val=new.get("val"), kind=kind, labels=labels_of(kind, new))

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
    splits = {"train": join("train", train, names, worded), "test": join("test", test, names, worded)}
    if val is not None:
        splits["val"] = join("val", val, names, worded)
    for what, split in splits.items():
        check_alike(what, split, splits["train"])
    size = count_tokens({what: (s.x, s.offsets) for what, s in splits.items()}, tokens, names) if worded else 0
    kind = task or guess([split.y for split in splits.values()], splits["train"].x.shape if worded else None)
    splits = {what: Split(s.x, targets_of(what, s, kind, names, worded), s.offsets) for what, s in splits.items()}
    labels = labels_of(kind, splits)
    if kind == "classification" and classes:
        if labels > max(2, len(classes)):
            raise InvalidData(f"the labels go up to {labels - 1} but there are {len(classes)} classes; name them all")
        labels = max(2, len(classes))
    elif kind == "classification":
        warn_of_gaps(labels, splits)
    rows, notes = (None, ()) if public is None else public_rows(public, splits["train"].x, resize)
    return Federation(
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        public=rows,
        names=names,
        kind=kind,
        labels=labels,
        truth=None if truth is None else [truth_of(t, kind, labels) for t in truth],
        name=name,
        classes=tuple(classes),
        tokens=size,
        notes=notes,
    )
