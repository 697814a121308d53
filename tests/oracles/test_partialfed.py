"""The transcription of PartialFed itself: the slope of its logits, and its noise."""

from __future__ import annotations

import numpy as np
import pytest

import fedtailor as ft
from tests.make import seeded
from tests.oracles import networks, partialfed
from tests.oracles.differences import slope
from tests.oracles.harness import D, K, arrays, gap


def test_the_logits_slope_is_that_of_the_mixture_straight_through():
    """Forward the draw, backward the softmax: W(b) = (h + s(b) - s(a)) applied to (g, w), differentiated in b at a."""
    draw = np.random.default_rng(6)
    g = arrays(ft.Task.from_module(seeded(networks.normed, D, K)).init())
    w = {name: value + 0.3 * draw.uniform(size=value.shape) for name, value in g.items()}
    X, y, tau = draw.normal(size=(7, D)), draw.integers(0, K, 7), 0.8
    layers = partialfed.layers(g)
    a, e = draw.normal(size=(2, len(layers), 2))
    chosen = np.stack([partialfed.take_shared(a + e), ~partialfed.take_shared(a + e)], 1)
    assert chosen.any(0).all()

    def straight(b):
        share = chosen + partialfed.softmax((b + e) / tau) - partialfed.softmax((a + e) / tau)
        return networks.risk(
            {n: own * g[n] + rest * w[n] for names, (own, rest) in zip(layers, share, strict=True) for n in names}, X, y
        )

    by_hand = partialfed.logit_gradient(networks.gradient, g, w, a, e, tau, X, y)
    assert np.abs(by_hand).max() > 1e-3
    assert gap(by_hand, slope(straight, a, 1e-5)) < 1e-7


def test_the_noise_is_gumbels():
    assert partialfed.finalise(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first word from seed 0
    e = partialfed.gumbel(-12345, 20_000)
    assert e.shape == (20_000, 2)
    assert e.mean(0) == pytest.approx(np.euler_gamma, abs=0.03)  # three standard errors of pi / sqrt(6 * 20000)
    assert e.var(0) == pytest.approx(np.pi**2 / 6, rel=0.05)
    assert abs(np.corrcoef(e.T)[0, 1]) < 0.03
