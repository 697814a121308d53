"""What a run across sites costs: bytes, seconds and memory, beside Flower's own FedAvg in the same deployment.

``python -m benchmarks.sites`` starts real processes on loopback, with TLS and registered keys, and writes docs/results/sites.md;
``python -m benchmarks.sites secure peer`` measures these parts anew and takes the others from docs/results/sites.json.
Bytes are counted on the wire, by a relay between the sites and the server, and everything is in them (TLS, HTTP, heartbeats).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

import fedtailor as ft
from benchmarks.flower_app import BATCH, COLUMNS, HIDDEN, LR
from fedtailor.cli.sites_run import train
from fedtailor.engine.options import Options
from fedtailor.runs.layout import HISTORY, TIMING
from fedtailor.sites import masks, processes
from fedtailor.sites.agreed import Agreed, Rows
from fedtailor.sites.house import House
from fedtailor.sites.local import InProcess
from fedtailor.sites.names import APP
from fedtailor.sites.pact import Pact
from fedtailor.sites.processes import Member, _flwr, runs_of, start_server
from fedtailor.sites.project import CONFIG, Draft, Network, Place, create
from fedtailor.sites.server import Conductor, Terms

PAGE = Path("docs/results/sites.md")
KEPT = PAGE.with_suffix(".json")  # what was measured, by part
SITES = ("Aarhus", "Bern", "Cork")
ROWS = 80
SHORT, LONG = 1, 4  # rounds of two runs: their difference is what rounds cost
MODEL = f"mlp:{HIDDEN}"
NUMBERS = COLUMNS * HIDDEN + HIDDEN + 2 * HIDDEN + 2
BYTES = 4 * NUMBERS
SCHEMA: dict[str, Any] = {
    "label": "y",
    "classes": ["no", "yes"],
    "columns": [{"name": f"a{i}", "kind": "numeric", "range": [-4, 4]} for i in range(COLUMNS)],
}
WANTED = 0.02
CONNECTED, WINDOW = 120.0, 15.0  # seconds: to connect, and to see what sites say that have nothing to do
Measured = dict[str, float]


class Relay:
    """Passes bytes on between the sites and the server, and counts them."""

    def __init__(self, port: int) -> None:
        self.target, self.down, self.up = port, 0, 0
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.door.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                site, _ = self.door.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            for name, here, there in (("up", site, server), ("down", server, site)):
                threading.Thread(target=self._carry, args=(name, here, there), daemon=True).start()

    def _carry(self, name: str, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([self.down, self.up])


class Memory:
    """Watches the memory of the processes of one site: what is theirs alone, and their part of what they share."""

    def __init__(self, leader: int) -> None:
        self.leader, self.peak, self.now, self.open = leader, 0.0, 0.0, True
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while self.open:
            self.now = sum(map(_memory, _group(self.leader)))
            self.peak = max(self.peak, self.now)
            time.sleep(0.2)


def _group(leader: int) -> list[int]:
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[2]) == leader:
            members.append(int(path.parent.name))
    return members


def _memory(process: int) -> float:
    """Return megabytes."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def tables(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    draw, out = np.random.default_rng(0), {}
    for name in names:
        x = draw.uniform(-3, 3, (ROWS, COLUMNS))
        frame = pd.DataFrame(x, columns=[f"a{i}" for i in range(COLUMNS)])
        frame["y"] = np.where(x.sum(1) > 0, "yes", "no")
        out[name] = folder / f"{name}.csv"
        frame.to_csv(out[name], index=False)
    return out


