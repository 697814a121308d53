"""The peer of ``benchmarks.sites``: a Flower app in the manner of its quickstart, with Flower's own FedAvg, on the same tables.

It knows nothing of fedtailor. The benchmark copies it into an app's folder.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

COLUMNS, HIDDEN, BATCH, LR = 64, 3912, 16, 0.1
server = ServerApp()
client = ClientApp()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(COLUMNS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2))


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    frame = pd.read_csv(str(context.node_config["data"])).iloc[: int(context.run_config["rows"])]
    x = torch.tensor(frame.drop(columns="y").to_numpy(np.float32))
    y = torch.tensor((frame["y"] == "yes").to_numpy(np.int64))
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    for rows in torch.randperm(len(y)).split(BATCH):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
    metrics = MetricRecord({"num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@server.main()
def lead(grid: Grid, context: Context) -> None:
    rounds, nodes = int(context.run_config["rounds"]), int(context.run_config["nodes"])
    times: list[float] = []
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=lambda *_: times.append(time.perf_counter()))
    Path(str(context.run_config["out"])).write_text(json.dumps(np.diff(times).tolist()))
