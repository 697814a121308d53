"""What is odd about a federation, with evidence: columns that give the label away, copies, outliers, tiny clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.federation import Federation
from fedtailor.data.schema import Column
from fedtailor.data.split import Split
from fedtailor.data.words import counted, listed, shown

Floats = NDArray[np.float64]
ROWS = 50_000  # of each part that are looked at
BINS = 50
LEFT = 0.1  # of the errors of guessing: a column alone that leaves no more gives the label away
UNEXPLAINED = 0.01  # the same, of a quantity's variance
FEWEST_ERRORS = 5  # of guessing, for that to mean something
TINY = 10  # test rows
RARE = 0.05
FAR = 12  # robust deviations from the median
APART = 0.2  # of a column's variance between clients
SAME = 1 - 1e-6  # correlation
ABSENT = 0.9  # of a client's values missing
ROUNDING = 1e-6  # of a column's size: what is left of 0 in features of 32 bits


class Finding(NamedTuple):
    """What was found (a word for programs), in which column if in one, the number that shows it, and a sentence."""

    what: str
    column: str | None
    evidence: float
    sentence: str


class Part(NamedTuple):
    """Some rows of a split: features, targets, and the client of each."""

    x: Floats
    y: NDArray[np.float64]
    client: NDArray[np.int64]


def findings(fed: Federation) -> list[Finding]:
    """Return what is worth a look before training; columns are looked at where the federation came from a table."""
    out = [*_clients(fed), *_imbalance(fed)]
    if fed.schema is None or fed.tokens or fed.train.x.dim() != 2:
        return out
    train, test = _part(fed.train), _part(fed.test)
    everyone = _joined([train, test] if fed.val is None else [train, test, _part(fed.val)])
    slices = list(_slices(fed.schema.columns))
    for column, at in slices:
        out += _leak(fed, column, train, test, at)
    out += _copies(slices, train)
    for i, (column, at) in enumerate(slices):
        if column.kind in ("numeric", "date"):
            back = _restorer(fed, i)
            out += [
                *_outliers(column, everyone, at, back),
                *_shift(fed, column, train, at, back),
                *_one_value(fed, column, train, at, back),
            ]
    return out + _repeated(train, test)


def _part(split: Split) -> Part:
    rows = np.arange(len(split.y))
    if len(rows) > ROWS:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), ROWS, replace=False))
    owner = np.repeat(np.arange(len(split.sizes)), split.sizes)
    return Part(split.x[rows].double().numpy(), split.y[rows].double().numpy(), owner[rows])


def _joined(parts: list[Part]) -> Part:
    """Return the rows of several parts: a slip of the pen in a test row does harm as well."""
    return Part(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _slices(columns: tuple[Column, ...]) -> Iterator[tuple[Column, slice]]:
    at = 0
    for column in columns:
        width = len(column.names())
        yield column, slice(at, at + width)
        at += width


def _restorer(fed: Federation, i: int) -> Callable[[Floats, NDArray[np.int64]], Floats]:
    """Return what brings the i-th column's features back to its units; dates are then days since 1970."""
    assert fed.schema is not None
    column, own = fed.schema.columns[i], fed.schema.clients
    moments = np.array([own[name][i] if name in own else (column.mean, column.scale) for name in fed.names])
    small = ROUNDING * np.abs(moments).sum(1)

    def back(values: Floats, client: NDArray[np.int64]) -> Floats:
        units = values * moments[client, 1] + moments[client, 0]
        return np.where(np.abs(units) < small[client], 0.0, units) + column.origin

    return back


def _clients(fed: Federation) -> list[Finding]:
    out = []
    small = [(name, int(size)) for name, size in zip(fed.names, fed.test.sizes, strict=True) if size < TINY]
    if small:
        few = _those([f"{shown(name)} ({size})" for name, size in sorted(small, key=lambda item: item[1])])
        sentence = f"{_have(len(small))} fewer than {TINY} test rows, too few to judge them by: {few}."
        out.append(Finding("tiny client", None, float(len(small)), sentence))
    if fed.kind.softmax and fed.train.y.dim() == 1:
        single = [name for i, name in enumerate(fed.names) if len(np.unique(fed.train.client(i)[1].numpy())) == 1]
        if single:
            sentence = f"{_have(len(single))} one class only in the training rows: {listed(single)}."
            out.append(Finding("one class", None, float(len(single)), sentence))
    return out


def _have(clients: int) -> str:
    return f"{counted(clients, 'client')} {'has' if clients == 1 else 'have'}"


