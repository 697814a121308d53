"""The noise is nobody's to know: it does not cancel between releases, and nothing that is published gives it away."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data import rng
from fedtailor.data.batches import step_keys
from fedtailor.data.secret import Secret
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs.noise_key import NAME
from tests.make import pairs

WIDE, ROWS, LR = 400, 20, 0.5
CLIP, NOISE = 1.0, 2.0
DEVIATION = LR * CLIP * NOISE / ROWS  # of one number of a released model, after one step on all rows
OPEN = {"rounds": 1, "evaluate_every": 0, "engine": "loop", "workers": 1, "dtype": "float64", "bias": False, "seed": 0}


def one_client(clients: int = 1) -> ft.Federation:
    return ft.Federation.from_arrays(pairs([ROWS] * clients, WIDE), pairs([4] * clients, WIDE, seed=1))


def released(method: Any, **options: Any) -> np.ndarray:
    """What the server gets of the client's rows: the model after one noisy step from zero."""
    return ft.run(method, one_client(), **{**OPEN, **options}).shared["model"]["weight"].numpy().ravel()


def private(kind: Any = ft.FedAvg, **settings: Any) -> Any:
    opt = ft.Private(clip=CLIP, noise=NOISE, **{name: settings.pop(name) for name in ("seed",) if name in settings})
    return kind(lr=LR, steps=1, opt=opt, **settings)


def looks_like_noise(difference: np.ndarray, releases: int) -> bool:
    """True if the deviation is that of so many independent noises, within five standard errors."""
    expected = DEVIATION * math.sqrt(releases)
    return abs(difference.std() / expected - 1) < 5 / math.sqrt(2 * difference.size)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (private(), private()),  # the same seed, twice
        (private(), private(ft.FedProx, mu=1e-9)),  # two methods of a comparison
        (private(), private(server_lr=1.0 + 1e-9)),  # two trials of tuning
        (private(seed=3), private(ft.FedProx, mu=1e-9, seed=3)),  # even with noise that can be repeated
    ],
    ids=["again", "methods", "trials", "seeded"],
)
def test_the_noise_of_two_releases_does_not_cancel(one: Any, other: Any) -> None:
    assert looks_like_noise(released(one) - released(other), 2)


def test_methods_of_one_comparison_have_noise_of_their_own() -> None:
    methods = [private(), private(ft.FedProx, mu=1e-9)]
    runs = ft.compare(methods, one_client(), **OPEN)
    one, other = (run.shared["model"]["weight"].numpy().ravel() for run in runs.values())
    assert looks_like_noise(one - other, 2)


def test_a_seed_of_the_noise_repeats_it_and_says_so() -> None:
    one, other = (ft.run(private(seed=3), one_client(), **OPEN) for _ in range(2))
    assert torch.equal(one.shared["model"]["weight"], other.shared["model"]["weight"])
    assert one.summary["noise_secret"] is False
    assert ft.run(private(), one_client(), **OPEN).summary["noise_secret"] is True


def gradient() -> np.ndarray:
    """The clipped gradient at zero, by hand: what an attacker is after."""
    x, y = one_client().train.client(0)
    x, y = x.double().numpy(), y.numpy()
    each = np.stack([np.outer(np.array([0.5, 0.5]) - np.eye(2)[label], row).ravel() for row, label in zip(x, y, strict=True)])
    norms = np.linalg.norm(each, axis=1, keepdims=True)
    return (each * np.minimum(1, CLIP / norms)).sum(0) / ROWS


def test_the_gradient_is_what_the_attack_would_find() -> None:
    plain = ft.FedAvg(lr=LR, steps=1, opt=ft.Private(clip=CLIP, noise=0.0, force=True))
    assert np.allclose(-released(plain) / LR, gradient(), atol=1e-12)


