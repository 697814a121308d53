"""The networks written by hand: their gradients are the slopes of the risk."""

from __future__ import annotations

import numpy as np
import pytest

import fedtailor as ft
from tests.oracles import networks
from tests.oracles.differences import slope
from tests.oracles.harness import NETWORKS, D, K, Setting, gap, plan


@pytest.mark.parametrize("rows", [6, 1])
@pytest.mark.parametrize("model", NETWORKS)
def test_the_gradient_written_by_hand_is_the_slope_of_the_risk(model, rows):
    draw, problem = np.random.default_rng(5), NETWORKS[model]
    start = problem.start(plan(ft.FedAvg(), problem, Setting(None, 4)).task)
    point = {name: value + 0.3 * draw.uniform(size=value.shape) for name, value in start.items()}
    X, y = draw.normal(size=(rows, D)), draw.integers(0, K, rows)
    by_hand, _ = networks.gradient(point, X, y)
    by_differences = slope(lambda m: networks.risk(m, X, y), point, 1e-5)
    assert gap(by_hand, {name: by_differences[name] for name in by_hand}) < 1e-7