def _imbalance(fed: Federation) -> list[Finding]:
    if not fed.kind.softmax or fed.train.y.dim() != 1:
        return []
    counts = np.bincount(np.concatenate([fed.train.y.numpy(), fed.test.y.numpy()]), minlength=fed.labels)
    share = float(counts.min() / counts.sum())
    if not 0 < share < RARE:
        return []
    name = (fed.classes or tuple(map(str, range(fed.labels))))[int(counts.argmin())]
    best = counts.max() / counts.sum()
    why = "accuracy hardly shows whether it is found"
    if best > 1 - 2 * RARE:
        why = f"always guessing the most frequent class is right in {100 * best:.1f} %, so accuracy says little"
    sentence = f"The class {shown(name)} is {100 * share:.1f} % of the rows: {why}; look at the AUC."
    return [Finding("imbalance", None, share, sentence)]


def _codes(column: Column, train: Floats, test: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a group for every row: its category, or the bin of its number among the training rows."""
    if column.kind == "category":
        return tuple(np.where(part.any(1), part.argmax(1) + 1, 0) for part in (train, test))  # type: ignore[return-value]
    values = np.unique(train[:, 0])
    edges = values[1:] if len(values) <= BINS else np.unique(np.quantile(train[:, 0], np.linspace(0, 1, BINS + 1)[1:-1]))
    return np.searchsorted(edges, train[:, 0], "right"), np.searchsorted(edges, test[:, 0], "right")


def _leak(fed: Federation, column: Column, train: Part, test: Part, at: slice) -> list[Finding]:
    """Guess the label of test rows from this column alone, by the training rows with the same value (or of the same bin)."""
    if train.y.ndim != 1 or not (fed.kind.softmax or fed.kind.least_squares):
        return []
    own, new = _codes(column, train.x[:, at], test.x[:, at])
    groups = int(max(own.max(), new.max())) + 1
    advice = "if it is not known when you predict, --drop it"
    if fed.kind.softmax:
        counts = np.zeros((groups, fed.labels))
        np.add.at(counts, (own, train.y.astype(np.int64)), 1)
        overall = int(counts.sum(0).argmax())
        guess = np.where(counts.sum(1) > 0, counts.argmax(1), overall)
        errors, base = int((guess[new] != test.y).sum()), int((test.y != overall).sum())
        if base < FEWEST_ERRORS or errors > LEFT * base:
            return []
        right, plain = 1 - errors / len(test.y), 1 - base / len(test.y)
        share = f"{100 * right:.1f} % of the test rows (guessing: {100 * plain:.1f} %)"
        sentence = f"{shown(column.name)} alone gives the label of {share}; {advice}."
        return [Finding("leak", column.name, right, sentence)]
    sizes = np.bincount(own, minlength=groups)
    means = np.where(sizes > 0, np.bincount(own, train.y, groups) / np.maximum(sizes, 1), train.y.mean())
    fits = [means[new]]
    if column.kind != "category" and np.ptp(train.x[:, at.start]) > 0:
        fits.append(np.polyval(np.polyfit(train.x[:, at.start], train.y, 1), test.x[:, at.start]))
    left = min(float(((test.y - fit) ** 2).sum()) for fit in fits) / max(float(((test.y - train.y.mean()) ** 2).sum()), 1e-300)
    if len(test.y) < FEWEST_ERRORS or left > UNEXPLAINED:
        return []
    sentence = f"{shown(column.name)} alone explains {100 * (1 - left):.1f} % of the label's variance in the test rows; {advice}."
    return [Finding("leak", column.name, 1 - left, sentence)]


def _copies(slices: list[tuple[Column, slice]], train: Part) -> list[Finding]:
    """Find columns whose features are all those of an earlier column, up to scale and sign."""
    x = train.x - train.x.mean(0)
    norms = np.sqrt((x**2).sum(0))
    known = norms > 0
    x[:, known] /= norms[known]
    same = np.abs(x.T @ x) > SAME
    out: list[Finding] = []
    for j, (column, at) in enumerate(slices):
        for other, earlier in slices[:j]:
            if known[at].all() and same[at, earlier].any(1).all():
                sentence = f"{shown(column.name)} says the same as {shown(other.name)} in every training row; --drop one of them."
                out.append(Finding("copy", column.name, 1.0, sentence))
                break
    return out


def _outliers(column: Column, rows: Part, at: slice, back: Callable[[Floats, NDArray[np.int64]], Floats]) -> list[Finding]:
    values = back(rows.x[:, at.start], rows.client)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    if high <= low:
        return []
    far = np.abs(values - middle) / ((high - low) / 1.349)
    count = int((far > FAR).sum())
    if not 0 < count <= 0.01 * len(values) + 1:
        return []
    worst = float(values[int(far.argmax())])
    value = _written(column, worst)
    usual = "" if column.kind == "date" else f"; half of its values lie between {low:.4g} and {high:.4g}"
    return [
        Finding(
            "outlier",
            column.name,
            float(far.max()),
            f"{shown(column.name)} has {counted(count, 'far outlier')}, as {value}{usual}.",
        )
    ]


def _shift(
    fed: Federation, column: Column, train: Part, at: slice, back: Callable[[Floats, NDArray[np.int64]], Floats]
) -> list[Finding]:
    values = back(train.x[:, at.start], train.client)
    sizes = np.bincount(train.client, minlength=len(fed))
    seen = np.flatnonzero(sizes >= TINY)
    whole = float(((values - values.mean()) ** 2).sum())
    if len(seen) < 2 or whole <= 0:
        return []
    means = np.bincount(train.client, values, len(fed)) / np.maximum(sizes, 1)
    among = float((sizes * (means - values.mean()) ** 2).sum()) / whole
    among -= (1 - among) * (len(fed) - 1) / max(len(values) - len(fed), 1)  # what chance alone puts between clients
    if among < APART:
        return []
    first, last = seen[means[seen].argmin()], seen[means[seen].argmax()]
    low, high = (_written(column, means[i]) for i in (first, last))
    sentence = (
        f"{shown(column.name)} differs between clients ({100 * among:.0f} % of its variance): its mean is {low} at "
        f"{shown(fed.names[first])} and {high} at {shown(fed.names[last])}."
    )
    return [Finding("shift", column.name, among, sentence)]


def _one_value(
    fed: Federation, column: Column, train: Part, at: slice, back: Callable[[Floats, NDArray[np.int64]], Floats]
) -> list[Finding]:
    """Find clients who lack a column that others have, or have one number in all rows: often a code for missing."""
    gap = train.x[:, at.start + 1] > 0 if column.has_indicator else np.zeros(len(train.x), bool)
    values, owner = back(train.x[:, at.start], train.client)[~gap], train.client[~gap]
    if len(np.unique(values)) < 3 or gap.mean() >= ABSENT:
        return []
    rows, known = (np.bincount(clients, minlength=len(fed)) for clients in (train.client, owner))
    low, high = np.full(len(fed), np.inf), np.full(len(fed), -np.inf)
    np.minimum.at(low, owner, values)
    np.maximum.at(high, owner, values)
    share = 1 - known / np.maximum(rows, 1)
    lacking = np.flatnonzero((rows >= TINY) & (share >= ABSENT))
    single = np.flatnonzero((known >= TINY) & (share < ABSENT) & (low == high))
    out = []
    if len(lacking):
        who = _those([f"{shown(fed.names[i])} ({100 * share[i]:.0f} %)" for i in lacking])
        sentence = f"{shown(column.name)} is missing in nearly all training rows of {who}."
        out.append(Finding("absent", column.name, float(share.max()), sentence))
    if len(single):
        who = _those([f"{shown(fed.names[i])} ({_written(column, low[i])})" for i in single])
        sentence = (
            f"{shown(column.name)} is one and the same in all training rows of {who}; if that means missing, empty the cells."
        )
        out.append(Finding("one value", column.name, float(len(single)), sentence))
    return out


def _those(clients: list[str]) -> str:
    return ", ".join(clients[:5]) + (f" and {len(clients) - 5:,} more" if len(clients) > 5 else "")


def _written(column: Column, value: float) -> str:
    return str(np.datetime64(int(value), "D")) if column.kind == "date" else f"{value:.4g}"


def _repeated(train: Part, test: Part) -> list[Finding]:
    """Find test rows that are training rows too, where rows are otherwise mostly different."""

    def keys(part: Part) -> NDArray[np.void]:
        rows = np.ascontiguousarray(np.column_stack([part.x, part.y.reshape(len(part.y), -1)]).astype(np.float32))
        return rows.view(np.dtype((np.void, rows.shape[1] * 4)))[:, 0]

    own, new = keys(train), keys(test)
    distinct = np.unique(own)
    if 2 * len(distinct) < len(own):
        return []
    count = int(np.isin(new, distinct).sum())
    if not count:
        return []
    share = count / len(new)
    sentence = (
        f"{count:,} of {len(new):,} test rows ({100 * share:.1f} %) are equal to a training row in all features and the label; "
        "if they are copies, scores are too good."
    )
    return [Finding("repeated rows", None, share, sentence)]
