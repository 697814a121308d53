"""``fedtailor check``: the ten laws on a method of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor.cli.base import Json, show
from fedtailor.errors import InvalidArgument

if TYPE_CHECKING:
    from fedtailor.algorithms.base import Algorithm


def check(
    where: Annotated[str, typer.Argument(metavar="METHOD", help="As in mine.py:MyMethod, package.module:MyMethod or fedavg.")],
    as_json: Json = False,
) -> None:
    """Try the ten laws on a method, your own or ours, with its default settings."""
    from fedtailor.laws import check_algorithm

    verdicts = check_algorithm(example_of(where))
    rows = [{"law": verdict.number, "title": verdict.law, "model": verdict.model} for verdict in verdicts]
    show(rows, rows, as_json)


def example_of(where: str) -> Algorithm:
    """The method of this name with its default settings."""
    from fedtailor.algorithms.settings import find

    kind = find(where)
    try:
        return kind.example()
    except TypeError as error:
        raise InvalidArgument(
            f"{where} cannot be made with its default settings ({error}); give every setting a default, or the class an example()"
        ) from error
