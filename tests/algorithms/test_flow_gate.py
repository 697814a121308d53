"""FlowGate: its gate is the logistic regression of everybody's rows, its models are FedAvg's and FedAvgFT's, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

import fedtailor as ft
from fedtailor.algorithms.flow_gate import NUMBERS, evidence
from fedtailor.errors import InvalidArgument
from fedtailor.laws.ground import network

WORK = {"lr": 0.3, "epochs": 1, "finetune_epochs": 5, "finetune_lr": 0.4}


def dealt(clients=8, rows=15, val=40, seed=0):
    """Clients that agree on most of the law of a label and differ in the rest; three classes."""
    draw = np.random.default_rng(seed)
    law = draw.normal(size=(4, 3))
    parts = {"train": [], "test": [], "val": []}
    for _ in range(clients):
        own = law + 0.7 * draw.normal(size=(4, 3))
        for part, n in (("train", rows), ("test", 50), ("val", val)):
            x = draw.normal(size=(n, 4))
            parts[part].append((x, (x @ own).argmax(1)))
    return ft.Federation.from_arrays(**parts)


def trained(method, fed, rounds=4, **options):
    common = {
        "rounds": rounds,
        "batch_size": 10,
        "seed": 1,
        "dtype": "float64",
        "evaluate_every": 0,
        "engine": "loop",
        "workers": 1,
    }
    return ft.run(method, fed, "linear", **{**common, **options})


def test_of_models_that_stand_still_the_gate_is_the_logistic_regression_of_all_clients_rows(tmp_path):
    """Steps too small to move anything: w is given, v is given, and Newton's steps end at the pooled fit of scikit-learn."""
    fed, ridge = dealt(), 0.02
    trained(ft.FedAvg(lr=0.3), fed, rounds=3, out=tmp_path / "start")
    method = ft.FlowGate(lr=1e-12, finetune_epochs=5, finetune_lr=0.4, ridge=ridge, memory=0.0, combine="gate")
    run = trained(method, fed, rounds=12, start=str(tmp_path / "start"), batch_size=None)
    rows, labels = [], []
    for i in range(len(fed)):
        x, y = fed.val.client(i)
        ours, theirs = (run.task.apply(m, x.double()).softmax(-1) for m in (run.shared["model"], run.personal[i]["local"]))
        right = (ours.argmax(-1) == y, theirs.argmax(-1) == y)
        rows.append(evidence(ours, theirs)[right[0] != right[1]])
        labels.append(right[0][right[0] != right[1]])
    X, t = torch.cat(rows).numpy(), torch.cat(labels).numpy()
    assert len(t) > 30
    assert 0.1 < t.mean() < 0.9
    # scikit-learn minimises |theta|^2 / 2 + C * sum; ours is the mean over 8 clients plus ridge/2 |theta|^2
    fit = LogisticRegression(C=1 / (len(fed) * ridge), fit_intercept=False, tol=1e-10, max_iter=5000).fit(X, t)
    assert np.abs(fit.coef_[0] - run.shared["gate"].numpy()).max() < 1e-5


def test_the_models_are_fedavgs_and_those_of_fine_tuning():
    fed = dealt()
    run, tuned = trained(ft.FlowGate(**WORK), fed), trained(ft.FedAvgFT(**WORK), fed)
    assert all(torch.equal(run.shared["model"][k], tuned.shared["model"][k]) for k in tuned.shared["model"])
    for i in range(len(fed)):
        assert all(torch.equal(run.personal[i]["local"][k], tuned.personal[i]["model"][k]) for k in tuned.shared["model"])


def test_every_answer_is_that_of_the_model_the_gate_trusts():
    run = trained(ft.FlowGate(**WORK, combine="gate"), dealt())
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(200, 4)))
    ours, theirs = (run.task.apply(m, x).log_softmax(-1) for m in (run.shared["model"], run.personal[0]["local"]))
    to_w = evidence(ours.exp(), theirs.exp()) @ run.shared["gate"] > 0
    assert 0 < int(to_w.sum()) < 200
    assert torch.allclose(torch.as_tensor(run.predict(0, x)), torch.where(to_w[:, None], ours, theirs), atol=1e-12)


def test_nine_numbers_of_a_row_by_hand():
    ours, theirs = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.1, 0.9, 0.0]]).double()
    entropy = -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)), -(0.1 * np.log(0.1) + 0.9 * np.log(0.9))
    by_hand = [0.5, 0.9, 0.2, 0.8, entropy[0] / np.log(3), entropy[1] / np.log(3), 0.0, 0.3, 0.1, 1.0]
    assert evidence(ours, theirs)[0].tolist() == pytest.approx(by_hand)
    assert len(by_hand) == NUMBERS


