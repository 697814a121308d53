"""``engine="ray"`` without a cluster: shards give the numbers of one machine, whatever their number."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data import rng
from fedtailor.engine import cluster
from fedtailor.engine.cluster import ClusterEngine, Here
from fedtailor.engine.shards import arcs, on_disk, owners
from fedtailor.errors import WorkerDied
from fedtailor.runs import increments
from tests.sites.network import federation
from tests.sites.test_core import METHODS, Halfway, difference

OPTIONS = {"rounds": 4, "batch_size": 8, "evaluate_every": 2, "cohort": 3, "dtype": "float64"}


@pytest.fixture
def shards(monkeypatch):
    """The engine on so many shards in this process."""
    made: list[ClusterEngine] = []

    def use(count: int) -> list[ClusterEngine]:
        def engine(plan, options):
            made.append(cluster.here(plan, options, count))
            return made[-1]

        monkeypatch.setattr(cluster, "engine", engine)
        return made

    return use


def same(mine: ft.Run, other: ft.Run) -> None:
    """Compare two runs bit by bit: trees, personal states, history, every client's scores."""
    assert mine.summary["engine"] == "ray"
    for one, two in ((mine.shared, other.shared), (mine.server, other.server)):
        assert difference(one, two) == 0
    assert (mine.store.born == other.store.born).all()
    born = np.flatnonzero(other.store.born)
    assert difference(mine.store.get(born), other.store.get(born)) == 0
    for one, two in zip(mine.history, other.history, strict=True):
        assert {**one, "seconds": 0} == {**two, "seconds": 0}
    for name, values in other.clients.items():
        np.testing.assert_array_equal(mine.clients[name], values)


@pytest.mark.parametrize(("method", "model", "public"), METHODS, ids=lambda value: type(value).__name__)
def test_shards_give_the_bits_of_the_loop_engine_at_partial_turnout(shards, method, model, public):
    fed = federation(public=public)
    loop = ft.run(method, fed, model, engine="loop", workers=1, **OPTIONS)
    shards(3)
    same(ft.run(method, fed, model, engine="ray", on_nodes="loop", **OPTIONS), loop)


def crowd(clients: int = 40) -> ft.Federation:
    draw = np.random.default_rng(3)
    pairs = [(draw.normal(size=(5 + i % 7, 4)), np.arange(5 + i % 7) % 3) for i in range(clients)]
    return ft.Federation.from_arrays(pairs, pairs, names=[f"client {i}" for i in range(clients)])


@pytest.mark.parametrize("inner", ["loop", "vectorized"])
@pytest.mark.parametrize("method", [ft.FedCLUP(lam=0.3, steps=3), Halfway()], ids=["FedCLUP", "Halfway"])
def test_no_bit_depends_on_the_number_of_shards(shards, inner, method):
    fed, options = crowd(), {"rounds": 3, "batch_size": 4, "cohort": 0.5, "on_nodes": inner}
    runs = []
    for count in (1, 2, 3, 4):
        shards(count)
        runs.append(ft.run(method, fed, engine="ray", **options))
    for other in runs[1:]:
        same(other, runs[0])
    one = ft.run(method, fed, engine=inner, workers=1, **{k: v for k, v in options.items() if k != "on_nodes"})
    assert difference(runs[0].shared, one.shared) <= (0 if inner == "loop" else 1e-6)  # single precision


def test_one_shard_more_moves_only_the_half_of_one_arc():
    keys = np.fromiter((rng.purpose(f"client {i}") for i in range(4000)), np.uint64)
    for count in range(1, 12):
        begins = np.array(arcs(count)), np.array(arcs(count + 1))
        assert set(begins[0]) < set(begins[1])
        moved = np.mean(begins[0][owners(keys, count)] != begins[1][owners(keys, count + 1)])
        assert 0 < moved <= 0.55 / 2 ** int(np.log2(count))
    assert (np.diff(owners(np.sort(keys), 7)) >= 0).all()  # arcs are ranges of keys


def test_in_a_round_a_shard_is_sent_one_tree_and_one_sum_is_handed_on(shards, monkeypatch):
    made, calls = shards(2), []
    each, chain = Here.each, Here.chain
    monkeypatch.setattr(Here, "each", lambda self, *a: calls.append((a[0], sorted(a[2]))) or each(self, *a))
    monkeypatch.setattr(Here, "chain", lambda self, *a: calls.append(("chain", list(a[0]))) or chain(self, *a))
    ft.run(ft.FedAvg(), crowd(), engine="ray", rounds=2, evaluate_every=0)
    assert made[0].places.members[1].size
    assert [c for c in calls if c[0] in ("work", "chain", "uploads")] == 2 * [("work", [0, 1]), ("chain", [0, 1])]


class Middle(ft.FedAvg):
    reduce = "median"


def test_what_teachers_say_and_compressed_uploads_are_summed_where_they_are_and_medians_here(shards, monkeypatch):
    asked: list[str] = []
    each = Here.each
    monkeypatch.setattr(Here, "each", lambda self, *a: asked.append(a[0]) or each(self, *a))
    for method, public, here in (
        (ft.FedDF(kd_steps=2), 6, False),
        (ft.Compressed(method=ft.FedAvg(), keep=0.5), 0, False),
        (Middle(), 0, True),
    ):
        fed = federation(public=public)
        loop = ft.run(method, fed, engine="loop", workers=1, **OPTIONS)
        shards(3)
        same(ft.run(method, fed, engine="ray", on_nodes="loop", **OPTIONS), loop)
        assert ("uploads" in asked) is here
        asked.clear()


