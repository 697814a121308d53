"""``engine="ray"`` on small clusters of this machine: the bits of one process, a node that is lost, what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.engine.nodes import QUIET
from fedtailor.engine.options import Options
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.runs import noise_key
from tests.engine.test_shards import OPTIONS, crowd, same
from tests.sites.network import federation
from tests.sites.test_core import METHODS

ray = pytest.importorskip("ray")
NOISE = ("ResourceWarning", "FutureWarning", "pytest.PytestUnraisableExceptionWarning")  # of Ray's own processes and files
pytestmark = [pytest.mark.xdist_group("ray"), *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in NOISE)]
NAMED = ("FedAvg", "FedCLUP", "ScaffoldP", "HypCluster", "PerAda", "PFedHN")
MINE = """
from dataclasses import dataclass
from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.local import descend

def half(one, other):
    return tree.mix(one, other, 0.5)

@dataclass(frozen=True, kw_only=True)
class MyMethod(Algorithm):
    def init_server(self, task):
        return {"model": task.init()}, {}
    def init_client(self, task, shared, data):
        return {"model": shared["model"]}
    def client_update(self, task, shared, personal, data, rnd):
        new = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(new, shared["model"])}, {"model": half(personal["model"], new)}
    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], 1.0)}, server
    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.update(QUIET)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    leave()


