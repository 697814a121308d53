"""The cluster engine beside Flower's simulation (W1), and two nodes beside one (W2); writes docs/results/cluster.md.

``python -m benchmarks.cluster`` starts every measurement in a process of its own: ``python -m benchmarks.cluster WAY ROWS.npz
OUT.json``; ``python -m benchmarks.cluster "W1 here"`` measures that way only, and the others' figures are kept. All that is timed
are rounds: processes have started and have their rows. One node and two are timed in turns within one process, on nodes of one
CPU and one thread each, so that both sides see the same load.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedtailor as ft
from benchmarks import bare, w1, w2
from benchmarks.kept import keep
from fedtailor.engine.shards import Places

PAGE = Path("docs/results/cluster.md")
TURNS = 2  # of one node and two
ROUNDS = {"W1": 20, "W2": 2, "flower": 3}  # that are timed, after a first one
COHORT = {"W1": w1.COHORT, "W2": 20}
FLOWER, NODES = 30.0, 1.6  # times as many clients a second as Flower; as one node


@cache
def rows(path: str) -> tuple[Tensor, Tensor]:
    """All clients' rows: x [clients, rows, ...] and y [clients, rows]."""
    with np.load(path) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def federation(path: str) -> ft.Federation:
    pairs = list(zip(*rows(path), strict=True))
    return ft.Federation.from_arrays(pairs, [(x[:2], y[:2]) for x, y in pairs])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(w1.D, w1.CLASSES)


def cnn() -> nn.Module:
    return ft.models.cnn(2, (28, 28), 10)


@contextmanager
def nodes(count: int) -> Any:
    """A cluster of nodes with one CPU each, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def ours(path: str, case: str) -> list[list[float]]:
    """Return what FedAvg took in every turn: seconds of a round on one node and on two, and CPU seconds of the busier node."""
    with nodes(2):
        return [[*_timed(path, case, 1), *_timed(path, case, 2)] for _ in range(TURNS)]


def _timed(path: str, case: str, count: int) -> tuple[float, float]:
    """Return (seconds, CPU seconds of the busiest node) of a round on so many nodes, the first and the last round left out."""
    settings: dict[str, Any] = {"W1": {"batch_size": w1.BATCH, "cohort": w1.COHORT}, "W2": {"batch_size": 32}}[case]
    method = ft.FedAvg(lr=w1.LR, epochs=w1.EPOCHS) if case == "W1" else ft.FedAvg(lr=w2.LR, epochs=1)
    model: Any = "linear" if case == "W1" else cnn()
    marks: list[dict[int, float]] = []
    more: Any = {"rounds": ROUNDS[case] + 2, "evaluate_every": 0, "workers": count, "callback": lambda _: marks.append(spent())}
    run = ft.run(method, federation(path), model, engine="ray", **settings, **more)  # the last round is measured as well
    busy = max(marks[-2][pid] - marks[0][pid] for pid in marks[0] if pid in marks[-2]) / ROUNDS[case]
    return statistics.median(record["seconds"] for record in run.history[1:-1]), busy


def spent() -> dict[int, float]:
    """Return the CPU seconds of the processes of shards that descend from this one, by number."""
    parents, seconds, hosts = {}, {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid, facts = int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(facts[1])
            seconds[pid] = (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")
            if b"ray::Host" in (entry / "cmdline").read_bytes():
                hosts.add(pid)

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    return {pid: seconds[pid] for pid in hosts if is_ours(pid)}


def flower(path: str) -> list[list[float]]:
    """Seconds of a round of the same FedAvg (W1) in Flower's simulation, on as many processes as there are cores."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server, client, seconds = ServerApp(), ClientApp(), Path(f"{path}.flower")

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model, who = linear(), int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        x, y = (part[who] for part in rows(path))
        bare.sgd(model, x, y, w1.EPOCHS, w1.BATCH, w1.LR)
        metrics = MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @server.main()
    def lead(grid: Grid, context: Context) -> None:
        share = w1.COHORT / w1.CLIENTS
        strategy = FedAvg(share, fraction_evaluate=0.0, min_train_nodes=w1.COHORT, min_available_nodes=w1.CLIENTS)
        state = ArrayRecord(linear().state_dict())
        strategy.start(grid, state, num_rounds=1)  # processes start and read
        began = time.perf_counter()
        strategy.start(grid, state, num_rounds=ROUNDS["flower"])
        seconds.write_text(str((time.perf_counter() - began) / ROUNDS["flower"]))

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    config: Any = {"init_args": {"num_cpus": os.cpu_count(), **quiet}, "client_resources": {"num_cpus": 1}}
    run_simulation(server, client, w1.CLIENTS, backend_config=config)
    return [[float(seconds.read_text())]]


def side_by_side(path: str) -> list[list[float]]:
    """Return in every turn the seconds of a round of bare loops on W2's clients: in one process, in two that share nothing."""
    torch.set_num_threads(1)
    pairs, net, turns = list(zip(*rows(path), strict=True)), cnn(), []
    with w2.SideBySide(net, pairs, 32) as both:
        both()
        for _ in range(TURNS):
            times = []
            for way in (lambda: bare.fedavg_round(net, pairs, 1, 32, w2.LR), both):
                began = time.perf_counter()
                way()
                times.append(time.perf_counter() - began)
            turns.append(times)
    return turns


