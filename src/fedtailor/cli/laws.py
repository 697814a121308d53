"""``fedtailor check``: the ten laws on a method of one's own."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, show
from fedtailor.errors import InvalidArgument


def check(
    where: Annotated[str, typer.Argument(metavar="PATH:CLASS", help="A method in a file, as in mine.py:MyMethod.")],
    as_json: Json = False,
) -> None:
    """Try the ten laws on a method of your own, with its default settings."""
    from fedtailor.laws import check_algorithm

    kept = check_algorithm(made(where))
    rows = [{"law": verdict.number, "title": verdict.law, "model": verdict.model} for verdict in kept]
    show(rows, rows, as_json)


def made(where: str) -> Any:
    """The method with its default settings."""
    kind = load(where)
    try:
        return kind()
    except TypeError as error:
        raise InvalidArgument(
            f"{where} cannot be made with its default settings ({error}); give every setting a default"
        ) from error


def load(where: str) -> Any:
    """The class named by ``PATH:CLASS``."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    path, _, name = where.rpartition(":")
    if not name.isidentifier() or not path.endswith(".py") or not Path(path).is_file():
        raise InvalidArgument(f"cannot read {where!r}; give a Python file and a class in it, as in mine.py:MyMethod")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # a dataclass looks its module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's: anything can happen in it
        raise InvalidArgument(f"{path} cannot be imported ({type(error).__name__}: {error}); run it with python first") from error
    if not isinstance(getattr(module, name, None), type):
        raise InvalidArgument(f"{path} has no class {name!r}")
    return getattr(module, name)
