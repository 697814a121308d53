"""A hundred thousand clients: killed, resumed and found again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedtailor.runs import checkpoint, models

CODE = """
import os, signal, sys
import numpy as np
import fedtailor as ft
out, resume, after = sys.argv[1], sys.argv[2] == "resume", int(sys.argv[3])
draw = np.random.default_rng(0)
x = draw.standard_normal((100_000, 4, 20), dtype=np.float32)
y = (x @ draw.standard_normal(20, dtype=np.float32) > 0).astype(np.int64)
halves = [[(x[i, part], y[i, part]) for i in range(len(x))] for part in (slice(0, 2), slice(2, 4))]
def kill(record):
    if record["round"] == after:
        os.kill(os.getpid(), signal.SIGKILL)
ft.run(
    ft.FedCLUP(lam=0.1), ft.Federation.from_arrays(*halves), out=out, resume=resume, callback=kill,
    rounds=30, cohort=1000, evaluate_every=10, evaluate_clients=500, checkpoint_every=3, engine="vectorized",
)
"""


def process(out, resume="", after=-1):
    done = subprocess.run([sys.executable, "-c", CODE, str(out), resume, str(after)], timeout=500, check=False)
    return done.returncode


@pytest.mark.slow
def test_a_hundred_thousand_clients_are_killed_resumed_and_found(tmp_path):
    assert process(tmp_path / "a") == 0
    assert process(tmp_path / "b", after=22) == -signal.SIGKILL
    assert "parts" in checkpoint.newest(tmp_path / "b" / "checkpoints").facts
    assert process(tmp_path / "b", "resume") == 0
    written = [path.relative_to(tmp_path / "a") for name in ("models", "measures") for path in (tmp_path / "a" / name).iterdir()]
    for name in (*written, "history.jsonl", "checkpoints/round-0000030.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert os.path.getsize(tmp_path / "a" / "history.jsonl") < 2_000_000
    saved = models.read(tmp_path / "b")
    names = [str(i) for i in np.random.default_rng(0).integers(100_000, size=300)]
    for name in names:
        saved.of(name)
    began = time.process_time()
    for name in names:
        saved.of(name)
    assert (time.process_time() - began) / len(names) < 0.001
