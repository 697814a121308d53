"""``python -m benchmarks.flow_speed``: hard inference on a mixed batch against one model, same rows, same run, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import fedtailor as ft
from fedtailor.algorithms import routing
from fedtailor.engine.setup import build_task

REPEATS = 25
CASES = [(model, rows) for model in ("mlp:256,128", "cnn2", "cnn5", "resnet8") for rows in (32, 128, 512)]


def timed(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPEATS + 3):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(found[3:])) for name, found in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    lines = [
        "# Hard inference of Flow: time against one model",
        "",
        "Written by `python -m benchmarks.flow_speed`: images 1x28x28, every row's path in every layer drawn evenly, so that "
        f"half of the rows change sides at each; one thread, median of {REPEATS} taken in turns. Wanted of *hard*: at most 1.2.",
        "",
        "| model | rows | hard | soft (both paths, mixed) | held |",
        "|---|---|---|---|---|",
    ]
    for model, rows in CASES:
        x, y = torch.rand(rows, 1, 28, 28, generator=draw), torch.randint(10, (rows,), generator=draw)
        fed = ft.Federation.from_arrays([(x, y)], [(x, y)], classes=list("0123456789"))
        task = build_task(model, fed, 0, torch.float32, True)
        g = task.init()
        v = {name: leaf + 0.01 * torch.randn(leaf.shape, generator=draw) for name, leaf in g.items()}
        paths = routing.routes(task, "layer")
        to_global = torch.rand(rows, len(paths), generator=draw) < 0.5
        q = torch.stack([to_global, ~to_global], -1).float()
        with torch.no_grad():
            assert torch.allclose(routing.hard(paths, g, v, to_global, x), routing.soft(paths, g, v, q, x)[0], atol=1e-4)
            found = timed(
                {
                    "one": lambda task=task, g=g, x=x: task.apply(g, x),  # type: ignore[misc]
                    "hard": lambda p=paths, g=g, v=v, t=to_global, x=x: routing.hard(p, g, v, t, x),  # type: ignore[misc]
                    "soft": lambda p=paths, g=g, v=v, q=q, x=x: routing.soft(p, g, v, q, x),  # type: ignore[misc]
                }
            )
        hard, soft = found["hard"] / found["one"], found["soft"] / found["one"]
        lines.append(f"| {model} | {rows} | {hard:.2f} | {soft:.2f} | {'yes' if hard <= 1.2 else 'no'} |")
        print(lines[-1], flush=True)
    (Path(__file__).parents[1] / "docs" / "results" / "flow-speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