def test_slow_clients_lost_uploads_and_privacy_are_as_in_the_loop_engine(shards, tmp_path):
    fed = federation()
    table = tmp_path / "who.csv"
    table.write_text("round,client,lost,pace\n0,Cork,1,\n0,Delft,0,0.5\n0,Aarhus,0,\n1,Bergen,0,\n1,Cork,0,0.4\n")
    crowds = {"user_clip": 1.0, "user_noise": 1.0, "user_seed": 3}
    private = ft.Private(clip=1.0, noise=1.0, seed=5)
    cases = [
        (ft.Ditto(lam=0.2, epochs=2), {"cohort": str(table)}),
        (ft.FedAvg(), {**crowds, "cohort": 0.6, "evaluate_every": 0}),
        (ft.FedAvg(steps=2, opt=private), {"evaluate_every": 0}),
    ]
    for method, more in cases:
        loop = ft.run(method, fed, engine="loop", workers=1, **{**OPTIONS, **more})
        shards(2)
        same(ft.run(method, fed, engine="ray", on_nodes="loop", **{**OPTIONS, **more}), loop)


class Failing(Here):
    """Shards of which one is lost at given calls, with all that it knew."""

    def __init__(self, shards, at):
        super().__init__(shards)
        self.at, self.calls, self.lost = at, 0, 0

    def _loses(self):
        self.calls += 1
        if self.calls in self.at:
            self.replace(1)
            self.lost += 1
        return [1] if self.calls in self.at else []

    def each(self, method, common, calls):
        gone = self._loses() if 1 in calls and method in ("work", "predictions") else []
        out, _ = super().each(method, common, {shard: own for shard, own in calls.items() if shard not in gone})
        return out, gone

    def chain(self, shards, reduce):
        gone = self._loses() if 1 in shards else []
        return (None, gone) if gone else super().chain(shards, reduce)


@pytest.mark.parametrize("backup", [2, 20])
@pytest.mark.parametrize("at", [{1}, {2}, {5, 6, 7}, {2, 11, 26}], ids=["work", "sum", "again", "often"])
def test_a_shard_that_is_lost_is_rebuilt_and_gives_the_same_bits(monkeypatch, at, backup):
    fed, method = crowd(), ft.Ditto(lam=0.2)
    options = {"rounds": 5, "evaluate_every": 2, "cohort": 0.5}
    loop, made = ft.run(method, fed, engine="loop", workers=1, **options), []

    def engine(plan, asked):
        made.append(cluster.here(plan, asked, 2))
        made[-1].crew = Failing(made[-1].crew.shards, at)
        return made[-1]

    monkeypatch.setattr(cluster, "engine", engine)
    monkeypatch.setattr(cluster, "BACKUP", backup)
    crews = []
    close = Failing.close
    monkeypatch.setattr(Failing, "close", lambda self: crews.append(self) or close(self))
    same(ft.run(method, fed, engine="ray", on_nodes="loop", **options), loop)
    assert crews[0].lost >= min(len(at), 2)


def test_a_shard_that_is_lost_again_and_again_ends_the_run(monkeypatch):
    def engine(plan, asked):
        made = cluster.here(plan, asked, 2)
        made.crew = Failing(made.crew.shards, set(range(1000)))
        return made

    monkeypatch.setattr(cluster, "engine", engine)
    with pytest.raises(WorkerDied, match="lost 3 times in one round"):
        ft.run(ft.Ditto(), crowd(), engine="ray", rounds=2)


@pytest.mark.parametrize("small", [increments.SMALL, 1], ids=["whole", "changes only"])
def test_a_run_goes_on_with_another_number_of_shards(shards, tmp_path, monkeypatch, small):
    monkeypatch.setattr(increments, "SMALL", small)
    fed, method, options = crowd(), ft.Ditto(lam=0.2), {"rounds": 4, "cohort": 0.5, "evaluate_every": 0}

    def stop(record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    shards(2)
    with pytest.raises(KeyboardInterrupt):
        ft.run(method, fed, engine="ray", on_nodes="loop", out=tmp_path / "a", callback=stop, checkpoint_every=1, **options)
    parts = sorted((tmp_path / "a").rglob("store-*.safetensors"))
    assert len(parts) == (2 if small == 1 else 0)
    assert len({part.stat().st_size for part in parts}) == len(parts)  # first all who were born, then those that changed
    shards(3)
    again = ft.run(method, fed, engine="ray", on_nodes="loop", out=tmp_path / "a", resume=True, **options)
    same(again, ft.run(method, fed, engine="loop", workers=1, **options))
    whole = ft.run(method, fed, engine="loop", workers=1, **options)
    x = fed.test.client(0)[0]
    np.testing.assert_array_equal(again.predict(fed.names[0], x), whole.predict(fed.names[0], x))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_backups_are_pages_of_files_not_of_memory():
    draw = torch.Generator().manual_seed(0)
    states = {"model": {"w": torch.randn(7, 3000, generator=draw)}, "none": torch.zeros(0, 2), "steps": torch.arange(7)}
    kept = on_disk(states)
    assert difference(kept["model"], states["model"]) == 0
    assert kept["none"].shape == (0, 2)
    assert kept["steps"].tolist() == list(range(7))
    place = kept["model"]["w"].data_ptr()
    areas = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    [area] = [area for area in areas if int(area[0].split("-")[0], 16) <= place < int(area[0].split("-")[1], 16)]
    assert area[4] != "0"  # of a file
    assert area[1][3] == "s"
