"""Frozen means frozen: what has requires_grad=False never moves, is never sent and never kept per client."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtailor as ft
from fedtailor import Task, errors, models, tree
from fedtailor.algorithms import METHODS
from fedtailor.data.feed import Feed
from fedtailor.engine import prefix
from fedtailor.runs import models as saved
from tests.make import federation, normal, seeded
from tests.pictures import pictures

ENGINES = ("loop", "vectorized")
HELD = {"0.weight", "0.bias", "1.weight", "1.bias", "buffer:1.running_mean", "buffer:1.running_var"}
MOVING = ("3.weight", "3.bias", "4.weight", "4.bias", "6.weight", "6.bias", "buffer:4.running_mean", "buffer:4.running_var")


def module() -> nn.Module:
    """A frozen layer and norm, then a layer, a norm and a head that train."""
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)
        )
    )
    net[1].running_mean += 0.3
    net[1].running_var *= 2.0
    net[:2].requires_grad_(False)
    return net


def data(public: bool = False):
    fed = federation([8, 11, 5], d=4, val=True)
    return ft.Federation.from_arrays(
        [fed.train.client(i) for i in range(3)],
        [fed.test.client(i) for i in range(3)],
        [fed.val.client(i) for i in range(3)],
        public=normal(9, 4) if public else None,
        task="classification",
    ).with_facts(lam=[0.1, 0.2, 0.3])


def leaf_names(branch) -> set[str]:
    return {path.rsplit("/", 1)[-1] for path, _ in tree.items(branch)}


# -- the model is what moves ---------------------------------------------------------------------------------------------


def test_the_model_is_what_moves_and_the_rest_is_held_once():
    task = Task.from_module(module())
    assert task.names == MOVING
    assert set(task.frozen) == HELD
    assert task.groups["norm"] == ("4.weight", "4.bias", "buffer:4.running_mean", "buffer:4.running_var")
    assert task.groups["body"] == tuple(n for n in MOVING if not n.startswith("6."))
    assert next(b.parameters for b in task.blocks) == ()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_no_method_sends_or_keeps_what_is_frozen(method):
    algorithm = method(mu=0.1, smoothness=2.0) if method is ft.AL2SGD else method()
    run = ft.run(algorithm, data(public=True), module(), rounds=2, batch_size=4, dtype="float64", engine="loop", workers=1)
    everything = [run.shared, run.server, *run.personal, run.store.dump()]
    assert not HELD & set().union(*(leaf_names(branch) for branch in everything))
    rows = normal(3, 4, seed=9)
    assert torch.isfinite(run.predict(0, rows)).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_plain_torch_with_the_frozen_norm_in_evaluation_mode(engine):
    """One client, three steps of SGD, written with torch's own modules and optimiser."""
    fed = federation([9], d=4)
    run = ft.run(ft.FedAvg(lr=0.2, steps=3), fed, module(), rounds=1, dtype="float64", engine=engine)
    net = module().train()
    net[1].eval()
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.2)
    x, y = (t.double() if t.is_floating_point() else t for t in fed.train.client(0))
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    state = run.state_dict()
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)
    assert torch.equal(state["1.running_mean"], module()[1].running_mean)
    assert not torch.equal(state["4.running_mean"], module()[4].running_mean)


def test_statistics_of_moving_norms_travel_and_are_averaged():
    run = ft.run(ft.FedAvg(lr=0.1, steps=1), data(), module(), rounds=1, dtype="float64", engine="loop")
    names = [n for n in run.shared["model"] if n.startswith("buffer:")]
    assert names == ["buffer:4.running_mean", "buffer:4.running_var"]
    task = run.task
    after = [task.forward(task.init(), {"x": data().train.client(i)[0].double()})[1] for i in range(3)]
    mean = sum(a["buffer:4.running_mean"] for a in after) / 3
    torch.testing.assert_close(run.shared["model"]["buffer:4.running_mean"], mean, rtol=0, atol=1e-12)


def test_costs_count_what_moves():
    run = ft.run(ft.Ditto(), data(), module(), rounds=1, dtype="float64", engine="loop")
    moving = 5 * 6 + 6 + 6 + 6 + 6 * 2 + 2
    assert run.summary["trained_parameters"] == 2 * moving  # Ditto trains two models
    assert run.summary["bytes_down"] == 3 * len(tree.pack({"model": Task.from_module(module()).init()}))
    assert run.summary["personal_parameters"] == moving + 12  # its norm's statistics too


def test_engines_agree():
    runs = [ft.run(ft.Ditto(lr=0.1), data(), module(), rounds=2, batch_size=4, dtype="float64", engine=e) for e in ENGINES]
    for i in range(3):
        for name, value in runs[0].model(i).items():
            torch.testing.assert_close(runs[1].model(i)[name], value, rtol=0, atol=1e-11)


