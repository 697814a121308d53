"""``sites demo``: a network on one machine. Two methods are trained; a site is killed half way, and comes back."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedtailor.algorithms.settings import make
from fedtailor.cli.base import say
from fedtailor.cli.sites_run import next_run, train
from fedtailor.data.made_up import patients
from fedtailor.data.tables.read import read_table
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument
from fedtailor.report.page import write
from fedtailor.runs import files
from fedtailor.runs.folder import read
from fedtailor.sites.house import House
from fedtailor.sites.processes import Member, need_flower, start_server
from fedtailor.sites.project import Draft, Network, Place, create
from fedtailor.sites.replies import when

SITES = 3
DEADLINE = 90.0  # seconds: a machine under load starts a process slowly
METHODS: dict[str, dict[str, Any]] = {
    "fedclup": {"lam": 0.2, "lr": 0.3, "steps": 5},
    "ditto": {"lam": 0.2, "lr": 0.3, "epochs": 1},
}
ROUNDS = {"fedclup": 2, "ditto": 5}  # long enough to see the site come back, which takes Flower a minute to believe
# agreed on, not read off the table: nobody has to look at a row for it
COLUMNS: list[dict[str, Any]] = [
    {"name": "age", "kind": "numeric", "range": [0, 120]},
    {"name": "sex", "kind": "category", "categories": ["f", "m"]},
    {"name": "pressure", "kind": "numeric", "range": [50, 250]},
    {"name": "cholesterol", "kind": "numeric", "range": [1, 15], "may_be_missing": True},
    {"name": "smoker", "kind": "category", "categories": ["no", "yes"]},
]


def play(out: Path, data: Path | None) -> Path:
    """Train every method on a network of its own and return the page on all of them."""
    need_flower()
    if data is not None and not data.exists():
        raise InvalidArgument(f"there is no {data}; leave out --data to take made-up patients")
    if out.exists() and any(out.iterdir()):
        raise InvalidArgument(f"{out} exists and is not empty; give another --out")
    frame = patients() if data is None else read_table(data)
    names = list(dict.fromkeys(frame["hospital"]))[:SITES]
    tables = {}
    for name in names:
        tables[name] = out / "tables" / f"{name}.csv"
        files.write(tables[name], frame[frame["hospital"] == name].drop(columns="hospital").to_csv(index=False))
    classes = sorted(set(frame["outcome"]))
    schema = {"label": "outcome", "classes": classes, "test_share": 0.25, "val_share": 0.15, "seed": 0, "columns": COLUMNS}
    records = {}
    for number, (method, settings) in enumerate(METHODS.items()):
        options = Options(rounds=ROUNDS[method], batch_size=16, evaluate_every=0)
        address, algorithm = ("127.0.0.1", _free_port()), make(method, settings)
        draft = Draft(sites=names, schema=schema, address=address, algorithm=algorithm, options=options)
        network = create(out / method, draft)
        _impatient(network)
        victim = names[-1] if number == len(METHODS) - 1 else None
        run = _show(network, tables, victim)
        records[method] = read(run)
    pages = {next(iter(record.values()))[0].label: next(iter(record.values())) for record in records.values()}
    return write(pages, out / "report.html", command="fedtailor sites demo")


def _show(network: Network, tables: dict[str, Path], victim: str | None) -> Path:
    """Start a network, train, and stop it; ``victim`` is killed after the first round and started again at once."""
    with ExitStack() as stack:
        began = time.monotonic()

        def tell(who: str, text: str) -> None:
            say(f"{time.monotonic() - began:6.1f} s  {who:>8}  {text}")

        tell("server", f"starts for {network.agreed.algorithm.__class__.__name__}, with TLS and the sites' keys")
        server = start_server(network, "127.0.0.1")
        stack.callback(server.stop)
        started: dict[str, Member] = {}

        def begin(name: str) -> None:
            house = House(Place(network.folder / "sites" / name), tables[name])
            tell(name, f"connects with {len(house.rows.train.y)} rows to train on, which stay")
            started[name] = Member(house)

        def end() -> None:
            for site in started.values():
                site.stop()

        stack.callback(end)
        for name in network.clients:
            begin(name)

        def show(record: dict[str, Any]) -> None:
            away = f"; without {', '.join(record['left_out'])}" if record.get("left_out") else ""
            tell("server", f"round {record['round'] + 1} of {network.agreed.options.rounds}: {record['cohort']} uploads{away}")
            if victim is not None and record["round"] == 0:
                started[victim].stop(hard=True)
                tell(victim, "is killed")
                begin(victim)

        def look() -> None:
            for site in started.values():
                site.look()

        out = next_run(network, resume=False)
        summary = train(network, out, False, show, look)
        for event in summary["events"]:
            tell("server", f"noted {when(event, network.agreed.options.rounds)}: {event['client']} {event['what']}")
        tell("server", f"personal accuracy {summary['acc_personal']:.3f}, shared {summary['acc_global'] or float('nan'):.3f}")
        for name in network.clients:
            for run in (network.folder / "sites" / name / "runs").glob("*/"):
                page = write(read(run), run / "report.html", command="fedtailor sites demo")
                tell(name, f"has its own model and report: {page}")
        write(read(out), out / "report.html", command="fedtailor sites demo")
    return out


def _impatient(network: Network) -> None:
    """Lower the deadline in the server's config, so that a killed site does not hold up the demonstration."""
    import tomli_w

    path = network.folder / "config.toml"
    files.write(path, tomli_w.dumps({**network.values, "terms": {**network.values["terms"], "deadline": DEADLINE}}))
    network.values["terms"]["deadline"] = DEADLINE


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