def deployed(
    work: Callable[[Network, Path, int], list[float]],
    secure: dict[str, Any] | None = None,
    plain: bool = False,
    names: Sequence[str] = SITES,
) -> Measured:
    """Return bytes and seconds of a round, and the memory of a site; ``work`` lets so many rounds be played and times them."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        options = Options(rounds=SHORT, batch_size=BATCH, evaluate_every=0)
        address = ("127.0.0.1", _free_port())
        draft = Draft(
            sites=names,
            schema=SCHEMA,
            address=address,
            algorithm=ft.FedAvg(lr=LR, epochs=1),
            model=MODEL,
            options=options,
            secure=secure,
        )
        made = create(folder / "net", draft)
        server = start_server(made, "127.0.0.1")
        stack.callback(server.stop)
        relay = Relay(address[1])
        stack.callback(relay.door.close)
        if plain:  # the peer's own app is what runs at its sites
            usual = processes._write_commands
            processes._write_commands = lambda _: Path(processes.tool("flower-superexec")).parent  # type: ignore[assignment]
            stack.callback(setattr, processes, "_write_commands", usual)
        members = []
        for name, table in tables(folder, names).items():
            site = Place(made.folder / "sites" / name)
            _edit(site.folder, network={"address": f"127.0.0.1:{relay.port}"})
            members.append(Member(House(Place(site.folder), table)))
            stack.callback(members[-1].stop)
        memory = Memory(members[0].started.process.pid)
        until = time.monotonic() + CONNECTED
        while time.monotonic() < until and set(processes.nodes_online(made).values()) != {"online"}:
            time.sleep(1)
        quiet = relay.counts()
        time.sleep(WINDOW)
        polling = (relay.counts() - quiet) / WINDOW / len(names)
        idle, counts, seconds, spans = memory.now, [], [], []
        for number, rounds in enumerate((SHORT, LONG)):
            for where in (made.folder, *(made.folder / "sites" / name for name in names)):
                _edit(where, run={"rounds": rounds})
            before, began = relay.counts(), time.monotonic()
            seconds = work(Network(made.folder), made.folder / "runs" / str(number + 1), rounds)
            spans.append(time.monotonic() - began)
            counts.append(relay.counts() - before)
        memory.open = False
        memory.thread.join()
        per_round = (counts[1] - counts[0]) / len(names) - polling * (spans[1] - spans[0])
        down, up = per_round / (LONG - SHORT)
        return {
            "down": float(down),
            "up": float(up),
            "seconds": statistics.median(seconds[: LONG - SHORT]),
            "idle": idle,
            "polling": float(polling.sum()),
            "peak": memory.peak,
        }


def _edit(folder: Path, **tables: dict[str, Any]) -> None:
    values = Network(folder).values
    (folder / CONFIG).write_text(tomli_w.dumps({**values, **{name: {**values[name], **more} for name, more in tables.items()}}))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ours(network: Network, out: Path, rounds: int) -> list[float]:
    summary = train(network, out, False, lambda record: None)
    if summary["events"]:
        raise SystemExit(f"something went wrong: {summary['events']}")
    lines = [json.loads(line) for line in (out / TIMING).read_text().splitlines()]
    return [float(line["seconds"]) for line in lines if "seconds" in line]


def peers(network: Network, out: Path, rounds: int) -> list[float]:
    app = network.folder / APP
    for path in app.iterdir():
        path.unlink()
    (app / "peer.py").write_text(Path(__file__).with_name("flower_app.py").read_text())
    settings = {"out": str(out) + ".json", "rounds": rounds, "nodes": len(SITES), "rows": int(ROWS * 0.6)}
    config = {
        "project": {"name": "peer", "version": f"1.0.{rounds}", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "peer",
                    "components": {"serverapp": "peer:server", "clientapp": "peer:client"},
                    "config": settings,
                }
            },
        },
    }
    (app / "pyproject.toml").write_text(tomli_w.dumps(config))
    out.parent.mkdir(exist_ok=True)
    number = str(_flwr(network, ["run", str(app.absolute()), processes.LINK])["run-id"])
    state = ""
    while not state.startswith("finished"):
        time.sleep(3)
        state = next(str(run["status"]) for run in runs_of(network) if str(run["run-id"]) == number)
    if state != "finished:completed":
        raise SystemExit(f"the peer ended as {state}; {(network.folder / 'server' / 'superlink.log').read_text()[-3000:]}")
    return list(json.loads(Path(settings["out"]).read_text()))


# -- secure sums without a network --------------------------------------------------------------------------------------
def sums(clients: int, bits: int) -> Measured:
    """Return what the server counts in a round of secure sums of a model of 1 MB, and the seconds that they add."""
    draw = np.random.default_rng(0)
    part = [(draw.normal(size=(12, COLUMNS)), draw.integers(0, 2, 12)) for _ in range(clients)]
    fed = ft.Federation.from_arrays(part, part, names=[f"s{i:02d}" for i in range(clients)], classes=["no", "yes"])
    pact = Pact(clients, -(-2 * clients // 3), bits, {64: 2.0**20, 32: 16.0}[bits])
    options = Options(rounds=3, batch_size=BATCH, evaluate_every=0)
    agreed = Agreed(ft.FedAvg(lr=LR, epochs=1), MODEL, options, fed.names, Rows.of(fed))
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, terms in (("plain", agreed), ("secure", replace(agreed, pact=pact))):
            out = Path(folder) / name
            Conductor(terms, InProcess.of(terms, fed, out / "sites"), out / "server", Terms(pause=0.0)).play()
            lines = [json.loads(line) for line in (out / "server" / TIMING).read_text().splitlines()]
            seconds[name] = statistics.median(float(line["seconds"]) for line in lines[:2])
        history = [json.loads(line) for line in (out / "server" / HISTORY).read_text().splitlines()]
    record = next(line for line in history if "client" not in line)
    return {
        "down": record["bytes_down"] / clients,
        "up": record["bytes_up"] / clients,
        "seconds": (seconds["secure"] - seconds["plain"]) / clients,
        "error": pact.error,
    }


def payload() -> Measured:
    """Return the bytes of a message each way as Flower packs it, before TLS and HTTP, and of one with the model alone."""
    from flwr.app import ArrayRecord, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from benchmarks.flower_app import network
    from fedtailor.sites.flower import to_records

    draw = np.random.default_rng(0)
    part = [(draw.normal(size=(12, COLUMNS)), draw.integers(0, 2, 12)) for _ in range(3)]
    fed = ft.Federation.from_arrays(part, part, names=SITES, classes=["no", "yes"])
    options = Options(rounds=1, batch_size=BATCH, evaluate_every=0)
    agreed = Agreed(ft.FedAvg(lr=LR, epochs=1), MODEL, options, fed.names, Rows.of(fed))
    sizes: Measured = {}

    def size(records: Any) -> float:
        return float(sum(len(piece.deflate()) for piece in get_all_nested_objects(records).values()))

    class Weighing(InProcess):
        def ask(self, parcels: Any, seconds: float) -> Any:
            replies = super().ask(parcels, seconds)
            if next(iter(parcels.values())).facts["action"] == "train":
                sizes["down"], sizes["up"] = (size(to_records(sent[SITES[0]])) for sent in (parcels, replies))
            return replies

    with tempfile.TemporaryDirectory() as folder:
        transport = Weighing(InProcess.of(agreed, fed, Path(folder) / "sites").sites)
        Conductor(agreed, transport, Path(folder) / "server", Terms(pause=0.0)).play()
    sizes["flower"] = size(RecordDict({"arrays": ArrayRecord(network().state_dict())}))
    return sizes


def streams() -> float:
    """Return the megabytes of mask that are made in a second."""
    masks.library()
    began = time.perf_counter()
    masks.stream(masks.fresh(), 1 << 22, 64)
    return (1 << 25) / 1e6 / (time.perf_counter() - began)


# -- the page ----------------------------------------------------------------------------------------------------------
TEXT = """# What a run across sites costs

