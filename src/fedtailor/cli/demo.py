"""``make demo``: eight methods on scikit-learn's digits, 20 clients with skewed labels; a table and report.html."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import fedtailor as ft
from fedtailor.report.page import cell, columns, headline, write

HIDDEN = ("trained_parameters", "bytes_down")  # the table fits 80 columns without them


def methods() -> list[ft.Algorithm]:
    return [
        ft.Local(lr=0.5, epochs=5),
        ft.FedAvg(lr=0.5, epochs=5),
        ft.FedAvgFT(lr=0.5, epochs=5, finetune_epochs=5),
        ft.FedProx(mu=0.1, lr=0.5, epochs=5),
        ft.FedProxPersonal(lam=0.1, lr=0.5, epochs=5),
        ft.FedCLUP(lam=0.1, lr=0.5, epochs=5),
        ft.PFedMe(lam=1.0, lr=0.1, inner_lr=0.1, epochs=5),
        ft.Ditto(lam=0.1, lr=0.5, epochs=5),
    ]


def main(path: str = "report.html", rounds: int = 40) -> None:
    console = Console()
    federation = ft.Federation.load("digits", clients=20, partition="dirichlet:0.3")
    console.print(federation)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        todo = progress.add_task("rounds", total=len(methods()) * rounds)
        comparison = ft.compare(methods(), federation, rounds=rounds, batch_size=16, callback=lambda _: progress.advance(todo))
    shown = {key: title for key, title in columns("acc").items() if key not in HIDDEN}
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for title in shown.values():
        short = title.replace(" accuracy", "")
        table.add_column(short, justify="right", min_width=max(len(word) for word in short.split()))
    for label, run in comparison.items():
        table.add_row(label, *(cell(key, run.summary[key]) for key in shown))
    console.print(table)
    records = comparison.records()
    best = headline(records)
    console.print(f"Best on validation: {best['best']}, personal accuracy {best['acc_personal']:.4f} on test.")
    console.print(f"The report is in {write(records, path, command='make demo')}.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "report.html")
