"""Bugs found in public implementations of these methods, each as a test that they would fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree


@pytest.fixture(scope="module")
def federation():
    draw = np.random.default_rng(0)
    clients = [(x := draw.normal(size=(12, 3)), x @ draw.normal(size=3)) for _ in range(3)]
    return ft.Federation.from_arrays(clients, clients)


EXACT = {"bias": False, "dtype": "float64", "engine": "loop", "evaluate_every": 0}


def test_pfedmes_personal_model_is_theta_and_not_an_alias_of_w(federation):
    """The authors' and PFLlib's code keep a reference to live parameters and then write w_i into them."""
    method = ft.PFedMe(lam=2.0, lr=0.1, inner_lr=0.1, inner_steps=1, steps=1)
    run = ft.run(method, federation, rounds=1, **EXACT)
    for i in range(3):
        x, y = (t.double() for t in federation.train.client(i))
        theta = 0.1 * x.T @ y / len(y)  # one inner step from zero: the pull is zero there
        assert torch.allclose(run.personal[i]["model"]["weight"][0], theta, atol=1e-12)
        assert not torch.allclose(run.personal[i]["model"]["weight"], run.shared["model"]["weight"])


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize(
    "method",
    [ft.FedProx(mu=0.7, steps=2), ft.FedCLUP(lam=0.7, steps=2), ft.Ditto(lam=0.7, steps=2)],
    ids=lambda m: type(m).__name__,
)
def test_the_pull_is_not_detached_and_its_norm_is_squared(federation, method, engine):
    """FL_partial_personalization and PFLlib's MTL add a penalty with no gradient; Flow's Ditto takes the norm unsquared.

    Two steps by hand: the second feels 0.7 (w_1 - w_0), in proportion to the distance."""
    run = ft.run(method, federation, rounds=1, **{**EXACT, "engine": engine})
    deltas = []
    for i in range(3):
        x, y = (t.double() for t in federation.train.client(i))
        first = 0.1 * x.T @ y / len(y)
        second = first - 0.1 * (x.T @ (x @ first - y) / len(y) + 0.7 * first)
        deltas.append(second)
        if isinstance(method, (ft.FedCLUP, ft.Ditto)):
            assert torch.allclose(run.personal[i]["model"]["weight"][0], second, atol=1e-12)
    if isinstance(method, ft.FedProx):
        assert torch.allclose(run.shared["model"]["weight"][0], torch.stack(deltas).mean(0), atol=1e-12)


def test_ditto_pulls_towards_the_model_received_not_towards_the_moving_copy(federation):
    weak, strong = (
        ft.run(ft.Ditto(lam=lam, lr=0.05, personal_lr=1e-4, steps=50), federation, rounds=1, **EXACT) for lam in (0.0, 1e4)
    )
    # the received model is zero: a strong pull keeps v at zero whatever the shared branch does meanwhile
    assert float(strong.shared["model"]["weight"].abs().max()) > 0.1
    assert float(strong.personal[0]["model"]["weight"].abs().max()) < float(weak.personal[0]["model"]["weight"].abs().max()) / 5


@pytest.mark.parametrize("method", [ft.FedAvg, ft.Ditto, ft.FedCLUP])
def test_batch_norm_statistics_travel_and_are_averaged(method):
    """PFLlib averages parameters only, so every method there is partly FedBN."""
    draw = np.random.default_rng(1)
    clients = [(draw.normal(loc=loc, size=(16, 3)), np.arange(16) % 2) for loc in (-4.0, 8.0)]
    federation = ft.Federation.from_arrays(clients, clients)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    for engine in ("loop", "vectorized"):
        run = ft.run(method(lr=1e-3, steps=1), federation, net, rounds=1, dtype="float64", engine=engine, evaluate_every=0)
        means = torch.stack([torch.from_numpy(x).mean(0) for x, _ in clients])
        assert torch.allclose(run.shared["model"]["buffer:0.running_mean"], 0.1 * means.mean(0), atol=1e-12)
        variances = torch.stack([torch.from_numpy(x).var(0) for x, _ in clients])  # unbiased, as torch's
        assert torch.allclose(run.shared["model"]["buffer:0.running_var"], 0.9 + 0.1 * variances.mean(0), atol=1e-12)


def test_a_batch_gives_one_step_to_each_branch_not_two(federation):
    """FL-bench's APFL forgets zero_grad between two backward passes: one model steps twice with one gradient."""
    ditto = ft.run(ft.Ditto(lam=0.0, steps=1), federation, rounds=1, **EXACT)
    for i in range(3):
        x, y = (t.double() for t in federation.train.client(i))
        assert torch.allclose(ditto.personal[i]["model"]["weight"][0], 0.1 * x.T @ y / len(y), atol=1e-12)
    mean = torch.stack([0.1 * x.double().T @ y.double() / len(y) for x, y in map(federation.train.client, range(3))]).mean(0)
    assert torch.allclose(ditto.shared["model"]["weight"][0], mean, atol=1e-12)


