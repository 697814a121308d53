"""Corrupted tests and public rows: what they do to pictures, that they are seeded and grow, and where they may be used."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli.app import app
from fedtailor.data import shift
from fedtailor.data.readers.public import with_public
from fedtailor.data.resize import fitted
from fedtailor.data.sources import POOLS
from fedtailor.engine.measure import on_shifted
from fedtailor.errors import FedtailorError, InvalidArgument, InvalidData


def pictures(side: int = 32, channels: int = 3, count: int = 24) -> torch.Tensor:
    """Smooth pictures with a little grain, in [0, 1]."""
    draw = torch.Generator().manual_seed(side)
    wide = F.interpolate(torch.rand(count, channels, 8, 8, generator=draw), (side, side), mode="bilinear")
    return (0.85 * wide + 0.15 * torch.rand(count, channels, side, side, generator=draw)).clamp(0, 1)


def federation(channels: int = 3, side: int = 12, public: bool = False) -> ft.Federation:
    x = pictures(side, channels, 36)
    y = (x.mean((1, 2, 3)) > x.mean()).long()
    parts = [(x[i::3], y[i::3]) for i in range(3)]
    return ft.Federation.from_arrays(parts, parts, public=pictures(side, channels, 10) if public else None, classes=("a", "b"))


# -- the corruptions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("side", "channels"), [(32, 3), (28, 1), (16, 3), (48, 3)])
@pytest.mark.parametrize("kind", shift.CORRUPTIONS)
def test_severity_grows_and_values_stay_in_range(kind, side, channels):
    x = pictures(side, channels)
    images = [shift.corrupted(x, kind, severity) for severity in range(1, 6)]
    far = [float((new - x).square().mean().sqrt()) for new in images]
    assert far[0] > 1e-3
    assert all(b > 1.02 * a for a, b in pairwise(far)), far
    assert all(new.shape == x.shape and new.dtype == x.dtype and new.min() >= 0 and new.max() <= 1 for new in images)


@pytest.mark.parametrize("kind", shift.CORRUPTIONS)
def test_the_same_seed_gives_the_same_pictures(kind):
    x = pictures()
    before = x.clone()
    one, again, other = (shift.corrupted(x, kind, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert torch.equal(one, other) != kind.endswith("noise")
    assert torch.equal(x, before)
    assert torch.equal(shift.corrupted(x[:, 0], kind, 2), shift.corrupted(x[:, :1], kind, 2)[:, 0])  # without a channel axis


def test_contrast_and_brightness_by_hand():
    x = torch.tensor([[[[0.2, 0.4], [0.6, 0.8]]]])
    torch.testing.assert_close(shift.corrupted(x, "contrast", 2), 0.5 + 0.55 * (x - 0.5))
    torch.testing.assert_close(shift.corrupted(x, "brightness", 5), torch.tensor([[[[0.55, 0.75], [0.95, 1.0]]]]))


@pytest.mark.parametrize("kind", ["gaussian-blur", "defocus-blur", "pixelate", "contrast"])
def test_a_plain_picture_stays_plain(kind):
    x = torch.full((2, 3, 16, 16), 0.37)
    torch.testing.assert_close(shift.corrupted(x, kind, 5), x)


def test_noise_has_the_strength_it_says():
    grey = torch.full((8, 3, 64, 64), 0.5)
    assert float(shift.corrupted(grey, "gaussian-noise", 2).std()) == pytest.approx(0.07, rel=0.02)
    assert float(shift.corrupted(grey, "speckle-noise", 2).std()) == pytest.approx(0.075, rel=0.02)
    assert float(shift.corrupted(grey, "shot-noise", 1).var()) == pytest.approx(0.5 / 250, rel=0.03)  # Poisson: mean / photons
    hit = shift.corrupted(grey, "impulse-noise", 4) != 0.5
    assert float(hit.float().mean()) == pytest.approx(0.11, rel=0.03)


def test_pixelate_gives_blocks_of_their_mean():
    x = pictures(16, 1, 2)
    half = shift._pixelate(x, 0.5, np.random.default_rng(0))
    torch.testing.assert_close(half, F.interpolate(F.avg_pool2d(x, 2), (16, 16), mode="nearest"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shift.corrupted(pictures(8), "contrasts", 3), "did you mean 'contrast'"),
        (lambda: shift.corrupted(pictures(8), "contrast", 0), "severity of a corruption is 1, 2, 3, 4 or 5"),
        (lambda: shift.corrupted(torch.rand(5, 7), "contrast", 1), "corruptions are for images"),
        (lambda: shift.corrupted(3 * pictures(8), "contrast", 1), r"values in \[0, 1\]"),
        (lambda: shift.corrupted(pictures(8, 2), "jpeg", 1), "1 or 3 channels"),
        (lambda: shift.parse("fog:3"), "unknown shift 'fog:3'"),
        (lambda: shift.parse("contrast:9"), "write for instance contrast:3"),
    ],
    ids=["kind", "severity", "table", "range", "channels", "spec", "spec severity"],
)
def test_what_cannot_be_corrupted_is_refused(call, words):
    with pytest.raises(FedtailorError, match=words):
        call()


# -- measuring on them --------------------------------------------------------------------------------------------------
def test_only_the_test_images_are_corrupted():
    fed = federation()
    new = ft.data.shift.corrupt(fed, "contrast", 3)
    assert torch.equal(new.train.x, fed.train.x)
    assert torch.equal(new.test.x, shift.corrupted(fed.test.x, "contrast", 3))
    assert new.notes[-1] == "The test images are corrupted: contrast, severity 3 of 5."


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_run_measures_its_models_on_corrupted_tests(engine):
    fed, specs = federation(), ["contrast:4", "gaussian-noise:5"]
    options = {"rounds": 2, "batch_size": 6, "evaluate_every": 0, "engine": engine, "workers": 1 if engine == "loop" else None}
    run = ft.run(ft.FedAvgFT(lr=0.2, epochs=1), fed, "cnn2", shift=specs, **options)
    plain = ft.run(ft.FedAvgFT(lr=0.2, epochs=1), fed, "cnn2", **options)
    assert plain.summary["acc_global_test"] == run.summary["acc_global_test"]
    assert list(run.summary["shifted"]) == specs
    for spec in specs:
        test = shift.corrupt(fed, *shift.parse(spec)).test
        own, union, common = [], [], []
        for i in range(3):
            x, y = test.client(i)
            own.append((run.predict(i, x).argmax(1) == y).double().mean())
            common.append((run.predict_global(x).argmax(1) == y).double().mean())
            union.append((run.predict(i, test.x).argmax(1) == test.y).double().mean())
        measured = run.summary["shifted"][spec]
        assert measured["acc_personal"] == pytest.approx(float(np.mean(own)))
        assert measured["acc_global"] == pytest.approx(float(np.mean(common)))
        assert measured["acc_global_test"] == pytest.approx(float(np.mean(union)))
        assert on_shifted(plain, spec) == measured  # a finished run can be asked later
    assert run.summary["acc_shifted_test"] == pytest.approx(
        np.mean([f["acc_global_test"] for f in run.summary["shifted"].values()])
    )


def test_features_of_frozen_layers_are_of_the_corrupted_images():
    fed, net = federation(), ft.models.build("resnet8:head", (3, 12, 12), 2)
    run = ft.run(ft.Ditto(lr=0.2, steps=2), fed, net, rounds=1, evaluate_every=0, engine="loop", workers=1, shift=["contrast:5"])
    assert run.engine.plan.task is not run.task  # the frozen layers were computed once
    test = shift.corrupt(fed, "contrast", 5).test
    want = np.mean([(run.predict(i, test.x).argmax(1) == test.y).double().mean() for i in range(3)])
    assert run.summary["acc_shifted_test"] == pytest.approx(want)


def test_rows_that_are_no_images_are_refused_before_training():
    clients = [(np.ones((4, 3)), np.array([0, 1, 0, 1]))]
    with pytest.raises(InvalidArgument, match="corruptions are for images"):
        ft.run(ft.FedAvg(), ft.Federation.from_arrays(clients, clients), rounds=1, shift=["contrast:3"])
    with pytest.raises(InvalidArgument, match="unknown shift 'snow'"):
        ft.run(ft.FedAvg(), federation(), "cnn2", rounds=1, shift=["snow"])


def test_cifar10_1_is_read_where_it_lies(tmp_path):
    fed = federation(side=8)
    run = ft.run(ft.FedAvg(lr=0.1, steps=1), replace(fed, recipe={"data_dir": str(tmp_path)}), "cnn2", rounds=1, evaluate_every=0)
    with pytest.raises(InvalidArgument, match=r"cifar10.1_v6_data.npy and cifar10.1_v6_labels.npy"):
        on_shifted(run, "cifar10.1")
    (tmp_path / "cifar10.1").mkdir()
    bytes_ = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), np.uint8)
    np.save(tmp_path / "cifar10.1" / "cifar10.1_v6_data.npy", bytes_)
    np.save(tmp_path / "cifar10.1" / "cifar10.1_v6_labels.npy", np.arange(7) % 2)
    measured = on_shifted(run, "cifar10.1")
    x = bytes_.transpose(0, 3, 1, 2).astype(np.float32) / 255
    right = run.predict_global(x).argmax(1).numpy() == np.arange(7) % 2
    assert measured["acc_global_test"] == pytest.approx(float(right.mean()))
    assert measured["union_rows"] == 7
    np.save(tmp_path / "cifar10.1" / "cifar10.1_v6_data.npy", np.zeros((7, 9, 9, 3), np.uint8))
    with pytest.raises(InvalidData, match=r"images of shape \(3, 9, 9\)"):
        on_shifted(run, "cifar10.1")


def test_the_distance_between_personal_and_shared_predictions():
    fed = federation(side=8, public=True)
    run = ft.run(ft.Ditto(lr=0.3, lam=0.1, epochs=2), fed, "cnn2", rounds=2, evaluate_every=0, dtype="float64")
    x = fed.public.double()
    common = run.predict_global(x).softmax(1)
    apart = [(run.predict(i, x).softmax(1) - common).abs().sum(1).clamp(max=1).mean() for i in range(3)]
    assert run.summary["personal_distance"] == pytest.approx(float(np.mean(apart)), rel=1e-9)
    assert run.summary["personal_distance"] > 0
    assert "personal_distance" not in ft.run(ft.FedAvg(), fed, "cnn2", rounds=1, evaluate_every=0).summary
    assert "personal_distance" not in ft.run(ft.Local(), fed, "cnn2", rounds=1, evaluate_every=0).summary


# -- public rows --------------------------------------------------------------------------------------------------------
def test_public_images_are_resized_where_asked_and_refused_where_not():
    x, y = pictures(8, 3, 6), np.array([0, 1] * 3)
    pair = [(x, y)]
    with pytest.raises(InvalidData, match=r"have shape \(3, 16, 16\) but the clients' have \(3, 8, 8\).*resize=True"):
        ft.Federation.from_arrays(pair, pair, public=pictures(16))
    fed = ft.Federation.from_arrays(pair, pair, public=pictures(16), resize=True)
    assert fed.public.shape == (24, 3, 8, 8)
    assert fed.notes == ("The public rows are resized from 16x16 to 8x8.",)
    plain = torch.full((2, 3, 16, 16), 0.4)
    torch.testing.assert_close(fitted(plain, x)[0], torch.full((2, 3, 8, 8), 0.4))
    with pytest.raises(InvalidData, match="only images can be resized"):
        ft.Federation.from_arrays(pair, pair, public=np.ones((4, 9)), resize=True)


def test_grey_and_colour_become_each_other():
    grey, colour = torch.rand(2, 8, 8), torch.rand(2, 3, 8, 8)
    resized, note = fitted(grey, colour)
    assert all(torch.equal(resized[:, c], grey) for c in range(3))
    assert note == ", in three equal colours"
    back, note = fitted(colour, grey)
    torch.testing.assert_close(back, colour.mean(1))
    assert note == ", made grey"
    with pytest.raises(InvalidData, match="2 channels"):
        fitted(torch.rand(2, 2, 8, 8), colour)


def test_public_rows_by_name_and_number():
    fed = ft.Federation.load("digits", clients=3, images=True)
    made = with_public(fed, "mnist5k:40", {**POOLS, "mnist5k": mnist}, seed=3)
    assert made.public.shape == (40, 8, 8)
    assert 0 <= float(made.public.min()) < float(made.public.max()) <= 1
    assert made.notes[-1].startswith("40 public rows without labels are from mnist5k, ")
    assert made.recipe["public"] == "mnist5k:40"
    assert torch.equal(made.public, with_public(fed, "mnist5k:40", {**POOLS, "mnist5k": mnist}, seed=3).public)
    for spec, words in (
        ("digits:10", "the clients' rows are from digits themselves"),
        ("mnist5k:0", "has 60 rows, not 0"),
        ("mnist5k:61", "has 60 rows, not 61"),
        ("nmist5k", "did you mean 'mnist5k'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            with_public(fed, spec, {**POOLS, "mnist5k": mnist})


def mnist():
    """In place of the set, which may not be there."""
    from fedtailor.data.pool import PooledData

    return PooledData("mnist5k", np.random.default_rng(0).integers(0, 256, (60, 1, 28, 28), np.uint8), np.zeros(60, np.int64))


def test_the_command_line_takes_public_rows_and_shifts(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).uniform(size=(20, 8, 8)).astype(np.float32))
    out = tmp_path / "run"
    command = ["run", "perada", "digits", "--clients", "3", "--with", "images=true", "--public", f"{tmp_path / 'rows.npy'}:12"]
    command += [
        "--rounds",
        "1",
        "--kd-steps",
        "2",
        "--model",
        "mlp:8",
        "--shift",
        "contrast:3,pixelate",
        "--out",
        str(out),
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["shifted"]) == ["contrast:3", "pixelate"]
    assert 0 < summary["ensemble_distance"] < 2  # in L1 between two laws over the classes, which differ after one round
    assert any("12 public rows" in note for note in summary["notes"])
    config = (out / "config.toml").read_text()
    assert 'shift = [\n    "contrast:3",\n    "pixelate",\n]' in config
    assert "rows.npy:12" in config
    assert CliRunner().invoke(app, ["resume", str(out), "--json"]).exit_code == 0
    bad = CliRunner().invoke(app, ["run", "fedavg", "digits", "--shift", "fog", "--rounds", "1", "--out", str(tmp_path / "no")])
    assert bad.exit_code == 2
    assert "unknown shift 'fog'" in bad.output
