"""PerAda: its limits, what it sends and trains, the streaming of teachers, its gate, its measures and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from fedtailor.server import distill
from fedtailor.server.reduce import mean
from tests.make import pairs, seeded, the_round

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "engine": "loop", "workers": 1}


def federation(public: int = 12, classes: int = 3):
    clients = pairs((9, 12, 7), d=4, classes=classes, seed=3)
    rows = np.random.default_rng(5).normal(size=(public, 4)) if public else None
    return ft.Federation.from_arrays(clients, clients, public=rows)


def adapted() -> nn.Module:
    """A frozen layer with a norm, an adapter in the group of that name, and a head."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[:2].requires_grad_(False)
    net.groups = {"adapter": ("3", "4")}
    return net


def images(count: int = 3, size: int = 8):
    draw = np.random.default_rng(0)
    clients = [(draw.uniform(size=(10, 3, size, size)).astype(np.float32), np.arange(10) % 4) for _ in range(count)]
    return ft.Federation.from_arrays(clients, clients, public=draw.uniform(size=(16, 3, size, size)).astype(np.float32))


# -- limits and costs ---------------------------------------------------------------------------------------------------
def test_without_pull_and_distillation_adapters_are_local_and_the_shared_one_is_fedavg_on_adapters():
    fed, net = federation(), seeded(adapted)
    run = ft.run(ft.PerAda(lam=0.0, kd_steps=0, steps=4), fed, net, rounds=3, batch_size=4, **OPTIONS)
    local = ft.run(ft.Local(steps=4), fed, net, rounds=3, batch_size=4, **OPTIONS)
    shared = ft.run(ft.FedAvg(steps=4), fed, net, rounds=3, batch_size=4, **OPTIONS)
    assert set(run.shared["model"]) == {"3.weight", "3.bias", "4.weight", "4.bias"}
    for name, leaf in run.shared["model"].items():
        assert torch.equal(leaf, shared.shared["model"][name])
        assert all(torch.equal(run.personal[i]["model"][name], local.personal[i]["model"][name]) for i in range(3))


def test_naming_the_adapter_is_the_same_as_freezing_the_rest():
    """Without a norm, whose batches would differ, ``parts`` on a free network is the frozen network."""
    fed = federation()

    def layers() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        net.groups = {"adapter": ("2",)}
        return net

    free, frozen = seeded(layers), seeded(layers)
    frozen[0].requires_grad_(False)
    for engine in ("loop", "vectorized"):
        options = {**OPTIONS, "engine": engine, "rounds": 3, "batch_size": 4, "cohort": 2}
        # taught by logits, the mean of last layers is taught nothing: what Adam would then magnify is rounding
        work = {"kd_steps": 4, "kd_batch": 5, "steps": 3, "teach": "probabilities"}
        one = ft.run(ft.PerAda(parts="adapter", **work), fed, free, **options)
        other = ft.run(ft.PerAda(**work), fed, frozen, **options)
        assert set(one.shared["model"]) == {"2.weight", "2.bias"} == set(one.personal[0]["model"])
        for name, leaf in one.shared["model"].items():
            torch.testing.assert_close(leaf, other.shared["model"][name], rtol=0, atol=1e-12)
        for key in ("bytes_down", "bytes_up", "trained_parameters", "personal_parameters"):
            assert one.summary[key] == other.summary[key]


def test_perada_trains_two_adapters_and_sends_one():
    fed = images()
    net = ft.models.build("resnet8:adapters", (3, 8, 8), 4)
    moving = sum(p.numel() for p in net.parameters() if p.requires_grad)
    method = ft.PerAda(steps=1, kd_steps=1, kd_batch=4)
    result = ft.run(method, fed, net, rounds=1, batch_size=5, evaluate_every=0, engine="loop", workers=1)
    assert result.summary["trained_parameters"] == 2 * moving
    sent = tree.size(tree.trainable(result.shared["model"]))
    assert sent == moving < sum(p.numel() for p in net.parameters()) / 2
    ditto = ft.run(ft.Ditto(steps=1), fed, "resnet8", rounds=1, batch_size=5, evaluate_every=0, engine="loop", workers=1)
    assert result.summary["bytes_up"] < ditto.summary["bytes_up"]


