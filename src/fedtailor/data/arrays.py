"""Checks of the arrays that a user passes in: every refusal names the client and says what to do."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedtailor.data.resize import fitted
from fedtailor.data.split import Split
from fedtailor.errors import InvalidData
from fedtailor.task.kinds import CLASSIFICATION, MULTILABEL, PAD, REGRESSION, Kind
from fedtailor.task.packing import Packing, is_packable

Pairs = Sequence[tuple[ArrayLike | Tensor, ArrayLike | Tensor]]


def fact(name: str, value: Any, clients: Sequence[str]) -> NDArray[np.float64]:
    """Return one finite number per client, in the clients' order."""
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


def public_rows(value: Any, x: Tensor, resize: bool) -> tuple[Tensor, tuple[str, ...]]:
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


def truth_of(value: Any, kind: Kind, labels: int) -> Mapping[str, Tensor]:
    """Return true parameters by name; bare weights are a linear model's. A binary w is the softmax (-w/2, w/2)."""
    if isinstance(value, Mapping):
        return {k: torch.as_tensor(np.asarray(v)) for k, v in value.items()}
    weight = torch.as_tensor(np.asarray(value))
    if weight.dim() == 1:
        weight = weight.unsqueeze(0)
    if kind.softmax and labels == 2 and len(weight) == 1:
        weight = torch.cat([-weight / 2, weight / 2])
    return {"weight": weight}


def _tensor(label: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_complex():
            raise InvalidData(f"{label} holds complex values; give real numbers, for instance x.abs() or torch.view_as_real(x)")
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidData(f"{label} has rows of different lengths; give every row the same number of features") from error
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"{label} holds {array.dtype} values; give numbers (encode categories as 0, 1, 2, ...)")
    if array.dtype == np.uint16 or array.dtype == np.uint32 or array.dtype == np.uint64:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def client_names(names: Sequence[str] | None, train: Any, test: Any, others: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the clients' names, by default their numbers; ``others`` has one entry per client in each argument, or is None."""
    if not isinstance(train, Sequence) or not isinstance(test, Sequence):
        raise InvalidData("train and test must be lists with one pair (x, y) per client; for a dict, give its values and names=")
    if len(train) == 0:
        raise InvalidData("there are no clients; give train=[(x, y), ...] with one pair per client")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise InvalidData("names must be strings (a number counts clients from 0); use names=[str(n) for n in names]")
    names = tuple(names) if names is not None else tuple(str(i) for i in range(len(train)))
    if len(set(names)) != len(names):
        duplicate = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidData(f"two clients are called {duplicate!r}; give every client a name of its own")
    for argument, values in {"names": names, "test": test, **others}.items():
        if values is not None and len(values) != len(train):
            raise InvalidData(f"{argument} has {len(values)} entries but train has {len(train)} clients; give one for each")
    return names


def packing_of(train: Any, client: str) -> Packing | None:
    """Return how x is put together where it has several parts; None where it is one array."""
    has_parts = isinstance(train[0], (tuple, list)) and len(train[0]) and is_packable(train[0][0])
    return Packing.of(train[0][0], f"train x of client {client}") if has_parts else None


def packed(packing: Packing, split: str, pairs: Any, names: Sequence[str]) -> Any:
    """Return pairs (x, y) whose x has several parts with these put together."""
    if pairs is None:
        return None
    for client, pair in zip(names, pairs, strict=True):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidData(f"{split} of client {client} is not a pair (x, y); give [(x, y), ...], one pair per client")
    return [(packing.pack(x, f"{split} x of client {client}"), y) for client, (x, y) in zip(names, pairs, strict=True)]


def row_weights(weights: Any, train: Split, names: Sequence[str]) -> Tensor:
    """Return the weight of every training row: finite, at least 0, and some above 0 for each client."""
    out = []
    for client, value, size in zip(names, weights, train.sizes, strict=True):
        one = _tensor(f"weights of client {client}", value).to(torch.float64)
        if one.shape != (size,):
            raise InvalidData(f"weights of client {client} have shape {tuple(one.shape)} for {size} rows; give one for each")
        if not bool(torch.isfinite(one).all()) or bool((one < 0).any()) or not bool((one > 0).any()):
            raise InvalidData(f"weights of client {client} must be finite, at least 0, and not all 0")
        out.append(one)
    return torch.cat(out).to(train.x.dtype if train.x.is_floating_point() else torch.float32)


def joined(parts: Mapping[str, Pairs | None], names: Sequence[str], tokens: bool) -> dict[str, Split]:
    """Return every part that is there as a split; all have rows like those of ``train``."""
    splits = {part: join(part, pairs, names, tokens) for part, pairs in parts.items() if pairs is not None}
    for part, split in splits.items():
        check_alike(part, split, splits["train"])
    return splits


def join(split: str, pairs: Pairs, names: Sequence[str], tokens: bool) -> Split:
    """Return one split of all clients' rows, checked."""
    features, targets, offsets = _at_once(pairs) or _one_by_one(split, pairs, names)
    for array_name, values in (("x", features), ("y", targets)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values.reshape(len(values), -1)).all(1)).nonzero()[0, 0])
            client = names[int(np.searchsorted(offsets, bad, "right")) - 1]
            raise InvalidData(
                f"{split} {array_name} of client {client} has a value that is not finite (NaN or infinity); fill or drop it"
            )
    if not features.is_floating_point():
        features = features.to(torch.int64 if tokens else torch.float32)
    return Split(features, targets, offsets)