def test_a_module_changed_later_does_not_change_the_task():
    net = module()
    task, x = Task.from_module(net), normal(4, 4)
    before = task.apply(task.init(), x)
    with torch.no_grad():
        net[0].weight.fill_(9.0)
        net[1].running_mean.fill_(9.0)
    assert torch.equal(task.apply(task.init(), x), before)


def test_a_norm_without_weights_goes_with_the_module_around_it():
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    net = nn.Sequential(inner, copy.deepcopy(inner), nn.Linear(4, 2)).double()
    net[0].requires_grad_(False)
    task = Task.from_module(net)
    assert "buffer:0.1.running_mean" in task.frozen
    assert "buffer:1.1.running_mean" in task.names
    _, moved = task.forward(task.init(), {"x": normal(6, 4)})
    assert set(moved) == {"buffer:1.1.running_mean", "buffer:1.1.running_var"}


def test_a_linear_model_with_a_frozen_bias_keeps_the_bias():
    net = seeded(nn.Linear, 4, 2)
    net.bias.requires_grad_(False)
    task, x = Task.from_module(net), normal(3, 4)
    assert task.names == ("weight",)
    torch.testing.assert_close(task.apply(task.init(), x), net(x))


def test_a_whole_model_may_be_applied_as_well():
    run = ft.run(ft.FedAvg(), data(), module(), rounds=1, dtype="float64", engine="loop")
    x = normal(3, 4)
    assert set(run.model()) == {*MOVING, *HELD}
    assert torch.equal(run.task.apply(run.model(), x), run.predict_global(x))
    net = module().eval()
    net.load_state_dict(run.state_dict(), strict=False)
    torch.testing.assert_close(net(x), run.predict_global(x))


def test_a_task_whose_frozen_part_has_another_precision_is_refused():
    task = Task.from_module(module().float())
    with pytest.raises(errors.InvalidArgument, match="frozen part is float32 and the run float64; pass dtype='float32'"):
        ft.run(ft.FedAvg(), data(), task, rounds=1, dtype="float64")
    ft.run(ft.FedAvg(), data(), task, rounds=1, engine="loop")


# -- the frozen first layers -----------------------------------------------------------------------------------------------


def test_the_prefix_is_all_layers_before_the_first_that_moves():
    task, x = Task.from_module(module()), normal(6, 4)
    first = task.prefix
    assert first.layers == ("0", "1", "2")
    model, batch = task.init(), {"x": x, "y": torch.zeros(6, dtype=torch.int64), "key": torch.tensor(3)}
    features = first.apply(x)
    assert torch.equal(first.rest.apply(model, features), task.apply(model, x))
    assert torch.equal(first.rest.features(model, features), task.features(model, x))
    assert torch.equal(first.rest.risk(model, {**batch, "x": features}), task.risk(model, batch))
    whole, short = task.forward(model, batch), first.rest.forward(model, {**batch, "x": features})
    assert torch.equal(whole[0], short[0])
    assert all(torch.equal(whole[1][k], short[1][k]) for k in whole[1])
    h = features
    for block in first.rest.blocks:
        h = block(model, h)
    assert torch.equal(h, task.apply(model, x))


class Own(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("layers", "cut"),
    [
        ((nn.Linear(4, 4), nn.Dropout(0.5)), ("0",)),
        ((nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU()), ("0", "1", "2")),
        ((nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), ("0",)),
        ((nn.Linear(4, 4), Own()), ("0",)),
        ((nn.ReLU(),), None),
        ((Own(), nn.Linear(4, 4)), None),
    ],
    ids=["dropout", "no-dropout", "batch-statistics", "own-layer", "no-weights", "own-layer-first"],
)
def test_the_prefix_ends_where_an_output_depends_on_more_than_the_row(layers, cut):
    net = nn.Sequential(*layers, nn.Linear(4, 2))
    net[:-1].requires_grad_(False)
    first = Task.from_module(net).prefix
    assert (None if first is None else first.layers) == cut


def test_nothing_is_cut_where_the_order_of_the_layers_is_not_known():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x) + x)

    assert Task.from_module(Net()).prefix is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "method", [ft.Ditto(lr=0.1), ft.KNNPer(), ft.FedDF(kd_steps=3), ft.FedBN()], ids=lambda m: type(m).__name__
)
def test_training_from_the_features_is_training_from_the_rows(method, engine, monkeypatch):
    options = {"rounds": 2, "batch_size": 4, "dtype": "float64", "engine": engine, "new_clients": 0.4}
    short = ft.run(method, data(public=True), module(), **options)
    monkeypatch.setattr(prefix, "ROOM", 0)
    long = ft.run(method, data(public=True), module(), **options)
    assert any("computed once" in note for note in short.summary["notes"])
    assert any("was not kept" in note for note in long.summary["notes"])
    for path, value in tree.items(long.shared):
        torch.testing.assert_close(dict(tree.items(short.shared))[path], value, rtol=0, atol=1e-12)
    x = normal(4, 4, seed=8)
    for i in range(3):
        torch.testing.assert_close(short.predict(i, x), long.predict(i, x), rtol=0, atol=1e-10)
    assert {k: short.summary[k] for k in ("bytes_up", "acc_personal")} == {
        k: long.summary[k] for k in ("bytes_up", "acc_personal")
    }


