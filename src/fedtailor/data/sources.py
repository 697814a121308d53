"""Federations by name: the registry, and ``load``, the one door to named sets, tables, folders and LEAF files."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data import files, images, natural, rng, synthetic, text
from fedtailor.data.federation import Federation
from fedtailor.data.partition import keep, whole
from fedtailor.data.partition import split as split_rows
from fedtailor.data.pool import Pool, dealt
from fedtailor.data.public import with_public
from fedtailor.errors import InvalidArgument, InvalidData

Source = Callable[..., Federation]
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")


def source(read: Callable[..., Any], finish: Callable[..., Federation], **defaults: Any) -> Source:
    """A source made of two steps: ``read`` gives what is there, ``finish`` makes a federation of it.

    It takes the options of both, those of ``finish`` with these defaults.
    """
    own = inspect.signature(read).parameters
    more = list(inspect.signature(finish).parameters.values())[1:]  # the first is what was read
    more = [p.replace(default=defaults.get(p.name, p.default)) for p in more]

    def load_it(**options: Any) -> Federation:
        mine = {name: options.pop(name) for name in own if name in options}
        return finish(read(**mine), **{**defaults, **options})

    keyword = inspect.Parameter.KEYWORD_ONLY
    # where the files are goes last: it is no property of the set
    ordered = sorted([*own.values(), *more], key=lambda p: p.name == "data_dir")
    load_it.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in ordered])  # type: ignore[attr-defined]
    load_it.__doc__ = read.__doc__
    return load_it


def leaf(
    path: str,
    clients: int | None = None,
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    min_samples: int | None = None,
    shape: Sequence[int] | None = None,
) -> Federation:
    """LEAF json (FEMNIST and the like): the clients are its users; its own train and test are kept where it has them.

    ``shape`` is one row's, for instance (1, 28, 28); without it rows stay as they are.
    """
    folder = Path(path).expanduser().absolute()
    parts = files.read_leaf(folder)
    if shape is not None:
        parts = {part: {u: (_shaped(x, shape, folder), y) for u, (x, y) in users.items()} for part, users in parts.items()}
    if "all" in parts:
        users = parts["all"]
        sizes = [len(y) for _, y in users.values()]
        y = np.concatenate([y for _, y in users.values()])
        _classes(folder, y)
        pool = Pool(
            "leaf", _joined(folder, [x for x, _ in users.values()]), y.astype(np.int64), owner=np.repeat(list(users), sizes)
        )
        return replace(dealt(pool, clients, "natural", seed, test_share, val_share, min_samples), name=f"leaf/{folder.name}")
    return _split_leaf(folder, parts, clients, seed, val_share, min_samples)


def _split_leaf(
    folder: Path, parts: Mapping[str, Any], clients: int | None, seed: int, val_share: float, min_samples: int | None
) -> Federation:
    """LEAF's own train and test rows; the validation rows come out of train."""
    train, test = parts["train"], parts["test"]
    if set(train) != set(test):
        raise InvalidData(f"{folder} has other users in test than in train; split it by sample, so that every user has both")
    if not 0 <= val_share < 1:
        raise InvalidArgument(f"val_share={val_share} leaves no rows to train on; give a share of the train rows below 1")
    if min_samples is not None:
        whole("min_samples", min_samples)
    least = max(2 if val_share else 1, min_samples or 1)
    names = keep(list(train), [len(train[user][1]) for user in train], clients, seed, least)
    _classes(folder, np.concatenate([users[user][1] for users in (train, test) for user in names]))
    if not val_share:
        return Federation.from_arrays(
            [train[u] for u in names], [test[u] for u in names], names=names, name=f"leaf/{folder.name}"
        )
    kept: list[tuple[Any, Any]] = []
    held: list[tuple[Any, Any]] = []
    for user in names:
        x, y = train[user]
        rows = split_rows(y, (1 - val_share, val_share), rng.generator(seed, "split", rng.purpose(user)))
        for out, its in zip((kept, held), rows, strict=True):
            out.append((x[its], y[its]))
    return Federation.from_arrays(kept, [test[u] for u in names], held, names=names, name=f"leaf/{folder.name}")


def _classes(folder: Path, y: Any) -> None:
    if y.ndim != 1 or y.dtype.kind not in "iub" or y.min(initial=0) < 0:
        raise InvalidData(f"the labels in {folder} are not classes 0, 1, 2, ...; read them with Federation.from_arrays")


def _joined(folder: Path, rows: Sequence[Any]) -> Any:
    try:
        return np.concatenate(rows)
    except ValueError as error:
        raise InvalidData(f"the users in {folder} have rows of different shapes; give all the same") from error


def _shaped(x: Any, shape: Sequence[int], folder: Path) -> Any:
    if int(np.prod(shape)) != int(np.prod(x.shape[1:])):
        raise InvalidArgument(
            f"rows of {folder} hold {int(np.prod(x.shape[1:]))} numbers, which cannot take the shape {tuple(shape)}"
        )
    return x.reshape(len(x), *shape)


