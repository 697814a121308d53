"""``sites``: the same run across real sites, from the folder of a network to everybody's report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, print_text, say, show
from fedtailor.cli.sites_init import init
from fedtailor.cli.sites_run import ENDED, LOOK, next_run, train
from fedtailor.errors import InvalidArgument

sites = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train across real sites, each with its own rows.")
Folder = Annotated[Path, typer.Argument(metavar="NETWORK", help="The folder that sites init made.")]


sites.command()(init)


@sites.command()
def server(
    folder: Folder,
    host: Annotated[str, typer.Option(help="The interface to listen on (0.0.0.0: all).")] = "127.0.0.1",
) -> None:
    """Let the sites of a network connect, over TLS and with their own keys only; stays until it is stopped."""
    from fedtailor.sites.listening import refusals
    from fedtailor.sites.processes import start_server
    from fedtailor.sites.project import Network

    network = Network(folder)
    _ = network.agreed
    started = start_server(network, host)
    say(f"listening on {host}:{network.address[1]}; sites: {', '.join(network.clients)}; log: {started.log}")
    refused = 0
    try:
        while started.alive:
            time.sleep(LOOK)
            heard = refusals(started.said())
            for line in dict.fromkeys(heard[refused:]):  # a site that tries again and again is told of once
                say(line)
            refused = len(heard)
    finally:
        started.stop()
    raise InvalidArgument(f"the server ended by itself; read {started.log}")


@sites.command()
def client(
    folder: Annotated[Path, typer.Argument(metavar="SITE", help="The site's folder.")],
    data: Annotated[Path, typer.Option(help="The site's table (.csv, .tsv, .parquet).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would leave the house, and stop.")] = False,
    key: Annotated[Path | None, typer.Option(help="A file with the key to encrypt the site's state with.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Make that file first.")] = False,
    allow_advice: Annotated[
        bool, typer.Option("--allow-advice", help="Answer sites advise: a summary of a fit, short trials of other methods.")
    ] = False,
) -> None:
    """Take part with the rows of a table; first shows exactly what would leave the house. Stays until it is stopped."""
    from fedtailor.runs import files
    from fedtailor.sites import memory
    from fedtailor.sites.house import House
    from fedtailor.sites.processes import Member
    from fedtailor.sites.project import Place

    if new_key:
        if key is None or key.exists():
            raise InvalidArgument("--new-key needs --key FILE, a file that does not exist yet")
        files.write(key, memory.new_key(), files.PRIVATE)
    house = House(Place(folder), data, key, allow_advice)
    for line in house.paper():
        print_text(line)
    if dry_run:
        return
    house.site()  # whatever cannot be read is refused before anything is started
    member = Member(house)
    say(f"{house.place.client} takes part; log: {member.started.log}")
    seen, told = {path.parent for path in _finished(folder)}, False
    try:
        while True:
            time.sleep(LOOK)
            member.look()
            if member.waits and not told:
                say(
                    f"the server does not let {house.place.client} in yet: its key is not registered, or it was connected until "
                    f"a moment ago; tried again for {member.patience:.0f} seconds"
                )
            told = member.waits
            for run in sorted({path.parent for path in _finished(folder)} - seen):
                say(f"a run is finished; this site's model is in {run}, its report in {_report(run)}")
                seen.add(run)
    finally:
        member.stop()


@sites.command()
def start(
    folder: Folder,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run, if it is not finished.")] = False,
    as_json: Json = False,
) -> None:
    """Train across the sites that are connected, and write the server's report."""
    from fedtailor.sites.names import nodes_of
    from fedtailor.sites.project import Network
    from fedtailor.sites.replies import when

    network = Network(folder)
    nodes_of(folder)  # refused here if there is no server yet
    out = next_run(network, resume)
    summary = train(network, out, resume, lambda record: say(_words(record)))
    page = _report(out)
    if as_json:
        typer.echo(json.dumps({**summary, "out": str(out), "report": str(page)}, indent=2))
        return
    for event in summary["events"]:
        say(f"{when(event, network.agreed.options.rounds)}: {event['client']} {event['what']}")
    print_text(f"The run is in {out}, the report in {page}.")


@sites.command()
def advise(
    folder: Folder,
    rounds: Annotated[int | None, typer.Option(help="Rounds of every trial (default: a fifth of those agreed on).")] = None,
    as_json: Json = False,
) -> None:
    """Ask the connected sites whether they should learn together, and how: summaries and validation scores, never rows."""
    from fedtailor.cli.sites_advise import ask
    from fedtailor.sites.names import nodes_of
    from fedtailor.sites.project import Network

    nodes_of(folder)  # refused here if there is no server yet
    advice, written = ask(Network(folder), rounds)
    if as_json:
        typer.echo(json.dumps({**advice, "out": str(written)}, indent=2))
        return
    print_text(advice["text"])
    show([], [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in advice["race"]], False)
    print_text(f"The advice is in {written}.")