def test_a_gate_that_knows_nothing_averages():
    fed = dealt()
    blind = ft.Federation.from_arrays(*([s.client(i) for i in range(len(fed))] for s in (fed.train, fed.test)))
    one, other = (trained(ft.FlowGate(**WORK, combine=how), blind) for how in ("gate", "average"))
    assert not one.shared["gate"].any()
    assert np.array_equal(one.predict(0, fed.test.x), other.predict(0, fed.test.x))


def test_of_models_that_stand_still_the_pool_has_the_least_log_loss_of_all_clients_rows(tmp_path):
    """Steps too small to move anything: Newton's steps end where scipy ends on the same sum, written out row by row."""
    fed, ridge = dealt(clients=5, val=20), 0.05
    trained(ft.FedAvg(lr=0.3), fed, rounds=3, out=tmp_path / "start")
    method = ft.FlowGate(lr=1e-12, finetune_epochs=5, finetune_lr=0.4, ridge=ridge, memory=0.0, combine="pool")
    run = trained(method, fed, rounds=25, start=str(tmp_path / "start"), batch_size=None)
    rows = []
    for i in range(len(fed)):
        x, y = fed.val.client(i)
        ours, theirs = (run.task.apply(m, x.double()).log_softmax(-1) for m in (run.shared["model"], run.personal[i]["local"]))
        counts = np.bincount(fed.train.client(i)[1], minlength=3) + 0.5
        told = evidence(ours.exp(), theirs.exp()).numpy()
        rows += zip(ours.numpy(), theirs.numpy(), [np.log(counts / counts.sum())] * len(y), told, y.tolist(), strict=True)
    start = np.zeros(30)
    start[[9, 19]] = 0.5

    def loss(theta):
        total = 0.0
        for ours, theirs, shares, told, y in rows:
            a, b, d = (told @ part for part in theta.reshape(3, 10))
            z = a * ours + b * theirs + d * shares
            total += np.log(np.exp(z - z.max()).sum()) + z.max() - z[y]
        return total / len(fed) + ridge / 2 * ((theta - start) ** 2).sum()

    least = minimize(loss, start, method="BFGS", options={"gtol": 1e-6}).fun
    ours = run.shared["gate"].numpy()
    assert loss(start) - least > 0.01
    assert loss(ours) - least < 1e-6


def test_a_pool_that_knows_nothing_takes_the_geometric_mean():
    fed = dealt()
    blind = ft.Federation.from_arrays(*([s.client(i) for i in range(len(fed))] for s in (fed.train, fed.test)))
    run = trained(ft.FlowGate(**WORK, combine="pool"), blind)
    x = fed.test.x
    ours, theirs = (run.task.apply(m, x.double()).log_softmax(-1) for m in (run.shared["model"], run.personal[0]["local"]))
    assert torch.allclose(torch.as_tensor(run.predict(0, x)), ((ours + theirs) / 2).log_softmax(-1), atol=1e-12)


def test_while_it_warms_up_the_gate_stands_still():
    run = trained(ft.FlowGate(**WORK, warmup=4, combine="gate"), dealt())
    assert not run.shared["gate"].any()
    assert trained(ft.FlowGate(**WORK, warmup=3, combine="gate"), dealt()).shared["gate"].any()


@pytest.mark.parametrize("combine", ["gate", "pool", "stack"])
def test_it_keeps_the_laws(combine):
    method = ft.FlowGate(**WORK, combine=combine, inference="soft", warmup=1)
    assert {v.number for v in ft.check_algorithm(method, network(), laws=(1, 2, 3, 4, 10))} == {1, 2, 3, 4, 10}


def test_what_it_cannot_do_is_refused():
    with pytest.raises(InvalidArgument, match="combine must be one of pool, gate, average, stack"):
        ft.FlowGate(combine="vote")
    with pytest.raises(InvalidArgument, match="chooses between two classifiers"):
        ft.run(ft.FlowGate(), _regression(), rounds=1)
    with pytest.raises(InvalidArgument, match="FlowGate cannot be private"):
        ft.run(ft.FlowGate(opt=ft.Private(clip=1.0, noise=1.0)), dealt(), rounds=1)


def _regression():
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(9, 2)), draw.normal(size=9)) for _ in range(3)]
    return ft.Federation.from_arrays(rows, rows)