def npy(path: str) -> Pool:
    """A directory with x.npy (rows) and y.npy (class labels), and optionally client.npy (whose each row is)."""
    folder = Path(path).expanduser().absolute()
    for name in ("x.npy", "y.npy"):
        if not (folder / name).is_file():
            raise InvalidArgument(f"{folder} has no {name}; save the rows as x.npy and their labels as y.npy")
    x, y = files.read_pair(folder / "x.npy", folder / "y.npy")
    owner = None
    if (folder / "client.npy").is_file():
        owner = files.read_npy(folder / "client.npy").astype(np.str_)
        if owner.shape != y.shape:
            raise InvalidData(f"{folder / 'client.npy'} has shape {owner.shape}; give one client per row, {len(y)} of them")
    return Pool(f"npy/{folder.name}", x, y, owner=owner)


POOLED = (images.digits, images.mnist5k, images.fashion_mnist, images.emnist, images.cifar10, images.usps, images.pneumonia)
OWNED = (images.mnist, images.cifar100)  # dealt too unless asked for their own clients, so their number depends
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
        **{_name(read): source(read, natural.owned) for read in (*tables, *sites)},
        "shakespeare": text.shakespeare,
        **{_name(make): make for make in made},
    }


def _name(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", "-")


SOURCES: dict[str, Source] = _registry()
POOLS: dict[str, Callable[..., Pool]] = {_name(read): read for read in (*POOLED, *OWNED, *SHIFTED)}
# written before a path, as in leaf:PATH
FORMATS: dict[str, Source] = {"leaf": leaf, "npy": source(npy, dealt), "text": text.folder}


def load(name: str, *, public: str | None = None, **options: Any) -> Federation:
    """A federation: a set by name, a table (.csv, .tsv, .parquet), a directory, ``leaf:PATH``, ``npy:PATH`` or
    ``text:PATH``.

    ``public`` adds unlabelled rows that everyone may see: another set's images (``cifar100:5000``) or those of a .npy file.
    """
    made = _load(name, options)
    return made if public is None else with_public(made, public, POOLS, options.get("data_dir"), options.get("seed", 0))


def _load(name: str, options: Mapping[str, Any]) -> Federation:
    path = Path(name).expanduser()
    form, _, where = name.partition(":")
    if name in SOURCES:
        return _made(name, SOURCES[name], options)
    if form in FORMATS and where:
        return _found(form, Path(where).expanduser(), options)
    if name.lower().endswith(TABLES):
        return _table(path, options)
    if path.is_dir():
        form = "leaf" if files.is_leaf(path) else "text" if text.is_folder(path) else ""
        return _found(form, path, options) if form else _folder(path, options)
    if path.is_file():
        raise InvalidArgument(f"cannot tell what {name} is; give a table ({', '.join(TABLES)}) or a directory")
    if len(path.parts) > 1:
        raise InvalidArgument(f"there is no file or directory {path.absolute()}; check the path")
    near = difflib.get_close_matches(name, SOURCES, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the data sets are {', '.join(SOURCES)}"
    raise InvalidArgument(f"unknown data set {name!r}; {hint}")


def _made(name: str, make: Source, options: Mapping[str, Any]) -> Federation:
    _known(f"data set {name!r}", make, options)
    recipe = {key: str(files.root(value)) if key == "data_dir" and value else value for key, value in options.items()}
    return replace(make(**options), recipe={"data": name, **recipe})


def _found(form: str, path: Path, options: Mapping[str, Any]) -> Federation:
    where = path.absolute()
    if not where.is_dir():
        raise InvalidArgument(f"there is no directory {where}; check the path")
    _known(f"{form}:{path}", FORMATS[form], options, 1)
    return replace(FORMATS[form](path=str(where), **options), recipe={"data": f"{form}:{where}", **options})


def _table(path: Path, options: Mapping[str, Any]) -> Federation:
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path.absolute()}; check the path")
    _known(f"table {path}", Federation.from_table, options, 1)
    return Federation.from_table(path, **options)


def _folder(path: Path, options: Mapping[str, Any]) -> Federation:
    _known(f"directory {path}", Federation.from_folder, options, 1)
    return Federation.from_folder(path, **options)


def _known(what: str, make: Callable[..., Any], options: Mapping[str, Any], first: int = 0) -> None:
    """Refuses options that ``make`` does not have and asks for those it needs; the ``first`` parameters are given already."""
    parameters = {p.name: p for p in list(inspect.signature(make).parameters.values())[first:]}
    for option in options:
        if option not in parameters:
            raise InvalidArgument(f"{what} has no option {option!r}; use {', '.join(parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise InvalidArgument(f"{what} needs {name}=; give the name of the column")
