"""The front page: a thumbnail of every figure with what held of its claims, beside the ledger as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtailor.papers import ledger, picture, routing_page
from fedtailor.papers.base import Experiment, Scale
from fedtailor.papers.results import BySeed, cpu_seconds
from fedtailor.runs import files

Sections = Mapping[str, tuple[Experiment, BySeed]]
ABOUT = """\
# The papers, run and shown

Written by `fedtailor papers pages docs`, from what was measured. `fedtailor papers list` names the experiments, `fedtailor
papers run clup/fronts` measures one and draws its figure (SVG, PDF, and a CSV of its numbers under `runs/papers`),
`fedtailor papers check` says which of the papers' claims hold. Results are kept by seed, so that what was measured is not
measured again; `--scale paper` takes the paper's sizes. Every claim, with its number, its interval over seeds and what the
paper says, is in [results/papers.md](results/papers.md).

What takes long (PERADA, FLOW, CLUP on images, PARTIAL on MNIST) is measured by `papers run`, in pieces that are kept, so that
a seed may be stopped and gone on with; earlier results are kept in `src/fedtailor/papers/stored/`, so that `papers check` need
not measure for hours. Of PERADA's cifar10, pacs, ablations and privacy these are means over three seeds of an earlier benchmark
([results/perada.md](results/perada.md)). [results/routing.md](results/routing.md) has FLOW's tables,
[results/flow.md](results/flow.md) an earlier benchmark of it.

An experiment is a file in `src/fedtailor/papers/PAPER/` with an `EXPERIMENT`: settings at both scales, a function that
measures one seed with `ft.run`, the axes of its figure, and its claims, each a number with limits. It is known by being
there.
"""
ACROSS = 2  # thumbnails in a row


def times(out: Path, names: Sequence[str], scale: Scale, seeds: int) -> dict[str, float]:
    """Return the CPU seconds of the experiments of which they are known."""
    found = {name: cpu_seconds(out, name, scale, seeds) for name in names}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def write(folder: Path, sections: Sections, scale: Scale, took: Mapping[str, float] | None = None) -> list[Path]:
    """Write papers.md, papers/PAPER-EXPERIMENT.svg and results/papers.md, results/routing.md; return where they are."""
    results = folder / "results"
    contents = {folder / "papers.md": page(sections), results / "papers.md": ledger.page(sections, scale, took)}
    if scale == "laptop" and (routing := routing_page.page(sections)):
        contents[results / "routing.md"] = routing
    for name, (experiment, by_seed) in sections.items():
        if by_seed:
            contents[folder / thumbnail(name)] = picture.thumbnail(experiment, by_seed)
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)
    return list(contents)


def thumbnail(name: str) -> str:
    """Return where an experiment's thumbnail is, seen from the front page."""
    return f"papers/{name.replace('/', '-')}.svg"


def page(sections: Sections) -> str:
    """Return the front page: a table of thumbnails for every paper."""
    lines = [ABOUT]
    for paper in dict.fromkeys(name.partition("/")[0] for name in sections):
        cells = [cell(name, *section) for name, section in sections.items() if name.startswith(f"{paper}/")]
        lines += [f"## {paper.upper()}", "", "| " * ACROSS + "|", "|---" * ACROSS + "|"]
        for start in range(0, len(cells), ACROSS):
            row = cells[start : start + ACROSS]
            lines.append("| " + " | ".join(row + [""] * (ACROSS - len(row))) + " |")
        lines.append("")
    return "\n".join(lines)


def cell(name: str, experiment: Experiment, by_seed: BySeed) -> str:
    """Return an experiment in the table: its figure, what it is, how many of its claims held."""
    words = f"**{name}**: {experiment.title} ({experiment.source})"
    if not by_seed:
        return f"{words}; not tried"
    rows = ledger.rows_of(name, experiment, by_seed)
    held = sum(row["held"] is True for row in rows)
    seeds = experiment.means_of or len(by_seed)
    count = f"{held} of {len(rows)} claims held, {seeds} seed{'s' * (seeds > 1)}"
    return f"![{experiment.title}]({thumbnail(name)})<br>{words}; [{count}](results/papers.md#{name.replace('/', '')})"
