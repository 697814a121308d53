"""scikit-learn's interface: its own checks, groups by argument, by metadata routing and by column."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedtailor as ft
from fedtailor.errors import InvalidArgument

# All of scikit-learn's checks apply. One skips itself: check_array_api_input, where SCIPY_ARRAY_API is not set.
QUICK = {"method": "fedavg", "rounds": 1, "steps": 20}


@parametrize_with_checks([ft.FederatedClassifier(**QUICK), ft.FederatedRegressor(**QUICK)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def opposed(rows: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two clients whose laws are opposite but for what they have in common."""
    draw = np.random.default_rng(0)
    x, groups = draw.normal(5, 3, (rows, 2)), np.arange(rows) % 2
    return x, np.where(groups == 0, 1, -1) * (x[:, 0] - 5) + 2 * x[:, 1], np.where(groups == 0, "north", "south")


def test_alone_every_group_has_its_least_squares_fit():
    x, y, groups = opposed()
    y = y + np.random.default_rng(1).normal(size=len(y))
    local = ft.FederatedRegressor("local", rounds=1, steps=2000).fit(x, y, groups=groups)
    assert list(local.groups_) == ["north", "south"]
    for name in local.groups_:
        mine = groups == name
        expected = LinearRegression().fit(x[mine], y[mine]).predict(x)
        np.testing.assert_allclose(local.predict(x, groups=[name] * len(x)), expected, atol=1e-6)


def test_where_nothing_is_shared_a_stranger_has_the_model_of_the_client_whose_rows_are_most_like_its_own():
    x, y, groups = opposed()
    x = x + np.where(groups == "north", 0.0, 40.0)[:, None]
    local = ft.FederatedRegressor("local", rounds=1, steps=5).fit(x, y, groups=groups)
    for name in local.groups_:
        mine = x[groups == name]
        np.testing.assert_allclose(
            local.predict(mine, groups=["new"] * len(mine)), local.predict(mine, groups=[name] * len(mine))
        )
    both = local.predict(x, groups=np.where(groups == "north", "new", "newer"))
    np.testing.assert_allclose(both, local.predict(x, groups=groups))


def test_without_groups_all_rows_are_one_client_and_fedavg_is_least_squares():
    x, y, _ = opposed()
    fit = ft.FederatedRegressor("fedavg", rounds=1, steps=2000).fit(x, y)
    np.testing.assert_allclose(fit.predict(x), LinearRegression().fit(x, y).predict(x), atol=1e-6)


def test_personal_models_need_to_know_whose_row_it_is():
    x, y, groups = opposed()
    labels = np.where(y > np.median(y), "high", "low")
    fit = ft.FederatedClassifier("ditto", rounds=20, lam=0.01).fit(x, labels, groups=groups)
    own, shared = fit.score(x, labels, groups=groups), fit.score(x, labels)
    assert own > 0.95 > shared
    assert fit.predict_proba(x, groups=groups).sum(1) == pytest.approx(np.ones(len(x)))
    strangers = fit.predict_proba(x, groups=["elsewhere"] * len(x))
    np.testing.assert_array_equal(strangers, fit.predict_proba(x))
    again = pickle.loads(pickle.dumps(fit))
    np.testing.assert_array_equal(again.predict(x, groups=groups), fit.predict(x, groups=groups))
    assert fit.run_.summary["clients"] == 2


def test_in_a_pipeline_groups_are_the_last_steps_own():
    x, y, groups = opposed()
    pipe = Pipeline([("scale", StandardScaler()), ("fed", ft.FederatedRegressor("local", rounds=1, steps=200))])
    pipe.fit(x, y, fed__groups=groups)
    np.testing.assert_allclose(pipe.predict(x, groups=groups), y, atol=0.1)


def test_metadata_routing_carries_groups_through_a_search():
    x, y, groups = opposed()
    with sklearn.config_context(enable_metadata_routing=True):
        fed = ft.FederatedRegressor(rounds=3, steps=20).set_fit_request(groups=True).set_score_request(groups=True)
        pipe = Pipeline([("scale", StandardScaler()), ("fed", fed)])
        search = GridSearchCV(pipe, {"fed__lam": [0.001, 100.0]}, cv=3).fit(x, y, groups=groups)
        assert search.best_params_ == {"fed__lam": 0.001}  # laws are opposite: the less pull the better
        assert search.best_score_ > 0.8


def test_a_column_of_groups_needs_no_routing():
    x, y, groups = opposed()
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(site=groups)
    scaled = ColumnTransformer(
        [("scale", StandardScaler(), ["a", "b"])], remainder="passthrough", verbose_feature_names_out=False
    )
    pipe = Pipeline([("scale", scaled.set_output(transform="pandas")), ("fed", ft.FederatedRegressor(rounds=3, steps=20))])
    pipe.set_params(fed__group_column="site")
    search = GridSearchCV(pipe, {"fed__lam": [0.001, 100.0]}, cv=3).fit(frame, y)
    assert search.best_params_ == {"fed__lam": 0.001}
    assert list(search.best_estimator_[-1].groups_) == ["north", "south"]
    coded = np.c_[x, groups == "north"]
    by_number = ft.FederatedRegressor("local", group_column=-1, rounds=1, steps=200).fit(coded, y)
    assert by_number.n_features_in_ == 2
    np.testing.assert_allclose(by_number.predict(coded), y, atol=0.1)


def test_what_does_not_fit_together_is_refused():
    x, y, groups = opposed()
    with pytest.raises(InvalidArgument, match="given twice"):
        ft.FederatedRegressor(group_column=0).fit(x, y, groups=groups)
    with pytest.raises(InvalidArgument, match="no column 'site'"):
        ft.FederatedRegressor(group_column="site").fit(pd.DataFrame(x), y)
    with pytest.raises(InvalidArgument, match="X has no names"):
        ft.FederatedRegressor(group_column="site").fit(x, y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        ft.FederatedRegressor().fit(x, y, groups=groups[:-1])
    with pytest.raises(InvalidArgument, match="has its settings"):
        ft.FederatedRegressor(ft.Ditto(), lam=3.0).fit(x, y)
    with pytest.raises(InvalidArgument, match="no setting 'lam'"):
        ft.FederatedRegressor("fedavg", lam=3.0).fit(x, y)
    assert clone(ft.FederatedRegressor(ft.Ditto(lam=2.0), model="mlp:4")).method == ft.Ditto(lam=2.0)
