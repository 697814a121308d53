"""What single methods refuse, choose and keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedtailor as ft


def test_split_methods_refuse_parts_that_are_not_there():
    fed = ft.Federation.load("digits", clients=3)
    with pytest.raises(ft.errors.InvalidArgument, match="its groups are head, body"):
        ft.run(ft.FedPer(personal="neck"), fed, "mlp:8", rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="leaves no shared"):
        ft.run(ft.FedPer(), fed, "linear", rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="leaves no personal"):
        ft.run(ft.FedBN(), fed, "mlp:8", rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="public="):
        ft.run(ft.FedDF(), fed, rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="plain SGD"):
        ft.Scaffold(opt=ft.SGD(momentum=0.9))
    numbers = ft.Federation.load("clup-regression", clients=2)
    with pytest.raises(ft.errors.InvalidArgument, match="classifier"):
        ft.run(ft.KNNPer(), numbers, rounds=1)


def test_methods_of_all_clients_refuse_partial_turnout():
    fed = ft.Federation.load("digits", clients=3)
    with pytest.raises(ft.errors.InvalidArgument, match=r"cohort=1\.0"):
        ft.run(ft.L2GD(), fed, rounds=1, cohort=2)
    with pytest.raises(ft.errors.InvalidArgument, match="mu and smoothness"):
        ft.run(ft.AL2SGD(), fed, rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="one iteration"):
        ft.L2GD(steps=5)


def test_a_part_is_found_by_module_and_never_by_substring():
    fed = ft.Federation.load("digits", clients=3)
    net = torch.nn.Sequential()
    net.add_module("bn_free", torch.nn.Linear(64, 6))
    net.add_module("down", torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.ReLU()))
    net.add_module("top", torch.nn.Linear(6, 10))
    run = ft.run(ft.FedBN(), fed, net, rounds=1)
    assert set(run.personal[0]["model"]) == {
        "down.0.weight",
        "down.0.bias",
        "buffer:down.0.running_mean",
        "buffer:down.0.running_var",
    }
    run = ft.run(ft.FedSim(personal=["down", "top.bias"]), fed, net, rounds=1)
    assert "top.bias" in run.personal[0]["model"]
    assert "top.weight" in run.shared["model"]


def test_knn_pers_weight_is_chosen_on_validation_only():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 2))
    noise = draw.integers(0, 2, 40)
    truth = (x[:, 0] * x[:, 1] > 0).astype(int)  # not linear: neighbours know, the model does not
    fits = ft.Federation.from_arrays([(x, truth)], [(x, noise)], val=[(x, truth)])
    run = ft.run(ft.KNNPer(k=3, steps=2, lr=0.1), fits, rounds=2)
    own = (run.predict_global(x).argmax(1).numpy() == truth).mean()
    assert float(run.personal[0]["weight"]) > 0
    assert (run.predict(0, x).argmax(1).numpy() == truth).mean() > own
    without = ft.run(ft.KNNPer(steps=1), ft.Federation.from_arrays([(x, truth)], [(x, truth)]), rounds=1)
    assert float(without.personal[0]["weight"]) == 0.5


@pytest.mark.filterwarnings("ignore:.*classes are assumed")  # one client alone lacks a digit
def test_dynamic_lam_rises_when_validation_stalls_and_not_before():
    fed = ft.Federation.load("digits", clients=4, partition="dirichlet:0.5")
    still = ft.run(ft.FedCLUPDynamic(lam=0.02, lr=1e-6, steps=1, patience=3, factor=3.0, ceiling=5.0), fed, rounds=10)
    # nothing improves: raised in rounds 3, 6 and 9 (the first sets the mark)
    assert float(still.shared["lam"]) == pytest.approx(0.02 * 3**3)
    capped = ft.run(ft.FedCLUPDynamic(lam=0.02, lr=1e-6, steps=1, patience=1, factor=3.0, ceiling=0.5), fed, rounds=10)
    assert float(capped.shared["lam"]) == pytest.approx(0.5)
    moving = ft.run(ft.FedCLUPDynamic(lam=0.02, lr=0.5, steps=2, patience=3), fed, rounds=5)
    assert float(moving.shared["lam"]) == pytest.approx(0.02)
    bare = ft.Federation.from_arrays([fed.train.client(0)], [fed.test.client(0)])
    with pytest.raises(ft.errors.InvalidArgument, match="val="):
        ft.run(ft.FedCLUPDynamic(), bare, rounds=1)