# -- the teachers -------------------------------------------------------------------------------------------------------
def test_teachers_are_kept_as_one_sum_whatever_their_number():
    fed = federation().to(torch.float64)
    task = build_task("linear", fed, 0, torch.float64, bias=True)
    reduce = distill.Teachers(task, task.public, lambda upload: upload["model"])
    draw = torch.Generator().manual_seed(0)
    sizes, state, seen = [], reduce.start(), []
    for chunk in (1, 3, 2):
        models = tree.map(lambda leaf, n=chunk: torch.randn(n, *leaf.shape, dtype=leaf.dtype, generator=draw), task.init())
        state = reduce.add(state, {"model": models}, torch.ones(chunk), torch.arange(chunk))
        seen += [tree.map(lambda leaf, i=i: leaf[i], models) for i in range(chunk)]
        sizes.append(sum(tree.size(part) for part in (state[0][0], state[1])))
    assert len(set(sizes)) == 1  # one model, and the outputs on the rows
    result = reduce.finish(state)
    logits = torch.stack([task.apply(model, task.public) for model in seen])
    torch.testing.assert_close(result["teachers"]["target"], torch.softmax(logits.mean(0), -1))
    torch.testing.assert_close(result["teachers"]["probabilities"], torch.softmax(logits, -1).mean(0))
    torch.testing.assert_close(result["model"]["weight"], torch.stack([m["weight"] for m in seen]).mean(0))


def test_the_rows_of_a_round_are_drawn_without_replacement_and_those_of_the_gate_are_apart():
    fed = federation(public=20)
    task = build_task("linear", fed, 0, torch.float64, bias=True)
    method = ft.PerAda(kd_steps=4, kd_batch=6, gate=0.25)
    gates = set()
    for number in range(3):
        rows, index, judged = method.lessons(task, the_round(number=number, seed=9))
        assert index.shape == (4, 6)
        real = [set(rows[i[i >= 0]].tolist()) for i in torch.from_numpy(index)]
        assert [len(r) for r in real] == [6, 6, 3, 6]  # 15 rows an epoch, the last batch shorter
        assert set.union(*real[:3]) == set(rows[: judged.start].tolist())
        assert not real[0] & real[1]
        gates.add(tuple(rows[judged].tolist()))
        assert not set(rows[judged].tolist()) & set.union(*real)
    assert len(gates) == 1  # always the same five
    assert len(next(iter(gates))) == 5


def test_only_the_first_rounds_distil():
    fed = federation()
    method = ft.PerAda(kd_steps=5, kd_lr=0.05, kd_rounds=1, steps=3)
    assert isinstance(
        method.reducer(build_task("linear", fed, 0, torch.float64, True), {}, the_round(number=0)), distill.Teachers
    )
    assert method.reducer(build_task("linear", fed, 0, torch.float64, True), {}, the_round(number=1)) is mean
    run = ft.run(method, fed, rounds=3, **OPTIONS)
    assert ["ensemble_distance" in record for record in run.history] == [True, False, False]


def two_teachers(method, seed=0):
    """(task, what the method's server makes of two very different teachers, the mean of them)."""
    fed = federation(public=30).to(torch.float64)
    task = build_task(seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))), fed, 0, torch.float64, True)
    shared, server = method.init_server(task)
    draw = torch.Generator().manual_seed(seed)
    deltas = tree.map(lambda leaf: 2 * torch.randn(2, *leaf.shape, dtype=leaf.dtype, generator=draw), shared["model"])
    rnd = the_round(seed=seed)
    reduce = method.reducer(task, shared, rnd)
    upload = reduce.finish(reduce.add(reduce.start(), {"delta": deltas}, torch.ones(2), torch.arange(2)))
    after, server = method.server_update(task, shared, server, upload, rnd)
    return task, upload, after["model"], tree.add(shared["model"], upload["delta"]), method.measures(server, rnd)