Written by `python -m benchmarks.sites`: {sites} sites (or twenty) and a server as real processes on one machine with {cores}
cores, TLS, registered keys; FedAvg on an MLP of {numbers:,} numbers ({bytes:,} bytes), {rows} rows per site to train on. The load
average over a minute before each of the runs was {load}. Bytes are those on the wire, for one site and one round (a run of
{long} rounds less one of {short}, so that what happens once is not in them), with TLS and HTTP, less what a site says all the
time to ask for work (the last column, measured before the first run). Seconds of a round are the median of three. Memory is
that of all processes of one site.

| run | down | over the model | up | over the model | seconds of a round | MB of a site, idle | at its peak | bytes a second |
|---|---|---|---|---|---|---|---|---|
{deployed}

{missing}Wanted: at most {wanted:.0%} over the model on the wire. Held by the plain run: {held}.

A message as Flower packs it, before TLS and HTTP: {down:,.0f} bytes down ({over_down} over the model), {up:,.0f} up
({over_up}); a record of Flower's with the model alone: {flower:,.0f} ({over_flower}). The rest upward is what a site says for
every object of a message that it asks for or sends: about a kilobyte of HTTP with its key and a signature. A message of ours
has one array for each type of number, whatever the number of tensors; Flower's own has one for each tensor.

