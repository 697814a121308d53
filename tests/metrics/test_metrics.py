"""Measures against scikit-learn, NumPy and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_squared_error, roc_auc_score

import fedtailor as ft
from fedtailor import tree
from fedtailor.data.split import Split
from fedtailor.engine.prepare import prepare
from fedtailor.metrics.client import measure
from fedtailor.metrics.spread import summarize, worst_decile
from fedtailor.task.scores import auc
from tests import make


def ragged(kind, outputs, seed=0, sizes=(7, 20, 1, 33)):
    """Logits, targets and mask of clients of uneven size; padded places hold nonsense."""
    draw = np.random.default_rng(seed)
    widest = max(sizes)
    logits = draw.normal(size=(2, len(sizes), widest, outputs)).round(1)  # rounded: ties occur
    if kind == "classification":
        y = draw.integers(0, outputs, (len(sizes), widest))
    elif kind == "multilabel":
        y = draw.integers(0, 2, (len(sizes), widest, outputs)).astype(float)
    else:
        y = draw.normal(size=(len(sizes), widest, outputs))
    mask = np.arange(widest) < np.array(sizes)[:, None]
    own, shared = (torch.from_numpy(np.where(mask[..., None], part, 1e6)) for part in logits)
    return own, shared, torch.from_numpy(y), torch.from_numpy(mask)


def task(kind):
    module = torch.nn.Linear(2, 2)
    return ft.Task.from_module(module, {"classification": "cross_entropy", "regression": "mse", "multilabel": "bce"}[kind])


def test_classification_measures_are_those_of_counting():
    own, shared, y, mask = ragged("classification", 3)
    measures = measure(task("classification"), own, shared, y, mask)
    for i in range(4):
        m = mask[i]
        a, b = own[i][m].argmax(1) == y[i][m], shared[i][m].argmax(1) == y[i][m]
        assert measures["acc_personal"][i] == pytest.approx(a.double().mean().item())
        assert measures["acc_global"][i] == pytest.approx(b.double().mean().item())
        assert measures["both_correct"][i] == pytest.approx((a & b).double().mean().item())
        assert measures["global_only"][i] == pytest.approx((b & ~a).double().mean().item())
        assert measures["personal_only"][i] == pytest.approx((a & ~b).double().mean().item())
        assert measures["loss_personal"][i] == pytest.approx(torch.nn.functional.cross_entropy(own[i][m], y[i][m]).item())
    assert list(measures["rows"]) == [7, 20, 1, 33]


def test_regression_reports_the_mean_square_though_the_risk_is_half_of_it():
    own, shared, y, mask = ragged("regression", 1)
    measures = measure(task("regression"), own, shared, y, mask)
    for i in range(4):
        expected = mean_squared_error(y[i][mask[i]], own[i][mask[i]])
        assert measures["mse_personal"][i] == pytest.approx(expected)
        assert measures["loss_personal"][i] == pytest.approx(expected / 2)
    assert "both_correct" not in measures


@pytest.mark.parametrize("outputs", [1, 4])
def test_auc_is_scikit_learns_with_ties_and_padding_and_is_undefined_for_one_class(outputs):
    own, _, y, mask = ragged("multilabel", outputs, seed=3)
    y[2] = 1.0
    areas = auc(own.numpy(), y.numpy() > 0.5, mask.numpy())
    for i in (0, 1, 3):
        labels = y[i][mask[i]].numpy()
        columns = [c for c in range(outputs) if 0 < labels[:, c].sum() < len(labels)]
        expected = np.mean([roc_auc_score(labels[:, c], own[i][mask[i]][:, c]) for c in columns])
        assert areas[i] == pytest.approx(expected, abs=1e-12)
    assert np.isnan(areas[2])


def test_summary_over_clients():
    clients = {
        "rows": np.array([10.0, 30.0, 20.0, 40.0]),
        "acc_personal": np.array([0.9, 0.5, 0.8, 0.7]),
        "acc_global": np.array([0.8, 0.5, 0.9, 0.6]),
        "loss_personal": np.ones(4),
        "loss_global": np.ones(4),
        "both_correct": np.array([0.5, 0.1, 0.2, 0.4]),
    }
    out = summarize("classification", clients)
    assert out["acc_personal"] == pytest.approx(0.725)
    assert out["acc_personal_weighted"] == pytest.approx((9 + 15 + 16 + 28) / 100)
    assert out["share_benefit"] == 0.5  # strictly better: a tie is no benefit
    assert out["worst_decile"] == 0.5
    assert out["deviation"] == pytest.approx(np.std([0.9, 0.5, 0.8, 0.7]))
    assert out["both_correct"] == pytest.approx((5 + 3 + 4 + 16) / 100)
    assert out["global_only"] is None
    mse = summarize(
        "regression",
        {
            "rows": np.ones(2),
            "mse_personal": np.array([1.0, 3.0]),
            "mse_global": np.array([2.0, 2.0]),
            "loss_personal": np.ones(2),
        },
    )
    assert mse["share_benefit"] == 0.5
    assert mse["worst_decile"] == 3.0


def test_worst_decile_is_the_mean_of_the_worst_tenth_rounded_up():
    scores = np.arange(25) / 25
    assert worst_decile("classification", scores) == pytest.approx(np.mean([0, 1 / 25, 2 / 25]))
    assert worst_decile("regression", scores) == pytest.approx(np.mean([24 / 25, 23 / 25, 22 / 25]))


@pytest.fixture(scope="module")
def digits():
    return ft.Federation.load("digits", clients=8, partition="dirichlet:0.5")


def test_the_summary_says_what_the_clients_models_do(digits):
    run = ft.run(ft.Ditto(lam=0.1, lr=0.5, epochs=3), digits, rounds=5, batch_size=16)
    own, common, union = [], [], []
    x_all, y_all = digits.test.x, digits.test.y
    for i in range(8):
        x, y = digits.test.client(i)
        own.append((run.predict(i, x).argmax(1) == y).double().mean().item())
        common.append((run.predict_global(x).argmax(1) == y).double().mean().item())
        union.append((run.predict(i, x_all).argmax(1) == y_all).double().mean().item())
    s = run.summary
    assert s["acc_personal"] == pytest.approx(np.mean(own))
    assert s["acc_global"] == pytest.approx(np.mean(common))
    assert s["acc_global_test"] == pytest.approx(np.mean(union))
    assert s["share_benefit"] == pytest.approx(np.mean(np.array(own) > np.array(common)))
    assert (s["union_rows"], s["union_clients"]) == (len(y_all), 8)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_both_engines_measure_the_same(digits, engine):
    options = {"rounds": 3, "batch_size": 16, "dtype": "float64"}
    reference = ft.run(ft.FedAvgFT(epochs=1, finetune_epochs=2), digits, **options, engine="loop").summary
    summary = ft.run(ft.FedAvgFT(epochs=1, finetune_epochs=2), digits, **options, engine=engine).summary
    for key in ("acc_personal", "acc_global", "acc_global_test", "loss_personal", "worst_decile", "both_correct", "best_round"):
        assert summary[key] == pytest.approx(reference[key], rel=1e-9), key


def test_bytes_are_those_of_the_messages_and_nothing_is_charged_for_nothing(digits):
    run = ft.run(ft.FedAvg(epochs=1), digits, rounds=4, cohort=0.5, batch_size=16)
    message = len(tree.pack(run.shared))
    assert 650 * 4 < message < 650 * 4 + 400  # the numbers, and a header
    assert run.summary["bytes_down"] == 4 * 4 * message
    assert run.summary["bytes_up"] == 4 * 4 * len(tree.pack({"delta": run.shared["model"]}))
    local = ft.run(ft.Local(epochs=1), digits, rounds=2, batch_size=16).summary
    assert (local["bytes_down"], local["bytes_up"]) == (0, 0)


@pytest.mark.parametrize(
    ("method", "trained", "kept"),
    [
        (ft.Local(), 1, 1),
        (ft.FedAvg(), 1, 0),
        (ft.FedAvgFT(), 1, 1),
        (ft.FedProxPersonal(), 1, 1),
        (ft.FedCLUP(), 1, 1),
        (ft.PFedMe(), 1, 1),
        (ft.Ditto(), 2, 1),
        (ft.PerFedAvg(), 1, 1),
        (ft.ScaffoldP(personal=()), 1, 1),  # its control
        (ft.L2GD(), 1, 1),
        (ft.AL2SGD(mu=0.1, smoothness=1.0), 1, 4),
        (ft.HypCluster(k=3), 1, 0),
    ],
    ids=lambda m: type(m).__name__ if isinstance(m, ft.Algorithm) else None,
)
def test_parameters_trained_and_kept_are_counted(digits, method, trained, kept):
    summary = ft.run(method, digits, rounds=1).summary
    assert summary["trained_parameters"] == trained * 650
    assert summary["personal_parameters"] // 650 == kept  # HypCluster keeps its choice, k numbers


def test_apfl_trains_two_models_and_keeps_one_and_its_weight(digits):
    summary = ft.run(ft.APFL(), digits, rounds=1).summary
    assert (summary["trained_parameters"], summary["personal_parameters"]) == (1300, 651)


def test_distance_to_the_truth_and_excess_risk():
    federation = ft.Federation.load("clup-regression", clients=4, R=1.0, noise=0.0, rows=30, d=4, kappa=3.0)
    run = ft.run(ft.Local(lr=0.3, steps=300), federation, rounds=2, bias=False, dtype="float64")
    assert run.summary["distance_personal"] < 1e-18  # no noise: every client finds its truth
    assert abs(run.summary["aer"]) < 1e-18
    zero = ft.run(ft.Local(lr=1e-12, steps=1), federation, rounds=1, bias=False, dtype="float64")
    truth = np.stack([t["weight"].numpy()[0] for t in federation.truth])
    assert zero.summary["distance_personal"] == pytest.approx((truth**2).sum(1).mean(), rel=1e-9)
    half = [0.5 * np.mean(federation.test.client(i)[1].numpy() ** 2) for i in range(4)]
    assert zero.summary["aer"] == pytest.approx(np.mean(half), rel=1e-9)
    assert zero.clients["ier"] == pytest.approx(np.array(half), rel=1e-9)
    shared = ft.run(ft.FedAvg(lr=1e-12, steps=1), federation, rounds=1, bias=False, dtype="float64").summary
    assert shared["distance_global"] == pytest.approx((truth.mean(0) ** 2).sum(), rel=1e-9)


def test_new_clients_are_never_trained_on_and_reported_apart(digits):
    run = ft.run(ft.FedCLUP(lam=0.1, lr=0.5, epochs=2), digits, rounds=5, batch_size=16, new_clients=0.25)
    assert (run.summary["clients"], run.summary["new_clients"]) == (6, 2)
    left_out = [i for i, name in enumerate(digits.names) if name not in run.engine.plan.federation.names]
    same = ft.run(run.algorithm, digits.take([i for i in range(8) if i not in left_out]), rounds=5, batch_size=16)
    assert torch.equal(run.shared["model"]["weight"], same.shared["model"]["weight"])
    zero_step = [(run.predict_global(x).argmax(1) == y).double().mean().item() for x, y in map(digits.test.client, left_out)]
    assert run.summary["new_acc_global"] == pytest.approx(np.mean(zero_step))


def test_the_best_round_is_chosen_on_validation(digits):
    run = ft.run(ft.FedAvg(lr=0.5, epochs=1), digits, rounds=8, batch_size=16, evaluate_every=1)
    judged = [r["val_acc_personal"] for r in run.history]
    assert run.summary["best_round"] == int(np.argmax(judged))
    assert run.summary["best_acc_personal"] == run.history[int(np.argmax(judged))]["acc_personal"]
    assert run.summary["acc_personal"] == run.history[-1]["acc_personal"]  # the last is reported too


def test_the_union_test_is_sampled_when_it_would_be_too_large_and_says_so(monkeypatch, digits):
    monkeypatch.setattr("fedtailor.engine.measure.UNION_PREDICTIONS", 150)
    monkeypatch.setattr("fedtailor.engine.measure.UNION_CLIENTS", 3)
    summary = ft.run(ft.Local(epochs=1), digits, rounds=1).summary
    assert (summary["union_rows"], summary["union_clients"]) == (50, 3)


def test_a_split_knows_its_clients():
    split = Split(torch.arange(6.0).view(6, 1), torch.arange(6), np.array([0, 2, 3, 6]))
    assert [split.client(i)[1].tolist() for i in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert split.take(np.array([2, 0])).y.tolist() == [3, 4, 5, 0, 1]


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_where_nobody_has_a_model_of_its_own_nothing_is_measured_twice_and_all_is_the_same(kind):
    fed = make.federation([9, 8, 9], kind=kind)
    task = prepare(ft.FedAvg(), fed, "linear").plan.task
    draw = torch.Generator().manual_seed(1)
    own = torch.randn(2, 6, fed.outputs, generator=draw)
    y = torch.randint(2, (2, 6), generator=draw) if kind == "classification" else torch.randn(2, 6, generator=draw)
    mask = torch.ones(2, 6)
    once, twice = measure(task, own, own, y, mask), measure(task, own, own.clone(), y, mask)
    assert list(once) == list(twice)
    for name, values in twice.items():
        np.testing.assert_array_equal(once[name], values)
