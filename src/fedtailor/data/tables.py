"""Federations from tables (one row per example, a column that says whose it is) and from folders (one entry per client)."""

from __future__ import annotations

import difflib
import gzip
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.data.federation import Federation, Split
from fedtailor.data.schema import (
    BLOCK,
    MISSING,
    OTHER,
    Column,
    Features,
    Floats,
    Raw,
    Schema,
    Where,
    as_numbers,
    check_choice,
    check_finite,
    columns_of,
    listed,
    one_line,
    read_column,
    row_number,
    shown,
    text,
    write_block,
)
from fedtailor.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Table = Mapping[str, "pd.Series[Any]"]
Entry = tuple[Path, str, str | None]  # a table, its client, its part
T = TypeVar("T")
U = TypeVar("U")

PARTS = ("train", "test", "val")
PART_OF = {"train": 0, "test": 1, "val": 2, "validation": 2}
TABLE_ENDS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
IMAGE_ENDS = (".png", ".jpg", ".jpeg")
MOST_CATEGORIES = 30  # the rest share one feature
MOST_CLASSES = 20  # a label with more whole numbers than this is taken for a quantity
ROWS_PER_CLASS = 10
INDICATOR_SHARE = 0.01
ROUNDING = 1e-13
LAYOUTS = (
    "a folder holds one .csv, .tsv or .parquet per client, one .npz with x and y per client, one sub-folder per client with such "
    "tables (optionally train, val, test), or one sub-folder per client with a sub-folder of .png or .jpg images per class"
)


@dataclass(frozen=True)
class Options:
    """How a table is read; every field but these defaults is part of a federation's recipe."""

    features: Sequence[str] | None = None
    drop: Sequence[str] = ()
    split: str | None = None
    task: str | None = None
    standardize: str = "pooled"
    missing: str = "fill"
    min_samples: int | None = None
    test_share: float = 0.25
    val_share: float = 0.15
    seed: int = 0
    name: str | None = None
    standardize_label: bool = False
    image_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for option in ("features", "drop"):
            value = getattr(self, option)
            if isinstance(value, str):
                raise InvalidArgument(f"{option}={value!r} is one string; give a list of column names, for instance [{value!r}]")
        if self.task is not None:
            check_choice("task", self.task, ("classification", "regression"))
        check_choice("standardize", self.standardize, ("pooled", "client", "none"))
        check_choice("missing", self.missing, ("fill", "drop", "refuse"))
        if self.min_samples is not None and self.min_samples < 1:
            raise InvalidArgument(f"min_samples={self.min_samples} must be at least 1")
        if not 0 < self.test_share < 1 or not 0 <= self.val_share < 1 or self.test_share + self.val_share >= 1:
            raise InvalidArgument(
                f"test_share={self.test_share} and val_share={self.val_share} leave no rows to train on or to test on; "
                "use for instance 0.25 and 0.15"
            )

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, as plain values."""
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in mine.items()}

    @property
    def shares(self) -> tuple[float, ...]:
        return (1 - self.test_share - self.val_share, self.test_share) + ((self.val_share,) if self.val_share else ())


@dataclass(frozen=True)
class Source:
    """A table by column, whose row is whose, its part where that is given, and how to speak of a row."""

    table: Table
    owner: Raw
    given: NDArray[np.int8] | None
    where: Where
    name: str
    recipe: Mapping[str, Any] | None
    client: str = ""  # the column that names the client, if there is one
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """The label of every row of the table: class numbers or quantities, and whether it is missing."""

    kind: str
    values: NDArray[Any]
    missing: NDArray[np.bool_]
    classes: tuple[str, ...]
    why: str

    @property
    def strata(self) -> tuple[Ints, tuple[str, ...]]:
        """What a client's split is balanced over: the classes; nothing for quantities."""
        if self.kind == "classification":
            return self.values, self.classes
        return np.zeros(len(self.values), np.int64), ("",)


