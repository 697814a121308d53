"""What the commands share: refusals in one line, notes on stderr, tables or JSON on stdout, progress."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedtailor.errors import FedtailorError

WIDTH = 100  # columns of a table where the terminal does not say

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]


class Group(TyperGroup):
    """Commands whose refusals are one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
        try:
            return super().invoke(ctx)
        except FedtailorError as error:
            if ctx.find_root().params.get("debug"):
                raise
            say(str(error))
            raise typer.Exit(2) from None
        except BrokenPipeError:  # the reader of our output has seen enough
            sys.stderr.close()
            raise typer.Exit(0) from None


def say(text: str) -> None:
    """One line on stderr."""
    typer.echo(f"fedtailor: {' '.join(text.split())}", err=True)


def show(rows: Any, cells: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Rows as one JSON document, or their cells as a table."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not cells:
        typer.echo("nothing")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    numbers = {t for t in list(cells[0])[1:] if all(_counts(row[t]) for row in cells)}
    words = len(numbers) + 1 < len(cells[0])  # where there is no other text to break, the names in front are
    for i, title in enumerate(cells[0]):
        if title in numbers:
            table.add_column(title.replace(" ", "\n"), no_wrap=True, justify="right")
        else:
            table.add_column(title, no_wrap=words and i == 0, overflow="fold")
    for row in cells:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    console().print(table)


def _counts(value: Any) -> bool:
    """Whether a cell is a number, or stands for one that is not there."""
    return value is None or str(value)[:1] in "-0123456789"


def console() -> Any:
    from rich.console import Console

    return Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=WIDTH)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar with rounds, accuracy, bytes and the time left, on stderr; nothing where stderr is not a terminal.

    Gives the callback of ``run``, ``compare`` and ``sweep``.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = Console(stderr=True)
    columns = ("{task.fields[label]}", "{task.fields[score]}", "{task.fields[traffic]}")
    bar = Progress(
        TextColumn(columns[0], markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        *(TextColumn(c) for c in columns[1:]),
        TimeRemainingColumn(),
        console=screen,
        disable=not screen.is_terminal,
    )
    sent = 0

    def tell(record: dict[str, Any]) -> None:
        nonlocal sent
        sent += record["bytes_down"] + record["bytes_up"]
        fields: dict[str, Any] = {"traffic": f"{sent / 1e6:.1f} MB"}
        for name, title in (("acc_personal", "accuracy"), ("mse_personal", "MSE")):
            if record.get(name) is not None:
                fields["score"] = f"{title} {record[name]:.4f}"
        label = record.get("label", "training")
        fields["label"] = f"{label} ({record['stage']})" if "stage" in record else label
        bar.update(todo, advance=1, **fields)

    with bar:
        todo = bar.add_task("", total=total, label="preparing", score="", traffic="")
        yield tell