def _at_once(pairs: Pairs) -> tuple[Tensor, Tensor, NDArray[np.int64]] | None:
    """Return (x, y, offsets) of NumPy arrays that are all alike, without a tensor for each client, since there may be a million;
    None where they are anything else, or something is wrong that is to be named."""
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        return None
    joined = []
    for place, least in ((0, 2), (1, 1)):
        arrays: list[Any] = [pair[place] for pair in pairs]
        if not all(type(array) is np.ndarray for array in arrays):
            return None
        forms = {(array.dtype, array.shape[1:], array.ndim) for array in arrays}
        (dtype, _, axes), *others = forms
        if others or axes < least or dtype.kind not in "biuf" or not dtype.isnative:
            return None
        joined.append((np.fromiter(map(len, arrays), np.int64, len(arrays)), _tensor("rows", np.concatenate(arrays))))
    (sizes, x), (lengths, y) = joined
    if not np.array_equal(sizes, lengths) or not sizes.all():
        return None
    return x, y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _one_by_one(split: str, pairs: Pairs, names: Sequence[str]) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Return (x, y, offsets); what is wrong is refused with the name of the client."""
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
    return torch.cat(xs), torch.cat(ys), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def check_alike(part: str, split: Split, train: Split) -> None:
    if split.x.shape[1:] != train.x.shape[1:] or split.y.shape[1:] != train.y.shape[1:]:
        raise InvalidData(
            f"{part} has rows of shape {tuple(split.x.shape[1:])} with targets {tuple(split.y.shape[1:])} but train has "
            f"{tuple(train.x.shape[1:])} with {tuple(train.y.shape[1:])}; they must be the same"
        )


def guess(targets: Sequence[Tensor], sequences: torch.Size | None) -> Kind:
    if sequences is not None and targets[0].shape == sequences and not targets[0].is_floating_point():
        return CLASSIFICATION
    binary = all(bool(((y == 0) | (y == 1)).all()) for y in targets)
    if targets[0].dim() > 1:
        return MULTILABEL if binary else REGRESSION
    return REGRESSION if targets[0].is_floating_point() and not binary else CLASSIFICATION


def warn_of_gaps(labels: int, splits: Mapping[str, Split]) -> None:
    seen = np.unique(np.concatenate([split.y.unique().numpy() for split in splits.values()]))
    seen = seen[seen != PAD]
    if len(seen) < labels and not (labels == 2 and len(seen) == 1):
        missing = np.setdiff1d(np.arange(labels), seen)
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        text = f"{labels} classes are assumed but no client has a row of class {shown}; number the classes from 0 without gaps"
        warnings.warn(text, stacklevel=4)  # where from_arrays is called


def labels_of(kind: Kind, splits: Mapping[str, Split]) -> int:
    if kind.softmax:
        return max(2, int(max(split.y.max() for split in splits.values())) + 1)
    return 0 if kind.least_squares else int(np.prod(splits["train"].y.shape[1:]))


def class_count(kind: Kind, splits: Mapping[str, Split], classes: Sequence[str]) -> int:
    """Return how many classes or labels there are, where there are any: those that have names, or those that have rows."""
    labels = labels_of(kind, splits)
    if kind.softmax and classes:
        if labels > max(2, len(classes)):
            raise InvalidData(f"the labels go up to {labels - 1} but there are {len(classes)} classes; name them all")
        return max(2, len(classes))
    if kind.softmax:
        warn_of_gaps(labels, splits)
    return labels


def targets_of(part: str, split: Split, kind: Kind, names: Sequence[str], tokens: bool) -> Tensor:
    y = split.y
    if kind.least_squares:
        return y if y.is_floating_point() else y.to(torch.float32)
    if not kind.softmax:
        if y.dim() < 2 or not bool(((y == 0) | (y == 1)).all()):
            raise InvalidData(f"{part} y is not a matrix of 0 and 1; multi-label targets need one column per label")
        return y.to(torch.float32)
    if y.dim() > 1 and not (tokens and y.shape == split.x.shape):
        raise InvalidData(f"{part} y has {y.dim()} axes; class labels need one number per row (or task='multilabel')")
    whole = y.to(torch.int64)
    wrong = (whole != y) | (whole < (PAD if y.dim() > 1 else 0))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InvalidData(
            f"{part} y of client {_owner(split, place[0], names)} holds the label {y[place].item()}; classes are whole numbers "
            "from 0 (use sklearn.preprocessing.LabelEncoder, or task='regression')"
        )
    if y.dim() > 1 and bool((empty := (whole == PAD).all(1)).any()):
        client = _owner(split, int(empty.nonzero()[0, 0]), names)
        raise InvalidData(f"{part} of client {client} has an empty sequence (every label is -1, padding); leave that row out")
    return whole


def _owner(split: Split, row: int, names: Sequence[str]) -> str:
    return names[int(np.searchsorted(split.offsets, row, "right")) - 1]
