"""W2: CNN2 on 28x28 images, 20 clients x 500 rows, batch 32, one epoch; and a ResNet-18-like network with batches of 64.
The loop engine with one worker against the bare loop on one thread, with two against the bare loop on two threads."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import fedtailor as ft
from benchmarks import bare
from benchmarks.players import Player
from benchmarks.timing import on_threads, turn_about
from fedtailor.engine.loop import LoopEngine

LR = 0.05


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.short(x)).relu()


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18's blocks behind the ImageNet stem (7x7 stride 2, pooling), for 32x32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(width, outputs, stride))
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def _half(connection: Connection, net: nn.Module, pairs: bare.Pairs, batch: int) -> None:
    """Do half of a round whenever told to; end when told that it is enough."""
    torch.set_num_threads(1)
    while connection.recv():
        bare.fedavg_round(net, pairs, 1, batch, LR)
        connection.send(True)


class SideBySide:
    """Two bare loops in processes of their own, each with half of the clients: nothing is sent, so no pool can be faster."""

    def __init__(self, net: nn.Module, pairs: bare.Pairs, batch: int) -> None:
        self.ends, self.processes = [], []
        for half in (pairs[::2], pairs[1::2]):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=_half, args=(theirs, net, half, batch), daemon=True)
            process.start()
            self.ends.append(ours)
            self.processes.append(process)

    def __call__(self) -> None:
        for end in self.ends:
            end.send(True)
        for end in self.ends:
            end.recv()

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            end.send(False)
            process.join(10)


def _case(
    name: str, net: nn.Module, shape: tuple[int, ...], clients: int, rows: int, batch: int, two: float, goes: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    pairs = [(torch.randn(rows, *shape), torch.randint(10, (rows,))) for _ in range(clients)]
    federation = ft.Federation.from_arrays(pairs, [(x[:2], y[:2]) for x, y in pairs])
    algorithm = ft.FedAvg(lr=LR, epochs=1)
    torch.set_num_threads(1)
    one_worker = Player(algorithm, federation, net, batch, clients, LoopEngine, workers=1)
    two_workers = Player(algorithm, federation, net, batch, clients, LoopEngine, workers=2)

    def loop() -> None:
        bare.fedavg_round(net, pairs, 1, batch, LR)

    with two_workers.engine, SideBySide(net, pairs, batch) as side_by_side:
        seconds = turn_about(
            {
                "one worker": on_threads(1, one_worker),
                "bare, one thread": on_threads(1, loop),
                "two workers": on_threads(1, two_workers),
                "bare, two threads": on_threads(2, loop),
                "bare, two processes": side_by_side,
            },
            goes,
        )
    torch.set_num_threads(1)
    found = []
    for ours, other, wanted in (("one worker", "bare, one thread", 1.05), ("two workers", "bare, two threads", two)):
        ratio = seconds[ours] / seconds[other]
        found.append(
            {
                "case": f"{name}, {ours} against {other}",
                "ours_ms": 1e3 * seconds[ours],
                "bare_ms": 1e3 * seconds[other],
                "figure": f"{ratio:.2f}x the time",
                "wanted": f"at most {wanted}x",
                "met": ratio <= wanted,
            }
        )
    limit = seconds["bare, two processes"] / seconds["bare, two threads"]
    found[-1]["figure"] += f" (two bare processes side by side, which is the machine's limit: {limit:.2f}x)"
    return found


def small(goes: int = 2) -> list[dict[str, Any]]:
    return _case("W2 CNN2", ft.models.cnn(2, (28, 28), 10), (1, 28, 28), 20, 500, 32, 0.60, goes)


def large(goes: int = 2) -> list[dict[str, Any]]:
    return _case("W3 ResNet-18-like", resnet18(), (3, 32, 32), 4, 256, 64, 0.75, goes)[1:]


if __name__ == "__main__":
    for row in [*small(), *large()]:
        print(row)
