"""Privacy of whole clients: uploads clipped, noise on their sum, each client drawn by itself, and what it costs."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting import pld

import fedtailor as ft
from fedtailor import tree
from fedtailor.data.secret import Secret
from fedtailor.engine.setup import drawn
from fedtailor.errors import InvalidArgument
from fedtailor.server.crowd import Crowd
from fedtailor.server.reduce import mean
from tests.make import federation

OPEN = {"rounds": 3, "evaluate_every": 0, "workers": 1, "dtype": "float64"}


def crowd(clip: float = 1.0, noise: float = 1.0, share: float = 0.5, clients: int = 8, seed: int = 0) -> Crowd:
    return Crowd(clip, noise, share, clients, Secret.from_seed(seed))


def reduced(way: Any, uploads: Any, chunks: int = 1) -> Any:
    state, count = way.start(), len(uploads["a"])
    for ids in torch.arange(count).chunk(chunks):
        state = way.add(state, {k: v[ids] for k, v in uploads.items()}, torch.full((len(ids),), 1 / count), ids)
    return way.finish(state)


def test_uploads_are_clipped_as_a_whole_and_divided_by_what_is_expected() -> None:
    uploads = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0], [0.0, 0.0]]), "b": torch.tensor([4.0, 0.4, 0.0])}  # norms 5, 0.5, 0
    result = reduced(crowd(noise=1e-12).mean(0, 0, False, False), uploads)  # four of eight are expected, three came
    assert torch.allclose(result["a"], torch.tensor([(0.6 + 0.3) / 4, 0.0]), atol=1e-9)
    assert torch.allclose(result["b"], torch.tensor((0.8 + 0.4) / 4), atol=1e-9)


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_noise_has_its_deviation_and_does_not_depend_on_chunks(chunks: int) -> None:
    n = 20_000
    uploads = {"a": torch.zeros(5, n, dtype=torch.float64)}
    way = crowd(clip=0.5, noise=3.0)
    first = reduced(way.mean(0, 0, False, False), uploads, chunks)["a"]
    assert torch.equal(first, reduced(way.mean(0, 0, False, False), uploads)["a"])
    assert abs(float(first.var()) / (3.0 * 0.5 / 4) ** 2 - 1) < 5 * math.sqrt(2 / n)
    for place in ((1, 0), (0, 1)):
        other = reduced(way.mean(*place, False, False), uploads)["a"]
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 5 / math.sqrt(n)


def test_where_nobody_was_drawn_only_noise_is_left() -> None:
    way, uploads = crowd(noise=1e-12).mean(0, 0, False, True), {"a": torch.ones(1, 3)}
    assert torch.allclose(reduced(way, uploads)["a"], torch.zeros(3), atol=1e-9)


def test_every_client_is_drawn_by_itself_with_the_share_that_is_charged() -> None:
    keys = np.arange(1000, dtype=np.uint64) * np.uint64(2654435761)
    seen = np.stack([crowd(share=0.1).drawn(keys, number) for number in range(200)])
    assert abs(seen.mean() - 0.1) < 5 * math.sqrt(0.09 / seen.size)
    sizes = seen.sum(1)
    assert 0.7 < sizes.var() / 90 < 1.4  # binomial, not a fixed number
    assert not np.array_equal(seen[0], crowd(share=0.1, seed=1).drawn(keys, 0))
    assert np.array_equal(seen[0][:500], crowd(share=0.1).drawn(keys[:500], 0))  # whatever the others do


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_with_a_wide_clip_and_hardly_any_noise_it_is_the_plain_method(engine: str) -> None:
    fed = federation([9, 12, 7, 10])
    for method in (ft.FedAvg(steps=2), ft.Ditto(steps=2), ft.Scaffold(steps=2)):
        plain = ft.run(method, fed, engine=engine, **OPEN)
        open_ = ft.run(method, fed, engine=engine, user_clip=1e3, user_noise=1e-12, **OPEN)
        for name, leaf in plain.shared["model"].items():
            assert torch.allclose(leaf, open_.shared["model"][name], atol=1e-7)


MEAN_REDUCED = (
    *("AL2SGD", "APFL", "Ditto", "FedAdam", "FedAvg", "FedAvgFT", "FedAvgM", "FedCLUP"),
    *("FedDyn", "FedProx", "FedProxPersonal", "FedROD", "FedYogi", "GIANT", "HypCluster", "KNNPer"),
    *("L2GD", "Local", "MTL", "PFedMe", "PartialFed", "PerFedAvg", "Scaffold"),
)
IN_PARTS = ["FedAlt", "FedAvgP", "FedBABU", "FedPer", "FedRep", "FedSim", "LGFedAvg", "ScaffoldP"]


@pytest.mark.parametrize("name", [*MEAN_REDUCED, *IN_PARTS])
def test_every_method_whose_server_needs_the_mean_hides_clients_alike_on_both_engines(name: str) -> None:
    part = {"personal": "bias"} if name in IN_PARTS else {"spread": 0.1} if name == "HypCluster" else {}
    method = replace(getattr(ft, name).example(), **part)
    options = {**OPEN, "cohort": 1.0 if method.needs_everyone else 0.5, "user_clip": 0.1, "user_noise": 1.0, "user_seed": 3}
    loop, stacked = (ft.run(method, federation([9, 12, 7, 10]), engine=e, **options) for e in ("loop", "vectorized"))
    for ours, theirs in zip(tree.leaves(loop.shared), tree.leaves(stacked.shared), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)
    assert loop.summary["user_epsilon"] == stacked.summary["user_epsilon"] > 0


def test_engines_agree_and_a_run_can_be_repeated_with_a_seed_only() -> None:
    fed = federation([9, 12, 7, 10])
    options = {**OPEN, "rounds": 6, "cohort": 0.5, "user_clip": 0.1, "user_noise": 1.0}
    seeded = [ft.run(ft.FedAvg(steps=2), fed, engine=engine, user_seed=4, **options) for engine in ("loop", "vectorized")]
    assert torch.allclose(*(run.shared["model"]["weight"] for run in seeded), atol=1e-10)
    assert seeded[0].summary["user_noise_secret"] is False
    secret = [ft.run(ft.FedAvg(steps=2), fed, engine="loop", **options) for _ in range(2)]
    assert not torch.allclose(*(run.shared["model"]["weight"] for run in secret), atol=1e-3)
    assert secret[0].summary["user_noise_secret"] is True


def test_a_round_without_anybody_is_played() -> None:
    fed = federation([9, 12, 7])
    options = {**OPEN, "rounds": 12, "cohort": "1 client", "user_clip": 0.1, "user_noise": 1.0, "user_seed": 0}
    run = ft.run(ft.FedAvg(steps=1), fed, engine="loop", **options)
    plan = run.engine.plan
    empty = [number for number in range(12) if not plan.crowd.drawn(plan.federation.keys, number).any()]
    assert empty  # (2/3)^3 of the rounds
    assert all(len(drawn(plan, 1, number)) == 1 for number in empty)
    assert {record["cohort"] for record in run.history} == {1}  # how many there were is not told


@pytest.mark.parametrize(("rounds", "cohort", "noise"), [(20, 0.5, 1.5), (7, 1.0, 3.0), (40, 0.25, 2.0)])
def test_epsilon_is_the_librarys_by_hand(rounds: int, cohort: float, noise: float) -> None:
    fed = federation([5] * 8)
    options = {**OPEN, "rounds": rounds, "cohort": cohort, "user_clip": 1.0, "user_noise": noise, "user_delta": 1e-3}
    summary = ft.run(ft.FedAvg(steps=1), fed, engine="vectorized", **options).summary
    loss = pld.privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=cohort, value_discretization_interval=1e-3)
    assert summary["user_epsilon"] == pytest.approx(loss.self_compose(rounds).get_epsilon_for_delta(1e-3), abs=0.02)
    if cohort == 1.0:  # exactly: one Gaussian mechanism with noise/sqrt(rounds)
        exact = dp.get_epsilon_gaussian(noise / math.sqrt(rounds), 1e-3)
        assert exact <= summary["user_epsilon"] <= exact + 0.01


def test_a_roll_call_and_a_second_exchange_are_charged() -> None:
    fed = federation([5] * 8)
    options = {**OPEN, "rounds": 4, "cohort": 0.5, "user_clip": 1.0, "user_noise": 2.0, "user_delta": 1e-3}
    plain = ft.run(ft.FedAvg(steps=1), fed, engine="vectorized", **options).summary["user_epsilon"]
    called = ft.run(ft.ScaffoldP(steps=1, personal="bias"), fed, engine="vectorized", **options).summary["user_epsilon"]
    assert called > plain + 0.3


def test_a_target_is_kept() -> None:
    fed = federation([5] * 8)
    options = {**OPEN, "rounds": 10, "cohort": 0.5, "user_clip": 1.0, "user_target_epsilon": 2.0, "user_delta": 1e-3}
    summary = ft.run(ft.FedAvg(steps=1), fed, engine="vectorized", **options).summary
    assert 1.9 < summary["user_epsilon"] <= 2.0


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (ft.FedFomo(), {"user_noise": 1.0}, "FedFomo cannot hide whole clients"),
        (ft.FedAvg(), {}, "user_noise or user_target_epsilon"),
        (ft.FedAvg(), {"user_noise": 1.0, "weights": "size"}, "weights='uniform'"),
        (ft.FedAvg(), {"user_noise": 1.0, "user_delta": 0.25}, "one of the 4 clients"),
        (ft.FedAvg(), {"user_noise": 1.0, "user_clip": None}, "give user_clip"),
    ],
    ids=str,
)
def test_what_is_refused(method: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ft.run(method, federation([6] * 4), **{**OPEN, "user_clip": 1.0, **options})


def test_the_plain_mean_is_what_is_replaced() -> None:
    assert ft.FedAvg().reducer(None, {}, None) is mean


class Stop(Exception):
    pass


def test_a_run_that_hides_clients_goes_on_with_the_same_draws_and_noise(tmp_path: Path) -> None:
    options = {**OPEN, "rounds": 6, "cohort": 0.5, "user_clip": 0.1, "user_noise": 1.0, "checkpoint_every": 2, "engine": "loop"}
    fed, method = federation([9, 12, 7, 10]), ft.Ditto(steps=1)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        ft.run(method, fed, out=tmp_path / "run", callback=stop, **options)
    secret = (tmp_path / "run/checkpoints/noise.key").read_text()
    shutil.copytree(tmp_path / "run", tmp_path / "twin")
    one, twin = (ft.run(method, fed, out=tmp_path / name, resume=True, **options) for name in ("run", "twin"))
    assert torch.equal(one.shared["model"]["weight"], twin.shared["model"]["weight"])
    assert (tmp_path / "run/history.jsonl").read_bytes() == (tmp_path / "twin/history.jsonl").read_bytes()
    assert (tmp_path / "run/checkpoints/noise.key").read_text() == secret
    published = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "noise.key"]
    assert not any(secret.strip().encode() in path.read_bytes() for path in published)