WAYS = {
    "W1 here": lambda path: ours(path, "W1"),
    "W1 in Flower": flower,
    "W2 here": lambda path: ours(path, "W2"),
    "W2 bare": side_by_side,
}
Found = dict[str, list[list[float]]]  # what every way took, turn by turn


def write_rows(folder: Path) -> dict[str, str]:
    """Write the rows of both cases and return where they are."""
    draw = np.random.default_rng(0)
    shapes = {"W1": (w1.CLIENTS, w1.ROWS, w1.D), "W2": (20, 500, 1, 28, 28)}
    for case, shape in shapes.items():
        np.savez(folder / case, x=draw.normal(size=shape).astype(np.float32), y=draw.integers(10, size=shape[:2]))
    return {case: str(folder / f"{case}.npz") for case in shapes}


def measured(ways: Sequence[str]) -> Found:
    """Measure some ways; return what every way measured so far took, turn by turn."""
    found: Found = {}
    with TemporaryDirectory() as spare:
        places, out = write_rows(Path(spare)), Path(spare) / "out.json"
        for way in ways:
            command = [sys.executable, "-m", "benchmarks.cluster", way, places[way[:2]], str(out)]
            subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found = keep("cluster", way, json.loads(out.read_text()))
            print(way, [[round(one, 4) for one in turn] for turn in found[way]], flush=True)
    return found


def _rows(found: Found) -> list[str]:
    """Return the table's rows: (where, seconds of a round, CPU seconds of the busiest node, clients a second)."""
    places = [("W1 here", "W1 on one node", 0), ("W1 here", "W1 on two nodes", 2), ("W2 here", "W2 on one node", 0)]
    places += [("W2 here", "W2 on two nodes", 2)]
    lines = []
    for way, name, at in places:
        wall, busy = (statistics.median(turn[at + more] for turn in found[way]) for more in (0, 1))
        lines.append(f"| {name} | {wall:.4f} | {busy:.3f} | {COHORT[name[:2]] / wall:,.0f} |")
    flower = found["W1 in Flower"][0][0]
    return [*lines[:2], f"| W1 in Flower | {flower:.4f} | | {COHORT['W1'] / flower:,.0f} |", *lines[2:]]


def _gains(turns: list[list[float]], over: int, under: int) -> tuple[float, str]:
    """Return the median over turns of one time over another, and every turn's."""
    each = [turn[over] / turn[under] for turn in turns]
    return statistics.median(each), ", ".join(f"{gain:.2f}" for gain in each)


def page(found: Found) -> str:
    """Return the results in Markdown."""
    best = min(statistics.median(turn[at] for turn in found["W1 here"]) for at in (0, 2))
    beside = found["W1 in Flower"][0][0] / best
    (gain, gains), (busy, _), (bare_gain, bare_gains) = (
        _gains(found["W2 here"], 0, 2),
        _gains(found["W2 here"], 1, 3),
        _gains(found["W2 bare"], 0, 1),
    )
    dealt = [len(members) for members in Places.of(_keys(), 2).members]
    lines = [
        "# The cluster engine, measured",
        "",
        "`make bench-cluster` wrote this page. W1 is softmax regression on 60 features and 10 classes, 100 of 1,000 clients a "
        "round, 5 epochs on 100 rows in batches of 16. W2 is a small CNN on 28x28 images, all of 20 clients, one epoch on 500 "
        "rows in batches of 32. Both are FedAvg. A node is a Ray node with one CPU, and its process has one thread; all are on "
        f"one machine with {os.cpu_count()} cores ({platform.machine()}); its other work is in the seconds. What is timed are "
        f"rounds, after a first one. One node and two were timed in turns, {TURNS} of each; the medians are shown. CPU seconds "
        "are those of the busiest node in a round, which other work changes little.",
        "",
        "| | seconds a round | CPU seconds of the busiest node | clients a second |",
        "|---|---|---|---|",
        *_rows(found),
        "",
        f"- W1: {beside:.0f} times as many clients a second as Flower's simulation on the same cores (wanted: {FLOWER:g}): "
        f"**{'held' if beside >= FLOWER else 'not held'}**.",
        f"- W2: two nodes give {gain:.2f} times the throughput of one ({gains} turn by turn; wanted: {NODES:g}): "
        f"**{'held' if gain >= NODES else 'not held'}**. Two bare loops side by side, which share nothing and have half of the "
        f"clients each, give {bare_gain:.2f} times that of one ({bare_gains}): the machine's limit in the same minutes. By names "
        f"the 20 clients are dealt {dealt[0]} to {dealt[1]}, so two nodes can give {20 / max(dealt):.2f} at most; by CPU "
        f"seconds, which leave other work out, the busier of two nodes has 1/{busy:.2f} of the work of one.",
        "",
    ]
    return "\n".join(lines)


def _keys() -> Any:
    """Return the keys of W2's clients, by which they are dealt to nodes."""
    pairs = [(np.zeros((2, 1)), np.arange(2))] * COHORT["W2"]
    return ft.Federation.from_arrays(pairs, pairs).keys


def main(*asked: str) -> None:
    if len(asked) == 3 and asked[0] in WAYS and asked[1] not in WAYS:
        way, path, out = asked
        Path(out).write_text(json.dumps(WAYS[way](path)))
        return
    found = measured(asked or list(WAYS))
    if set(found) >= set(WAYS):
        PAGE.write_text(page(found))


if __name__ == "__main__":
    from benchmarks import cluster  # under its own name, by which the processes of a simulation find it

    cluster.main(*sys.argv[1:])
