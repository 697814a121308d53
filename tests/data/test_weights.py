"""Rows that count more than others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.data.redeal import redealt
from fedtailor.errors import InvalidArgument, InvalidData
from tests.make import pairs, seeded

SIZES = (7, 5, 9)
TRAIN, TEST = pairs(SIZES), pairs((4, 4, 4), seed=1)
WEIGHTS = [np.random.default_rng(i).integers(0, 4, n).astype(float) + (np.arange(n) == 0) for i, n in enumerate(SIZES)]
WEIGHTED = ft.Federation.from_arrays(TRAIN, TEST, weights=WEIGHTS)
REPEATED = ft.Federation.from_arrays(
    [(x.repeat(w.astype(int), 0), y.repeat(w.astype(int))) for (x, y), w in zip(TRAIN, WEIGHTS, strict=True)], TEST
)
SETTINGS = {"rounds": 3, "workers": 1, "dtype": "float64"}
MODELS = {
    "linear": lambda: "linear",
    "network": lambda: seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))),
}


def assert_same(a, b):
    for p, q in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "method",
    [ft.Ditto(lr=0.3, steps=3), ft.APFL(lr=0.3, steps=2), ft.Scaffold(lr=0.3, steps=2), ft.PFedMe(steps=2)],
    ids=lambda m: type(m).__name__,
)
def test_a_weight_is_how_often_a_row_is_there(engine, model, method):
    module = MODELS[model]()
    weighted, repeated = (ft.run(method, fed, module, engine=engine, **SETTINGS) for fed in (WEIGHTED, REPEATED))
    assert_same(weighted.shared, repeated.shared)
    assert_same(weighted.store.get(np.arange(3)), repeated.store.get(np.arange(3)))


def test_engines_agree_on_small_batches_and_only_ratios_matter():
    half = ft.Federation.from_arrays(TRAIN, TEST, weights=[w / 1000 for w in WEIGHTS])
    runs = [
        ft.run(ft.Ditto(lr=0.3, epochs=2), fed, MODELS["network"](), engine=engine, batch_size=3, **SETTINGS)
        for fed, engine in ((WEIGHTED, "loop"), (WEIGHTED, "vectorized"), (half, "vectorized"))
    ]
    for other in runs[1:]:
        assert_same(other.shared, runs[0].shared)


def test_weights_are_part_of_what_a_run_is_and_of_its_clients(tmp_path):
    settings = {**SETTINGS, "out": tmp_path / "run"}
    ft.run(ft.FedAvg(), WEIGHTED, **settings)
    from fedtailor.errors import BadRun

    with pytest.raises(BadRun, match="data"):
        ft.run(ft.FedAvg(), ft.Federation.from_arrays(TRAIN, TEST), resume=True, **settings)
    np.testing.assert_array_equal(WEIGHTED.take([2]).train.weights, WEIGHTS[2])


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([w[:-1] for w in WEIGHTS], r"weights of client 0 have shape \(6,\) for 7 rows"),
        ([-w for w in WEIGHTS], "at least 0"),
        ([0 * w for w in WEIGHTS], "not all 0"),
        (WEIGHTS[:2], "weights has 2 entries but train has 3 clients"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, says):
    with pytest.raises(InvalidData, match=says):
        ft.Federation.from_arrays(TRAIN, TEST, weights=weights)


def test_what_is_not_derived_for_weights_is_refused():
    with pytest.raises(InvalidArgument, match="rows with weights cannot be private"):
        ft.run(ft.FedAvg(opt=ft.Private()), WEIGHTED, rounds=1)
    with pytest.raises(InvalidArgument, match="for rows that count alike"):
        ft.run(ft.FedCLUP(lam=0.1, steps="theory"), WEIGHTED, rounds=1)
    with pytest.raises(InvalidArgument, match="count all rows alike"):
        ft.advise(WEIGHTED)
    with pytest.raises(InvalidArgument, match="other splits would train on test rows"):
        redealt(WEIGHTED, 1)
