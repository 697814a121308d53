"""Who takes part is said by a function or a table; uploads get lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.errors import BadRun, InvalidArgument, InvalidData
from tests.make import federation

NAMES = ("ann", "bob", "cid", "dee", "eve")
DATA = federation((7, 5, 9, 6, 8), names=NAMES)
SETTINGS = {"rounds": 3, "workers": 1, "dtype": "float64", "batch_size": 4, "evaluate_every": 0}
ENGINES = ["loop", "vectorized"]


def assert_close(a, b):
    for (path, p), q in zip(tree.items(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=path)


def some(number, names, draw):
    return [("ann", "cid"), ("bob", "cid", "eve"), ("dee",)][number % 3]


def losing(number, names, draw):
    return ["ann", "bob", "cid"], ["bob"]


def drawn(number, names, draw):
    return draw.choice(names, 2, replace=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_clients_that_are_named_take_part(engine):
    run = ft.run(ft.Ditto(), DATA, engine=engine, cohort=some, **{**SETTINGS, "rounds": 2})
    assert [record["cohort"] for record in run.history] == [2, 3]
    assert [NAMES[i] for i in np.flatnonzero(run.store.born)] == ["ann", "bob", "cid", "eve"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_upload_counts_for_nothing_and_its_client_has_trained(engine):
    run = ft.run(ft.Ditto(), DATA, engine=engine, cohort=losing, **SETTINGS)
    without = ft.run(ft.Ditto(), DATA, engine=engine, cohort=lambda *_: ["ann", "cid"], **SETTINGS)
    assert_close(run.shared, without.shared)
    assert run.store.born.tolist() == [True, True, True, False, False]
    assert without.store.born.tolist() == [True, False, True, False, False]
    alone = ft.run(ft.Ditto(), DATA, engine=engine, cohort=lambda *_: ["bob"], **{**SETTINGS, "rounds": 1})
    first = ft.run(ft.Ditto(), DATA, engine=engine, cohort=losing, **{**SETTINGS, "rounds": 1})
    assert_close(first.store.get(np.array([1])), alone.store.get(np.array([1])))
    one = [run.history[0][key] for key in ("cohort", "lost", "bytes_up", "bytes_down")]
    other = [without.history[0][key] for key in ("cohort", "bytes_up", "bytes_down")]
    assert one == [2, 1, other[1], other[2] * 3 // 2]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nobody", [lambda *_: [], lambda *_: (["ann"], ["ann"])], ids=["away", "lost"])
def test_a_round_in_which_nothing_arrives_changes_nothing(engine, nobody):
    run = ft.run(ft.Scaffold(), DATA, engine=engine, cohort=nobody, **{**SETTINGS, "rounds": 2})
    assert_close(run.shared["model"], run.task.init())
    assert [record["cohort"] for record in run.history] == [0, 0]


def test_methods_that_keep_a_stack_of_uploads_are_told_who_is_in_it():
    def first_is_lost(number, names, draw):
        return names, names[:1]

    fed = federation((7, 5, 9), val=True)
    for method in (ft.FedFomo(), ft.FedPAC(), ft.PFedHN()):
        runs = [ft.run(method, fed, "mlp:4", engine=engine, cohort=first_is_lost, **SETTINGS) for engine in ENGINES]
        assert_close(*(run.shared for run in runs))


@dataclass(frozen=True, kw_only=True)
class Asking(ft.FedAvg):
    """The server counts how often each client was lost, and clients send who they are."""

    def init_server(self, task):
        return {"model": task.init()}, {"lost": torch.zeros(task.clients), "seen": torch.zeros(task.clients)}

    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        who = torch.nn.functional.one_hot(data["client"][0], task.clients).to(torch.float64)
        return {**upload, "who": who}, personal

    def server_update(self, task, shared, server, upload, rnd):
        shared, _ = super().server_update(task, shared, {}, upload, rnd)
        lost = server["lost"].index_add(0, rnd.lost, torch.ones(len(rnd.lost)))
        return shared, {"lost": lost, "seen": server["seen"] + upload["who"] * len(rnd.ranks)}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_method_may_ask_who_is_lost_and_who_a_client_is(engine):
    run = ft.run(Asking(), DATA, engine=engine, cohort=losing, **SETTINGS)
    ranks = {name: int(DATA.ranks[i]) for i, name in enumerate(NAMES)}
    assert run.server["lost"].tolist() == [3.0 if rank == ranks["bob"] else 0.0 for rank in range(5)]
    assert run.server["seen"].round().tolist() == [3.0 if rank in (ranks["ann"], ranks["cid"]) else 0.0 for rank in range(5)]


def test_a_cohort_that_draws_depends_on_the_seed_and_the_round_alone():
    def who(order, seed):
        fed = federation((7, 5, 9, 6, 8), names=NAMES).take(order)
        met = ft.run(ft.FedAvg(), fed, cohort=drawn, seed=seed, engine="loop", **SETTINGS)
        return [tensor.tolist() for tensor in tree.leaves(met.shared)]

    assert who([0, 1, 2, 3, 4], 1) == who([3, 1, 4, 0, 2], 1) != who([0, 1, 2, 3, 4], 2)


def test_a_table_says_who_was_there(tmp_path):
    path = tmp_path / "who.csv"
    path.write_text("round,client,lost\n0,ann,\n0,cid,0\n1,bob,1\n1,cid,\n1,eve,no\n2,dee,\n")

    def same(number, names, draw):
        return some(number, names, draw), ["bob"] if number % 3 == 1 else []

    by_table, by_hand = (ft.run(ft.FedAvg(), DATA, cohort=c, engine="loop", **{**SETTINGS, "rounds": 5}) for c in (path, same))
    assert_close(by_table.shared, by_hand.shared)
    out = {"out": tmp_path / "run", "engine": "loop", **SETTINGS}
    ft.run(ft.FedAvg(), DATA, cohort=str(path), **out)
    path.write_text(path.read_text() + "2,ann,\n")
    with pytest.raises(BadRun, match="cohort="):
        ft.run(ft.FedAvg(), DATA, cohort=str(path), resume=True, **out)


@pytest.mark.parametrize(
    ("cohort", "says"),
    [
        (lambda *_: ["zoe"], "'zoe' in round 0, which is no client"),
        (lambda *_: (["ann"], ["bob"]), "loses 'bob' in round 0, who is not there"),
        (lambda *_: 1 / 0, "fails in round 0"),
        ("nowhere.py:who", "no function 'who'"),
    ],
)
def test_a_cohort_that_cannot_be_is_refused(cohort, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.run(ft.FedAvg(), DATA, cohort=cohort, engine="loop", **SETTINGS)


def test_tables_and_methods_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "who.csv").write_text("client\nann\n")
    with pytest.raises(InvalidData, match="needs the columns round and client"):
        ft.run(ft.FedAvg(), DATA, cohort=tmp_path / "who.csv", **SETTINGS)
    with pytest.raises(InvalidArgument, match="AL2SGD needs all clients"):
        ft.run(ft.AL2SGD(), DATA, cohort=some, **SETTINGS)
    with pytest.raises(InvalidArgument, match="each is drawn by chance"):
        ft.run(ft.FedAvg(), DATA, cohort=some, user_clip=1.0, user_noise=1.0, **SETTINGS)


# -- slow clients -------------------------------------------------------------------------------------------------------
def slowly(number, names, draw):
    return names, [], {"cid": 0.5, "eve": 0.01}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_size", [4, None])
def test_a_slow_client_takes_the_first_of_its_steps(engine, batch_size):
    settings = {**SETTINGS, "rounds": 1, "batch_size": batch_size, "engine": engine}
    slow = ft.run(ft.Local(steps=6), DATA, cohort=slowly, **settings)
    for steps, client in ((6, 0), (3, 2), (1, 4)):
        alone = ft.run(ft.Local(steps=steps), DATA, **settings)
        assert_close(slow.store.get(np.array([client])), alone.store.get(np.array([client])))


def test_engines_agree_on_slow_clients_also_under_privacy():
    for opt in (ft.SGD(), ft.Private(clip=0.5, noise=1.0, seed=0)):
        method = ft.Ditto(epochs=3, opt=opt)
        loop, stacked = (ft.run(method, DATA, cohort=slowly, engine=engine, **SETTINGS) for engine in ENGINES)
        assert_close(stacked.shared, loop.shared)


def test_a_table_says_who_is_slow(tmp_path):
    table = tmp_path / "who.csv"
    table.write_text("round,client,lost,pace\n" + "".join(f"0,{n},0,{ {'cid': 0.5, 'eve': 0.01}.get(n, '') }\n" for n in NAMES))
    by_table, by_function = (ft.run(ft.Ditto(epochs=3), DATA, cohort=who, **SETTINGS) for who in (table, slowly))
    assert_close(by_table.shared, by_function.shared)
    table.write_text("round,client,pace\n0,ann,soon\n")
    with pytest.raises(InvalidData, match="pace is a number"):
        ft.run(ft.FedAvg(), DATA, cohort=table, **SETTINGS)


@pytest.mark.parametrize(
    ("pace", "says"), [({"ann": 0}, "gives 'ann' the pace 0"), ({"zoe": 0.5}, "'zoe' in round 0, which is no client")]
)
def test_paces_that_cannot_be_are_refused(pace, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.run(ft.FedAvg(), DATA, cohort=lambda number, names, draw: (names, [], pace), **SETTINGS)
