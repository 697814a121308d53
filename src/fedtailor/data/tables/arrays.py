"""Folders of arrays: an .npz file per client, features used as they are."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Raw
from fedtailor.data.federation import Federation
from fedtailor.data.limits import check_archive
from fedtailor.data.tables.assembly import federation
from fedtailor.data.tables.codes import take_rows
from fedtailor.data.tables.features import finish_target
from fedtailor.data.tables.layout import PART_OF, lay_out
from fedtailor.data.tables.notes import task_note
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.pieces import category_column, concatenated, row_locator
from fedtailor.data.tables.target import Target, read_target
from fedtailor.data.words import listed, one_line, shown
from fedtailor.errors import InvalidArgument, InvalidData


def from_arrays(paths: Sequence[Path], options: TableOptions, name: str) -> Federation:
    """Read one .npz per client: x and y, or those of every part."""
    import pandas as pd

    loaded = [_load_arrays(path) for path in paths]
    pieces: list[tuple[Path, str, NDArray[Any], NDArray[Any]]] = []
    for path, arrays in zip(paths, loaded, strict=True):
        for part in ("",) if "x" in arrays else ("train", "test", "val"):
            suffix = f"_{part}" if part else ""
            if part == "val" and "x_val" not in arrays:
                continue
            x, y = arrays["x" + suffix], arrays["y" + suffix]
            _check_arrays(path, suffix, x, y)
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
    where = row_locator([path for path, _, _, _ in pieces], sizes)
    labels = concatenated([pd.Series(y) for _, _, _, y in pieces])
    owner = category_column([path.stem for path, _, _, _ in pieces], sizes)
    known_part = np.repeat(np.array([PART_OF[part] for _, part, _, _ in pieces], np.int8), sizes) if first[1] else None
    x = np.concatenate([x for _, _, x, _ in pieces])
    return from_features(x, read_target("y", labels, options.task, where), owner, known_part, options, name)


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (InvalidArgument, InvalidData):
        raise
    except (OSError, ValueError, EOFError, KeyError, MemoryError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidData(f"{path.name!r} cannot be read ({one_line(error)}); write it with numpy.savez") from error
    wanted = ("x", "y") if "x" in arrays or "y" in arrays else ("x_train", "y_train", "x_test", "y_test")
    absent = [key for key in (*wanted, *(("y_val",) if "x_val" in arrays else ())) if key not in arrays]
    if absent:
        raise InvalidData(
            f"{path.name!r} lacks {listed(absent)}; give x and y, or x_train, y_train, x_test, y_test (and x_val, y_val)"
        )
    return arrays


def _check_arrays(path: Path, suffix: str, x: NDArray[Any], y: NDArray[Any]) -> None:
    description = f"x{suffix} in {path.name!r}"
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise InvalidData(f"{description} has shape {x.shape} and type {x.dtype}; give numbers, rows by features")
    if y.ndim == 0 or y.size != len(y) or len(y) != len(x):
        raise InvalidData(f"{description} has {len(x)} rows but y{suffix} the shape {y.shape}; give one label per row")
    if not len(y):
        raise InvalidData(f"{description} has no rows; give it some or take the file away")


def from_features(
    x: NDArray[Any], target: Target, owner: Raw, known_part: NDArray[np.int8] | None, options: TableOptions, name: str
) -> Federation:
    """Make a federation of features that are used as they are."""
    rows = np.flatnonzero(~target.missing)
    notes = [f"{len(x) - len(rows):,} rows without a label were left out."] if len(rows) < len(x) else []
    if not len(rows):
        raise InvalidData("no row has a label; fill in y")
    layout = lay_out(owner, target, rows, None if known_part is None else known_part[rows], options)
    with np.errstate(over="ignore"):
        features = layout.sort(take_rows(x, layout.rows).astype(np.float32))
    if not np.isfinite(features).all():
        bad = int(np.flatnonzero(~np.isfinite(features.reshape(len(features), -1)).all(1))[0])
        client = layout.names[int(layout.sort(layout.client)[bad])]
        raise InvalidData(f"x of client {shown(client)} is missing, infinite or too large somewhere; fill, replace or drop it")
    y, _, _ = finish_target("y", target, layout, options)
    notes.append("Features are the arrays as they stand: not standardised.")
    return federation(features, y, target, layout, name, None, None, task_note("y", target, options), notes)
