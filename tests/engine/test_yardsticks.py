"""Yardsticks: what methods are held against, by hand and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

import fedtailor as ft
from fedtailor.errors import InvalidArgument
from fedtailor.report.evidence import Evidence
from fedtailor.report.page import page
from fedtailor.runs.folder import yardsticks_in


def federation(kind="classes", seed=0):
    draw = np.random.default_rng(seed)

    def part(rows):
        out = []
        for i in range(3):
            x = draw.normal(size=(rows + 10 * i, 2))
            y = x[:, 0] * 2 + draw.normal(size=len(x)) + i - 1
            out.append((x, y if kind == "numbers" else (y > 0).astype(int)))
        return out

    return ft.Federation.from_arrays(part(40), part(20), part(10))


def test_the_majority_class_is_that_of_each_clients_training_rows():
    fed = federation()
    record = ft.compare([ft.Local()], fed, rounds=1).yardsticks["majority class"][0]
    for i in range(len(fed)):
        most = np.bincount(fed.train.client(i)[1]).argmax()
        assert record.clients["acc_personal"][i] == pytest.approx((fed.test.client(i)[1] == most).double().mean())
        assert record.clients["auc_personal"][i] == 0.5
    assert record.summary["acc_personal"] == pytest.approx(record.clients["acc_personal"].mean())


def test_of_numbers_it_is_the_mean():
    fed = federation("numbers")
    record = ft.compare([ft.Local()], fed, rounds=1).yardsticks["mean"][0]
    want = [float(((fed.test.client(i)[1] - fed.train.client(i)[1].mean()) ** 2).mean()) for i in range(len(fed))]
    assert record.clients["mse_personal"] == pytest.approx(want, rel=1e-5)


def test_the_pooled_model_is_local_training_on_all_rows_in_one_place():
    fed = federation()
    record = ft.compare([ft.Local(lr=0.2, steps=3)], fed, rounds=4).yardsticks["all rows pooled"][0]
    together = [(fed.train.x.numpy(), fed.train.y.numpy())]
    one = ft.Federation.from_arrays(together, [(fed.test.x.numpy(), fed.test.y.numpy())])
    run = ft.run(ft.Local(lr=0.2, steps=3), one, rounds=4)
    for i in range(len(fed)):
        x, y = fed.test.client(i)
        assert record.clients["acc_personal"][i] == pytest.approx((run.predict(0, x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_boosting_is_scikit_learns_alone_and_pooled(kind):
    fed = federation(kind)
    found = ft.compare([ft.Local()], fed, rounds=1, yardsticks=["boosting"]).yardsticks
    assert {"all rows pooled", "boosting, each alone", "boosting, pooled"} <= set(found)
    model = HistGradientBoostingClassifier if kind == "classes" else HistGradientBoostingRegressor
    everyone = model(random_state=0).fit(fed.train.x.numpy(), fed.train.y.numpy())
    for i in range(len(fed)):
        (x, y), (new, target) = ((a.numpy(), b.numpy()) for a, b in (fed.train.client(i), fed.test.client(i)))
        alone = model(random_state=0).fit(x, y)
        for label, fitted in (("boosting, each alone", alone), ("boosting, pooled", everyone)):
            said = fitted.predict(new)
            name, want = ("acc", (said == target).mean()) if kind == "classes" else ("mse", ((said - target) ** 2).mean())
            assert found[label][0].clients[f"{name}_personal"][i] == pytest.approx(want, rel=1e-5)


def test_boosting_counts_rows_as_their_weights_say():
    fed, draw = federation(), np.random.default_rng(5)
    pairs, tests = ([part.client(i) for i in range(len(fed))] for part in (fed.train, fed.test))
    weights = [draw.integers(1, 9, len(y)) for _, y in pairs]
    weighted = ft.Federation.from_arrays(pairs, tests, weights=weights)
    found = ft.compare([ft.Local()], weighted, rounds=1, yardsticks=["boosting"]).yardsticks
    for i, (x, y) in enumerate(pairs):
        alone = HistGradientBoostingClassifier(random_state=0).fit(x.numpy(), y.numpy(), weights[i])
        share = alone.predict_proba(tests[i][0].numpy())[np.arange(len(tests[i][1])), tests[i][1]]
        assert found["boosting, each alone"][0].clients["loss_personal"][i] == pytest.approx(-np.log(share).mean(), rel=1e-4)


def test_they_stand_on_the_page_and_are_never_the_best(tmp_path):
    found = ft.compare([ft.Local(), ft.FedAvg()], federation(), rounds=1, out=tmp_path / "a")
    evidence = Evidence(found.records(), {}, found.yardsticks)
    assert evidence.best in ("Local", "FedAvg")
    text = page(found.records(), yardsticks=found.yardsticks)
    assert "majority class (yardstick)" in text
    assert "which nobody here has" in text
    stored = yardsticks_in(tmp_path / "a")
    assert {k: v[0].summary for k, v in stored.items()} == {k: v[0].summary for k, v in found.yardsticks.items()}
    np.testing.assert_array_equal(
        stored["majority class"][0].clients["acc_personal"], found.yardsticks["majority class"][0].clients["acc_personal"]
    )


def test_private_rows_are_looked_at_by_no_yardstick():
    private = ft.FedAvg(opt=ft.Private(clip=1.0, noise=2.0, seed=0), steps=1)
    assert not ft.compare([private], federation(), rounds=1).yardsticks


def test_unknown_ones_are_refused_and_none_is_none():
    with pytest.raises(InvalidArgument, match="unknown yardstick 'bosting'"):
        ft.compare([ft.Local()], federation(), rounds=1, yardsticks=["bosting"])
    assert not ft.compare([ft.Local()], federation(), rounds=1, yardsticks=["none"]).yardsticks
