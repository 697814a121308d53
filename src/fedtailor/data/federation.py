"""Federation: the clients' data, each split kept as one block of rows and the offsets of the clients in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.arrays import (
    Pairs,
    class_count,
    client_names,
    fact,
    guess,
    joined,
    labels_of,
    packed,
    packing_of,
    public_rows,
    row_weights,
    targets_of,
    truth_of,
)
from fedtailor.data.refit import Refit
from fedtailor.data.schema import Schema
from fedtailor.data.split import Split
from fedtailor.data.tokens import count_tokens
from fedtailor.data.unread import PARTS, Shards, made_up, zeros
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import InvalidArgument
from fedtailor.task.kinds import CLASSIFICATION, Kind, kind_of
from fedtailor.task.packing import Packing


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients with their train, test and (optional) validation rows.

    ``truth`` holds the true parameters of every client where the data were generated from them, ``public`` unlabelled rows
    that everyone may see. A client's randomness derives from its name, so listing the clients in another order changes
    nothing. ``classes`` names the labels, ``schema`` turns new rows of the table it came from into features, ``notes`` says
    in sentences what was assumed or changed on the way, and ``recipe`` holds the options that make the same federation again
    (None where none do: it was made from arrays, or is part of another one, or more). ``facts`` holds one number per client, by
    the fact's name (see ``with_facts``).
    ``tokens`` is the size of the vocabulary where x holds tokens (else 0), ``vocabulary`` says what they stand for. ``refit``
    reads the table again, fitted to the rows of some clients (see ``fitted_to``).
    ``packing`` says how a row of several parts lies in x. With ``shards`` the rows are in files and not here (``with_rows``).
    """

    train: Split
    test: Split
    val: Split | None = None
    public: Tensor | None = None
    names: tuple[str, ...] = ()
    kind: Kind = CLASSIFICATION
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
    packing: Packing | None = None
    precision: torch.dtype = torch.float32  # the dtype of masks and facts where x holds tokens
    refit: Refit | None = None
    shards: Shards | None = None

    # The other constructors are the readers' own functions; ``fedtailor.data`` puts them here, so that this file needs no reader.
    from_table: ClassVar[Callable[..., Federation]]
    from_folder: ClassVar[Callable[..., Federation]]
    from_texts: ClassVar[Callable[..., Federation]]
    from_datasets: ClassVar[Callable[..., Federation]]
    from_shards: ClassVar[Callable[..., Federation]]
    load: ClassVar[Callable[..., Federation]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind_of(self.kind))

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        shape = tuple(self.train.x.shape[1:])
        targets = f"{self.labels} classes" if self.kind.softmax else self.kind
        rows = f"{len(self.train.y)} train and {len(self.test.y)} test rows of shape {shape}"
        return f"Federation({self.name!r}: {len(self)} clients, {rows}, {targets})"

    @cached_property
    def positions(self) -> dict[str, int]:
        """Every client's position, by its name."""
        return {name: position for position, name in enumerate(self.names)}

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """One 64-bit word per client, derived from its name."""
        return np.fromiter((rng.purpose(name) for name in self.names), np.uint64, len(self.names))

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Clients in canonical order (by key): what is drawn or summed over clients goes by it."""
        return np.argsort(self.keys, kind="stable")

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """Every client's place in the canonical order, in the order in which they are listed."""
        return np.argsort(self.order, kind="stable")

    @property
    def per_position(self) -> bool:
        """Return whether there is a label for every position of a row."""
        return self.kind.per_position(self.train.y)

    @cached_property
    def outputs(self) -> int:
        """The number of outputs a model must have per row (or position)."""
        if self.kind.softmax:
            return self.labels
        return 1 if self.train.y.dim() == 1 else int(np.prod(self.train.y.shape[1:]))

    def index(self, client: int | str) -> int:
        """Return the position of a client, which is named by position or by name."""
        if isinstance(client, str):
            if client not in self.positions:
                more = ", ..." if len(self.names) > 8 else ""
                raise InvalidArgument(f"no client {client!r}; the clients are {', '.join(self.names[:8])}{more}")
            return self.positions[client]
        if not -len(self) <= client < len(self):
            raise InvalidArgument(f"no client {client}; there are {len(self)}, counted from 0")
        return int(client) % len(self)

    def take(self, clients: Sequence[int] | NDArray[np.int64]) -> Federation:
        """Return a federation of these clients only, under their names."""
        chosen = np.asarray(clients, np.int64)
        return replace(
            self,
            train=self.train.take(chosen),
            test=self.test.take(chosen),
            val=None if self.val is None else self.val.take(chosen),
            names=tuple(self.names[i] for i in chosen),
            truth=None if self.truth is None else [self.truth[i] for i in chosen],
            facts={name: values[chosen] for name, values in self.facts.items()},
            refit=None,
            shards=None if self.shards is None else self.shards.take(chosen),
            recipe=self.recipe if np.array_equal(chosen, np.arange(len(self))) else None,
        )

    def _splits(self) -> dict[str, Split]:
        return {part: split for part in PARTS if (split := getattr(self, part)) is not None}

    def with_rows(self) -> Federation:
        """Return the federation with its rows, read from their files where they are not here."""
        return self if self.shards is None else replace(self, **self.shards.read(self._splits()), shards=None)  # type: ignore[arg-type]

    def with_zeros(self) -> Federation:
        """Return the federation with zeros in the place of all rows: enough for what depends on their form alone."""
        return replace(self, **{part: zeros(split) for part, split in self._splits().items()}, shards=None)  # type: ignore[arg-type]

    def few(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first training rows, to try something on; where the rows are not here, some that are made up."""
        x, y = self.train.x[:count], self.train.y[:count]
        if self.shards is None:
            return x, y
        binary = 0 if self.kind.least_squares else 2
        return made_up(x, len(y), self.tokens), made_up(y, len(y), self.labels if self.kind.softmax else binary)

    def fitted_to(self, clients: Sequence[int] | NDArray[np.int64]) -> Federation:
        """Return the same rows with features made by the training rows of these clients alone: means, scales, fills, categories.

        Where that cannot be done (the splits are not those that were read) or changes nothing, a note says so.
        """
        if self.schema is None or self.schema.public:
            return self
        splits = (self.train, self.test, self.val)
        new, place = (self, {}) if self.refit is None else self.refit([self.names[i] for i in clients])
        if not all(split is None or id(split) in place for split in splits):
            note = f"Means, scales and categories of columns are those of all {len(self)} clients, of those held out as well."
            return replace(self, notes=(*self.notes, note))
        val = None if self.val is None else place[id(self.val)]
        note = (
            f"Means, scales, fills and categories of columns were learnt from the {len(clients)} clients that are not held out."
        )
        train, test = place[id(self.train)], place[id(self.test)]
        return replace(self, train=train, test=test, val=val, schema=new.schema, notes=(*self.notes, note), refit=None)

    def with_facts(self, **facts: ArrayLike | Mapping[str, float]) -> Federation:
        """Return the same clients with a number for each: in their order, or by their names.

        A method finds the number of its client in ``data["facts"][name]``, a tensor of one element.
        """
        new = {name: fact(name, value, self.names) for name, value in facts.items()}
        return replace(self, facts={**self.facts, **new}, recipe=None if new else self.recipe)

    def to(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> Federation:
        """Return the federation with its floating features (and regression targets) in ``dtype``, on a device."""

        def cast(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype) if t.is_floating_point() else t.to(device)

        def split(s: Split) -> Split:
            return replace(s, x=cast(s.x), y=cast(s.y), weights=None if s.weights is None else cast(s.weights))

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
        """Return the same rows with their targets read as ``kind``."""
        kind = kind_of(kind)
        if kind is self.kind:
            return self
        splits = {part: getattr(self, part) for part in ("train", "test", "val") if getattr(self, part) is not None}
        new = {part: replace(s, y=targets_of(part, s, kind, self.names, bool(self.tokens))) for part, s in splits.items()}
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
        weights: Sequence[ArrayLike | Tensor] | None = None,
    ) -> Federation:
        """Make a federation from one (x, y) pair per client and split, NumPy or torch.

        The task is guessed from y unless given: whole numbers are classes 0..C-1, floats are regression (unless all are 0
        or 1), a matrix of 0 and 1 is multi-label. ``classes`` names them, also those of which nobody here has a row. ``resize``
        brings public images to the size of the clients', and ``notes`` says so.

        Whole numbers in x become floats unless they are ``tokens``: True, or how many there are (numbered from 0). Then y may
        have a label for every position, the shape of x, with -1 where a row is padded; the loss and the accuracy of a client are
        the means over the positions that are not.

        x may have several parts, a dict or a tuple of arrays (text and its mask; an image and a table): a module of your own gets
        them by name, in order, or as the dict or the tuple, as its forward asks for.

        ``weights`` has one array per client: how much each training row counts in the loss (a weight of 2 is the row twice);
        measures count all rows alike.
        """
        wanted, has_tokens = None if task is None else kind_of(task), tokens is not False
        clients = client_names(names, train, test, {"val": val, "truth": truth, "weights": weights})
        packing = packing_of(train, clients[0])
        if packing is not None:
            train, test, val = (packed(packing, *part, clients) for part in (("train", train), ("test", test), ("val", val)))
            public = public if public is None else packing.pack(public, "public")
        splits = joined({"train": train, "test": test, "val": val}, clients, has_tokens)
        size = count_tokens({part: (s.x, s.offsets) for part, s in splits.items()}, tokens, clients) if has_tokens else 0
        kind = wanted or guess([split.y for split in splits.values()], splits["train"].x.shape if has_tokens else None)
        splits = {part: Split(s.x, targets_of(part, s, kind, clients, has_tokens), s.offsets) for part, s in splits.items()}
        if weights is not None:
            splits["train"] = replace(splits["train"], weights=row_weights(weights, splits["train"], clients))
        labels = class_count(kind, splits, classes)
        public_tensor, notes = (None, ()) if public is None else public_rows(public, splits["train"].x, resize)
        return Federation(
            train=splits["train"],
            test=splits["test"],
            val=splits.get("val"),
            public=public_tensor,
            names=clients,
            kind=kind,
            labels=labels,
            truth=None if truth is None else [truth_of(t, kind, labels) for t in truth],
            name=name,
            classes=tuple(classes),
            tokens=size,
            notes=notes,
            packing=packing,
        )
