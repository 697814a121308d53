"""The measures of every client against scikit-learn's, with rows of padding beside them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import rankdata
from sklearn import metrics as sk

import fedtailor as ft
from fedtailor.task import scores


def clients(classes: int, seed: int = 0):
    """Five clients of up to 40 rows, padded; coarse logits, so that there are ties."""
    draw = np.random.default_rng(seed)
    sizes = [40, 25, 31, 40, 12]
    real = torch.from_numpy(np.arange(40)[None] < np.array(sizes)[:, None])
    logits = torch.from_numpy(draw.normal(size=(5, 40, classes)).round(1))
    y = torch.from_numpy(draw.integers(0, classes, (5, 40)))
    return logits, y, real


def each(measure, reference, classes: int) -> None:
    logits, y, real = clients(classes)
    found = measure(logits, y, real)
    chances = torch.softmax(logits, -1).numpy()
    for i in range(5):
        rows = real[i].numpy()
        expected = reference(y[i].numpy()[rows], chances[i][rows])
        assert found[i] == pytest.approx(expected, abs=1e-12), (measure.__name__, i)


def sensitivity_by_hand(y, chances) -> float:
    best = 0.0
    for threshold in [*np.unique(chances[:, 1]), 2.0]:
        said = chances[:, 1] >= threshold
        if (~said[y == 0]).mean() >= 0.9 - 1e-12:
            best = max(best, said[y == 1].mean())
    return best


def calibration_by_hand(y, chances) -> float:
    confidence, right = chances.max(1), chances.argmax(1) == y
    gap = 0.0
    for low in np.arange(10) / 10:
        inside = (confidence >= low) & (confidence < low + 0.1)
        if inside.any():
            gap += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return gap


@pytest.mark.parametrize(
    ("measure", "reference"),
    [
        (scores.auc_of_two, lambda y, p: sk.roc_auc_score(y, np.round(np.log(p[:, 1] / p[:, 0]), 6))),
        (scores.average_precision, lambda y, p: sk.average_precision_score(y, np.round(np.log(p[:, 1] / p[:, 0]), 6))),
        (scores.f1, lambda y, p: sk.f1_score(y, p.argmax(1))),
        (scores.balanced_accuracy, lambda y, p: sk.balanced_accuracy_score(y, p.argmax(1))),
        (scores.brier, lambda y, p: sk.brier_score_loss(y, p[:, 1])),
        (scores.sensitivity, sensitivity_by_hand),
        (scores.calibration_error, calibration_by_hand),
    ],
)
def test_two_classes_are_measured_as_by_scikit_learn(measure, reference):
    if measure in (scores.auc_of_two, scores.average_precision, scores.sensitivity):
        logits, y, real = clients(2)
        logits = torch.stack([torch.zeros_like(logits[..., 0]), logits[..., 1]], -1)  # ties stay ties
        found = measure(logits, y, real)
        for i in range(5):
            rows = real[i].numpy()
            p = torch.softmax(logits[i], -1).numpy()[rows]
            assert found[i] == pytest.approx(reference(y[i].numpy()[rows], p), abs=1e-12)
        return
    each(measure, reference, 2)


@pytest.mark.parametrize(
    ("measure", "reference"),
    [
        (scores.f1, lambda y, p: sk.f1_score(y, p.argmax(1), average="macro")),
        (scores.balanced_accuracy, lambda y, p: sk.balanced_accuracy_score(y, p.argmax(1))),
        (scores.brier, lambda y, p: ((p - np.eye(4)[y]) ** 2).sum(1).mean()),
        (scores.calibration_error, calibration_by_hand),
    ],
)
def test_four_classes_are_measured_as_by_scikit_learn(measure, reference):
    each(measure, reference, 4)


def test_what_has_no_meaning_is_not_a_number():
    logits, y, real = clients(2)
    y[0], y[1] = 0, 1
    assert np.isnan(scores.average_precision(logits, y, real)[0])
    assert np.isnan(scores.sensitivity(logits, y, real)[:2]).all()
    assert scores.average_precision(*clients(3)) is None
    assert scores.sensitivity(*clients(3)) is None
    numbers = torch.zeros(1, 4, 1)
    assert np.isnan(scores.determination(numbers, torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))[0])


def test_numbers_are_measured_as_by_scikit_learn():
    draw = np.random.default_rng(0)
    real = torch.from_numpy(np.arange(30)[None] < np.array([30, 12])[:, None])
    y, out = torch.from_numpy(draw.normal(size=(2, 30))), torch.from_numpy(draw.normal(size=(2, 30, 1)))
    for i in range(2):
        a, b = y[i][real[i]].numpy(), out[i, :, 0][real[i]].numpy()
        assert scores.absolute_error(out, y, real)[i] == pytest.approx(sk.mean_absolute_error(a, b))
        assert scores.root_squared_error(out, y, real)[i] == pytest.approx(sk.mean_squared_error(a, b) ** 0.5)
        assert scores.determination(out, y, real)[i] == pytest.approx(sk.r2_score(a, b))


def test_a_summary_has_every_measure_over_clients_and_on_all_rows():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": [f"h{i % 4}" for i in range(400)], "x": draw.normal(size=400)})
    frame["y"] = (frame["x"] + draw.normal(size=400) + 0.3 * (np.arange(400) % 4) > 1.5).astype(int)
    run = ft.run(ft.FedAvgFT(lr=0.5), ft.Federation.from_table(frame, client="who", label="y"), rounds=3, seed=0)
    chances = [torch.softmax(run.predict(i, run.federation.test.client(i)[0]).double(), -1)[:, 1].numpy() for i in range(4)]
    truth = [run.federation.test.client(i)[1].numpy() for i in range(4)]
    own = [sk.roc_auc_score(y, p) for y, p in zip(truth, chances, strict=True)]
    assert run.summary["auc_personal"] == pytest.approx(np.mean(own))
    assert run.clients["ap_personal"][2] == pytest.approx(sk.average_precision_score(truth[2], chances[2]))
    assert run.summary["auc_rows_personal"] == pytest.approx(sk.roc_auc_score(np.concatenate(truth), np.concatenate(chances)))
    assert run.summary["brier_rows_personal"] == pytest.approx(
        sk.brier_score_loss(np.concatenate(truth), np.concatenate(chances))
    )
    assert run.summary["f1_rows_global"] is not None
    assert run.summary["mae_personal"] is None


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_ranks_are_scipys(rows):
    draw = np.random.default_rng(rows)
    values = draw.integers(0, 5, (6, rows, 3)).astype(float)  # many ties
    values[draw.random(values.shape) < 0.3] = np.nan
    expected = rankdata(values, axis=1, nan_policy="omit") if rows else np.empty(values.shape)
    np.testing.assert_array_equal(scores._ranks(values), expected)
