"""PERADA on images: what is measured of a way to train, and every baseline by a name of its own."""

from __future__ import annotations

import numpy as np
import pytest

from fedtailor.data.pool import PooledData
from fedtailor.engine import prefix
from fedtailor.papers import adapters, frozen_images
from fedtailor.papers.perada import ablations, baselines, counts, privacy, rounds

TINY = {
    **adapters.CIFAR,
    **{"images": 60, "partition": "iid", "clients": 2, "cohort": 1.0, "network": adapters.SMALL, "start": "random"},
    **{"rounds": 1, "epochs": 1, "batch_size": 16, "public": 20, "kd_steps": 2, "kd_batch": 10},
}


def pool(name="images", count=120):
    draw = np.random.default_rng(0)
    return PooledData(name, draw.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10)


@pytest.fixture
def pools(monkeypatch):
    for name in ("cifar10", "cifar100", "pacs"):
        monkeypatch.setitem(frozen_images.POOLS, name, pool)
    yield
    frozen_images.let_go()


def test_outputs_of_frozen_layers_are_held_for_one_set_and_let_go(pools):
    before = prefix._made
    frozen_images.played(TINY, 0, "FedAvg", baselines.ways(TINY)["FedAvg"])
    assert prefix._made is not before
    frozen_images.let_go()
    assert prefix._made is before


def test_a_networks_name_says_what_moves():
    assert frozen_images.network("resnet8:last=1", "adapters") == "resnet8:adapters,last=1"
    assert frozen_images.network("resnet18", "both") == "resnet18:adapters,all"
    assert frozen_images.network("resnet18", "full") == "resnet18"
    assert frozen_images.input_layer(TINY) == "layer3.0.conv1"


@pytest.mark.parametrize("label", ["PerAda", "Standalone", "FedAlt, input", "FedAvg"])
def test_a_way_is_measured_on_own_rows_on_all_rows_and_by_the_shared_model(pools, label):
    (row,) = frozen_images.played(TINY, 0, label, baselines.ways(TINY)[label])
    assert all(0 <= row[key] <= 1 for key in ("local", "global", "corrupted"))
    assert (row["union"] is None) == (label == "Standalone")
    assert (row["sent"] == 0) == (label == "Standalone")
    assert (row["phi_after"] is None) == (label != "PerAda")
    if label == "FedAvg":  # one model for all: all ways to ask it come to the same
        assert row["global"] == pytest.approx(row["union"])
        assert row["corrupted"] == pytest.approx(row["union_corrupted"])


def test_claims_find_their_rows_in_what_is_measured():
    for module in (baselines, ablations, privacy, rounds):
        labels = module.EXPERIMENT.measure.names({**TINY, **module.EXPERIMENT.settings["laptop"]})
        numbers = ("local", "global", "corrupted", "trained", "union", "union_corrupted", "phi_after", "phi_mean")
        rows = [{"method": label, **{key: 1.0 + i for i, key in enumerate(numbers)}} for label in labels]
        assert all(np.isfinite(claim.number(rows)) for claim in module.EXPERIMENT.claims)


def test_peradas_counts_are_the_papers():
    """11.18 M of the network and 1.41 M of the adapters, by hand: 3x3 and 7x7 convolutions, norms, head; twice for two models."""
    claims = {claim.words: claim for claim in counts.EXPERIMENT.claims}
    full = 3 * 49 * 64 + 2 * 64 + 512 * 10 + 10
    widths = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    full += sum(9 * a * b + 9 * b * b + 4 * b + (a * b + 2 * b if a != b else 0) for a, b in widths)
    assert full == 11_181_642
    low, high = claims["Ditto: parameters sent, in millions"].above, claims["Ditto: parameters sent, in millions"].below
    assert low < full / 1e6 < high