def leave() -> None:
    """End Ray here, and let go of the files that it leaves open while their warnings are ignored."""
    ray.shutdown()
    gc.collect()


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes of one CPU each: (the cluster, the second node)."""
    from ray.cluster_utils import Cluster

    os.environ.update(QUIET)
    leave()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield nodes, nodes.add_node(num_cpus=1)
    finally:
        leave()
        nodes.shutdown()


def on_ray(method: object, fed: ft.Federation, model: str = "linear", **more: object) -> ft.Run:
    return ft.run(method, fed, model, engine="ray", on_nodes="loop", **{**OPTIONS, **more})


def test_actors_give_the_bits_of_the_loop_engine_at_partial_turnout(cluster):
    method, model, public = next(case for case in METHODS if type(case[0]).__name__ == "Ditto")
    fed = federation(public=public)
    same(on_ray(method, fed, model), ft.run(method, fed, model, engine="loop", workers=1, **OPTIONS))


@pytest.mark.slow
def test_actors_give_the_bits_of_the_loop_engine_whatever_is_sent(cluster, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    mine = ft.algorithms.origin.load(f"{tmp_path / 'mine.py'}:MyMethod")
    (tmp_path / "mine.py").unlink()  # no node has the file
    cases = [case for case in METHODS if type(case[0]).__name__ in NAMED]
    for method, model, public in [*cases, (mine(), "linear", 0)]:
        fed = federation(public=public)
        same(on_ray(method, fed, model), ft.run(method, fed, model, engine="loop", workers=1, **OPTIONS))


@pytest.mark.slow
def test_noise_of_a_private_run_is_that_of_one_machine(cluster):
    private = ft.FedAvg(steps=2, opt=ft.Private(clip=1.0, noise=1.0, seed=5))
    more = {"evaluate_every": 0}
    same(on_ray(private, federation(), **more), ft.run(private, federation(), engine="loop", workers=1, **{**OPTIONS, **more}))
    secret = ft.FedAvg(steps=2, opt=ft.Private(clip=1.0, noise=1.0))  # drawn anew: two runs differ, on every node
    assert on_ray(secret, federation(), **more).summary["epsilon_max"] > 0


@pytest.mark.slow
def test_errors_of_a_client_are_raised_here(cluster):
    with pytest.raises(Diverged, match="diverged in round"):
        on_ray(ft.FedAvg(lr=1e200, steps=50), federation(), "mlp")


@pytest.mark.slow
def test_without_a_cluster_at_the_address_it_is_refused(tmp_path):
    code = (
        "import fedtailor as ft, numpy as np\n"
        "pairs = [(np.ones((4, 2)), np.arange(4) % 2)] * 2\n"
        "ft.run(ft.FedAvg(), ft.Federation.from_arrays(pairs, pairs), engine='ray', address='127.0.0.1:1', rounds=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "InvalidArgument: there is no cluster at address='127.0.0.1:1'" in done.stderr, done.stderr


def test_without_ray_it_is_refused(monkeypatch):
    from fedtailor.engine import nodes

    monkeypatch.setattr(nodes, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r'needs the package ray: pip install "fedtailor\[ray\]"'):
        ft.run(ft.FedAvg(), federation(), engine="ray", rounds=1)


def test_the_address_is_no_property_of_a_run():
    assert "address" not in Options.of({"address": "auto"}).identity()
    assert Options.of({"on_nodes": "loop"}).identity()["on_nodes"] == "loop"


@pytest.mark.slow
def test_a_node_that_is_lost_is_replaced_and_no_bit_changes():
    with two_nodes() as (nodes, second):
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        gone: list[int] = []

        def lose(record: dict[str, object]) -> None:
            if record["round"] == 2:
                nodes.remove_node(second, allow_graceful=False)
                gone.append(2)

        fed, method = crowd(), ft.Ditto(lam=0.2)
        options = {"rounds": 6, "evaluate_every": 0, "cohort": 0.5}
        mine = ft.run(method, fed, engine="ray", on_nodes="loop", callback=lose, **options)
        assert gone == [2]
        same(mine, ft.run(method, fed, engine="loop", workers=1, **options))


COMMAND = ["run", "Ditto", "digits", "--model", "mlp", "--clients=6", "--rounds=40", "--batch-size=16"]
MORE = ["--evaluate-every=10", "--checkpoint-every=1"]


@pytest.mark.slow
def test_a_run_from_the_command_line_that_is_killed_goes_on_to_the_same_bits(tmp_path):
    line, history = [sys.executable, "-m", "fedtailor"], tmp_path / "a" / "history.jsonl"
    afar = [*line, *COMMAND, *MORE, "--engine=ray", "--on-nodes=loop", "--address=auto", "--out", str(tmp_path / "a")]
    with two_nodes() as (nodes, _):
        environment, until = {**os.environ, "RAY_ADDRESS": nodes.address}, time.monotonic() + 120  # auto looks there first
        first = subprocess.Popen(afar, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (history.exists() and len(history.read_bytes().splitlines()) >= 3):
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        first.kill()  # SIGKILL: nothing is tidied up
        first.wait()
        assert len(history.read_bytes().splitlines()) < 40
        again = [*line, "resume", str(tmp_path / "a")]
        done = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    near = [*line, *COMMAND, *MORE, "--engine=loop", "--workers=1", "--out", str(tmp_path / "b")]
    subprocess.run(near, capture_output=True, timeout=200, check=True)
    assert history.read_bytes() == (tmp_path / "b" / "history.jsonl").read_bytes()
    weights = sorted(path.relative_to(tmp_path / "b") for path in (tmp_path / "b" / "models").rglob("*.safetensors"))
    assert weights
    for name in weights:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.slow
def test_a_comparison_on_a_cluster_is_that_of_one_machine(cluster):
    from tests.engine import test_spread

    fed, more = test_spread.federation(), {"tune": {"lr": [0.03, 0.3]}, "seeds": 2}
    mine = ft.compare(test_spread.METHODS, fed, engine="ray", on_nodes="loop", **more, **test_spread.OPTIONS)
    test_spread.same(mine, ft.compare(test_spread.METHODS, fed, engine="loop", workers=1, **more, **test_spread.OPTIONS))


def places_of(word: bytes) -> list[str]:
    """Where a word lies in what Ray keeps: the files of its session, and the memory that its processes share."""
    files = {str(path): path for path in Path(ray._private.worker._global_node.get_session_dir_path()).rglob("*")}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            target = os.readlink(link)
            if "plasma" in target:
                files[target] = link
    return [name for name, path in files.items() if path.is_file() and word in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_key_behind_the_noise_is_in_no_file_of_ray_and_not_in_its_object_store(tmp_path):
    os.environ.update(QUIET)
    leave()
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    found: dict[str, list[str]] = {}

    def look(record: dict[str, object]) -> None:
        if record["round"] == 1:
            marked = ray.put(b"a mark that the search must find" * 10_000)
            secret = noise_key.read(tmp_path / "a")
            assert secret is not None
            found["mark"] = places_of(b"a mark that the search must find")
            found["key"] = places_of(secret.hex().encode()) + places_of(bytes.fromhex(secret.hex()))
            del marked

    try:
        private = ft.FedAvg(steps=2, opt=ft.Private(clip=1.0, noise=1.0))
        on_ray(private, federation(), evaluate_every=0, callback=look, out=tmp_path / "a")
    finally:
        leave()
    assert found["mark"]
    assert found["key"] == []


@pytest.mark.slow
def test_nodes_read_shards_by_themselves_and_give_the_bits_of_rows_in_memory(tmp_path):
    where = ft.save_shards(ft.Federation.load("digits", clients=6), tmp_path / "rows")
    line = [sys.executable, "-m", "fedtailor", "run", "Ditto", f"shards:{where}", "--rounds=4", "--batch-size=16"]
    with two_nodes() as (nodes, _):
        afar = [*line, "--engine=ray", "--on-nodes=loop", "--address=auto", "--out", str(tmp_path / "a")]
        environment = {**os.environ, "RAY_ADDRESS": nodes.address}
        done = subprocess.run(afar, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (where / "clients" / "0000" / "0000003.npz").write_bytes(b"PK")
        done = subprocess.run([*afar[:-1], str(tmp_path / "c")], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "0000003.npz, the rows of client" in done.stderr
        assert "Traceback" not in done.stderr
    near = ["run", "Ditto", "digits", "--clients=6", "--rounds=4", "--batch-size=16", "--engine=loop", "--workers=1"]
    subprocess.run([*line[:3], *near, "--out", str(tmp_path / "b")], capture_output=True, timeout=200, check=True)
    assert (tmp_path / "a" / "history.jsonl").read_bytes() == (tmp_path / "b" / "history.jsonl").read_bytes()
    for name in ("shared.safetensors", "personal.safetensors"):
        assert (tmp_path / "a" / "models" / name).read_bytes() == (tmp_path / "b" / "models" / name).read_bytes()