Flower's own FedAvg is an app in the manner of its quickstart, written without fedtailor (`benchmarks/flower_app.py`), under
the same server, keys and certificates. Flower starts a process for every message, and there it imports torch anew; a site of
fedtailor keeps one process that has imported everything, which is forked for every message: that is what it has more of when
it is idle. In both, a SuperNode without work looks for some every 3 seconds. Secure sums send four messages in a round where a
plain run sends one; their numbers of 64 bits take twice the room of single precision, those of 32 bits the same.

## Secure sums alone

In one process, no network: bytes of a round for one site as the server counts them, and the seconds that the sum adds to a
round, divided by the number of sites (keys, shares, masks, files, and the server's work). AES made {speed:,.0f} MB of mask
in a second. The error is the largest that a number in the mean may have.

| sites | bits | down | up | up over the model | seconds per site | error |
|---|---|---|---|---|---|---|
{quiet}
"""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def page(kept: Mapping[str, Any]) -> str:
    packed = kept["alone"]["packed"]

    def over(size: float) -> str:
        return f"{size / BYTES - 1:+.1%}"

    def cells(row: Measured) -> list[str]:
        sizes = [text for way in ("down", "up") for text in (f"{row[way]:,.0f}", over(row[way]))]
        return [*sizes, f"{row['seconds']:.1f}", f"{row['idle']:.0f}", f"{row['peak']:.0f}", f"{row['polling']:,.0f}"]

    def alone(name: str, row: Measured) -> str:
        sizes = (f"{row['down']:,.0f}", f"{row['up']:,.0f}", over(row["up"]))
        return _row(*map(str, ALONE[name]), *sizes, f"{row['seconds']:.2f}", f"{row['error']:.1e}")

    there = [part for part in DEPLOYED if part in kept]
    absent = [name for part, (name, _) in DEPLOYED.items() if part not in kept]
    wire = max(kept["ours"][way] for way in ("down", "up"))
    return TEXT.format(
        sites=len(SITES),
        cores=os.cpu_count(),
        numbers=NUMBERS,
        bytes=BYTES,
        rows=int(ROWS * 0.6),
        load=", ".join(f"{kept[part]['load']:.1f}" for part in there),
        long=LONG,
        short=SHORT,
        deployed="\n".join(_row(DEPLOYED[part][0], *cells(kept[part])) for part in there),
        missing=f"Not measured: {'; '.join(absent)}.\n\n" if absent else "",
        **packed,
        **{f"over_{way}": over(size) for way, size in packed.items()},
        wanted=WANTED,
        held="yes" if wire <= (1 + WANTED) * BYTES else "no",
        speed=kept["alone"]["speed"],
        quiet="\n".join(alone(name, row) for name, row in kept["alone"]["sums"].items()),
    )


DEPLOYED: dict[str, tuple[str, Callable[[], Measured]]] = {
    "ours": ("fedtailor", lambda: deployed(ours)),
    "peer": ("Flower's own FedAvg", lambda: deployed(peers, plain=True)),
    "secure": ("fedtailor, secure sums, 64 bits", lambda: deployed(ours, {"bits": 64})),
    "twenty": ("fedtailor, twenty sites", lambda: deployed(ours, names=[f"s{i:02d}" for i in range(20)])),
}
ALONE = {f"{clients} {bits}": (clients, bits) for clients in (3, 20) for bits in (64, 32)}


def main(asked: list[str]) -> None:
    unknown = set(asked) - {*DEPLOYED, "alone"}
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(DEPLOYED)} and alone")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and end what was started
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for part in asked or ["alone", *DEPLOYED]:
        load = os.getloadavg()[0]
        if part == "alone":
            quiet = {name: sums(*case) for name, case in ALONE.items()}
            kept[part] = {"sums": quiet, "speed": streams(), "packed": payload()}
        else:
            kept[part] = {**DEPLOYED[part][1](), "load": load}
        print(part, kept[part], flush=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    needed = [part for part in ("ours", "alone") if part not in kept]
    if needed:
        raise SystemExit(f"no page yet: {' and '.join(needed)} to be measured")
    PAGE.write_text(page(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