def test_distillation_brings_the_shared_model_nearer_to_the_ensemble():
    _, upload, after, start, measures = two_teachers(ft.PerAda(kd_steps=60, kd_lr=0.02, kd_batch=30, teach="probabilities"))
    assert measures["ensemble_distance"] < 0.5 * measures["ensemble_distance_mean"]
    task = two_teachers(ft.PerAda(kd_steps=1))[0]
    for model, key in ((start, "ensemble_distance_mean"), (after, "ensemble_distance")):
        probabilities = torch.softmax(task.apply(model, task.public), -1)  # a batch of all rows: the places are those of the rows
        want = (probabilities - upload["teachers"]["probabilities"]).abs().sum(1).mean()
        assert measures[key] == pytest.approx(float(want), rel=1e-9)


@pytest.mark.parametrize(("kd_lr", "accepted"), [(0.02, True), (1e3, False)])
def test_the_gate_keeps_the_mean_where_distillation_does_harm(kd_lr, accepted):
    _, _, after, start, measures = two_teachers(ft.PerAda(kd_steps=40, kd_lr=kd_lr, kd_batch=10, gate=0.3))
    assert all(torch.equal(after[name], start[name]) != accepted for name in start)
    assert (measures["ensemble_distance"] == measures["ensemble_distance_mean"]) != accepted


def test_statistics_are_averaged_and_not_distilled():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with_kd, without = (
        ft.run(ft.PerAda(kd_steps=k, kd_lr=0.05, steps=3), federation(), net, rounds=1, batch_size=4, **OPTIONS).shared["model"]
        for k in (5, 0)
    )
    for name, leaf in with_kd.items():
        assert torch.equal(leaf, without[name]) == name.startswith(tree.BUFFER)


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_other_tasks_are_distilled_too(kind):
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, (8, 2)).astype(np.float32) if kind == "multilabel" else draw.normal(size=(8, 2))
    clients = [(draw.normal(size=(8, 3)), y)] * 2
    fed = ft.Federation.from_arrays(clients, clients, public=draw.normal(size=(10, 3)), task=kind)
    run = ft.run(ft.PerAda(kd_steps=5, kd_lr=0.01, steps=2), fed, "mlp:6", rounds=2, **OPTIONS)
    assert 0 <= run.history[-1]["ensemble_distance"] < 10
    logits, target = torch.randn(7, 2, generator=torch.Generator().manual_seed(1)).requires_grad_(), torch.rand(7, 2)
    fed.kind.gap(logits, target).sum().backward()
    want = torch.sigmoid(logits) - target if kind == "multilabel" else logits - target
    torch.testing.assert_close(logits.grad, want.detach())


# -- refusals -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teach": "labels"}, "teach must be one of logits, probabilities"),
        ({"kd_schedule": "linear"}, "kd_schedule must be one of constant, cosine"),
        ({"gate": 1.0}, "gate must be less than 1"),
        ({"lam": -1.0}, "lam must be at least 0"),
        ({"personal_steps": 2, "personal_epochs": 1}, "give personal_steps or personal_epochs"),
    ],
    ids=["teach", "schedule", "gate", "lam", "work"],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(InvalidArgument, match=words):
        ft.PerAda(**settings)


def test_without_public_rows_there_is_one_clear_line():
    with pytest.raises(InvalidArgument, match=r"PerAda needs public rows to distil on; give .* or set kd_steps=0"):
        ft.run(ft.PerAda(), federation(public=0), rounds=1)
    ft.run(ft.PerAda(kd_steps=0), federation(public=0), rounds=1)
    ft.run(ft.PerAda(kd_rounds=0), federation(public=0), rounds=1)


def test_a_part_that_is_not_there_or_frozen_is_refused():
    with pytest.raises(InvalidArgument, match="no group or module 'adapter'"):
        ft.run(ft.PerAda(parts="adapter", kd_steps=0), federation(), "mlp:4", rounds=1)
    net = adapted()
    net.groups = {"adapter": ("3", "4"), "early": ("0",)}
    with pytest.raises(InvalidArgument, match="leaves nothing to train"):
        ft.run(ft.PerAda(parts="early", kd_steps=0), federation(), net, rounds=1)
    assert replace(ft.PerAda(), parts=["3"]).mine(build_task(net, federation(), 0, torch.float64, True)) == {"3.weight", "3.bias"}
