"""Worker processes: they leave signals to their parent, end with it, and one that stands still does not hang a run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import fedtailor as ft
from fedtailor.engine import pool as pools
from fedtailor.engine.pool import WorkerPool
from fedtailor.errors import WorkerStuck
from tests import make

SHARED = {"w": torch.arange(3.0)}


def jobs(function, count=4):
    return ((function, c, ()) for c in range(count))


def pid(context, shared, client):
    return torch.tensor(os.getpid())


def signal_itself(context, shared, client):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    return shared["w"] + client


def stop_itself(context, shared, client):
    if client == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return shared["w"]


def sleep(context, shared, client):
    time.sleep(60)


def compute(context, shared, client):
    until = time.perf_counter() + 1.5
    while time.perf_counter() < until:
        sum(range(1000))
    return shared["w"] + client


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pools, "POLL", 0.1)


def test_workers_leave_sigint_and_sigterm_to_their_parent():
    pool = WorkerPool(None, 2)
    results = list(pool.run(SHARED, jobs(signal_itself)))
    pool.close()
    assert all(torch.equal(value, SHARED["w"] + c) for c, value in enumerate(results))


def test_a_worker_that_is_stopped_is_named_and_ended():
    pool = WorkerPool(None, 2, timeout=0.5)
    pids = {worker.process.pid for worker in pool._workers}
    with pytest.raises(WorkerStuck, match=r"was stopped by a signal and has not answered for 0\.5 seconds") as caught:
        list(pool.run(SHARED, jobs(stop_itself)))
    assert any(f"worker process {number} " in str(caught.value) for number in pids)
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_a_worker_that_does_nothing_is_stuck_too():
    pool = WorkerPool(None, 2, timeout=0.5)
    with pytest.raises(WorkerStuck, match="does nothing"):
        list(pool.run(SHARED, jobs(sleep)))
    assert not multiprocessing.active_children()


def test_a_worker_that_computes_is_waited_for():
    pool = WorkerPool(None, 2, timeout=0.5)
    results = list(pool.run(SHARED, jobs(compute, 2)))
    pool.close()
    assert torch.equal(results[1], SHARED["w"] + 1)


def test_a_worker_that_is_woken_up_in_time_goes_on():
    pool = WorkerPool(None, 2, timeout=30.0)
    numbers = [worker.process.pid for worker in pool._workers]
    waker = threading.Timer(0.5, lambda: [os.kill(number, signal.SIGCONT) for number in numbers])
    waker.start()
    results = list(pool.run(SHARED, jobs(stop_itself)))
    pool.close()
    assert len(results) == 4


LEAVES_OPEN = """
import sys, torch
from pathlib import Path
from fedtailor.engine.pool import WorkerPool
from tests.engine.test_pool import SHARED, jobs, pid
pool = WorkerPool(None, 2)
list(pool.run(SHARED, jobs(pid)))
Path(sys.argv[1]).write_text(" ".join(str(worker.process.pid) for worker in pool._workers))
"""


def test_a_pool_that_nobody_closed_does_not_hang_the_end_of_the_program(tmp_path):
    subprocess.run([sys.executable, "-c", LEAVES_OPEN, str(tmp_path / "pids")], check=True, timeout=60)
    for number in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


def test_a_run_whose_worker_is_stopped_ends_and_can_be_resumed(tmp_path):
    federation = make.federation([9, 8, 7])
    options = {"rounds": 6, "engine": "loop", "workers": 2, "checkpoint_every": 1, "evaluate_every": 0}

    def stop_a_worker(record):
        if record["round"] == 2:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)

    with pytest.raises(WorkerStuck, match=r"was stopped by a signal .* resume it"):
        ft.run(ft.FedAvg(), federation, out=tmp_path / "a", worker_timeout=0.5, callback=stop_a_worker, **options)
    assert not multiprocessing.active_children()
    ft.run(ft.FedAvg(), federation, out=tmp_path / "a", resume=True, **options)
    ft.run(ft.FedAvg(), federation, out=tmp_path / "b", **options)
    assert (tmp_path / "a" / "history.jsonl").read_bytes() == (tmp_path / "b" / "history.jsonl").read_bytes()