@dataclass(frozen=True)
class Layout:
    """Which row goes where: ``rows`` of the table in its order, the client and part of each, its ``place`` in the block of all
    rows sorted by part and client, and the offsets of the clients in each part."""

    names: tuple[str, ...]
    rows: Ints
    client: Ints
    part: NDArray[np.int8]
    place: Ints
    offsets: tuple[Ints, ...]
    notes: tuple[str, ...]

    @cached_property
    def train(self) -> Ints:
        """Rows of the table that are trained on."""
        return self.rows[self.part == 0]

    def sort(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of ``rows``, sorted by part and client."""
        out = np.empty_like(values)
        out[self.place] = values
        return out

    def splits(self, x: Features, y: NDArray[Any]) -> dict[str, Split]:
        """The parts as views of one block of sorted rows."""
        features, targets = torch.from_numpy(x), torch.from_numpy(y)
        starts = np.cumsum([0] + [int(o[-1]) for o in self.offsets])
        return {
            part: Split(features[a:b], targets[a:b], offsets)
            for part, a, b, offsets in zip(PARTS, starts, starts[1:], self.offsets, strict=False)
        }


def from_table(data: pd.DataFrame | str | os.PathLike[str], client: str, label: str, options: Options) -> Federation:
    """See ``Federation.from_table``."""
    import pandas as pd

    recipe = None
    if isinstance(data, pd.DataFrame):
        table, name = columns_of(data), "table"
    elif isinstance(data, (str, os.PathLike)):
        path = Path(data)
        if path.is_dir():
            raise InvalidArgument(f"{str(path)!r} is a folder; use Federation.from_folder (without a client column)")
        table, name = columns_of(read_table(path)), path.name
        recipe = {"data": str(path.absolute()), "client": client, "label": label, **options.changed()}
    else:
        raise InvalidArgument(f"a table is a pandas DataFrame or a path, not {type(data).__name__}; use pandas.DataFrame(...)")
    if client == label:
        raise InvalidArgument(f"{shown(client)} is both the client and the label; name the column that says whose a row is")
    _check_known(table, client, "client column")
    owner = read_column(client, table[client], "category")
    return _build(Source(table, owner, None, row_number, options.name or name, recipe, client), label, options)


def from_folder(path: str | os.PathLike[str], label: str | None, options: Options) -> Federation:
    """See ``Federation.from_folder``."""
    root = Path(path)
    if not root.exists():
        raise InvalidArgument(f"no folder {str(root)!r}; check the path")
    if not root.is_dir():
        raise InvalidArgument(f"{str(root)!r} is a file; use Federation.from_table with client= and label=")
    files, folders = _entries(root)
    tables = [f for f in files if _ends(f, TABLE_ENDS)]
    arrays = [f for f in files if _ends(f, (".npz",))]
    found = [what for what, some in (("tables", tables), (".npz files", arrays), ("folders", folders)) if some]
    if len(found) != 1:
        what = f"holds {' and '.join(found)}" if found else "holds no data"
        raise InvalidData(f"{str(root)!r} {what}; {LAYOUTS}")
    name = options.name or root.absolute().name
    recipe = {"data": str(root.absolute()), **({} if label is None else {"label": label}), **options.changed()}
    ignored = [f.name for f in files if f not in tables and f not in arrays]
    notes = (f"Files that hold no data were ignored: {listed(ignored)}.",) if ignored else ()
    if arrays:
        made = _from_arrays(arrays, options, name)
    elif folders and not any(_ends(f, TABLE_ENDS) for folder in folders for f in _entries(folder)[0]):
        made = _from_images(root, folders, options, name)
    else:
        entries: list[Entry] = [(f, _stem(f), None) for f in tables]
        entries += [entry for folder in folders for entry in _tables_of(folder)]
        made = _from_tables(entries, label, options, name)
    return replace(made, recipe=recipe, notes=(*made.notes, *notes))


# -- files -------------------------------------------------------------------------------------------------------------


def _ends(path: Path, ends: Iterable[str]) -> bool:
    return path.name.lower().endswith(tuple(ends))


def _stem(path: Path) -> str:
    return path.name[: -len(next(end for end in sorted(TABLE_ENDS, key=len, reverse=True) if _ends(path, (end,))))]


def read_table(path: Path) -> pd.DataFrame:
    """A table by its file's ending; every way in which a file cannot be read is said in one line."""
    import pandas as pd

    if not path.exists():
        raise InvalidArgument(f"no file {str(path)!r}; check the path")
    if _ends(path, (".xlsx", ".xls", ".xlsm", ".ods")):
        raise InvalidArgument(f"{str(path)!r} is a spreadsheet; save it as .csv and give that")
    if not _ends(path, TABLE_ENDS):
        raise InvalidArgument(f"{str(path)!r} is no table fedtailor reads; give a {', '.join(TABLE_ENDS)} file")
    try:
        frame = _read_parquet(path) if _ends(path, (".parquet",)) else _read_text(path)
    except InvalidData:
        raise
    except UnicodeDecodeError as error:
        raise InvalidData(f"{str(path)!r} is not UTF-8 text (byte {error.object[error.start]:#x}); save it as UTF-8") from error
    except pd.errors.EmptyDataError as error:
        raise InvalidData(f"{str(path)!r} is empty; give a file with a header and rows") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InvalidData(f"{str(path)!r} cannot be read as a table: {_parse_error(error)}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidData(f"{str(path)!r} is no complete gzip file ({one_line(error)}); compress it again") from error
    except ImportError as error:
        raise InvalidArgument("reading .parquet needs pyarrow; install fedtailor[data], or save the table as .csv") from error
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidData(f"{str(path)!r} cannot be read ({one_line(error)}); check the file or save it again") from error
    if not len(frame):
        raise InvalidData(f"{str(path)!r} has a header but no rows; give a file with rows")
    return frame


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)


def _read_text(path: Path) -> pd.DataFrame:
    import pandas as pd

    with gzip.open(path) if _ends(path, (".gz",)) else path.open("rb") as file:
        head = file.read(4096)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InvalidData(f"{str(path)!r} is UTF-16 text; save it as UTF-8")
    if b"\0" in head:
        raise InvalidData(
            f"{str(path)!r} is not text; give a table saved as text, or name the file by what it is (.csv.gz, .parquet)"
        )
    sep = "\t" if _ends(path, (".tsv", ".tsv.gz")) else ","
    # pandas would rename a second column of the same name, so the header is read apart
    header = pd.read_csv(path, sep=sep, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0].tolist()
    named = [name for name in header if name.strip()]
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise InvalidData(f"{str(path)!r} has two columns called {shown(twice)}; rename one of them")
    if len(header) == 1 and re.search(r"[;\t|,]", header[0]):
        mark = next(mark for mark in ";\t|," if mark in header[0])
        raise InvalidData(f"{str(path)!r} seems to be separated by {mark!r}; save it with {sep!r} between the values")
    return _parse(path, sep)


def _parse(path: Path, sep: str) -> pd.DataFrame:
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        warnings.simplefilter("error", pd.errors.DtypeWarning)
        try:
            return pd.read_csv(path, sep=sep, index_col=False)
        except pd.errors.DtypeWarning:
            # a column's type was guessed piece by piece, and differently: read it as one
            return pd.read_csv(path, sep=sep, index_col=False, low_memory=False)


def _parse_error(error: Exception) -> str:
    """What pandas says about a malformed file, in our words where we know it."""
    said = one_line(error)
    if match := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", said):
        return f"line {match[2]} has {match[3]} values but the header has {match[1]}; fix it (quote a value that holds a comma)"
    if match := re.search(r"EOF inside string starting at row (\d+)", said):
        return f"a quote opened in line {int(match[1]) + 1} is never closed; close it"
    if "Length of header" in said:
        return "line 2 has more values than the header has names; name every column"
    return f"{said}; check the file or save it again"


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files and folders, hidden ones left out, in order of their names."""
    seen = sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)
    return [entry for entry in seen if entry.is_file()], [entry for entry in seen if entry.is_dir()]


# -- a table ------------------------------------------------------------------------------------------------------------


def _build(source: Source, label: str, options: Options) -> Federation:
    """The federation of a table: rows and clients first, then what the training rows say of the columns."""
    table, where = source.table, source.where
    if not table:
        raise InvalidData("the table has no columns; give one with a header")
    used = _used(table, source.client, label, options)
    if not len(table[label]):
        raise InvalidData("the table has no rows; give one with rows")
    target = _target(label, table[label], options.task, where)
    lost = {"client": source.owner.missing, "label": target.missing}
    notes = [f"{int(gap.sum()):,} rows without a {what} were left out." for what, gap in lost.items() if gap.any()]
    rows = np.flatnonzero(~(source.owner.missing | target.missing))
    if not len(rows):
        raise InvalidData(f"no row has both a client and the label {shown(label)}; check the two columns")
    raws, left = _read_features({column: table[column] for column in used}, rows, options, where)
    rows, said = _handle_missing(raws, rows, options.missing)
    notes += said
    given = source.given
    if options.split is not None:
        given = _given_parts(options.split, table[options.split], rows, where)
    elif given is not None:
        given = given[rows]
    layout = lay_out(source.owner, target, rows, given, options)
    columns, constant = _fit_columns(raws, layout, options)
    left |= constant
    if not columns:
        raise InvalidData(f"no column can be used as a feature ({_reasons(left) or 'there is none'}); give other columns")
    y, center, spread = _finish_target(label, target, layout, options)
    moments = _moments(columns, raws, layout) if options.standardize == "client" else None
    x = _encode(columns, [raws[column.name] for column in columns], layout, moments)
    schema = Schema(
        columns=tuple(columns),
        client=source.client,
        label=label,
        kind=target.kind,
        classes=target.classes,
        standardize=options.standardize,
        clients={} if moments is None else _by_client(layout.names, moments),
        label_mean=center,
        label_scale=spread,
    )
    notes += [*_column_notes(columns, raws, layout, left), _scale_note(options)]
    return _federation(x, y, target, layout, source.name, schema, source.recipe, _task_note(label, target, options), notes)


def _federation(
    x: Features,
    y: NDArray[Any],
    target: Target,
    layout: Layout,
    name: str,
    schema: Schema | None,
    recipe: Mapping[str, Any] | None,
    task: str,
    notes: Sequence[str],
) -> Federation:
    splits = layout.splits(x, y)
    size = f"{len(layout.rows):,} rows of {len(layout.names):,} clients."
    return Federation(
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        names=layout.names,
        kind=target.kind,
        labels=len(target.classes),
        name=name,
        classes=target.classes,
        schema=schema,
        notes=(size, task, *_class_notes(target, layout), *layout.notes, *notes),
        recipe=recipe,
    )


def _used(table: Table, client: str, label: str, options: Options) -> list[str]:
    """The columns to learn from, in the table's order or as asked."""
    roles = {"client": client or None, "label": label, "split": options.split}
    special = {role: column for role, column in roles.items() if column is not None}
    for role, column in special.items():
        _check_known(table, column, f"{role} column")
    if len(set(special.values())) < len(special):
        raise InvalidArgument(f"the split column {shown(options.split)} is also the client or the label; name another column")
    for column in options.drop:
        _check_known(table, column, "column to drop")
    if options.features is None:
        return [column for column in table if column not in special.values() and column not in options.drop]
    for column in options.features:
        _check_known(table, column, "feature column")
        for role, other in special.items():
            if column == other:
                raise InvalidArgument(
                    f"column {shown(column)} is the {role} and cannot be a feature too; take it out of features"
                )
    return [column for column in dict.fromkeys(options.features) if column not in options.drop]


def _check_known(table: Table, column: str, what: str) -> None:
    if column not in table:
        near = difflib.get_close_matches(str(column), list(table), 1)
        hint = f"did you mean {shown(near[0])}?" if near else f"the columns are {listed(table, 20)}"
        raise InvalidArgument(f"there is no {what} {shown(column)}; {hint}")


def _target(label: str, values: pd.Series[Any], task: str | None, where: Where) -> Target:
    """Classes or quantities: as told, or by what the column looks like."""
    raw = read_column(label, values, "numeric" if task == "regression" else None, where, words=MOST_CLASSES)
    missing = raw.missing
    if raw.kind == "date":
        raise InvalidData(f"the label {shown(label)} holds dates; give numbers to predict (for instance days) or classes")
    check_finite(label, raw, where=where)
    present = raw.values[~missing] if missing.any() else raw.values
    if not len(present):
        return Target("classification", np.zeros(len(missing), np.int64), missing, (), "")
    decimals = raw.kind == "numeric" and values.dtype.kind not in "iu" and bool((present != np.floor(present)).any())
    quantity = task == "regression" or (decimals and task is None)
    coded = raw if raw.kind == "category" or quantity else read_column(label, values, "category", where)
    kind, why = (task, "as asked") if task is not None else _guess(raw.kind, decimals, len(coded.texts), len(present))
    if kind == "regression":
        if present.min() == present.max():
            raise InvalidData(
                f"the label {shown(label)} is {text(present[0])} in every row; there is nothing to predict, check --label"
            )
        return Target(kind, raw.values, missing, (), why)
    hint = ", or use --task regression" if raw.kind == "numeric" else ""
    return _class_target(f"the label {shown(label)}", coded, why, hint)


def _class_target(what: str, coded: Raw, why: str, hint: str = "") -> Target:
    """Class numbers in the order of the classes' names."""
    missing = coded.missing
    counts = tally(coded.values, len(coded.texts))
    order = [i for i in _in_order(coded.texts) if counts[i]]
    classes = tuple(coded.texts[i] for i in order)
    if len(classes) < 2:
        raise InvalidData(f"{what} is {shown(classes[0])} in every row; there is nothing to predict, check --label")
    if len(classes) > 2 and 2 * len(classes) > counts.sum():
        raise InvalidData(
            f"{what} has {len(classes):,} classes in {counts.sum():,} rows, too few of each to learn; check --label{hint}"
        )
    number = np.full(len(coded.texts) + 1, -1, np.int64)
    number[order] = np.arange(len(order))
    return Target("classification", number[coded.values], missing, classes, why)


def _guess(kind: str, decimals: bool, distinct: int, rows: int) -> tuple[str, str]:
    """The task, and why it is taken to be that."""
    if kind != "numeric":
        return "classification", "it holds true and false" if kind == "bool" else "it holds words"
    if decimals:
        return "regression", "it holds numbers with decimals"
    if distinct <= 2 or (distinct <= MOST_CLASSES and rows >= ROWS_PER_CLASS * distinct):
        return "classification", f"it holds {distinct} different whole numbers"
    return "regression", f"it holds {distinct:,} different whole numbers in {rows:,} rows"


def _in_order(texts: Sequence[str]) -> list[int]:
    """Positions in sorted order: by number if all are numbers, else by text."""
    numbers = as_numbers(texts)
    if np.isnan(numbers).any():
        return sorted(range(len(texts)), key=lambda i: texts[i])
    # long whole numbers that are one float64 still differ as integers
    whole = [int(t) if re.fullmatch(r"-?\d{1,4000}", t) else 0 for t in texts]
    return sorted(range(len(texts)), key=lambda i: (numbers[i], whole[i], texts[i]))


def _read_features(table: Table, rows: Ints, options: Options, where: Where) -> tuple[dict[str, Raw], dict[str, str]]:
    """The columns as read, and those left out with the reason."""

    def read(name: str) -> Raw | str:
        if options.features is None and re.fullmatch(r"Unnamed: \d+", name):
            return "no name; most often the row number that another program wrote"
        raw = read_column(name, table[name], None, where)
        check_finite(name, raw, rows, where)
        values = at(raw.values, rows)
        if raw.kind != "category":
            return "empty" if bool(np.isnan(values).all()) else raw
        counts = tally(values, len(raw.texts))
        distinct, present = np.count_nonzero(counts), counts.sum()
        if distinct == present > 1 or (distinct > MOST_CATEGORIES and 2 * distinct > present):
            return "text that differs in (almost) every row"
        return raw if present else "empty"

    read_all = dict(zip(table, _each(read, list(table), len(rows)), strict=True))
    left = {name: raw for name, raw in read_all.items() if isinstance(raw, str)}
    return {name: raw for name, raw in read_all.items() if isinstance(raw, Raw)}, left


def _handle_missing(raws: Mapping[str, Raw], rows: Ints, missing: str) -> tuple[Ints, list[str]]:
    gaps = {name: at(raw.missing, rows) for name, raw in raws.items()}
    counts = {name: np.count_nonzero(gap) for name, gap in gaps.items() if gap.any()}
    if not counts:
        return rows, []
    what = ", ".join(f"{shown(name)} ({count:,})" for name, count in list(counts.items())[:8])
    what += f" and {len(counts) - 8} more columns" if len(counts) > 8 else ""
    if missing == "refuse":
        raise InvalidData(f"values are missing in {what}; fill them in, use --missing fill or drop, or --drop the columns")
    if missing == "fill":
        return rows, [
            f"Missing values in {what} were filled: numbers with the median of the training rows (and a feature that says so "
            f"where at least 1 % are missing), words with the category {MISSING!r}."
        ]
    kept = rows[~np.logical_or.reduce([gaps[name] for name in counts])]
    if not len(kept):
        raise InvalidData(f"every row misses a value in {what}; use --missing fill, or --drop the emptiest columns")
    return kept, [f"{len(rows) - len(kept):,} rows with missing values in {what} were left out."]


def _given_parts(column: str, values: pd.Series[Any], rows: Ints, where: Where) -> NDArray[np.int8]:
    """The part of every row of ``rows``, as its split column says."""
    raw = read_column(column, values, "category", where)
    parts = np.array([PART_OF.get(t.strip().lower(), -1) for t in raw.texts] + [-1], np.int8)[raw.values[rows]]
    if (parts < 0).any():
        row = int(rows[np.flatnonzero(parts < 0)[0]])
        value = shown(raw.texts[raw.values[row]]) if raw.values[row] >= 0 else "nothing"
        raise InvalidData(f"the split column {shown(column)} holds {value} in {where(row)}; use train, val or test")
    return parts


# -- who has which rows --------------------------------------------------------------------------------------------------


def lay_out(owner: Raw, target: Target, rows: Ints, given: NDArray[np.int8] | None, options: Options) -> Layout:
    """Clients in order, their rows in parts: as ``given``, or drawn class by class."""
    codes = at(owner.values, rows)
    counts = np.bincount(codes, minlength=len(owner.texts))
    order, notes = _choose_clients(owner, codes, counts, given, options)
    names = tuple(owner.texts[i] for i in order)
    number = np.full(len(owner.texts), -1, np.int64)
    number[order] = np.arange(len(order))
    client = number[codes]
    if len(order) < np.count_nonzero(counts):
        kept = client >= 0
        rows, client, given = rows[kept], client[kept], None if given is None else given[kept]
    clients = len(names)
    by_client = stable_order(client, clients)
    if given is None:
        values, strata = target.strata
        sizes = np.bincount(client, minlength=clients)
        part = draw_all(sizes, at(values, rows)[by_client], names, strata, options.shares, options.seed)
    else:
        part = given[by_client]
    # rows sorted by client stay so within a part: a part's places are consecutive
    place, start, offsets = np.empty_like(client), 0, []
    for which in range(int(part.max()) + 1):
        mine = by_client[part == which]
        place[mine] = np.arange(start, start + len(mine))
        start += len(mine)
        offsets.append(np.concatenate([[0], np.cumsum(np.bincount(client[mine], minlength=clients))]).astype(np.int64))
    in_order = np.empty_like(part)
    in_order[by_client] = part
    return Layout(names, rows, client, in_order, place, tuple(offsets), notes)


def _choose_clients(
    owner: Raw, codes: Ints, counts: Ints, given: NDArray[np.int8] | None, options: Options
) -> tuple[list[int], tuple[str, ...]]:
    """The clients that take part, in order; those that cannot are refused, or left out where ``min_samples`` allows it."""
    order = [i for i in _in_order(owner.texts) if counts[i]]
    need = len(options.shares) if given is None else 1
    parted = np.ones(len(counts), bool)
    if given is not None:
        parts = (0, 1, 2) if (given == 2).any() else (0, 1)
        parted = np.all([np.bincount(codes[given == part], minlength=len(counts)) > 0 for part in parts], 0)
    notes: tuple[str, ...] = ()
    if options.min_samples is not None:
        least = options.min_samples
        gone = [owner.texts[i] for i in order if counts[i] < least or not parted[i]]
        order = [i for i in order if counts[i] >= least and parted[i]]
        if not order:
            also = " and some in every part" if given is not None else ""
            raise InvalidData(f"no client has {least} rows{also} (the largest has {counts.max()}); use a smaller --min-samples")
        if gone:
            also = " or none in a part" if given is not None else ""
            notes = (f"{len(gone):,} clients with fewer than {least} rows{also} were left out: {listed(gone)}.",)
    if len(order) == 1:
        only = shown(owner.texts[order[0]])
        raise InvalidData(f"there is one client, {only}; federated learning needs two or more, check --client and --min-samples")
    if counts[order].sum() < 2 * len(order):
        raise InvalidData(
            f"there are {len(order):,} clients in {counts[order].sum():,} rows, almost one per row; check --client, or use "
            f"--min-samples {need} to leave out the small ones"
        )
    small = [owner.texts[i] for i in order if counts[i] < need]
    if small:
        raise InvalidData(
            f"clients with fewer than the {need} rows that {', '.join(PARTS[:need])} need: {listed(small)}; "
            f"use --min-samples {need} to leave them out"
        )
    bare = [owner.texts[i] for i in order if not parted[i]]
    if bare:
        raise InvalidData(
            f"clients without rows in a part: {listed(bare)}; give them some, or use --min-samples 1 to leave them out"
        )
    return order, notes


def draw_all(
    sizes: Ints, stratum: Ints, names: Sequence[str], strata: Sequence[str], shares: Sequence[float], seed: int
) -> NDArray[np.int8]:
    """``draw_parts`` on some clients at a time: they do not depend on each other, and their rows stay in the cache."""
    ends = np.cumsum(sizes)
    firsts = np.unique(np.searchsorted(ends, np.arange(0, int(ends[-1]), 2 * BLOCK), "right"))
    bounds = [*firsts.tolist(), len(sizes)]

    def some(i: int) -> NDArray[np.int8]:
        a, b = bounds[i], bounds[i + 1]
        mine = stratum[int(ends[a] - sizes[a]) : int(ends[b - 1])]
        return draw_parts(sizes[a:b], mine, names[a:b], strata, shares, seed)

    return np.concatenate(_each(some, range(len(firsts)), len(stratum)))


def draw_parts(
    sizes: Ints, stratum: Ints, names: Sequence[str], strata: Sequence[str], shares: Sequence[float], seed: int
) -> NDArray[np.int8]:
    """The part of every row, at random by (seed, client's name, place among the client's rows): nobody else's rows matter.

    Rows come client after client, ``sizes`` of each. A client's rows of a class are shuffled and spread evenly over [0, 1);
    cutting there keeps the classes' shares in every part and gives every part a row.
    """
    total, kinds = int(sizes.sum()), len(strata)
    keys = np.fromiter((rng.purpose(name) for name in names), np.uint64, len(names))
    group = np.repeat(np.arange(len(names)) * kinds, sizes) + stratum
    luck = rng.mix(np.repeat(rng.mix(seed, rng.purpose("split"), keys), sizes), _ranks(sizes)) >> np.uint64(40)
    shuffled = sort_by(group, luck)
    present, counts = np.unique(group, return_counts=True) if len(names) * kinds > total else _counted(group)
    labels = np.fromiter((rng.purpose(name) for name in strata), np.uint64, kinds)
    shift = rng.mix(seed, rng.purpose("place"), keys[present // kinds], labels[present % kinds]) / 2.0**64
    spot = (_ranks(counts) + np.repeat(shift, counts)) * np.repeat(2.0**24 / counts, counts)
    spread = shuffled[sort_by(np.repeat(present // kinds, counts), np.minimum(spot, 2**24 - 1).astype(np.uint64))]
    rank = _ranks(sizes)
    part = np.zeros(total, np.int8)
    for i, share in enumerate(np.cumsum(shares)[:-1] / sum(shares)):
        cut = np.clip(np.round(share * sizes).astype(np.int64), i + 1, sizes - len(shares) + i + 1)
        part += rank >= np.repeat(cut, sizes)
    out = np.empty(total, np.int8)
    out[spread] = part
    return out


def _ranks(sizes: Ints) -> Ints:
    """0, 1, ... within each of consecutive groups."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def tally(codes: NDArray[Any], count: int) -> Ints:
    """How often each code below ``count`` occurs; -1 does not count."""
    return np.bincount(codes[codes >= 0] if codes.min(initial=0) < 0 else codes, minlength=count)


def at(values: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """``values[rows]`` for increasing rows, without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[rows]


def _counted(codes: Ints) -> tuple[Ints, Ints]:
    counts = np.bincount(codes)
    present = np.flatnonzero(counts)
    return present, counts[present]


def stable_order(codes: Ints, count: int) -> Ints:
    """A stable argsort of codes below ``count``."""
    # NumPy sorts 16-bit integers by radix, ten times faster
    return np.argsort(codes.astype(np.uint16) if count <= 2**16 else codes, kind="stable")


def sort_by(major: Ints, minor: NDArray[np.uint64]) -> Ints:
    """Positions sorted by ``major``, then by ``minor`` (24 bits), then by position."""
    low = max(len(major) - 1, 1).bit_length()
    if int(major.max(initial=0)).bit_length() + 24 + low > 64:
        return np.lexsort((minor, major))
    # one word holds all three, and sorting words is several times faster than an argsort
    word = (major.astype(np.uint64) << np.uint64(24 + low)) | (minor << np.uint64(low)) | np.arange(len(major), dtype=np.uint64)
    word.sort()
    return (word & np.uint64(2**low - 1)).astype(np.int64)


# -- features --------------------------------------------------------------------------------------------------------------


def _each(do: Callable[[T], U], items: Sequence[T], rows: int) -> list[U]:
    """``do`` on every item, on all cores where the rows make it worth it; NumPy lets go of the interpreter in its loops."""
    if rows < 100_000:
        return [do(item) for item in items]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(do, items))


def _fit_columns(raws: Mapping[str, Raw], layout: Layout, options: Options) -> tuple[list[Column], dict[str, str]]:
    """What the training rows say of every column; a column that says nothing is left out."""
    train, scaled = layout.train, options.standardize != "none"
    fits = _each(lambda item: _fit(item[0], item[1], train, scaled), list(raws.items()), len(layout.rows))
    left = {name: fit for name, fit in zip(raws, fits, strict=True) if isinstance(fit, str)}
    return [fit for fit in fits if isinstance(fit, Column)], left


def _fit(name: str, raw: Raw, train: Ints, scaled: bool) -> Column | str:
    """The column as fitted to the training rows, or why it is left out."""
    values = raw.values[train]
    if raw.kind == "category":
        categories = _categories(raw.texts, values)
        return Column(name, raw.kind, categories=categories) if len(categories) > 1 else "the same in every training row"
    gap = np.isnan(values)
    some = bool(gap.any())
    seen = values[~gap] if some else values
    if not len(seen):
        return "empty in every training row"
    indicator = some and bool(gap.mean() >= INDICATOR_SHARE)
    if seen.min() == seen.max() and not indicator:
        return "the same in every training row"
    if raw.kind == "bool":
        return Column(name, raw.kind, fill=float(seen.mean() > 0.5), has_indicator=indicator)
    origin = float(seen.min()) if raw.kind == "date" else 0.0
    if origin:
        values, seen = values - origin, seen - origin
    with np.errstate(over="ignore", invalid="ignore"):
        fill = median(seen)
        filled = np.where(gap, fill, values) if some else values
        mean, scale = _pooled(filled) if scaled else (0.0, 1.0)
    if not np.isfinite([fill, mean, scale]).all():
        raise InvalidData(f"column {shown(name)} holds numbers too large to average; rescale it or --drop it")
    return Column(name, raw.kind, fill, indicator, origin=origin, mean=mean, scale=scale)


def median(values: Floats) -> float:
    """The median; of many values, only those between two quantiles of a sample are sorted."""
    half = [(len(values) - 1) // 2, len(values) // 2]
    if len(values) > 100_000:
        sample = np.sort(values[:: len(values) // 1000])
        low, high = sample[[int(0.45 * len(sample)), int(0.55 * len(sample))]]
        below = int(np.count_nonzero(values < low))
        middle = values[(values >= low) & (values <= high)]
        if below <= half[0] and half[1] < below + len(middle):
            values, half = middle, [half[0] - below, half[1] - below]
    return float(np.partition(values, half)[half].mean())


def _pooled(values: Floats) -> tuple[float, float]:
    """Mean and scale; a scale of nothing but rounding counts as 1."""
    mean = float(values.mean())
    scale = float(values.std())
    return mean, 1.0 if scale <= ROUNDING * abs(mean) else scale


def _categories(texts: Sequence[str], codes: NDArray[Any]) -> tuple[str, ...]:
    """The most frequent texts of the training rows, ``other`` for the rest of them and ``missing`` where some are."""
    counts = tally(codes, len(texts))
    seen = sorted(np.flatnonzero(counts).tolist(), key=lambda i: (-counts[i], texts[i]))
    kept = {texts[i] for i in seen[:MOST_CATEGORIES]}
    if len(seen) > MOST_CATEGORIES:
        kept.add(OTHER)
    if counts.sum() < len(codes):
        kept.add(MISSING)
    return tuple(sorted(kept))


def _moments(columns: Sequence[Column], raws: Mapping[str, Raw], layout: Layout) -> list[tuple[Floats, Floats]]:
    """(mean, scale) of every client's own training rows, [clients] each, for every column."""
    client = layout.client[layout.part == 0]
    sizes = np.diff(layout.offsets[0])

    def own(column: Column) -> tuple[Floats, Floats]:
        if column.kind not in ("numeric", "date"):
            return np.zeros(len(sizes)), np.ones(len(sizes))
        values = column.prepare(raws[column.name])[layout.train]
        values = np.where(np.isnan(values), column.fill, values)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.bincount(client, values, len(sizes)) / sizes
            scale = np.sqrt(np.bincount(client, (values - mean[client]) ** 2, len(sizes)) / sizes)
        return mean, np.where(scale <= ROUNDING * np.abs(mean), 1.0, scale)

    return _each(own, columns, len(layout.rows))


def _by_client(names: Sequence[str], moments: Sequence[tuple[Floats, Floats]]) -> dict[str, tuple[tuple[float, float], ...]]:
    pairs = np.stack([np.stack(pair, 1) for pair in moments], 1).tolist()  # [clients, columns, 2]
    return {name: tuple((mean, scale) for mean, scale in own) for name, own in zip(names, pairs, strict=True)}


def _encode(
    columns: Sequence[Column], raws: Sequence[Raw], layout: Layout, moments: Sequence[tuple[Floats, Floats]] | None
) -> Features:
    """The features of all rows, sorted by part and client.

    Blocks are read in the table's order, where a column's values are neighbours, and whole rows are written to their places.
    """
    width = sum(len(column.names()) for column in columns)
    prepared = [column.prepare(raw) for column, raw in zip(columns, raws, strict=True)]
    pooled = [(column.mean, column.scale) for column in columns]
    total = len(layout.rows)
    whole = all(len(values) == total for values in prepared)
    out = np.empty((total, width), np.float32)
    whole_rows = _as_items(out)

    def block(start: int) -> None:
        here = slice(start, start + BLOCK)
        client, rows = layout.client[here], layout.rows[here]
        own = pooled if moments is None else [(mean[client], scale[client]) for mean, scale in moments]
        features = np.zeros((len(client), width), np.float32)
        write_block(columns, [values[here] if whole else values[rows] for values in prepared], features, own)
        whole_rows[layout.place[here]] = _as_items(features)

    _each(block, range(0, total, BLOCK), total)
    return out


def _as_items(rows: Features) -> NDArray[Any]:
    """Every row as one item: NumPy puts items in their places three times faster than rows."""
    return rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]


def _finish_target(label: str, target: Target, layout: Layout, options: Options) -> tuple[NDArray[Any], float, float]:
    """The target of every row, sorted by part and client, and what it was standardised by."""
    values = at(target.values, layout.rows)
    if target.kind == "classification":
        return layout.sort(values), 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        center, spread = _pooled(target.values[layout.train]) if options.standardize_label else (0.0, 1.0)
        y = layout.sort(((values - center) / spread).astype(np.float32))
    if not np.isfinite(y).all():
        raise InvalidData(f"the label {shown(label)} holds numbers too large for 32-bit targets; rescale it")
    return y, center, spread


# -- what is said ----------------------------------------------------------------------------------------------------------


def _task_note(label: str, target: Target, options: Options) -> str:
    """The task, why, and in which units its errors are."""
    head = f"The task is {target.kind}: label {shown(label)}, " + ("as asked" if options.task else f"because {target.why}")
    if target.kind == "classification":
        return f"{head}; {len(target.classes)} classes: {listed(target.classes, 10)}."
    if options.standardize_label:
        return f"{head}; targets are standardised with the pooled training mean and scale, and errors are in those units."
    return f"{head}; targets are kept in their own units."


def _class_notes(target: Target, layout: Layout) -> list[str]:
    if target.kind != "classification":
        return []
    trained = np.bincount(target.values[layout.train], minlength=len(target.classes))
    absent = [name for name, count in zip(target.classes, trained, strict=True) if not count]
    return [f"No training row has the class {listed(absent)}; it cannot be learned."] if absent else []


def _reasons(left: Mapping[str, str]) -> str:
    return "; ".join(f"{shown(name)}: {why}" for name, why in list(left.items())[:8]) + ("; ..." if len(left) > 8 else "")


def _column_notes(columns: Sequence[Column], raws: Mapping[str, Raw], layout: Layout, left: Mapping[str, str]) -> list[str]:
    width = sum(len(column.names()) for column in columns)
    notes = [f"{len(columns)} columns became {width} features: {listed((column.name for column in columns), 20)}."]
    if left:
        notes.append(f"Columns left out: {_reasons(left)}.")
    for column in columns:
        raw = raws[column.name]
        if column.kind == "date":
            first = np.datetime64(int(np.floor(column.origin)), "D")
            notes.append(f"Dates in {shown(column.name)} are days since {first}, the earliest in the training rows.")
        elif column.kind == "category":
            notes += _category_notes(column, raw, layout)
        elif _looks_like_a_counter(raw.values):
            notes.append(f"Column {shown(column.name)} grows from row to row; if it only numbers the rows, --drop it.")
    return notes


def _category_notes(column: Column, raw: Raw, layout: Layout) -> list[str]:
    seen = tally(raw.values[layout.train], len(raw.texts)) > 0
    all_seen = tally(at(raw.values, layout.rows), len(raw.texts)) > 0
    name, new = shown(column.name), int((all_seen & ~seen).sum())
    notes = []
    if OTHER in column.categories and int(seen.sum()) > MOST_CATEGORIES:
        notes.append(
            f"{name} has {int(seen.sum()):,} values; the {MOST_CATEGORIES} most frequent are kept, the rest is {OTHER!r}."
        )
    if new:
        fate = f"count as {OTHER!r}" if OTHER in column.categories else "are 0 in all its features"
        notes.append(f"{new:,} values of {name} that no training row has {fate}.")
    return notes


def _looks_like_a_counter(values: Floats) -> bool:
    return len(values) >= 20 and bool((values[1:20] > values[:19]).all()) and bool((np.diff(values) == 1).all())


def _scale_note(options: Options) -> str:
    return {
        "pooled": "Numbers and dates are standardised with the mean and scale of all clients' training rows.",
        "client": "Numbers and dates are standardised with each client's own training mean and scale (a newcomer's: the pooled).",
        "none": "Features are not standardised.",
    }[options.standardize]


# -- folders ---------------------------------------------------------------------------------------------------------------


def _tables_of(folder: Path) -> list[Entry]:
    """(file, client, part) of every table in a client's folder."""
    files = [f for f in _entries(folder)[0] if _ends(f, TABLE_ENDS)]
    if not files:
        raise InvalidData(f"the folder {folder.name!r} holds no table; add one or take the folder away")
    parts = [_stem(f).lower() if _stem(f).lower() in PART_OF else None for f in files]
    if any(parts) and not all(parts):
        odd = files[parts.index(None)].name
        raise InvalidData(
            f"the folder {folder.name!r} holds {odd!r} beside train and test files; name all files by part, or none"
        )
    return [(f, folder.name, part) for f, part in zip(files, parts, strict=True)]


def _from_tables(entries: Sequence[Entry], label: str | None, options: Options, name: str) -> Federation:
    """One table from those of all clients."""
    if label is None:
        raise InvalidArgument("tables need a label; give label= (on the command line --label COLUMN)")
    parted = [part is not None for _, _, part in entries]
    if any(parted) and not all(parted):
        odd = entries[parted.index(False)][1]
        raise InvalidData(f"client {odd!r} has no train and test files but others do; split all clients or none")
    if any(parted) and options.split is not None:
        raise InvalidArgument(f"the files are named by part, so split={options.split!r} says it twice; leave it out")
    pieces = [columns_of(read_table(path)) for path, _, _ in entries]
    first = list(pieces[0])
    for (path, _, _), piece in zip(entries, pieces, strict=True):
        absent, extra = [c for c in first if c not in piece], [c for c in piece if c not in first]
        if absent or extra:
            wrong = f"lacks the column {listed(absent)} of" if absent else f"has a column {listed(extra)} that is not in"
            raise InvalidData(f"{_short(path)!r} {wrong} {_short(entries[0][0])!r}; give all files the same columns")
    sizes = [len(piece[first[0]]) for piece in pieces]
    owner = _owner([who for _, who, _ in entries], sizes)
    given = np.repeat(np.array([PART_OF[part] for _, _, part in entries if part], np.int8), sizes) if any(parted) else None
    table = {column: _concatenated([piece[column] for piece in pieces]) for column in first}
    return _build(Source(table, owner, given, _rows_of([path for path, _, _ in entries], sizes), name, None), label, options)


def _owner(clients: Sequence[str], sizes: Sequence[int]) -> Raw:
    """Whose every row is, from the client and size of every piece."""
    names = list(dict.fromkeys(clients))
    return Raw("category", np.repeat([names.index(who) for who in clients], sizes), tuple(names))


def _rows_of(paths: Sequence[Path], sizes: Sequence[int]) -> Where:
    """How to speak of a row when the rows come from many files."""
    ends = np.cumsum(sizes)

    def where(row: int) -> str:
        file = int(np.searchsorted(ends, row, "right"))
        return f"row {row - int(ends[file]) + sizes[file] + 1} of {_short(paths[file])!r}"

    return where


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _concatenated(pieces: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
    """One column of many files; where their types differ, each cell keeps its own."""
    import pandas as pd
    from pandas.api import types

    kinds = {piece.dtype for piece in pieces}
    if len(kinds) == 1:
        return pd.concat(pieces, ignore_index=True)
    if all(types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind) for kind in kinds):
        return pd.Series(np.concatenate([piece.to_numpy(np.float64, na_value=np.nan) for piece in pieces]))
    # a file whose cells are all empty says nothing of the type
    return pd.Series(np.concatenate([piece.astype(object).to_numpy() for piece in pieces]), dtype=object)


def _from_arrays(paths: Sequence[Path], options: Options, name: str) -> Federation:
    """One .npz per client: x and y, or those of every part."""
    import pandas as pd

    loaded = [_load_arrays(path) for path in paths]
    pieces: list[tuple[Path, str, NDArray[Any], NDArray[Any]]] = []
    for path, arrays in zip(paths, loaded, strict=True):
        for part in ("",) if "x" in arrays else ("train", "test", "val"):
            end = f"_{part}" if part else ""
            if part == "val" and "x_val" not in arrays:
                continue
            x, y = arrays["x" + end], arrays["y" + end]
            _check_arrays(path, end, x, y)
            pieces.append((path, part, x, y.reshape(len(y))))
    first = pieces[0]
    for path, part, x, _ in pieces:
        if x.shape[1:] != first[2].shape[1:]:
            raise InvalidData(
                f"x in {path.name!r} has rows of shape {x.shape[1:]} but {first[0].name!r} has {first[2].shape[1:]}; "
                "all need the same"
            )
        if bool(part) != bool(first[1]):
            raise InvalidData(f"{path.name!r} and {first[0].name!r} differ in whether they are split; give all x_train, or none")
    sizes = [len(y) for _, _, _, y in pieces]
    where = _rows_of([path for path, _, _, _ in pieces], sizes)
    labels = _concatenated([pd.Series(y) for _, _, _, y in pieces])
    owner = _owner([path.stem for path, _, _, _ in pieces], sizes)
    given = np.repeat(np.array([PART_OF[part] for _, part, _, _ in pieces], np.int8), sizes) if first[1] else None
    x = np.concatenate([x for _, _, x, _ in pieces])
    return _arrays_federation(x, _target("y", labels, options.task, where), owner, given, options, name)


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidData(f"{path.name!r} cannot be read ({one_line(error)}); write it with numpy.savez") from error
    wanted = ("x", "y") if "x" in arrays or "y" in arrays else ("x_train", "y_train", "x_test", "y_test")
    absent = [key for key in (*wanted, *(("y_val",) if "x_val" in arrays else ())) if key not in arrays]
    if absent:
        raise InvalidData(
            f"{path.name!r} lacks {listed(absent)}; give x and y, or x_train, y_train, x_test, y_test (and x_val, y_val)"
        )
    return arrays


def _check_arrays(path: Path, end: str, x: NDArray[Any], y: NDArray[Any]) -> None:
    what = f"x{end} in {path.name!r}"
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise InvalidData(f"{what} has shape {x.shape} and type {x.dtype}; give numbers, rows by features")
    if y.ndim == 0 or y.size != len(y) or len(y) != len(x):
        raise InvalidData(f"{what} has {len(x)} rows but y{end} the shape {y.shape}; give one label per row")
    if not len(y):
        raise InvalidData(f"{what} has no rows; give it some or take the file away")


def _arrays_federation(
    x: NDArray[Any], target: Target, owner: Raw, given: NDArray[np.int8] | None, options: Options, name: str
) -> Federation:
    """Arrays are features as they stand."""
    rows = np.flatnonzero(~target.missing)
    notes = [f"{len(x) - len(rows):,} rows without a label were left out."] if len(rows) < len(x) else []
    if not len(rows):
        raise InvalidData("no row has a label; fill in y")
    layout = lay_out(owner, target, rows, None if given is None else given[rows], options)
    with np.errstate(over="ignore"):
        features = layout.sort(at(x, layout.rows).astype(np.float32))
    if not np.isfinite(features).all():
        bad = int(np.flatnonzero(~np.isfinite(features.reshape(len(features), -1)).all(1))[0])
        client = layout.names[int(layout.sort(layout.client)[bad])]
        raise InvalidData(f"x of client {shown(client)} is missing, infinite or too large somewhere; fill, replace or drop it")
    y, _, _ = _finish_target("y", target, layout, options)
    notes.append("Features are the arrays as they stand: not standardised.")
    return _federation(features, y, target, layout, name, None, None, _task_note("y", target, options), notes)


def _from_images(root: Path, folders: Sequence[Path], options: Options, name: str) -> Federation:
    """One folder per client, in it one folder of images per class."""
    paths: list[Path] = []
    for folder in folders:
        mine = [f for kind in _entries(folder)[1] for f in _entries(kind)[0] if _ends(f, IMAGE_ENDS)]
        if not mine:
            raise InvalidData(f"the folder {folder.name!r} of {str(root)!r} holds neither tables nor images by class; {LAYOUTS}")
        paths += mine
    x = _load_images(paths, options.image_size)
    owner = _owner([path.parent.parent.name for path in paths], [1] * len(paths))
    kinds = _owner([path.parent.name for path in paths], [1] * len(paths))
    target = _class_target("the folder of an image", kinds, "a folder is a class")
    return _arrays_federation(x, target, owner, None, options, name)


def _load_images(paths: Sequence[Path], size: int | tuple[int, int] | None) -> Features:
    """Images [rows, channels, height, width] with values in [0, 1]; in colour if any of them is."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidArgument("reading images needs pillow; install fedtailor[data]") from error
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    if size is not None and min(height, width) < 1:
        raise InvalidArgument(f"image_size={size!r} must be a number of pixels, or (height, width)")
    images = []
    for path in paths:
        try:
            with Image.open(path) as file:
                whole = file.convert("L" if file.mode in ("1", "L", "LA") else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidData(
                f"{_short(path)!r} is no image that can be read ({one_line(error)}); replace or remove it"
            ) from error
        images.append(whole if size is None else whole.resize((width, height)))
    for path, image in zip(paths, images, strict=True):
        if image.size != images[0].size:
            raise InvalidData(
                f"{_short(path)!r} has {image.width}x{image.height} pixels but {_short(paths[0])!r} has "
                f"{images[0].width}x{images[0].height}; give image_size= to resize them"
            )
    mode = "RGB" if any(image.mode == "RGB" for image in images) else "L"
    pixels = np.stack([np.asarray(image.convert(mode), np.uint8) for image in images])
    pixels = pixels[:, None] if mode == "L" else np.moveaxis(pixels, -1, 1)
    return np.ascontiguousarray(pixels, np.float32) / np.float32(255)
