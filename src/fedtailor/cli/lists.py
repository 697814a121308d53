"""``fedtailor list``: what there is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, show
from fedtailor.cli.data import list_data
from fedtailor.cli.laws import example_of

DIGITS = (8, 8), 10  # the input and the number of classes that models are counted for
TEXT = (80,), 80  # and for models of tokens
lists = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What there is: algorithms, models, data.")


@lists.command("algorithms")
def list_algorithms(
    method: Annotated[list[str] | None, typer.Option(help="Only this one, ours or your own, as in mine.py:MyMethod.")] = None,
    as_json: Json = False,
) -> None:
    """The methods and their facts, found by running each on a small network.

    Down, up and kept count models; trained counts parameters.
    """
    from fedtailor import advisor

    cards = [advisor.card(example_of(name)) for name in method] if method else advisor.cards()
    show([card.row() for card in cards], [card.cells() for card in cards], as_json)


@lists.command("models")
def list_models(as_json: Json = False) -> None:
    """The networks by name; parameters are for 8x8 images and 10 classes, an lstm's for 80 of 80 characters, split-linear's for 2
    classes.

    Options follow a colon: resnet18:adapters,group. --backbone starts a network from a file of weights.
    """
    from fedtailor import models

    rows = [describe(name) for name in models.names()]
    show(rows, [{**row, "groups": ", ".join(row["groups"])} for row in rows], as_json)


def describe(name: str) -> dict[str, Any]:
    """A network's facts on the digits, or on what it is made for."""
    from fedtailor import models, tree
    from fedtailor.task import Task

    special = {
        "lstm": lambda: models.build(name, *TEXT, tokens=TEXT[1]),
        "split-linear": lambda: models.build(f"{name}:32", (64,), 2),
    }
    task = Task.from_module(special[name]() if name in special else models.build(name, *DIGITS))
    groups = [group for group, members in task.groups.items() if members]
    size = tree.size(tree.trainable(task.init()))
    return {"name": name, "parameters": size, "groups": groups, "options": models.options_of(name)}


lists.command("data")(list_data)