def test_the_frozen_layers_see_every_row_once_however_many_runs_there_are(monkeypatch):
    seen = []
    still = type(Task.from_module(module()).prefix.apply)
    monkeypatch.setattr(still, "__call__", lambda self, x: seen.append(len(x)) or self.module(x))
    fed = federation([8, 11, 5], d=4, val=True, seed=71)  # rows that no other test has seen
    ft.compare(
        [ft.FedAvg(), ft.Local(), ft.Ditto()], fed, module(), rounds=1, tune={"lr": [0.1, 0.2]}, dtype="float64", engine="loop"
    )
    shapes = seen.count(1)  # a run first looks at one row
    assert sum(seen) - shapes == sum(len(s.x) for s in (fed.train, fed.test, fed.val))


def test_features_are_let_go_with_the_last_run_unless_they_are_held():
    fed, task, seen = data(), Task.from_module(module()), []
    rows = replace(task, prefix=task.prefix._replace(apply=lambda x: seen.append(len(x)) or task.prefix.apply(x)))

    def passes() -> int:
        seen.clear()
        prefix.after_prefix(rows, fed)
        return sum(n > 1 for n in seen)  # beside the one row that is looked at first

    assert passes() == passes() > 0
    with prefix.keep_outputs():
        assert passes() > 0
        assert passes() == 0
    assert passes() > 0


def test_networks_that_freeze_the_same_share_what_is_computed_once():
    fed = pictures(seed=77).to(torch.float32)
    features = [
        prefix.after_prefix(Task.from_module(models.build(f"resnet8:{name},width=8", (3, 8, 8), 3)), fed)[1].train.x
        for name in ("adapters,last=1", "last=1", "adapters,last=2")
    ]
    assert features[0] is features[1]  # what follows differs, what is frozen before it does not
    assert features[2] is not features[0]
    assert features[2].shape != features[0].shape
    other = models.build("resnet8:last=1,width=8", (3, 8, 8), 3, seed=1)
    assert prefix.after_prefix(Task.from_module(other), fed)[1].train.x is not features[0]  # other weights


def test_a_residual_net_with_adapters_saves_its_first_convolution_only():
    """Its first norm trains: no more of the network is frozen before the first layer that moves."""
    task = Task.from_module(models.resnet(8, 3, adapters=True))
    assert task.prefix.layers == ("image", "conv1")
    assert Task.from_module(models.resnet(8, 3, train="head")).prefix.layers[-1] == "avgpool"


# -- on disk ---------------------------------------------------------------------------------------------------------------


def test_the_frozen_part_is_written_once_and_read_back(tmp_path):
    name = "resnet8:adapters,width=4"
    run = ft.run(ft.Ditto(), pictures(), name, rounds=1, batch_size=4, engine="loop", out=tmp_path / "run")
    files = {p.name: tree.unpack(p.read_bytes()) for p in (tmp_path / "run" / "models").glob("*.safetensors")}
    assert set(files["frozen.safetensors"]) == set(run.task.frozen)
    for other in ("shared.safetensors", "personal.safetensors"):
        assert not leaf_names(files[other]) & set(run.task.frozen)
    back = saved.read(tmp_path / "run")
    x = pictures().test.client(1)[0].float()
    assert torch.equal(back.predict("1", x), run.predict(1, x))
    whole = back.weights("1")
    net = models.build(name, (3, 8, 8), 3, seed=99).eval()
    net.load_state_dict(whole, strict=False)
    torch.testing.assert_close(net(x), run.predict(1, x))


def test_a_run_is_not_resumed_on_another_frozen_part(tmp_path):
    options = {"rounds": 1, "dtype": "float64", "engine": "loop", "out": tmp_path / "run"}
    ft.run(ft.FedAvg(), data(), module(), **options)
    other = module()
    with torch.no_grad():
        other[0].weight[0, 0] += 1.0
    with pytest.raises(errors.BadRun, match="frozen part"):
        ft.run(ft.FedAvg(), data(), other, resume=True, **options)


def test_feeds_of_features_draw_the_same_batches():
    """The rows' order is the federation's: batches are drawn by client, not by content."""
    task, fed = Task.from_module(module()), data().to(torch.float64)
    _, features, _ = prefix.after_prefix(task, fed)
    work = ft.FedAvg().work()
    for client in range(3):
        a, b = (Feed(f, work, 4, 0).one(client, 2) for f in (fed, features))
        raw, after = fed.train.client(client)[0], features.train.client(client)[0]  # a product's last digit goes by its rows
        for one, other in zip(a.batches(), b.batches(), strict=True):
            rows = [int((raw == row).all(1).nonzero()) for row in one["x"]]
            assert torch.equal(after[rows], other["x"])
            assert torch.equal(one["y"], other["y"])
