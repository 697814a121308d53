"""Federations by name: the registry, and ``load``, which opens named sets, tables, folders, shards and LEAF files."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedtailor.data.federation import Federation
from fedtailor.data.pool import PooledData, dealt
from fedtailor.data.readers import files, images, natural, shards, synthetic, text
from fedtailor.data.readers.leaf import leaf
from fedtailor.data.readers.npy import npy
from fedtailor.data.readers.public import with_public
from fedtailor.data.tables import from_folder, from_table
from fedtailor.data.tables.read import TABLE_ENDS as TABLES
from fedtailor.errors import InvalidArgument

Source = Callable[..., Federation]


def source(read: Callable[..., Any], finish: Callable[..., Federation], **defaults: Any) -> Source:
    """Return a source made of two steps: ``read`` reads a data set, ``finish`` makes a federation of it.

    It takes the options of both, those of ``finish`` with these defaults.
    """
    own = inspect.signature(read).parameters
    more = list(inspect.signature(finish).parameters.values())[1:]  # the first is what was read
    more = [p.replace(default=defaults.get(p.name, p.default)) for p in more]

    def load_source(**options: Any) -> Federation:
        read_options = {name: options.pop(name) for name in own if name in options}
        return finish(read(**read_options), **{**defaults, **options})

    keyword = inspect.Parameter.KEYWORD_ONLY
    # data_dir goes last: it is no property of the set
    ordered = sorted([*own.values(), *more], key=lambda p: p.name == "data_dir")
    load_source.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in ordered])  # type: ignore[attr-defined]
    load_source.__doc__ = read.__doc__
    return load_source


POOLED = (images.digits, images.mnist5k, images.fashion_mnist, images.emnist, images.cifar10, images.usps, images.pneumonia)
OWNED = (images.mnist, images.cifar100)  # they also have clients of their own (partition="natural"), hence no default number
SHIFTED = (images.pacs, images.office_caltech, images.digits_domains)


def _registry() -> dict[str, Source]:
    tables = (natural.schools, natural.exam, natural.chem97, natural.star, natural.insteval, natural.movielens)
    sites = (natural.tv16, natural.dialysis, natural.heart)
    made = (
        synthetic.clup_logistic,
        synthetic.clup_regression,
        synthetic.minimax_logistic,
        synthetic.clusters,
        synthetic.instances,
    )
    return {
        **{_name(read): source(read, dealt, clients=10) for read in POOLED},
        **{_name(read): source(read, dealt) for read in OWNED},
        **{_name(read): source(read, dealt, partition="domain") for read in SHIFTED},
        **{_name(read): source(read, natural.federation_of) for read in (*tables, *sites)},
        "shakespeare": text.shakespeare,
        **{_name(make): make for make in made},
    }


def _name(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", "-")


SOURCES: dict[str, Source] = _registry()
POOLS: dict[str, Callable[..., PooledData]] = {_name(read): read for read in (*POOLED, *OWNED, *SHIFTED)}
# written before a path, as in leaf:PATH
FORMATS: dict[str, Source] = {"leaf": leaf, "npy": source(npy, dealt), "text": text.folder, "shards": shards.from_shards}


@dataclass(frozen=True)
class Origin:
    """The source that a name leads to: a reader, the arguments that say where the rows lie, and the name that messages use.

    ``data`` is the name in the recipe of the federation; a reader of tables or folders writes the recipe itself.
    """

    read: Source
    shown: str
    place: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The options that the reader takes."""
        return {name: p for name, p in inspect.signature(self.read).parameters.items() if name not in self.place}


def load(name: str, *, public: str | None = None, **options: Any) -> Federation:
    """Load a federation: a set by name, a table (.csv, .tsv, .parquet), a directory, ``leaf:PATH``, ``npy:PATH``,
    ``text:PATH`` or ``shards:PATH``.

    ``public`` adds unlabelled rows that everyone may see: another set's images (``cifar100:5000``) or those of a .npy file.
    The other options are those of the set (``fedtailor data list``), or of ``from_table``, ``from_folder``, ``from_texts``.
    """
    origin = origin_of(name)
    _check(origin, options)
    fed = origin.read(**origin.place, **options)
    if origin.data is not None:
        recipe = {key: str(files.root(value)) if key == "data_dir" and value else value for key, value in options.items()}
        fed = replace(fed, recipe={"data": origin.data, **recipe})
    return fed if public is None else with_public(fed, public, POOLS, options.get("data_dir"), options.get("seed", 0))


def origin_of(name: str) -> Origin:
    """Return where ``load`` takes this name's rows from; a set's name wins over a file or directory that is called the same."""
    path = Path(name).expanduser()
    form, _, where = name.partition(":")
    if name in SOURCES:
        return Origin(SOURCES[name], f"data set {name!r}", data=name)
    if form in FORMATS and where:
        return _directory(form, Path(where).expanduser())
    if name.lower().endswith(TABLES):
        if not path.is_file():
            raise InvalidArgument(f"there is no file {path.absolute()}; check the path")
        return Origin(from_table, f"table {path}", {"source": path})
    if path.is_dir():
        return _directory(form, path) if (form := _form(path)) else Origin(from_folder, f"directory {path}", {"path": path})
    if path.is_file():
        raise InvalidArgument(f"cannot tell what {name} is; give a table ({', '.join(TABLES)}) or a directory")
    if len(path.parts) > 1:
        raise InvalidArgument(f"there is no file or directory {path.absolute()}; check the path")
    near = difflib.get_close_matches(name, SOURCES, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the data sets are {', '.join(SOURCES)}"
    raise InvalidArgument(f"unknown data set {name!r}; {hint}")


def _form(path: Path) -> str:
    """Return the format of a directory that shows it; a folder of tables has none."""
    looks = {"shards": shards.is_folder, "leaf": files.is_leaf, "text": text.is_folder}
    return next((form for form, look in looks.items() if look(path)), "")


def _directory(form: str, path: Path) -> Origin:
    where = path.absolute()
    if not where.is_dir():
        raise InvalidArgument(f"there is no directory {where}; check the path")
    return Origin(FORMATS[form], f"{form}:{path}", {"path": str(where)}, f"{form}:{where}")


def _check(origin: Origin, options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options that the reader does not have or that are missing."""
    for option in options:
        if option not in origin.options:
            raise InvalidArgument(f"{origin.shown} has no option {option!r}; use {', '.join(origin.options)}")
    for name, parameter in origin.options.items():
        if parameter.default is parameter.empty and name not in options:
            raise InvalidArgument(f"{origin.shown} needs {name}=; give the name of the column")
