"""Secure sums: the server learns the mean, and nothing of one upload; lost sites are made up for, as long as enough are there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedtailor as ft
from fedtailor import tree
from fedtailor.runs import checkpoint
from fedtailor.sites.pact import Pact
from tests.sites.network import agree, conduct, federation, loop


def secured(method, fed, threshold=3, bits=64, largest=2.0**20, **options):
    return replace(agree(method, fed, **options), pact=Pact(len(fed), threshold, bits, largest))


def shared_of(folder):
    return checkpoint.newest(folder / "server" / "checkpoints").state["shared"]


def apart(a, b) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


METHODS = [
    (ft.FedAvg(epochs=2), "linear", "uniform"),
    (ft.FedAvg(epochs=2), "linear", "size"),
    (ft.Ditto(lam=0.2), "linear", "uniform"),
    (ft.FedCLUP(lam=0.3, steps=3), "linear", "size"),
    (ft.ScaffoldP(personal="head"), "mlp", "uniform"),
    (ft.GIANT(), "linear", "uniform"),
    (ft.FedProto(), "mlp", "uniform"),
]


@pytest.mark.parametrize(("method", "model", "weights"), METHODS, ids=lambda value: getattr(value, "__name__", str(value))[:12])
def test_the_mean_is_the_plain_one_up_to_the_stated_error(tmp_path, method, model, weights):
    fed = federation()
    agreed = secured(method, fed, model=model, weights=weights, cohort=4, rounds=2)
    summary = conduct(agreed, fed, tmp_path).play()
    assert summary["events"] == []
    assert agreed.pact.error < 1e-12
    assert apart(shared_of(tmp_path), loop(agreed, fed).shared) < 1e-9  # two rounds, and what a method makes of the error


def test_thirty_two_bits_are_enough_for_single_precision(tmp_path):
    fed = federation()
    agreed = secured(ft.FedAvg(), fed, bits=32, largest=16.0, dtype="float32", rounds=1)
    conduct(agreed, fed, tmp_path).play()
    gap = apart(shared_of(tmp_path), loop(agreed, fed).shared)
    assert gap <= agreed.pact.error + np.finfo(np.float32).eps
