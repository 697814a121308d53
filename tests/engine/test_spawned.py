"""Workers on other operating systems are spawned: the same bits, the user's own classes, and failures that are said."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import origin
from fedtailor.engine import parcel, processes
from fedtailor.engine.memory import Memory
from fedtailor.engine.pool import WorkerPool, _Shelf
from tests import make

BOTH = pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
METHODS = [
    ft.FedAvg(epochs=1),
    ft.FedCLUP(lam=0.5, lr=0.1),
    ft.ScaffoldP(epochs=1),
    ft.FedPer(epochs=1),
    ft.APFL(),
    ft.HypCluster(),
    ft.FedAvg(opt=ft.Private(clip=1.0, noise=1.0, seed=3)),
]
MINE = """
from dataclasses import dataclass
import torch
from fedtailor import FedAvg

def halved(tree):
    return {name: leaf / 2 for name, leaf in tree.items()}

@dataclass(frozen=True, kw_only=True)
class Halved(FedAvg):
    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return {name: halved(branch) for name, branch in upload.items()}, personal

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x).tanh()

def net():
    return Net()
"""


@pytest.fixture
def use(monkeypatch):
    def change(start):
        if start not in multiprocessing.get_all_start_methods():
            pytest.skip(f"no {start} here")
        monkeypatch.setattr(processes, "START", start)

    return change


def played(method, model="mlp:4", workers=1):
    return ft.run(method, make.federation([9, 8, 7]), model, rounds=2, batch_size=4, engine="loop", workers=workers)


def same(one, other):
    for a, b in ((one.shared, other.shared), *zip(one.personal, other.personal, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@BOTH
def test_two_workers_give_the_bits_of_one(use, start, method):
    use(start)
    same(played(method), played(method, workers=2))


def test_a_spawned_worker_gives_the_bits_of_one(use):
    use("spawn")
    same(played(ft.Ditto(epochs=1)), played(ft.Ditto(epochs=1), workers=2))


@BOTH
def test_a_method_and_a_module_from_a_file_are_sent(use, start, tmp_path, monkeypatch):
    use(start)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    method = origin.load("mine.py:Halved")(epochs=1)
    same(played(method, "mine.py:net"), played(method, "mine.py:net", workers=2))


@BOTH
def test_a_module_defined_in_a_function_is_sent_and_its_failure_comes_home(use, start):
    use(start)

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            if multiprocessing.parent_process() is not None:
                raise ValueError("no good here")
            return self.layer(x)

    with pytest.raises(RuntimeError, match="no good here"):
        played(ft.FedAvg(), Breaks(), workers=2)
    assert not multiprocessing.active_children()


def die(context, shared, client):
    os.kill(os.getpid(), signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)


@BOTH
def test_a_worker_that_is_killed_is_reported(use, start):
    use(start)
    with pytest.raises(ft.errors.WorkerDied, match="died"):
        list(WorkerPool(None, 2).run({}, ((die, client, ()) for client in range(3))))
    assert not multiprocessing.active_children()


def scribble(context, shared, client):
    context += 1
    return os.getpid(), float(context[0])


def test_what_a_worker_writes_to_a_tensor_of_the_plan_is_seen_by_no_other():
    given = torch.zeros(1000)
    pool = WorkerPool(given, 2)
    seen = {}
    for pid, value in pool.run({}, ((scribble, client, ()) for client in range(20))):
        seen.setdefault(pid, []).append(value)
    pool.close()
    assert all(values == [1.0 + place for place in range(len(values))] for values in seen.values())
    assert sum(map(len, seen.values())) == 20
    assert not given.any()


def test_a_small_view_of_a_large_tensor_does_not_bring_all_of_it_along():
    memory = Memory()
    content, _ = parcel.dumps(torch.arange(1_000_000.0)[7:10], aside=_Shelf(memory).put)
    assert len(content) < 10_000
    assert parcel.loads(content, (), memory.view).tolist() == [7.0, 8.0, 9.0]
    memory.close()


def test_a_class_that_only_the_user_has_comes_back_as_itself():
    """As in a script or a notebook: no module has it by its name, and it is sent with the function that makes it."""

    @dataclass(frozen=True)
    class Mine:
        delta: torch.Tensor

    class Odd(ft.errors.InvalidArgument):
        pass

    def make_one(context, shared, client):
        if client == 1:
            raise Odd("client 1 is odd")
        return Mine(torch.full((3,), float(client)))

    pool = WorkerPool({"make": make_one}, 2)
    (found,) = pool.run({}, iter([(through, 0, ("make",))]))
    assert type(found) is Mine
    assert torch.equal(found.delta, torch.zeros(3))
    with pytest.raises(Odd, match="client 1 is odd"):
        list(pool.run({}, iter([(through, 1, ("make",))])))


def through(context, shared, client, name):
    return context[name](context, shared, client)


def test_torch_is_told_in_workers_what_it_was_told_here():
    torch.set_deterministic_debug_mode(1)
    torch.set_default_dtype(torch.float64)
    try:
        pool = WorkerPool(None, 1)
        assert list(pool.run({}, iter([(told, 0, ())]))) == [(torch.float64, 1)]
        pool.close()
    finally:
        torch.set_deterministic_debug_mode(0)
        torch.set_default_dtype(torch.float32)


def told(context, shared, client):
    return torch.get_default_dtype(), torch.get_deterministic_debug_mode()


def test_a_module_that_is_nowhere_else_is_refused_by_name_and_a_run_goes_on_in_one_process(monkeypatch):
    nowhere = ModuleType("nowhere_else")
    exec("class Net(torch.nn.Linear): pass", {"torch": torch, "__name__": "nowhere_else"}, nowhere.__dict__)
    monkeypatch.setitem(sys.modules, "nowhere_else", nowhere)
    with pytest.raises(ft.errors.InvalidArgument, match=r"cannot load .*nowhere_else.*; use workers=1"):
        played(ft.FedAvg(epochs=1), nowhere.Net(3, 2), workers=2)
    monkeypatch.setattr(processes, "LEAST", 0.0)
    monkeypatch.setattr(processes, "START_UP", 0.0)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    with pytest.warns(UserWarning, match="in one process: a worker process cannot load"):
        alone = played(ft.FedAvg(epochs=1), nowhere.Net(3, 2), workers=None)
    assert alone.summary["workers"] == 1
    assert not multiprocessing.active_children()


def test_workers_are_not_started_by_themselves_for_less_than_their_start_up(monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 2)
    monkeypatch.setattr(processes, "_owner", None)
    assert not processes.pays(here=1.0, in_all=processes.START_UP)  # two processes save half of it
    assert processes.pays(here=1.0, in_all=2 * processes.START_UP + 0.1)
    assert not processes.pays(here=processes.LEAST / 2, in_all=1e6)
    monkeypatch.setattr(processes, "_owner", os.getpid())
    monkeypatch.setattr(processes, "START", "forkserver")
    assert processes.pays(here=1.0, in_all=1.0)  # the server is there
    monkeypatch.setattr(processes, "cores", lambda: 1)
    assert not processes.pays(here=1e6, in_all=1e6)


def test_what_cannot_be_sent_is_refused_by_name():
    with pytest.raises(ft.errors.InvalidArgument, match=r"cannot be sent .*lock.*use workers=1"):
        WorkerPool(threading.Lock(), 2)
    assert not multiprocessing.active_children()


def test_the_server_of_workers_has_one_thread_and_a_pool_starts_beside_threads():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        same(played(ft.FedAvg(epochs=1)), played(ft.FedAvg(epochs=1), workers=2))
        if processes.START == "forkserver":
            server = processes.forkserver._forkserver._forkserver_pid
            assert len(os.listdir(f"/proc/{server}/task")) == 1
    finally:
        waiting.set()
        thread.join()


SCRIPT = """
import fedtailor as ft
from torch import nn
from fedtailor.engine import processes
from tests import make
print("once")
processes.START = "spawn"
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)
ft.run(ft.FedAvg(epochs=1), make.federation([9, 8]), Net(), rounds=1, engine="loop", workers=2)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again_and_its_classes_are_sent(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def test_memory_is_shared_where_there_are_no_files_without_a_name_in_memory(monkeypatch):
    """As on macOS, where a file that was removed is mapped by both."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    pool = WorkerPool(torch.arange(1000.0), 2)
    found = list(pool.run({"w": torch.ones(3)}, ((added, client, ()) for client in range(4))))
    pool.close()
    assert [value.tolist() for value in found] == [[1.0 + client] * 3 for client in range(4)]


def added(context, shared, client):
    return shared["w"] + context[client]


@pytest.mark.skipif(sys.platform == "win32", reason="no ps there")
def test_ps_says_whether_a_process_computes_or_is_stopped():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        stopped, first = processes.by_ps(busy.pid)
        assert not stopped
        assert first
        os.kill(busy.pid, signal.SIGSTOP)
        assert processes.by_ps(busy.pid)[0]
    finally:
        busy.kill()
        busy.wait()
