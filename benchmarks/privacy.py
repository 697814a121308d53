"""A step of DP-SGD against a plain step, on the CNN with two convolutions (28x28, batch of 32), one thread, in the same run.

``by layer`` is what fedtailor does, ``row by row`` what it falls back to (vmap of grad). Run: python -m benchmarks.privacy
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from benchmarks.timing import turn_about
from fedtailor import SGD, Private, Task, descend, models
from fedtailor.data import Batches

BATCH, STEPS, TIMES = 32, 10, 9


def run() -> dict[str, float]:
    """Milliseconds per step."""
    torch.set_num_threads(1)
    task = Task.from_module(models.build("cnn2", (28, 28), 10), classes=10)
    draw, rows = torch.Generator().manual_seed(0), STEPS * BATCH
    x, y = torch.randn(rows, 28, 28, generator=draw), torch.randint(0, 10, (rows,), generator=draw)
    data = Batches(x, y, np.arange(rows).reshape(STEPS, BATCH), np.arange(STEPS))
    unknown = replace(task, trainer=None)
    private = Private(lr=0.01, clip=1.0, noise=1.0)
    ways = {
        "plain": lambda: descend(task.risk, task.init(), data, SGD(lr=0.01)),
        "by layer": lambda: descend(task.risk, task.init(), data, private),
        "by layer, no noise": lambda: descend(task.risk, task.init(), data, replace(private, noise=0.0)),
        "row by row": lambda: descend(unknown.risk, unknown.init(), data, private),
    }
    return {name: 1e3 * seconds / STEPS for name, seconds in turn_about(ways, TIMES).items()}


def main() -> None:
    found = run()
    for name, each in found.items():
        print(f"{name:20s} {each:7.2f} ms per step   {each / found['plain']:5.2f} x")


if __name__ == "__main__":
    main()
