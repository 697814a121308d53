"""A lam for every client (CLUP, Problem 19), and the facts of a federation that carry it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.data.feed import Feed
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.runs.store import Store
from tests.make import federation, pairs, the_round

NAMES = ["ann", "bob", "cyd"]
LAMS = np.array([0.05, 0.4, 1.0, 3.0, 0.2])


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def problem_19(clients, lams, weights):
    """Minimiser of sum p_i (1/(2n) |X_i w_i - y_i|^2 + lam_i/2 |g - w_i|^2), by the normal equations.

    With H_i = X'X/n and b_i = X'y/n: w_i = (H_i + lam_i)^-1 (b_i + lam_i g), and sum p_i lam_i (g - w_i) = 0."""
    d = clients[0][0].shape[1]
    left, right, solve = np.zeros((d, d)), np.zeros(d), []
    for (x, y), lam, p in zip(clients, lams, weights, strict=True):
        inverse, b = np.linalg.inv(x.T @ x / len(y) + lam * np.eye(d)), x.T @ y / len(y)
        left += p * lam * (np.eye(d) - lam * inverse)
        right += p * lam * inverse @ b
        solve.append(lambda g, inverse=inverse, b=b, lam=lam: inverse @ (b + lam * g))
    g = np.linalg.solve(left, right)
    return g, [w(g) for w in solve]


@pytest.fixture(scope="module")
def least_squares():
    draw = np.random.default_rng(5)
    clients = [(x := draw.normal(size=(n, 3)), x @ draw.normal(size=3) + 0.1 * draw.normal(size=n)) for n in (40, 90, 60, 50, 70)]
    return ft.Federation.from_arrays(clients, clients), clients


# -- the method -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_fedclup_with_a_lam_for_every_client_reaches_problem_19(least_squares, engine, weights):
    fed, clients = least_squares
    p = fed.train.sizes / fed.train.sizes.sum() if weights == "size" else np.full(5, 0.2)
    g, w = problem_19(clients, LAMS, p)
    assert np.abs(g - sum(a * b for a, b in zip(p * LAMS / (p * LAMS).sum(), w, strict=True))).max() < 1e-12  # the weighted mean
    method = ft.FedCLUP(lam="client", lr=0.2, steps=25)
    run = ft.run(
        method,
        fed.with_facts(lam=LAMS),
        rounds=80,
        bias=False,
        dtype="float64",
        engine=engine,
        weights=weights,
        evaluate_every=0,
        workers=1,
    )
    assert np.abs(run.model()["weight"].numpy()[0] - g).max() < 1e-8
    assert max(np.abs(run.model(i)["weight"].numpy()[0] - w[i]).max() for i in range(5)) < 1e-8


def test_the_servers_step_is_one_over_the_mean_of_the_lams(least_squares):
    fed = least_squares[0].with_facts(lam=LAMS)
    for weights, p in (("uniform", np.full(5, 0.2)), ("size", fed.train.sizes / fed.train.sizes.sum())):
        run = ft.run(ft.FedCLUP(lam="client", lr=0.1, steps=2), fed, rounds=1, weights=weights, bias=False, dtype="float64")
        assert run.algorithm.server_lr == pytest.approx(1 / (p * LAMS).sum(), rel=1e-14)
        mean = sum(a * run.model(i)["weight"] for i, a in enumerate(p * LAMS / (p * LAMS).sum()))
        assert float((run.model()["weight"] - mean).abs().max()) < 1e-14  # so that g is the weighted mean of the w_i


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lam", [0.7, 1 / 3])
@pytest.mark.parametrize("server_lr", [None, 0.9])
def test_equal_lams_are_fedclup_bit_for_bit(engine, dtype, lam, server_lr):
    fed = federation([9, 4, 13, 6, 8, 11, 5], val=True)
    options = {"rounds": 5, "batch_size": 4, "cohort": 0.6, "engine": engine, "dtype": dtype, "weights": "size", "workers": 1}
    one = ft.run(ft.FedCLUP(lam=lam, epochs=2, server_lr=server_lr), fed, "mlp:4", **options)
    each = ft.run(ft.FedCLUP(lam="client", epochs=2, server_lr=server_lr), fed.with_facts(lam=[lam] * 7), "mlp:4", **options)
    assert equal(one.shared, each.shared)
    assert all(equal(one.personal[i], each.personal[i]) for i in range(7))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_client_with_lam_0_is_alone(engine):
    fed = federation([9, 4, 13]).with_facts(lam=[0.8, 0.0, 0.3])
    options = {"rounds": 4, "batch_size": 4, "engine": engine, "workers": 1}
    each, local = ft.run(ft.FedCLUP(lam="client", epochs=1), fed, **options), ft.run(ft.Local(epochs=1), fed, **options)
    assert equal(each.personal[1], local.personal[1])
    assert not equal(each.personal[0], local.personal[0])
    alone = ft.run(ft.FedCLUP(lam="client", epochs=1), fed.with_facts(lam=np.zeros(3)), **options)
    assert all(equal(alone.personal[i], local.personal[i]) for i in range(3))


def test_listing_the_clients_in_another_order_and_leaving_some_out_keeps_everyones_lam():
    fed = federation([9, 4, 13, 7], names=["a", "b", "c", "d"]).with_facts(lam=[0.1, 2.0, 0.5, 1.0])
    turned = fed.take([3, 1, 0, 2])
    assert turned.facts["lam"].tolist() == [1.0, 2.0, 0.1, 0.5]
    method = ft.FedCLUP(lam="client", epochs=2)
    for engine in ("loop", "vectorized"):
        options = {"rounds": 3, "batch_size": 4, "cohort": 0.75, "engine": engine, "dtype": "float64", "workers": 1}
        first, second = ft.run(method, fed, **options), ft.run(method, turned, **options)
        for name in fed.names:
            apart = tree.dist2(first.personal[name], second.personal[name])
            assert float(apart) < 1e-24
    run = ft.run(method, fed, rounds=2, new_clients=0.25)
    assert run.summary["new_clients"] == 1


# -- the facts ------------------------------------------------------------------------------------------------------------
def test_facts_are_given_in_order_or_by_name_and_go_with_the_clients():
    fed = ft.Federation.from_arrays(pairs([5, 6, 7]), pairs([3, 3, 3]), names=NAMES, task="classification")
    assert fed.facts == {}
    by_name = fed.with_facts(lam={"cyd": 3, "ann": 1, "bob": 2.5}, age=torch.tensor([30, 40, 50]))
    assert by_name.facts["lam"].tolist() == [1.0, 2.5, 3.0]
    assert by_name.with_facts(lam=[4, 5, 6]).facts["age"].tolist() == [30.0, 40.0, 50.0]
    for same in (by_name.to(torch.float64), by_name.as_task("regression")):
        assert {name: values.tolist() for name, values in same.facts.items()} == {
            "lam": [1.0, 2.5, 3.0],
            "age": [30.0, 40.0, 50.0],
        }
    assert by_name.take([2, 0]).facts["lam"].tolist() == [3.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_method_is_handed_its_clients_facts_and_nobody_elses(dtype):
    fed = federation([5, 9, 3]).with_facts(lam=[0.1, 0.2, 0.3]).to(dtype)
    feed = Feed(fed, ft.FedAvg(epochs=1).work(), 4, 0)
    many = feed.many(np.array([2, 0]), 0)["facts"]["lam"]
    assert many.shape == (1, 2)  # the client axis is second, as everywhere
    for i in range(3):
        one = feed.one(i, 0)["facts"]["lam"]
        assert one.shape == (1,)
        assert one.dtype == many.dtype == dtype
        assert one.item() == torch.tensor(fed.facts["lam"][i], dtype=dtype).item()
    assert many[0].tolist() == [feed.one(2, 0)["facts"]["lam"].item(), feed.one(0, 0)["facts"]["lam"].item()]
    assert "facts" not in Feed(federation([5, 9, 3]), ft.FedAvg(epochs=1).work(), 4, 0).one(0, 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0, 2.0], r"lam has shape \(2,\) but there are 3 clients; give one number per client"),
        (0.5, r"lam has shape \(\) but there are 3 clients"),
        (["a", "b", "c"], "lam does not hold numbers; give one number per client"),
        ([1.0, np.nan, 2.0], "lam of client bob is not finite"),
        ({"ann": 1.0, "bob": 2.0}, "lam: 'cyd' is missing; give one number"),
        ({"ann": 1.0, "bob": 2.0, "cyd": 3.0, "dan": 4.0}, "lam: 'dan' is no client of this federation"),
    ],
)
def test_facts_that_do_not_fit_are_refused(value, words):
    fed = ft.Federation.from_arrays(pairs([5, 6, 7]), pairs([3, 3, 3]), names=NAMES, task="classification")
    with pytest.raises(InvalidData, match=words):
        fed.with_facts(lam=value)


def test_what_cannot_be_done_with_a_lam_for_every_client_is_refused():
    fed = federation([5, 6], kind="regression")
    method = ft.FedCLUP(lam="client", steps=2)
    with pytest.raises(InvalidArgument, match=r"needs a lam for every client; use federation.with_facts\(lam="):
        ft.run(method, fed, rounds=1)
    with pytest.raises(InvalidArgument, match="the lam of client 1 is negative; give"):
        ft.run(method, fed.with_facts(lam=[1.0, -2.0]), rounds=1)
    with pytest.raises(InvalidArgument, match="proved for one lam for all; with lam='client' give lr and steps"):
        ft.run(ft.FedCLUP(lam="client", steps="theory"), fed.with_facts(lam=[1.0, 2.0]), rounds=1)
    with pytest.raises(InvalidArgument, match="lam must be a number or 'client', not 'clint'"):
        ft.FedCLUP(lam="clint")
    data = fed.with_facts(lam=[1.0, 2.0]).to(torch.float64)
    task = build_task("linear", data, 0, torch.float64, bias=True)
    plan = make_plan(method, task, data, None, 0, "uniform")
    shared, server = method.init_server(task)
    upload = LoopEngine(plan, workers=1).round(shared, np.arange(2), the_round(), Store(2))
    with pytest.raises(InvalidArgument, match=r"known only once there are data; use ft\.run"):
        method.server_update(task, shared, server, upload, the_round())
