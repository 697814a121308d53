"""Folders: a table, an archive of arrays, or a folder of images by class, for every client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.columns import columns_of
from fedtailor.data.federation import Federation
from fedtailor.data.keywords import keywords_of
from fedtailor.data.missing import added
from fedtailor.data.refit import Parts, refittable
from fedtailor.data.tables.arrays import from_arrays
from fedtailor.data.tables.assembly import Source, build, unmarked
from fedtailor.data.tables.images import from_images
from fedtailor.data.tables.layout import PART_OF
from fedtailor.data.tables.options import FolderOptions, TableOptions
from fedtailor.data.tables.pieces import category_column, concatenated, parent_and_name, row_locator
from fedtailor.data.tables.read import LAYOUTS, TABLE_ENDS, entries, has_ending, read_table, stem
from fedtailor.data.words import listed
from fedtailor.errors import InvalidArgument, InvalidData

Entry = tuple[Path, str, str | None]  # a table, its client, its part


@keywords_of(FolderOptions)
def from_folder(path: str | os.PathLike[str], *, label: str | None = None, **options: Any) -> Federation:
    """Read a folder with an entry per client: a table (``label`` names its column), a sub-folder of tables (named train,
    val and test to fix the split), a .npz file with x and y (or x_train, y_train, x_test, y_test), or a sub-folder with a
    folder of images per class (resized to ``image_size``). Tables are read as by ``from_table``; arrays and images are used
    as they are.
    """
    chosen = FolderOptions(**options)
    root = Path(path)
    if not root.exists():
        raise InvalidArgument(f"no folder {str(root)!r}; check the path")
    if not root.is_dir():
        raise InvalidArgument(f"{str(root)!r} is a file; use Federation.from_table with client= and label=")
    files, folders = entries(root)
    tables = [f for f in files if has_ending(f, TABLE_ENDS)]
    arrays = [f for f in files if has_ending(f, (".npz",))]
    contents = [content for content, paths in (("tables", tables), (".npz files", arrays), ("folders", folders)) if paths]
    if len(contents) != 1:
        raise InvalidData(f"{str(root)!r} holds {' and '.join(contents) or 'no data'}; {LAYOUTS}")
    name = chosen.name or root.absolute().name
    recipe = {"data": str(root.absolute()), **({} if label is None else {"label": label}), **chosen.changed()}
    ignored = [f.name for f in files if f not in tables and f not in arrays]
    notes = (f"Files that hold no data were ignored: {listed(ignored)}.",) if ignored else ()
    if arrays:
        federation = from_arrays(arrays, chosen, name)
    elif folders and not any(has_ending(f, TABLE_ENDS) for folder in folders for f in entries(folder)[0]):
        federation = from_images(root, folders, chosen, name)
    else:
        listing: list[Entry] = [(f, stem(f), None) for f in tables]
        listing += [entry for folder in folders for entry in _tables_of(folder)]
        federation = refittable(partial(_from_tables, listing, label, chosen, name))
    return replace(federation, recipe=recipe, notes=(*federation.notes, *notes))


def _tables_of(folder: Path) -> list[Entry]:
    """Return (file, client, part) of every table in a client's folder."""
    files = [f for f in entries(folder)[0] if has_ending(f, TABLE_ENDS)]
    if not files:
        raise InvalidData(f"the folder {folder.name!r} holds no table; add one or take the folder away")
    parts = [stem(f).lower() if stem(f).lower() in PART_OF else None for f in files]
    if any(parts) and not all(parts):
        odd = files[parts.index(None)].name
        raise InvalidData(
            f"the folder {folder.name!r} holds {odd!r} beside train and test files; name all files by part, or none"
        )
    return [(f, folder.name, part) for f, part in zip(files, parts, strict=True)]


def _from_tables(
    listing: Sequence[Entry],
    label: str | None,
    options: TableOptions,
    name: str,
    fit_to: frozenset[str] | None,
    parts: Parts | None,
) -> Federation:
    """Build a federation from one table that joins those of all clients, fitted to the rows of ``fit_to`` or of all; ``parts``
    says how its rows are split, where that is drawn elsewhere."""
    if label is None:
        raise InvalidArgument("tables need a label; give label= (on the command line --label COLUMN)")
    has_part = [part is not None for _, _, part in listing]
    if any(has_part) and not all(has_part):
        odd = listing[has_part.index(False)][1]
        raise InvalidData(f"client {odd!r} has no train and test files but others do; split all clients or none")
    if any(has_part) and options.split is not None:
        raise InvalidArgument(f"the files are named by part, so split={options.split!r} says it twice; leave it out")
    read = [
        unmarked(columns_of(read_table(path, (label,))), {label, options.split, options.row_weights}, options)
        for path, _, _ in listing
    ]
    pieces = [piece for piece, _ in read]
    first = list(pieces[0])
    for (path, _, _), piece in zip(listing, pieces, strict=True):
        absent, extra = [c for c in first if c not in piece], [c for c in piece if c not in first]
        if absent or extra:
            difference = f"lacks the column {listed(absent)} of" if absent else f"has a column {listed(extra)} that is not in"
            names = [parent_and_name(file) for file in (path, listing[0][0])]
            raise InvalidData(f"{names[0]!r} {difference} {names[1]!r}; give all files the same columns")
    sizes = [len(piece[first[0]]) for piece in pieces]
    owner = category_column([client for _, client, _ in listing], sizes)
    known_part = np.repeat(np.array([PART_OF[part] for _, _, part in listing if part], np.int8), sizes) if any(has_part) else None
    table = {column: concatenated([piece[column] for piece in pieces]) for column in first}
    where = row_locator([path for path, _, _ in listing], sizes)
    source = Source(
        table, owner, known_part if parts is None else parts, where, name, None, marked=added(marked for _, marked in read)
    )
    return build(source, label, options, fit_to)
