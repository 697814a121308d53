"""Federations from what torch and Hugging Face users have: datasets, data loaders, and mappings of columns.

A source is a pair (x, y), a mapping of arrays by column (or an object with ``column_names``, as a Hugging Face dataset), a torch
``Dataset`` or a ``DataLoader``. An example is (x, y), (x1, x2, ..., y), or a dict with the label under a name of its own. What a
source draws while it is read (shuffling, random transforms) is drawn once, by the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from fedtailor.data import partition as deal
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.pool import left_out, parts_of
from fedtailor.errors import FedtailorError, InvalidArgument, InvalidData

LABELS = ("label", "labels", "y", "target", "targets")  # where a label is looked for
SPLITS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}


class _Rows(NamedTuple):
    """A source, read: x is an array, or a dict or a tuple of arrays."""

    x: Any
    y: NDArray[Any]
    owner: NDArray[np.str_] | None = None
    weight: NDArray[np.float64] | None = None

    def take(self, rows: NDArray[np.int64]) -> _Rows:
        x = self.x
        if isinstance(x, Mapping):
            x = {name: part[rows] for name, part in x.items()}
        else:
            x = tuple(part[rows] for part in x) if isinstance(x, tuple) else x[rows]
        return _Rows(x, self.y[rows], None, None if self.weight is None else self.weight[rows])


def from_datasets(
    train: Any,
    test: Any = None,
    val: Any = None,
    *,
    label: str | None = None,
    columns: Sequence[str] | None = None,
    client: str | None = None,
    weight: str | None = None,
    clients: int | None = None,
    partition: str = "iid",
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    min_samples: int | None = None,
    **more: Any,
) -> Federation:
    """Make a federation from datasets, data loaders or mappings of arrays.

    ``train`` is one source per client (a list, or a dict by the clients' names), or one source of all rows: then ``client`` names
    the column that says whose row it is, or ``clients`` and ``partition`` deal the rows out. ``test`` and ``val`` have the same
    form; without ``test`` every client's rows are split by ``test_share`` and ``val_share``. A dict with a key ``train`` (and
    ``test``, ``validation``) holds the splits. ``label`` names the column to predict (default: label, labels, y or target),
    ``columns`` those to predict from (default: all others), ``weight`` that of the rows' weights. ``more`` are options of
    ``from_arrays``, as ``task``, ``classes``, ``tokens``, ``public``.
    """
    shares = parts_of(test_share, val_share)
    if isinstance(train, Mapping) and "train" in train and set(train) <= set(SPLITS):
        splits = {SPLITS[name]: source for name, source in train.items()}
        train, test, val = splits["train"], splits.get("test", test), splits.get("val", val)
    wanted = _Wanted(label, tuple(columns) if columns is not None else None, client, weight, seed)
    parts = (("train", train), ("test", test), ("val", val))
    by_client = [None if part is None else _by_client(part, word, wanted) for word, part in parts]
    notes: tuple[str, ...] = ()
    if by_client[0] is None:
        pooled = [None if part is None else wanted.read(part, word) for word, part in parts]
        least = max(min_samples or 0, 1 if test is not None else 2 * len(shares) if min_samples is None else len(shares))
        by_client, notes = _dealt(pooled, clients, partition, seed, least)
    elif client is not None or clients is not None:
        raise InvalidArgument("there is one source per client already; leave client= and clients= out, or give one source")
    whole, tests, vals = by_client
    assert whole is not None
    if tests is None:
        if vals is not None:
            raise InvalidArgument("there are validation rows and no test rows; give test=, or neither")
        whole, tests, vals = _split(whole, shares, seed)
    for word, part in (("test", tests), ("val", vals)):
        if part is not None and list(part) != list(whole):
            odd = next(iter(set(part) ^ set(whole)), "another order")
            raise InvalidData(f"train and {word} are not of the same clients ({odd}); give the same ones in the same order")
    pairs = [None if part is None else [(rows.x, rows.y) for rows in part.values()] for part in (whole, tests, vals)]
    assert pairs[0] is not None
    assert pairs[1] is not None
    more = {"name": "datasets", **more}
    if weight is not None:
        more["weights"] = [rows.weight for rows in whole.values()]
    federation = Federation.from_arrays(pairs[0], pairs[1], pairs[2], names=list(whole), **more)
    return replace(federation, notes=(*federation.notes, *notes))


class _Wanted(NamedTuple):
    """The columns that are wanted, and the seed of what a source draws."""

    label: str | None
    columns: tuple[str, ...] | None
    client: str | None
    weight: str | None
    seed: int

    def read(self, source: Any, where: str) -> _Rows:
        """Return the rows of one source."""
        with rng.seeded(self.seed):
            try:
                content = _content(source, where)
            except FedtailorError:
                raise
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise InvalidData(f"{where} cannot be read ({type(error).__name__}: {text})") from error
        if isinstance(content, Mapping):
            return self._from_columns(content, where)
        if self.columns is not None or self.client is not None or self.weight is not None or self.label is not None:
            raise InvalidData(f"{where} has pairs and no columns; leave label=, columns=, client= and weight= out, or give dicts")
        *x, y = content
        return _Rows(x[0] if len(x) == 1 else tuple(x), np.asarray(y))

    def _from_columns(self, columns: Mapping[str, Any], where: str) -> _Rows:
        label = self.label or next((name for name in LABELS if name in columns), None)
        for name in (label, self.client, self.weight, *(self.columns or ())):
            if name is not None and name not in columns:
                raise InvalidData(f"{where} has no column {name!r}; its columns are {', '.join(columns)}")
        if label is None:
            raise InvalidData(f"which column of {where} is the label? give label=, one of {', '.join(columns)}")
        used = (label, self.client, self.weight)
        names = self.columns if self.columns is not None else tuple(name for name in columns if name not in used)
        if not names:
            raise InvalidData(f"{where} has no column but the label to predict from; give it one")
        arrays = {name: _array(columns[name]) for name in names}
        x: Any = arrays
        if all(column.ndim == 1 for column in arrays.values()):  # a table: one row of numbers
            x = np.stack(list(arrays.values()), 1)
        elif len(arrays) == 1:
            (x,) = arrays.values()
        owner = None if self.client is None else np.asarray([str(name) for name in _array(columns[self.client])])
        return _Rows(x, _array(columns[label]), owner, None if self.weight is None else _array(columns[self.weight]))


def _by_client(part: Any, where: str, wanted: _Wanted) -> dict[str, _Rows] | None:
    """Return the rows of every client where there is a source for each; None for one source of all."""
    if isinstance(part, Mapping):
        if not part or not all(_is_source(value) for value in part.values()):
            return None
        return {str(name): wanted.read(source, f"{where} of client {name}") for name, source in part.items()}
    if isinstance(part, list) and part and all(_is_source(source) for source in part):
        return {str(i): wanted.read(source, f"{where} of client {i}") for i, source in enumerate(part)}
    return None


def _is_source(value: Any) -> bool:
    return isinstance(value, (tuple, Mapping, Dataset, DataLoader)) or hasattr(value, "column_names")


def _content(source: Any, where: str) -> Any:
    """Return a source as a mapping of columns, or as a tuple (x, ..., y)."""
    if isinstance(source, TensorDataset):
        return source.tensors
    if hasattr(source, "column_names"):
        return {name: source[name] for name in source.column_names}
    if isinstance(source, (Mapping, tuple)):
        return source
    if not isinstance(source, (Dataset, DataLoader)):
        raise InvalidData(f"{where} is a {type(source).__name__}; give pairs (x, y), a dict of arrays, a Dataset or a DataLoader")
    if isinstance(source, DataLoader):
        batches = list(source)
    else:
        one_by_one = source if isinstance(source, IterableDataset) else (source[i] for i in range(len(source)))  # type: ignore[arg-type]
        batches = [default_collate([example]) for example in one_by_one]
    if not batches:
        raise InvalidData(f"{where} has no rows; leave the client out or give it rows")
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if not isinstance(first, (tuple, list)) or len(first) < 2:
        raise InvalidData(
            f"{where} gives {type(first).__name__}, not (x, y) or a dict with a label; let its examples be one of these"
        )
    if len(first) == 2 and isinstance(first[0], Mapping):
        x = {name: _joined([batch[0][name] for batch in batches]) for name in first[0]}
        return x, _joined([batch[1] for batch in batches])
    if len(first) == 2 and isinstance(first[0], (tuple, list)):
        parts = tuple(_joined([batch[0][i] for batch in batches]) for i in range(len(first[0])))
        return parts, _joined([batch[1] for batch in batches])
    return tuple(_joined([batch[i] for batch in batches]) for i in range(len(first)))


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts)).numpy()
    return np.concatenate([np.asarray(part) for part in parts])


def _array(column: Any) -> NDArray[Any]:
    if isinstance(column, Tensor):
        return column.detach().cpu().numpy()
    return np.asarray(column if isinstance(column, (np.ndarray, list)) else list(column))


def _dealt(
    pooled: Sequence[_Rows | None], clients: int | None, rule: str, seed: int, least: int
) -> tuple[list[dict[str, _Rows] | None], tuple[str, ...]]:
    """Return every part's rows by client: by the owners that a column names, or dealt out."""
    train = pooled[0]
    assert train is not None
    if train.owner is not None:
        groups = [None if part is None or part.owner is None else deal.grouped(part.owner) for part in pooled]
        assert groups[0] is not None
        names = list(deal.natural(train.owner, clients, seed, least))
        for group in groups[1:]:
            names = names if group is None else [name for name in names if name in group]
        note = tuple(left_out(sum(len(rows) < least for rows in groups[0].values()), least))
        parts = zip(pooled, groups, strict=True)
        return [None if g is None or p is None else {n: p.take(g[n]) for n in names} for p, g in parts], note
    if any(part is not None for part in pooled[1:]):
        raise InvalidArgument(
            "train and test are each one source, and nobody says whose a row is; name a column with client=, give one source per "
            "client, or give all rows as train (test_share then splits every client's)"
        )
    y = train.y.astype(np.int64) if train.y.dtype.kind in "biu" else np.zeros(len(train.y), np.int64)
    if train.y.dtype.kind == "f" and rule.partition(":")[0] in ("dirichlet", "classes"):
        raise InvalidArgument(f"partition={rule!r} goes by classes and the labels are numbers; use 'iid' or 'quantity:0.5'")
    dealt = deal.partition(rule, y, 10 if clients is None else clients, seed, least)
    return [{str(i): train.take(rows) for i, rows in enumerate(dealt)}, None, None], ()


def _split(
    whole: Mapping[str, _Rows], shares: tuple[float, ...], seed: int
) -> tuple[dict[str, _Rows], dict[str, _Rows], dict[str, _Rows] | None]:
    """Return every client's rows for training, test and validation, of the same label mix."""
    parts: list[dict[str, _Rows]] = [{} for _ in shares]
    for i, (name, rows) in enumerate(whole.items()):
        y = rows.y if rows.y.dtype.kind in "biu" and rows.y.ndim == 1 else np.zeros(len(rows.y), np.int64)
        draw = rng.generator(seed, "split", i if name == str(i) else rng.purpose(name))
        for part, chosen in zip(parts, deal.split(y, shares, draw), strict=True):
            part[name] = rows.take(chosen)
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None
