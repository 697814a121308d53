"""``fedtailor papers``: the papers' experiments, measured anew, and a ledger of their claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedtailor.cli.base import Json, print_text, say, show

papers = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The papers' experiments, figures and claims.")
Scaled = Annotated[
    Literal["laptop", "paper"], typer.Option("--scale", help="laptop: minutes on two cores; paper: the paper's sizes.")
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, of data and training.")]
Results = Annotated[Path, typer.Option("--out", help="Where results are kept; what lies there is not measured again.")]
PLACE = Path("runs/papers")


@papers.command("list")
def list_experiments(as_json: Json = False) -> None:
    """The experiments and how many claims each has."""
    from fedtailor.papers import experiments

    rows = [
        {"experiment": name, "title": e.title, "source": e.source, "claims": len(e.claims), "convex": e.convex}
        for name, e in experiments().items()
    ]
    show(rows, [{key: str(row[key]) for key in ("experiment", "title", "source", "claims")} for row in rows], as_json)


@papers.command("run")
def run(
    name: Annotated[str, typer.Argument(metavar="PAPER[/EXPERIMENT]", help="As clup, or clup/fronts.")],
    scale: Scaled = "laptop",
    seeds: Seeds = 3,
    out: Results = PLACE,
    as_json: Json = False,
) -> None:
    """Measure a paper's experiments and draw their figures (SVG, PDF, and a CSV of the numbers)."""
    from fedtailor.papers import chosen, picture
    from fedtailor.papers.ledger import cells, rows_of
    from fedtailor.papers.results import measured, place

    rows, written = [], []
    for key, experiment in chosen(name).items():
        by_seed = measured(out, key, experiment, scale, seeds, say)
        rows += rows_of(key, experiment, by_seed)
        written += picture.write(experiment, by_seed, place(out, key, scale))
    if as_json:
        typer.echo(json.dumps({"claims": rows, "written": [str(path) for path in written]}, indent=2))
        return
    show([], [cells(row) for row in rows], False)
    print_text("\n".join(f"written: {path}" for path in written))


@papers.command("check")
def check(
    name: Annotated[str | None, typer.Argument(metavar="[PAPER[/EXPERIMENT]]", help="Only these (default: all).")] = None,
    scale: Scaled = "laptop",
    seeds: Seeds = 3,
    out: Results = PLACE,
    kept: Annotated[bool, typer.Option("--kept", help="Measure nothing: what is not in --out yet is not tried.")] = False,
    as_json: Json = False,
) -> None:
    """Print the ledger of claims; the exit status is 1 where one that must hold does not.

    What is missing in --out is measured first, but only of convex problems: the others take long, are measured by `papers run`,
    and count as far as earlier results of them are kept.
    """
    from fedtailor.papers import chosen, ledger
    from fedtailor.papers.results import measured, read

    sections = {}
    for key, experiment in chosen(name).items():
        ready = kept or not experiment.convex
        by_seed = read(out, key, experiment, scale, seeds) if ready else measured(out, key, experiment, scale, seeds, say)
        sections[key] = (experiment, by_seed)
    rows = [row for key, (experiment, by_seed) in sections.items() for row in ledger.rows_of(key, experiment, by_seed)]
    show(rows, [ledger.cells(row) for row in rows], as_json)
    failed = ledger.failures(rows)
    if failed:
        say(f"{len(failed)} of {len(rows)} claims do not hold: {'; '.join(row['claim'] for row in failed)}")
        raise typer.Exit(1)


@papers.command("pages")
def pages(
    folder: Annotated[Path, typer.Argument(help="Where papers.md, papers/*.svg and results/papers.md are written, as docs.")],
    scale: Scaled = "laptop",
    seeds: Seeds = 3,
    out: Results = PLACE,
) -> None:
    """Write the front page with a thumbnail of every figure, and the ledger as a page, from what is kept."""
    from fedtailor.papers import experiments, front
    from fedtailor.papers.results import read

    sections = {key: (experiment, read(out, key, experiment, scale, seeds)) for key, experiment in experiments().items()}
    written = front.write(folder, sections, scale, front.times(out, list(sections), scale, seeds))
    print_text("\n".join(f"written: {path}" for path in written))