@sites.command()
def invite(
    folder: Folder,
    to: Annotated[Path, typer.Option(help="The folder to make for the newcomer.")],
) -> None:
    """Write what a site that comes later needs: the shared model of the last run, and the schema."""
    from fedtailor.sites.newcomer import invite as write
    from fedtailor.sites.project import Network

    write(Network(folder), to)
    print_text(f"Give {to} to the newcomer, who joins with: fedtailor sites join {to} --data TABLE.csv --name SITE")


@sites.command()
def join(
    folder: Annotated[Path, typer.Argument(metavar="INVITATION", help="The folder that sites invite made.")],
    data: Annotated[Path, typer.Option(help="The newcomer's table, with labels (.csv, .tsv, .parquet).")],
    name: Annotated[str, typer.Option(help="The newcomer's name.")],
    rounds: Annotated[int | None, typer.Option(help="Rounds it works for (default: as many as the sites did).")] = None,
    as_json: Json = False,
) -> None:
    """Make a newcomer's model from the shared one and its own rows, and say whether it gains; nothing leaves the house."""
    from fedtailor.sites.newcomer import MODEL
    from fedtailor.sites.newcomer import join as work

    new, path = work(folder, data, name, rounds)
    if as_json:
        typer.echo(json.dumps({**new.record, "written": str(path)}, indent=2))
        return
    print_text(new.record["text"])
    print_text(f"Its model is kept: fedtailor predict {folder / MODEL} NEW.csv --client {name}")


@sites.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show which sites are connected, and the runs."""
    from fedtailor.sites.processes import nodes_online, runs_of
    from fedtailor.sites.project import Network

    network = Network(folder)
    online, runs = nodes_online(network), runs_of(network)
    rows = {"sites": online, "runs": [{"run": run["run-id"], "status": run["status"]} for run in runs]}
    show(rows, [{"site": name, "status": state} for name, state in online.items()], as_json)
    if not as_json:
        for run in rows["runs"]:
            print_text(f"run {run['run']}: {run['status']}")  # type: ignore[index]


@sites.command()
def stop(folder: Folder) -> None:
    """End the run that is under way; it can be gone on with (start --resume)."""
    from fedtailor.sites.names import nodes_of
    from fedtailor.sites.processes import runs_of, stop_run
    from fedtailor.sites.project import Network

    network = Network(folder)
    nodes_of(folder)
    under_way = [run["run-id"] for run in runs_of(network) if not run["status"].startswith(ENDED)]
    for number in under_way:
        stop_run(network, str(number))
    print_text(f"Stopped {len(under_way)}; go on with: fedtailor sites start {folder} --resume" if under_way else "Nothing runs.")


@sites.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="NETWORK|SITE", help="The folder of a network or of a site.")],
    as_json: Json = False,
) -> None:
    """Write the report of the last finished run anew: the server's, or that of one site."""
    from fedtailor.sites.house import newest_run

    run = newest_run(folder)
    if run is None:
        raise InvalidArgument(f"there is no finished run in {folder}; train one with: fedtailor sites start")
    page = _report(run)
    print_text(json.dumps({"report": str(page)}, indent=2) if as_json else f"The report is in {page}.")


@sites.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("sites-demo"),
    data: Annotated[
        Path | None, typer.Option(help="A table with the columns hospital and outcome (default: made-up patients).")
    ] = None,
) -> None:
    """Show a whole network on this machine: a TLS server and three sites, one of which is killed half way and comes back."""
    from fedtailor.cli.sites_demo import play

    page = play(out, data)
    print_text(f"The report is in {page}.")


def _words(record: dict[str, Any]) -> str:
    away = f", without {', '.join(record['left_out'])}" if record.get("left_out") else ""
    scores = [
        f"{key} {value:.4g}" for key, value in record.items() if key in ("acc_personal", "acc_global", "mse_personal") and value
    ]
    return f"round {record['round'] + 1}: {record['cohort']} sites{away}" + (f"; {', '.join(scores)}" if scores else "")


def _finished(folder: Path) -> list[Path]:
    from fedtailor.runs.layout import SUMMARY

    return list((folder / "runs").glob(f"*/{SUMMARY}"))


def _report(run: Path) -> Path:
    from fedtailor.report.page import write
    from fedtailor.runs.folder import read

    return write(read(run), run / "report.html", command=f"fedtailor sites report {run.parent.parent.name}")
