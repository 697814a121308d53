"""The same FedAvg three ways, on rows from a file: ``python -m benchmarks.peer_ways WAY CASE ROWS.npz OUT.json``.

``here`` is ft.run, ``bare`` a loop in plain PyTorch, ``flower`` an app in the manner of Flower's quickstart in its simulation.
All start from the same network. What is written is the accuracy of the last shared model on all clients' test rows, and the
seconds of the training itself, without imports and reading.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import bare

BATCH, EPOCHS = 32, 1
ROUNDS = {"table": 50, "images": 10}
LR = {"table": 0.05, "images": 0.05}


def network(case: str) -> nn.Module:
    torch.manual_seed(0)
    if case == "table":
        return nn.Sequential(nn.Linear(561, 64), nn.ReLU(), nn.Linear(64, 6))
    convolutions = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))


@cache
def clients(path: str) -> dict[str, Tensor]:
    """The rows, leaves [clients, rows, ...]."""
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@torch.no_grad()
def accuracy(model: nn.Module, rows: dict[str, Tensor]) -> float:
    x, y = rows["test_x"].flatten(0, 1), rows["test_y"].flatten()
    return float((model(x).argmax(1) == y).double().mean())


def here(case: str, path: str) -> tuple[float, float]:
    import fedtailor as ft

    pairs = {
        part: [(rows.numpy(), clients(path)[f"{part}_y"][i].numpy()) for i, rows in enumerate(clients(path)[f"{part}_x"])]
        for part in ("train", "test")
    }
    federation = ft.Federation.from_arrays(pairs["train"], pairs["test"])
    method, began = ft.FedAvg(lr=LR[case], epochs=EPOCHS), time.perf_counter()
    run = ft.run(method, federation, network(case), rounds=ROUNDS[case], batch_size=BATCH, evaluate_every=0)
    return run.summary["acc_global_weighted"], time.perf_counter() - began


def loop(case: str, path: str) -> tuple[float, float]:
    rows, model, began = clients(path), network(case), time.perf_counter()
    pairs = list(zip(rows["train_x"], rows["train_y"], strict=True))
    for _ in range(ROUNDS[case]):
        bare.fedavg_round(model, pairs, EPOCHS, BATCH, LR[case])
    return accuracy(model, rows), time.perf_counter() - began


def flower(case: str, path: str) -> tuple[float, float]:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server, client = ServerApp(), ClientApp()
    count, found = len(clients(path)["train_y"]), Path(f"{path}.flower")

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model, who, rows = network(case), int(context.node_config["partition-id"]), clients(path)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        bare.sgd(model, rows["train_x"][who], rows["train_y"][who], EPOCHS, BATCH, LR[case])
        metrics = MetricRecord({"num-examples": len(rows["train_y"][who])})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @server.main()
    def lead(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
        result = strategy.start(grid, ArrayRecord(network(case).state_dict()), num_rounds=ROUNDS[case])
        torch.save(result.arrays.to_torch_state_dict(), found)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    config: Any = {"init_args": {"num_cpus": os.cpu_count(), **quiet}, "client_resources": {"num_cpus": 1}}
    began = time.perf_counter()
    run_simulation(server, client, count, backend_config=config)
    seconds, model = time.perf_counter() - began, network(case)
    model.load_state_dict(torch.load(found, weights_only=True))
    return accuracy(model, clients(path)), seconds


WAYS = {"here": here, "bare": loop, "flower": flower}


def main(way: str, case: str, path: str, out: str) -> None:
    score, seconds = WAYS[way](case, path)
    Path(out).write_text(json.dumps({"accuracy": score, "training": seconds}))


if __name__ == "__main__":
    from benchmarks import peer_ways  # under its own name, by which the processes of a simulation find it

    peer_ways.main(*sys.argv[1:])