def test_published_files_do_not_give_the_noise_away(tmp_path: Path) -> None:
    run = ft.run(private(), one_client(), "linear", out=tmp_path / "run", **OPEN)
    published = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "noise.key"}
    secret = (tmp_path / "run" / NAME).read_text().strip()
    assert len(secret) == 64
    for path, content in published.items():
        assert secret.encode() not in content, path
        assert bytes.fromhex(secret) not in content, path
    assert stat.S_IMODE((tmp_path / "run" / NAME).stat().st_mode) == 0o600

    # everything that is published, and the noise rebuilt from it in each way that was ever used or is used for --dp-seed
    summary, config = (json.loads((tmp_path / "run/summary.json").read_text()), (tmp_path / "run/config.toml").read_text())
    seed = summary["seed"]
    assert f"seed = {seed}" in config
    fed = one_client()
    words = rng.mix(seed, rng.purpose("train"), np.int64(0), fed.keys[:1])
    key = int(step_keys(words, 1)[0, 0])
    old = np.random.Generator(np.random.Philox(key=np.array([np.uint64(key % 2**64), 0], np.uint64)))
    guesses = [old, Secret.from_seed(seed).generator(key, 0)]
    guesses += [Secret.from_seed(seed).bound("fedavg", summary["settings"]).generator(key, 0)]
    seen = -run.shared["model"]["weight"].numpy().ravel() / LR
    for guess in guesses:
        recovered = seen - CLIP * NOISE / ROWS * guess.standard_normal(2 * WIDE)
        assert looks_like_noise(LR * (recovered - gradient()), 2)  # worse off than before
    known = Secret.from_hex(secret).bound("fedavg", summary["settings"])  # with the secret it is easy
    key = int(step_keys(rng.mix(known.word("train", 0), fed.keys[:1]), 1)[0, 0])
    noise = known.generator(key, 0).standard_normal(2 * WIDE)
    assert np.allclose(seen - CLIP * NOISE / ROWS * noise, gradient(), atol=1e-9)


def test_which_rows_are_sampled_is_secret_too() -> None:
    """Amplification by sampling counts on it."""
    feeds = [ft.run(private(), one_client(), **{**OPEN, "batch_size": 4}).engine.plan.feed for _ in range(2)]
    drawn = [[feed.rows(0, number, "train")[0].tolist() for number in range(20)] for feed in feeds]
    assert drawn[0] != drawn[1]


def halfway(folder: Path, **more: Any) -> None:
    class Stop(Exception):
        pass

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        ft.run(private(), one_client(3), out=folder, callback=stop, **{**OPEN, "rounds": 6, "checkpoint_every": 2, **more})


def test_a_private_run_that_was_stopped_goes_on_with_the_same_noise(tmp_path: Path) -> None:
    halfway(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "twin")
    more = {**OPEN, "rounds": 6, "checkpoint_every": 2, "resume": True}
    one, twin = (ft.run(private(), one_client(3), out=tmp_path / name, **more) for name in ("run", "twin"))
    assert torch.equal(one.shared["model"]["weight"], twin.shared["model"]["weight"])
    assert (tmp_path / "run/history.jsonl").read_bytes() == (tmp_path / "twin/history.jsonl").read_bytes()


def test_without_its_key_a_private_run_does_not_go_on(tmp_path: Path) -> None:
    halfway(tmp_path / "run")
    (tmp_path / "run" / NAME).unlink()
    with pytest.raises(BadRun, match=r"noise\.key is missing"):
        ft.run(private(), one_client(3), out=tmp_path / "run", resume=True, **{**OPEN, "rounds": 6, "checkpoint_every": 2})
    (tmp_path / "run" / NAME).write_text("00")
    with pytest.raises(BadRun, match=r"noise\.key cannot be read"):
        ft.run(private(), one_client(3), out=tmp_path / "run", resume=True, **{**OPEN, "rounds": 6, "checkpoint_every": 2})


def test_a_secret_is_neither_shown_nor_copied() -> None:
    secret = Secret.fresh()
    assert secret.hex() not in repr(secret)
    with pytest.raises(TypeError, match="not copied"):
        pickle.dumps(secret)
    assert Secret.from_hex(secret.hex()).hex() == secret.hex() != Secret.fresh().hex()


def test_what_protects_nobody_is_refused_unless_forced() -> None:
    with pytest.raises(InvalidArgument, match="protects nobody"):
        ft.Private(noise=0.0)
    with pytest.raises(InvalidArgument, match=r"delta=0\.05 allows one of the 20 rows of client 0"):
        ft.run(ft.FedAvg(opt=ft.Private(delta=1 / ROWS)), one_client(), **OPEN)
    ft.run(ft.FedAvg(opt=ft.Private(delta=1 / ROWS, force=True)), one_client(), **OPEN)
    ft.run(ft.FedAvg(opt=ft.Private(delta=0.9 / ROWS)), one_client(), **OPEN)
