"""A client that is held out has no say in how columns become features."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import newcomers_of, prepare


def table() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(list("abcde"), 20), "x": draw.normal(3, 2, 100), "z": draw.choice(["u", "v"], 100)})
    frame["y"] = frame["x"] + draw.normal(size=100)
    frame["part"] = np.tile(["train", "train", "test", "val"], 25)
    frame.loc[::7, "x"] = np.nan
    return frame


def strange(frame: pd.DataFrame, client: str) -> pd.DataFrame:
    """The same table, in which one client is far from the others, has a word of its own and nothing missing."""
    mine = frame["who"] == client
    x = frame["x"].mask(mine, frame["x"].fillna(0) * 50 + 1000)
    return frame.assign(x=x, z=frame["z"].mask(mine, "w"), y=frame["y"].mask(mine, 5000.0))


def read(frame: pd.DataFrame, **options) -> ft.Federation:
    return ft.Federation.from_table(frame, client="who", label="y", split="part", standardize_label=True, **options)


@pytest.fixture
def held_out() -> str:
    fed = read(table())
    (client,) = newcomers_of(fed, 0.2, 0)
    return fed.names[client]


OPTIONS = Options(new_clients=0.2, rounds=2)


@pytest.mark.parametrize("scale", ["pooled", "client", "none"])
def test_columns_are_fitted_to_the_training_rows_of_those_who_take_part(held_out, scale):
    frame = strange(table(), held_out)
    schema = prepare(ft.FedAvg(), read(frame, standardize=scale), "linear", OPTIONS).federation.schema
    seen = frame[(frame["who"] != held_out) & (frame["part"] == "train")]
    x, z = schema.columns
    assert x.fill == pytest.approx(seen["x"].median())
    if scale != "none":
        filled = seen["x"].fillna(seen["x"].median())
        assert (x.mean, x.scale) == pytest.approx((filled.mean(), filled.std(ddof=0)))
    assert z.categories == ("u", "v")
    assert (schema.label_mean, schema.label_scale) == pytest.approx((seen["y"].mean(), seen["y"].std(ddof=0)))


def test_the_held_out_clients_rows_change_nothing_for_the_others(held_out, tmp_path):
    runs = []
    for i, frame in enumerate((table(), strange(table(), held_out))):
        frame.to_csv(tmp_path / f"{i}.csv", index=False)
        fed = read(tmp_path / f"{i}.csv")
        runs.append(ft.run(ft.Ditto(lam=0.1), fed, "linear", OPTIONS))
        assert fed.train.x.shape[1] == (4 if i == 0 else 5)  # as it was read, with the word of the one held out
    first, other = runs
    assert torch.equal(first.shared["model"]["weight"], other.shared["model"]["weight"])
    assert first.summary["mse_personal"] == other.summary["mse_personal"]
    assert first.summary["new_mse_personal"] != other.summary["new_mse_personal"]
    rows = table().loc[:5, ["x", "z"]]
    assert torch.equal(first.predict("a", rows), other.predict("a", rows))
    assert any("learnt from the 4 clients that are not held out" in note for note in other.summary["notes"])


def test_trials_of_tuning_are_fitted_in_the_same_way(held_out):
    results = [
        ft.compare([ft.FedAvg()], read(frame), "linear", OPTIONS, tune={"lr": [0.01, 0.1]}).tuning
        for frame in (table(), strange(table(), held_out))
    ]
    assert results[0] == results[1]


def test_where_it_cannot_be_done_it_is_said():
    fed = read(table()).take([0, 1, 2, 3, 4])
    assert any("of those held out as well" in note for note in ft.run(ft.FedAvg(), fed, "linear", OPTIONS).summary["notes"])


def test_balanced_class_weights_are_those_of_who_takes_part(held_out):
    frame = table()
    frame["y"] = np.where(np.arange(100) % 3 == 0, "ill", "well")
    frame.loc[frame["who"] == held_out, "y"] = "well"
    fed = ft.Federation.from_table(frame, client="who", label="y", split="part")
    ready = prepare(ft.FedAvg(), fed, "linear", OPTIONS.but(class_weights="balanced"))
    seen = frame[(frame["who"] != held_out) & (frame["part"] == "train")]["y"].value_counts()
    weights = ready.task.example_loss.weights
    assert float(weights[0] / weights[1]) == pytest.approx(seen["well"] / seen["ill"])
