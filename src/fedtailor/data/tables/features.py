"""Columns to features: which are used, what stands in for gaps, and the numbers that the training rows give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data.columns import Ints, Raw, Table, check_finite, read_column
from fedtailor.data.formats import Floats
from fedtailor.data.schema import BLOCK, MISSING, OTHER, Column, Features, write_block
from fedtailor.data.tables.codes import take_rows, tally
from fedtailor.data.tables.layout import Layout
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.target import Target
from fedtailor.data.tables.threads import parallel_map
from fedtailor.data.words import Where, shown
from fedtailor.errors import InvalidData

MOST_CATEGORIES = 30  # the rest share one feature
INDICATOR_SHARE = 0.01
ROUNDING = 1e-13
MANY = 100_000  # values from which on a median is looked for among few of them


def read_features(table: Table, rows: Ints, options: TableOptions, where: Where) -> tuple[dict[str, Raw], dict[str, str]]:
    """Return the columns as read, and the reason for each one left out."""

    def read(name: str) -> Raw | str:
        if options.features is None and re.fullmatch(r"Unnamed: \d+", name):
            return "no name; most often the row number that another program wrote"
        raw = read_column(name, table[name], None, where)
        check_finite(name, raw, rows, where)
        if raw.kind != "category":
            return "empty" if not raw.is_finite and bool(np.isnan(take_rows(raw.values, rows)).all()) else raw
        values = take_rows(raw.values, rows)
        counts = tally(values, len(raw.texts))
        distinct, present = np.count_nonzero(counts), counts.sum()
        if distinct == present > 1 or (distinct > MOST_CATEGORIES and 2 * distinct > present):
            return "text that differs in (almost) every row"
        return raw if present else "empty"

    read_all = dict(zip(table, parallel_map(read, list(table), len(rows)), strict=True))
    left_out = {name: raw for name, raw in read_all.items() if isinstance(raw, str)}
    return {name: raw for name, raw in read_all.items() if isinstance(raw, Raw)}, left_out


def handle_missing(raws: Mapping[str, Raw], rows: Ints, missing: str, source: str | None = None) -> tuple[Ints, list[str]]:
    """Return the rows that stay, and what a note says; ``source`` is the file that says what fills a column, if there is one."""
    gaps = {name: take_rows(raw.missing, rows) for name, raw in raws.items()}
    counts = {name: np.count_nonzero(gap) for name, gap in gaps.items() if gap.any()}
    if not counts:
        return rows, []
    listing = ", ".join(f"{shown(name)} ({count:,})" for name, count in list(counts.items())[:8])
    listing += f" and {len(counts) - 8} more columns" if len(counts) > 8 else ""
    if missing == "refuse":
        raise InvalidData(f"values are missing in {listing}; fill them in, use --missing fill or drop, or --drop the columns")
    if missing == "fill" and source is not None:
        return rows, [f"Missing values in {listing} were filled as {source} says."]
    if missing == "fill":
        return rows, [
            f"Missing values in {listing} were filled: numbers with the median of the training rows (and a feature that says "
            f"so where at least 1 % are missing), words with the category {MISSING!r}."
        ]
    complete_rows = rows[~np.logical_or.reduce([gaps[name] for name in counts])]
    if not len(complete_rows):
        raise InvalidData(f"every row misses a value in {listing}; use --missing fill, or --drop the emptiest columns")
    return complete_rows, [f"{len(rows) - len(complete_rows):,} rows with missing values in {listing} were left out."]


def fit_columns(raws: Mapping[str, Raw], layout: Layout, options: TableOptions) -> tuple[list[Column], dict[str, str]]:
    """Fit every column to the training rows; return those that vary, and the reason for each one left out."""
    train, scaled = layout.fitted, options.standardize != "none"
    fits = parallel_map(lambda item: _fit(item[0], item[1], train, scaled), list(raws.items()), len(layout.rows))
    left_out = {name: fit for name, fit in zip(raws, fits, strict=True) if isinstance(fit, str)}
    return [fit for fit in fits if isinstance(fit, Column)], left_out


def _fit(name: str, raw: Raw, train: Ints, scaled: bool) -> Column | str:
    """Return the column as fitted to the training rows, or why it is left out."""
    values = raw.values[train]
    if raw.kind == "category":
        categories = _categories(raw.texts, values)
        return Column(name, raw.kind, categories=categories) if len(categories) > 1 else "the same in every training row"
    values = values.astype(np.float64, copy=False)
    gap = np.zeros(len(values), bool) if raw.is_finite else np.isnan(values)
    any_missing = bool(gap.any())
    present = values[np.flatnonzero(~gap)] if any_missing else values
    if not len(present):
        return "empty in every training row"
    indicator = any_missing and bool(gap.mean() >= INDICATOR_SHARE)
    if present.min() == present.max() and not indicator:
        return "the same in every training row"
    if raw.kind == "bool":
        return Column(name, raw.kind, fill=float(present.mean() > 0.5), has_indicator=indicator)
    origin = float(present.min()) if raw.kind == "date" else 0.0
    if origin:
        values, present = values - origin, present - origin
    with np.errstate(over="ignore", invalid="ignore"):
        fill = median(present)
        filled = np.where(gap, fill, values) if any_missing else values
        mean, scale = mean_and_scale(filled) if scaled else (0.0, 1.0)
    if not np.isfinite([fill, mean, scale]).all():
        raise InvalidData(f"column {shown(name)} holds numbers too large to average; rescale it or --drop it")
    return Column(name, raw.kind, fill, indicator, origin=origin, mean=mean, scale=scale, style=raw.style)


def median(values: Floats) -> float:
    """Return the median; NumPy's own function looks for NaN and takes several times longer."""
    half, odd = len(values) // 2, len(values) % 2
    if len(values) >= MANY:  # it is nearly always between two values of a sample, and so among few
        sample = np.sort(values[:: len(values) // 4096])
        low, high = sample[int(0.46 * len(sample))], sample[int(0.54 * len(sample))]
        below, between = int(np.count_nonzero(values < low)), values[(values >= low) & (values <= high)]
        if below < half < below + len(between):
            values, half = between, half - below
    parted = np.partition(values, half)
    return float(parted[half] if odd else (parted[:half].max() + parted[half]) / 2)


def mean_and_scale(values: Floats) -> tuple[float, float]:
    """Return the mean and the standard deviation; one that is nothing but rounding counts as 1."""
    mean = float(values.mean())
    scale = float(values.std())
    return mean, 1.0 if scale <= ROUNDING * abs(mean) else scale


def _categories(texts: Sequence[str], codes: NDArray[Any]) -> tuple[str, ...]:
    """Return the most frequent texts of the training rows, ``other`` for the rest and ``missing`` where values are."""
    counts = tally(codes, len(texts))
    by_frequency = sorted(np.flatnonzero(counts).tolist(), key=lambda i: (-counts[i], texts[i]))
    categories = {texts[i] for i in by_frequency[:MOST_CATEGORIES]}
    if len(by_frequency) > MOST_CATEGORIES:
        categories.add(OTHER)
    if counts.sum() < len(codes):
        categories.add(MISSING)
    return tuple(sorted(categories))


def client_moments(columns: Sequence[Column], raws: Mapping[str, Raw], layout: Layout) -> list[tuple[Floats, Floats]]:
    """Return (mean, scale) of every client's own training rows, [clients] each, for every column."""
    client = layout.client[layout.in_training]
    sizes = np.diff(layout.offsets[0])

    def moments_of(column: Column) -> tuple[Floats, Floats]:
        if column.kind not in ("numeric", "date"):
            return np.zeros(len(sizes)), np.ones(len(sizes))
        values = column.prepare(raws[column.name])[layout.train]
        values = np.where(np.isnan(values), column.fill, values)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.bincount(client, values, len(sizes)) / sizes
            scale = np.sqrt(np.bincount(client, (values - mean[client]) ** 2, len(sizes)) / sizes)
        return mean, np.where(scale <= ROUNDING * np.abs(mean), 1.0, scale)

    return parallel_map(moments_of, columns, len(layout.rows))


def by_client(names: Sequence[str], moments: Sequence[tuple[Floats, Floats]]) -> dict[str, tuple[tuple[float, float], ...]]:
    pairs = np.stack([np.stack(pair, 1) for pair in moments], 1).tolist()  # [clients, columns, 2]
    return {name: tuple((mean, scale) for mean, scale in own) for name, own in zip(names, pairs, strict=True)}


def encode(
    columns: Sequence[Column], raws: Sequence[Raw], layout: Layout, moments: Sequence[tuple[Floats, Floats]] | None
) -> Features:
    """Return the features of all rows, sorted by part and client.

    Blocks are read in the table's order, where a column's values are neighbours, and whole rows are written to their places.
    """
    width = sum(len(column.names()) for column in columns)
    prepared = [column.prepare(raw) for column, raw in zip(columns, raws, strict=True)]
    pooled = [(column.mean, column.scale) for column in columns]
    total = len(layout.rows)
    all_rows = all(len(values) == total for values in prepared)
    # NumPy asks for huge pages, which a virtual machine gives at once or a fifth of a second late; torch does not
    out = torch.empty((total, width)).numpy()
    whole_rows = _as_items(out)

    def encode_block(start: int) -> None:
        positions = slice(start, start + BLOCK)
        client, rows = layout.client[positions], layout.rows[positions]
        block_moments = pooled if moments is None else [(mean[client], scale[client]) for mean, scale in moments]
        features = np.zeros((len(client), width), np.float32)
        write_block(columns, [values[positions] if all_rows else values[rows] for values in prepared], features, block_moments)
        whole_rows[layout.place[positions]] = _as_items(features)

    parallel_map(encode_block, range(0, total, BLOCK), total)
    return out


def _as_items(rows: Features) -> NDArray[Any]:
    """Return every row as one item: NumPy assigns items three times faster than rows."""
    return rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]


def finish_target(
    label: str, target: Target, layout: Layout, options: TableOptions, bounds: tuple[float, float] | None = None
) -> tuple[NDArray[Any], float, float]:
    """Return the target of every row, sorted by part and client, and the mean and scale it was standardized by: those of the
    training rows, or of the range ``given``."""
    values = take_rows(target.values, layout.rows)
    if target.kind.softmax:
        return layout.sort(values).astype(np.int64), 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        center, spread = 0.0, 1.0
        if options.standardize_label and bounds is not None:
            center, spread = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
        elif options.standardize_label:
            center, spread = mean_and_scale(target.values[layout.fitted])
        y = layout.sort(((values - center) / spread).astype(np.float32))
    if not np.isfinite(y).all():
        raise InvalidData(f"the label {shown(label)} holds numbers too large for 32-bit targets; rescale it")
    return y, center, spread
