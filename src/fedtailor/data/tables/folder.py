"""Folders: a table, an archive of arrays, or a folder of images by class, for every client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedtailor.data.columns import columns_of
from fedtailor.data.federation import Federation
from fedtailor.data.tables.arrays import from_arrays
from fedtailor.data.tables.assembly import Source, build
from fedtailor.data.tables.images import from_images
from fedtailor.data.tables.layout import PART_OF
from fedtailor.data.tables.options import Options
from fedtailor.data.tables.pieces import concatenated, owner_of, rows_of, short
from fedtailor.data.tables.read import LAYOUTS, TABLE_ENDS, ends, entries, read_table, stem
from fedtailor.data.words import listed
from fedtailor.errors import InvalidArgument, InvalidData

Entry = tuple[Path, str, str | None]  # a table, its client, its part


def from_folder(path: str | os.PathLike[str], label: str | None, options: Options) -> Federation:
    """See ``Federation.from_folder``."""
    root = Path(path)
    if not root.exists():
        raise InvalidArgument(f"no folder {str(root)!r}; check the path")
    if not root.is_dir():
        raise InvalidArgument(f"{str(root)!r} is a file; use Federation.from_table with client= and label=")
    files, folders = entries(root)
    tables = [f for f in files if ends(f, TABLE_ENDS)]
    arrays = [f for f in files if ends(f, (".npz",))]
    found = [what for what, some in (("tables", tables), (".npz files", arrays), ("folders", folders)) if some]
    if len(found) != 1:
        what = f"holds {' and '.join(found)}" if found else "holds no data"
        raise InvalidData(f"{str(root)!r} {what}; {LAYOUTS}")
    name = options.name or root.absolute().name
    recipe = {"data": str(root.absolute()), **({} if label is None else {"label": label}), **options.changed()}
    ignored = [f.name for f in files if f not in tables and f not in arrays]
    notes = (f"Files that hold no data were ignored: {listed(ignored)}.",) if ignored else ()
    if arrays:
        made = from_arrays(arrays, options, name)
    elif folders and not any(ends(f, TABLE_ENDS) for folder in folders for f in entries(folder)[0]):
        made = from_images(root, folders, options, name)
    else:
        listing: list[Entry] = [(f, stem(f), None) for f in tables]
        listing += [entry for folder in folders for entry in _tables_of(folder)]
        made = _from_tables(listing, label, options, name)
    return replace(made, recipe=recipe, notes=(*made.notes, *notes))


def _tables_of(folder: Path) -> list[Entry]:
    """(file, client, part) of every table in a client's folder."""
    files = [f for f in entries(folder)[0] if ends(f, TABLE_ENDS)]
    if not files:
        raise InvalidData(f"the folder {folder.name!r} holds no table; add one or take the folder away")
    parts = [stem(f).lower() if stem(f).lower() in PART_OF else None for f in files]
    if any(parts) and not all(parts):
        odd = files[parts.index(None)].name
        raise InvalidData(
            f"the folder {folder.name!r} holds {odd!r} beside train and test files; name all files by part, or none"
        )
    return [(f, folder.name, part) for f, part in zip(files, parts, strict=True)]


def _from_tables(listing: Sequence[Entry], label: str | None, options: Options, name: str) -> Federation:
    """One table from those of all clients."""
    if label is None:
        raise InvalidArgument("tables need a label; give label= (on the command line --label COLUMN)")
    parted = [part is not None for _, _, part in listing]
    if any(parted) and not all(parted):
        odd = listing[parted.index(False)][1]
        raise InvalidData(f"client {odd!r} has no train and test files but others do; split all clients or none")
    if any(parted) and options.split is not None:
        raise InvalidArgument(f"the files are named by part, so split={options.split!r} says it twice; leave it out")
    pieces = [columns_of(read_table(path)) for path, _, _ in listing]
    first = list(pieces[0])
    for (path, _, _), piece in zip(listing, pieces, strict=True):
        absent, extra = [c for c in first if c not in piece], [c for c in piece if c not in first]
        if absent or extra:
            wrong = f"lacks the column {listed(absent)} of" if absent else f"has a column {listed(extra)} that is not in"
            raise InvalidData(f"{short(path)!r} {wrong} {short(listing[0][0])!r}; give all files the same columns")
    sizes = [len(piece[first[0]]) for piece in pieces]
    owner = owner_of([who for _, who, _ in listing], sizes)
    given = np.repeat(np.array([PART_OF[part] for _, _, part in listing if part], np.int8), sizes) if any(parted) else None
    table = {column: concatenated([piece[column] for piece in pieces]) for column in first}
    return build(Source(table, owner, given, rows_of([path for path, _, _ in listing], sizes), name, None), label, options)