def test_momentum_and_decay_do_not_leak_from_round_to_round_or_client_to_client(federation):
    method = ft.Local(steps=2, opt=ft.SGD(momentum=0.9, weight_decay=0.1))
    all_three = ft.run(method, federation, rounds=3, **EXACT)
    alone = ft.run(method, federation.take([1]), rounds=3, **EXACT)
    assert torch.equal(all_three.personal[1]["model"]["weight"], alone.personal[0]["model"]["weight"])


def test_client_states_do_not_alias_the_servers_tensors(federation):
    run = ft.run(ft.FedCLUP(lam=0.5, steps=2), federation, rounds=2, **EXACT)
    for i in range(3):
        pointers = {t.untyped_storage().data_ptr() for t in tree.leaves(run.personal[i])}
        assert pointers.isdisjoint(t.untyped_storage().data_ptr() for t in tree.leaves(run.shared))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_last_batch_of_one_row_does_not_crash_batch_norm(engine):
    draw = np.random.default_rng(2)
    clients = [(draw.normal(size=(n, 3)), np.arange(n) % 2) for n in (9, 5, 1)]
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    run = ft.run(ft.FedAvg(epochs=1), ft.Federation.from_arrays(clients, clients), net, rounds=2, batch_size=4, engine=engine)
    assert all(torch.isfinite(t).all() for t in tree.leaves(run.shared))


def test_accuracy_of_the_shared_model_is_measured_with_no_local_step(federation):
    """Flow's code measures it after different amounts of local training, depending on the method."""
    draw = np.random.default_rng(5)
    clients = [(x := draw.normal(size=(40, 3)), (x @ draw.normal(size=3) > 0).astype(int)) for _ in range(4)]
    fed = ft.Federation.from_arrays(clients, clients)
    for method in (ft.FedAvgFT(epochs=1, finetune_epochs=20), ft.Ditto(epochs=1), ft.FedCLUP(epochs=1), ft.PFedMe(epochs=1)):
        run = ft.run(method, fed, rounds=3, batch_size=8)
        byhand = []
        for i in range(4):
            x, y = fed.test.client(i)
            logits = x.float() @ run.shared["model"]["weight"].T + run.shared["model"]["bias"]
            byhand.append(float((logits.argmax(1) == y).double().mean()))
        assert run.summary["acc_global"] == pytest.approx(np.mean(byhand), abs=1e-12)
        x, y = fed.test.client(0)
        assert torch.equal(
            run.predict_global(x), run.algorithm.predict(run.task, run.shared, {"model": run.shared["model"]}, x.float())
        )


def test_a_client_not_sampled_keeps_its_state():
    draw = np.random.default_rng(6)
    clients = [(draw.normal(size=(8, 2)), draw.normal(size=8)) for _ in range(8)]
    federation = ft.Federation.from_arrays(clients, clients)
    states = []
    for rounds in (3, 4):
        run = ft.run(ft.FedCLUP(lam=0.3, steps=2), federation, rounds=rounds, cohort=3, **EXACT)
        states.append([run.personal[i]["model"]["weight"].clone() for i in range(8)])
        born = run.store.born.copy()
    from fedtailor.engine.setup import cohort_of

    took_part = set(cohort_of(run.federation, run.algorithm, 3, 0, 3).tolist())
    for i in range(8):
        if i not in took_part and born[i]:
            assert torch.equal(states[0][i], states[1][i])
        if i in took_part:
            assert not torch.equal(states[0][i], states[1][i])


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_what_a_client_predicts_with_does_not_change_when_another_is_asked_for(engine):
    """A tree that points into a buffer of batches would: kNN-Per stores labels as they come."""
    fed = ft.Federation.load("digits", clients=4)
    run = ft.run(ft.KNNPer(epochs=1, weight=0.9), fed, rounds=1, batch_size=16, engine=engine)
    x = fed.test.client(0)[0]
    before = run.predict(0, x)
    for i in range(4):
        run.predict(i, x)
    assert torch.equal(run.predict(0, x), before)
    fresh = ft.run(ft.KNNPer(epochs=1, weight=0.9), fed, rounds=1, batch_size=16, engine=engine)
    assert torch.equal(fresh.predict(3, x), run.predict(3, x))


def test_ragged_full_batches_are_gathered_once_not_once_per_step():
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(n, 4)), draw.normal(size=n)) for n in (10, 9, 8, 10)]
    fed = ft.Federation.from_arrays(clients, clients)
    from fedtailor.data.batches import Work
    from fedtailor.data.feed import Feed

    data = Feed(fed, {"train": Work(steps=500)}, None, 0).many(np.arange(4), 0)
    assert data["x"].shape == (500, 4, 10, 4)
    assert data["x"].untyped_storage().nbytes() == 4 * 10 * 4 * 8
    assert data["mask"][0].sum(1).tolist() == [10, 9, 8, 10]
