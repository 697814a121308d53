"""What the commands share: errors in one line, notes on stderr, tables or JSON on stdout, progress."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedtailor.cli.escape import printable
from fedtailor.errors import FedtailorError
from fedtailor.runs.patience import Terminated, ending_on_signals, noted

WIDTH = 100  # columns of a table where the terminal does not say
NAMES = 10  # of these for the first column, at least

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]


class Group(TyperGroup):
    """Commands whose errors are one line on stderr and exit code 2; Ctrl-C and SIGTERM are one line, and codes 130 and 143."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
        try:
            with ending_on_signals(), stoppable(lambda: "give the same command again"):
                return super().invoke(ctx)
        except FedtailorError as error:
            if ctx.find_root().params.get("debug"):
                raise
            say(str(error))
            raise typer.Exit(2) from None
        except (MemoryError, RecursionError, RuntimeError) as error:
            advice = _on_memory(error)
            if ctx.find_root().params.get("debug") or advice is None:
                raise
            say(advice)
            raise typer.Exit(2) from None
        except BrokenPipeError:  # the reader of our output has seen enough
            sys.stderr.close()
            raise typer.Exit(0) from None


def _on_memory(error: Exception) -> str | None:
    """Return what to do where memory ran out, that of the stack included, for which torch has no class; None where it did not."""
    if isinstance(error, RecursionError):
        return "a file or a setting is nested too deeply to be read; check what you gave"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "there is not enough memory for this; use fewer rows, clients or workers, or a smaller model or batch size"
    return None


class Stopped(typer.Exit):
    """A signal ended the command, which was said."""


@contextmanager
def stoppable(advice: Callable[[], str]) -> Iterator[None]:
    """Let a signal that stops the command say in one line how to go on, and end it with the code that shells expect.

    Whatever error arrives after a signal is taken for the stop: what the signal raised may have become another error on its way.
    """
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        number = noted() or _signal_of(error)
        if number is None:
            raise
        with suppress(KeyboardInterrupt, Terminated):  # signals that come while we are at it
            say(f"stopped; {advice()}")
        raise Stopped(128 + number) from None


def _signal_of(error: BaseException) -> int | None:
    """Return the signal that an error stands for, if it does."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return signal.SIGTERM if isinstance(error, Terminated) else None


def say(text: str) -> None:
    """Write one line to stderr."""
    typer.echo(printable(f"fedtailor: {' '.join(text.split())}"), err=True)


def print_text(text: str) -> None:
    """Print a text to stdout, line by line."""
    typer.echo("\n".join(map(printable, text.split("\n"))))


def show(rows: Any, cells: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print rows as one JSON document, or their cells as a table."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not cells:
        typer.echo("nothing")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    numbers = {title for title in list(cells[0])[1:] if all(_is_number(row[title]) for row in cells)}
    has_text = len(numbers) + 1 < len(cells[0])  # if no other column is text, the names in the first one may be broken
    for i, title in enumerate(cells[0]):
        if title in numbers:
            longest = max(len(str(row[title])) for row in cells)  # "0.63 ± 0.07" is not cut between its words
            table.add_column(printable(title).replace(" ", "\n"), no_wrap=True, justify="right", min_width=longest)
        else:
            # however many columns of numbers there are, it is seen whose they are, and no word of a heading is broken
            least = NAMES if i == 0 else max(map(len, title.split()), default=0)
            table.add_column(printable(title), no_wrap=has_text and i == 0, overflow="fold", min_width=least)
    for row in cells:
        table.add_row(*("-" if value is None else printable(str(value)) for value in row.values()))
    screen = console()
    if not sys.stdout.isatty():
        wide = screen.options.update(max_width=1000)
        screen.width = max(WIDTH, screen.measure(table, options=wide).minimum)
    screen.print(table)


def _is_number(value: Any) -> bool:
    """Return whether a cell is a number, or empty in a column of numbers."""
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

    from fedtailor.task.scores import score_named

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

    def update(record: dict[str, Any]) -> None:
        nonlocal sent
        sent += record["bytes_down"] + record["bytes_up"]
        fields: dict[str, Any] = {"traffic": f"{sent / 1e6:.1f} MB"}
        metric = score_named(record.get("score", "acc" if "acc_personal" in record else "mse"))
        if (value := record.get(f"{metric.name}_personal")) is not None:
            fields["score"] = f"{metric.title} {metric.cell(value)}"
        label = record.get("label", "training")
        fields["label"] = f"{label} ({record['stage']})" if "stage" in record else label
        bar.update(todo, advance=1, **printable(fields))

    with bar:
        todo = bar.add_task("", total=total, label="preparing", score="", traffic="")
        yield update
