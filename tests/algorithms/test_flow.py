"""Flow: its router, its limits, hard routing along chosen paths only, what it costs, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import routing
from fedtailor.algorithms.flow import AT_THE_END
from fedtailor.algorithms.settings import make, settings
from fedtailor.data import Work
from fedtailor.data.batches import step_keys
from fedtailor.data.feed import Feed
from fedtailor.engine.base import NO_ROUND
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.laws.ground import network
from fedtailor.metrics.cost import multiply_adds, probe, wire_bytes, work_of_prediction
from fedtailor.models import router
from fedtailor.runs import models as saved_models
from fedtailor.runs.store import Store
from fedtailor.task import Task
from fedtailor.task.layers import batch_context
from fedtailor.task.parts import Block
from tests.make import federation, numbered, pairs, the_round

SIZES = (11, 4, 12, 7)


def mlp(d: int = 3, classes: int = 2) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, classes)).double()


def plan_of(algorithm, fed=None, model=None, batch=3, seed=1, weights="uniform"):
    fed = (federation(SIZES) if fed is None else fed).to(torch.float64)
    task = build_task(mlp() if model is None else model, fed, seed, torch.float64, bias=True)
    return make_plan(algorithm, task, fed, batch, seed, weights)


def trained(algorithm, rounds=3, engine="loop", fed=None, model=None, **options):
    fed = federation(SIZES) if fed is None else fed
    kind = {"loop": {"engine": "loop", "workers": 1}, "vectorized": {"engine": "vectorized"}}[engine]
    common = {"rounds": rounds, "batch_size": 3, "seed": 1, "dtype": "float64", "evaluate_every": 0}
    return ft.run(algorithm, fed, mlp() if model is None else model, **{**common, **kind, **options})


def close(a, b, tolerance=1e-10):
    assert tree.shapes(a) == tree.shapes(b)
    for (path, x), (_, y) in zip(tree.items(a), tree.items(b), strict=True):
        assert float((x - y).abs().max()) <= tolerance, path


# -- the router ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "routes", "widths", "parameters"),
    [(784, 4, (350, 150, 50), 336_158), (3072, 6, (1000, 750, 350, 150, 50), 4_151_512)],
    ids=["EMNIST CNN", "ResNet-18"],
)
def test_the_routers_of_the_papers_experiments_have_their_number_of_parameters(inputs, routes, widths, parameters):
    assert router.size(inputs, routes, widths) == parameters
    base = sum(a * b + b for a, b in zip((inputs, *widths), (*widths, 2), strict=True))  # the last base layer is its own exit
    exits = sum(2 * w + 2 for w in widths)
    assert base + exits == parameters
    if routes == 4:
        assert tree.size(router.init(inputs, routes, widths)) == parameters
        assert round(100 * parameters / 1_206_590, 2) == 27.86  # of the CNN's parameters, as the paper says


def test_a_router_is_a_chain_of_relu_layers_on_the_input_with_an_exit_after_each():
    params = router.init(6, 3, (5, 4, 3), seed=7, dtype=torch.float64)
    x = np.random.default_rng(0).normal(size=(9, 2, 3))
    p = {name: value.numpy() for name, value in params.items()}
    h, want = x.reshape(9, 6), []
    for j in (1, 2, 3):
        h = np.maximum(h @ p[f"base.{j}.weight"].T + p[f"base.{j}.bias"], 0)
        s = np.exp(h @ p[f"exit.{j}.weight"].T + p[f"exit.{j}.bias"])
        want.append(s / s.sum(1, keepdims=True))
    np.testing.assert_allclose(router.apply(params, torch.tensor(x)), np.stack(want, 1), atol=1e-12)


def test_a_router_starts_from_its_seed_and_within_the_bounds_of_its_layers():
    one, again, other = (router.init(16, 2, (9, 4), seed=s) for s in (3, 3, 4))
    assert all(torch.equal(one[k], again[k]) for k in one)
    assert not any(torch.equal(one[k], other[k]) for k in one)
    assert float(one["base.1.weight"].abs().max()) <= 0.25
    assert float(one["base.1.weight"].abs().max()) > 0.2


def test_the_routers_dropout_needs_a_key_and_keeps_the_mean_of_a_level():
    params = router.init(4, 1, (400,), seed=1, dtype=torch.float64)
    x = torch.ones(1, 4, dtype=torch.float64)
    still = router.scores(params, x, dropout=0.5)
    assert torch.equal(still, router.scores(params, x))
    keys = torch.from_numpy(step_keys(np.array([5], np.uint64), 400)[0])
    thinned = torch.stack([router.scores(params, x, 0.5, key) for key in keys])
    assert float(thinned.std(0).min()) > 0
    error = (thinned.mean(0) - still).abs() / (thinned.std(0) / 20)
    assert float(error.max()) < 5  # standard errors


def test_the_start_of_the_router_follows_the_seed_of_the_run_and_fits_the_inputs():
    shared = [plan_of(ft.Flow(), seed=s).algorithm.init_server(plan_of(ft.Flow(), seed=s).task)[0] for s in (1, 1, 2)]
    assert torch.equal(shared[0]["router"]["base.1.weight"], shared[1]["router"]["base.1.weight"])
    assert not torch.equal(shared[0]["router"]["base.1.weight"], shared[2]["router"]["base.1.weight"])
    assert shared[0]["router"]["base.1.weight"].shape == (8, 3)
    assert sum(name.startswith("exit") for name in shared[0]["router"]) == 2 * 3  # weight and bias of three exits


# -- the two parts of a client's rows ------------------------------------------------------------------------------------


def used(feed, client, round, phase):
    return sorted({int(i) for step in feed.rows(client, round, phase) for i in step})


@pytest.mark.parametrize("split", [0.25, 0.5, 0.9])
def test_the_two_parts_are_disjoint_are_all_rows_and_stay_from_round_to_round(split):
    plan = plan_of(ft.Flow(split=split))
    for client, n in enumerate(SIZES):
        mine, common = used(plan.feed, client, 0, "local"), used(plan.feed, client, 0, "train")
        assert sorted(mine + common) == list(range(n))
        assert len(mine) == min(max(int(split * n + 0.5), 1), n - 1)
        assert mine == used(plan.feed, client, 5, "local") == used(plan.feed, client, NO_ROUND, "personalize")
        assert common == used(plan.feed, client, 5, "train") == used(plan.feed, client, NO_ROUND, AT_THE_END)
        assert plan.feed.one(client, 0)["rows"].tolist() == [len(common)]
        assert plan.feed.one(client, 0)["local"]["rows"].tolist() == [len(mine)]


def test_redrawn_parts_change_from_round_to_round_but_not_within_one():
    feed = plan_of(ft.Flow(redraw=True)).feed
    parts = [(used(feed, 2, t, "local"), used(feed, 2, t, "train")) for t in range(4)]
    assert all(sorted(a + b) == list(range(SIZES[2])) for a, b in parts)
    assert len({tuple(a) for a, _ in parts}) > 1


def test_whole_gives_both_phases_all_rows():
    feed = plan_of(ft.Flow(split="whole")).feed
    assert used(feed, 0, 0, "local") == used(feed, 0, 0, "train") == list(range(SIZES[0]))


@pytest.mark.parametrize("batch", [None, 3, 50])
def test_both_engines_are_fed_the_same_rows_of_a_part(batch):
    fed = numbered([9, 1, 5, 2])
    phases = {"train": Work(epochs=2, part=(0.4, 1.0)), "personalize": Work(steps=3, part=(0.0, 0.4))}
    feed = Feed(fed, {**phases, "personalize:more": Work(steps=2, part=(0.4, 1.0))}, batch, 0)
    for phase, more in (("train", ()), ("personalize", ("personalize:more",))):
        many = feed.many(np.arange(4), 2, phase)
        assert ("personalize:more" in many) == bool(more)
        for i in range(4):
            one = feed.one(i, 2, phase)
            for name in ("", *more):
                part, wide = (one[name], many[name]) if name else (one, many)
                for s, step in enumerate(part.batches()):
                    assert torch.equal(wide["y"][s, i][wide["mask"][s, i] > 0], step["y"])
                assert wide["rows"][0, i] == part["rows"][0] == len(used(feed, i, 2, name or phase))


@pytest.mark.parametrize("part", [(0.5, 0.5), (-0.1, 1.0), (0.0, 1.1), (0.7, 0.2)])
def test_a_part_must_be_a_piece_of_the_rows(part):
    with pytest.raises(InvalidArgument, match="a part of the rows must be"):
        Work(epochs=1, part=part)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_client_too_small_to_be_split_trains_whole_in_both_parts_and_the_run_says_so(engine):
    fed = federation((5, 1, 2), names=["ann", "bob", "cyd"])
    run = trained(ft.Flow(lr=0.1), fed=fed, engine=engine)
    assert run.summary["notes"][-1].startswith("1 client has too few rows to be split in two")
    assert run.summary["notes"][-1].endswith(": bob")
    feed = run.engine.plan.feed
    assert used(feed, 1, 0, "local") == used(feed, 1, 0, "train") == [0]
    assert len(used(feed, 2, 0, "local")) == len(used(feed, 2, 0, "train")) == 1
    assert trained(ft.Flow(split="whole"), fed=fed, rounds=1).summary["notes"] == []


# -- limits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [mlp, lambda: network().double()], ids=["mlp", "batch norm and dropout"])
@pytest.mark.parametrize("order", ["alternate", "router-first", "global-first"])
def test_with_q0_one_the_shared_model_is_fedavg_on_the_other_half_weighed_by_its_rows(order, model):
    d = 3 if model is mlp else 4
    rows, test = pairs(SIZES, d, classes=2), pairs([4] * 4, d, seed=1)
    fed = ft.Federation.from_arrays(rows, test)
    work = {"lr": 0.2, "epochs": 2, "server_lr": 0.7, "opt": ft.SGD(momentum=0.5)}
    flow = trained(ft.Flow(**work, q0=1.0, order=order), fed=fed, model=model())
    feed = flow.engine.plan.feed
    rows_used = [used(feed, i, 0, "train") for i in range(len(SIZES))]
    half = ft.Federation.from_arrays([(x[k], y[k]) for (x, y), k in zip(rows, rows_used, strict=True)], test)
    fedavg = trained(ft.FedAvg(**work), fed=half, model=model(), weights="size")
    close(flow.shared, fedavg.shared, 1e-12)
    close({"p": flow.predict(0, test[0][0])}, {"p": fedavg.predict(0, test[0][0])}, 1e-12)


@pytest.mark.parametrize("settings", [{"warmup": 3}, {"global_risk": "own"}], ids=["warming up", "the model's own risk"])
def test_the_shared_model_is_as_with_q0_one_while_warming_up_and_with_steps_on_its_own_risk(settings):
    plain, warmed = (trained(ft.Flow(lr=0.2, epochs=2, **more)) for more in ({"q0": 1.0}, settings))
    close(warmed.shared["model"], plain.shared["model"], 1e-12)
    start = warmed.algorithm.init_server(warmed.task)[0]["router"]
    still = all(torch.equal(start[k], warmed.shared["router"][k]) for k in start)
    assert still == ("warmup" in settings)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize(
    "flow",
    [ft.Flow(lr=0.2, epochs=2, global_risk="own", global_rows="whole"), ft.Flow(lr=0.2, epochs=2, variant="eased", redraw=True)],
    ids=["whole", "eased"],
)
def test_the_shared_model_of_all_rows_and_its_own_risk_is_fedavgs(flow, engine):
    run, fedavg = trained(flow, engine=engine), trained(ft.FedAvg(lr=0.2, epochs=2), engine=engine, weights="size")
    close(run.shared["model"], fedavg.shared["model"], 1e-12)
    start = run.algorithm.init_server(run.task)[0]
    assert any(not torch.equal(start["router"][k], run.shared["router"][k]) for k in start["router"])


def test_the_eased_variant_routes_between_fedavgs_model_and_that_of_fedavg_with_fine_tuning():
    """Where every row goes to v it predicts as FedAvgFT."""
    work = {"lr": 0.2, "epochs": 2}
    flow = trained(ft.Flow(**work, variant="eased", q0=0.0, local_epochs=3, local_lr=0.05))
    tuned = trained(ft.FedAvgFT(**work, finetune_epochs=3, finetune_lr=0.05), weights="size")
    close(flow.shared, tuned.shared, 1e-12)
    x = federation(SIZES).test.x
    for client in range(4):
        close({"p": flow.predict(client, x)}, {"p": tuned.predict(client, x)}, 1e-12)


def test_pc_flow_is_fedavg_with_fine_tuning():
    work = {"lr": 0.2, "epochs": 2, "server_lr": 0.7}
    flow = trained(ft.Flow(**work, variant="pc", local_steps=5, local_lr=0.3))
    same = trained(ft.FedAvgFT(**work, finetune_steps=5, finetune_lr=0.3), weights="size")
    close(flow.shared, same.shared)
    x = federation(SIZES).test.x
    for client in range(4):
        close({"p": flow.predict(client, x)}, {"p": same.predict(client, x)})


def test_whole_model_routing_and_layer_routing_are_one_where_the_model_is_one_layer():
    one, other = (trained(ft.Flow(lr=0.3, routing=r, gamma=0.1), model="linear") for r in ("layer", "model"))
    close(one.shared, other.shared, 1e-12)


def test_a_server_with_momentum_zero_is_the_plain_server():
    plain = trained(ft.Flow(lr=0.2, server_lr=0.5))
    same = trained(ft.Flow(lr=0.2, server_opt=ft.FedAvgM(beta1=0.0, server_lr=0.5)))
    close(plain.shared, same.shared)
    yogi = trained(ft.Flow(lr=0.2, server_opt=ft.FedYogi(server_lr=0.01)))
    assert set(yogi.server["m"]) == {"model", "router"}
    moved = tree.sub(yogi.shared["router"], plain_start(yogi))
    assert 0 < max(float(leaf.abs().max()) for leaf in tree.leaves(moved)) <= 3 * 0.01 / 1e-3 * 0.1


def plain_start(run):
    return run.algorithm.init_server(run.task)[0]["router"]


def test_with_equal_versions_the_router_follows_the_regulariser_alone():
    """Where v = w the mixture does not depend on q; an exit's bias then moves by lr gamma/L mean(1 - q_0), to the global path."""
    plan = plan_of(ft.Flow(lr=0.5, gamma=0.3, steps=1, router_widths=(4,)), batch=None)
    task, flow = plan.task, plan.algorithm
    shared, _ = flow.init_server(task)
    data = plan.feed.one(0, 0)
    x = plan.federation.train.client(0)[0][used(plan.feed, 0, 0, "train")]
    new = flow.learn(task, shared, shared["model"], data, only=("router",))["router"]
    q = router.apply(shared["router"], x)
    for j in range(3):
        want = 0.5 * 0.3 / 3 * (1 - q[:, j, 0]).mean()
        moved = new[f"exit.{j + 1}.bias"] - shared["router"][f"exit.{j + 1}.bias"]
        torch.testing.assert_close(moved, torch.stack([want, -want]), rtol=1e-9, atol=1e-12)
    assert bool((router.apply(new, x)[..., 0] > q[..., 0]).all())


def test_the_regulariser_stays_finite_where_the_router_is_sure_of_the_local_path():
    plan = plan_of(ft.Flow(lr=0.1, gamma=1.0, steps=1))
    shared, _ = plan.algorithm.init_server(plan.task)
    sure = {k: torch.tensor([-800.0, 800.0], dtype=v.dtype) if k.startswith("exit") and v.dim() == 1 else v
            for k, v in shared["router"].items()}  # fmt: skip
    new = plan.algorithm.learn(plan.task, {**shared, "router": sure}, shared["model"], plan.feed.one(0, 0), only=("router",))
    moved = new["router"]["exit.1.bias"] - sure["exit.1.bias"]
    torch.testing.assert_close(moved, torch.tensor([0.1 / 3, -0.1 / 3], dtype=moved.dtype))


def test_in_training_two_equal_versions_are_the_model_with_its_masks_and_statistics():
    task = Task.from_module(network().double())
    model, x = task.init(), torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "key": torch.tensor(12345), "mask": torch.tensor([1.0, 1, 1, 1, 1, 0, 0], dtype=torch.float64)}
    want, moved = task.forward(model, batch)
    q = router.apply(router.init(4, 2, dtype=torch.float64), x)
    for paths, weights in ((routing.routes(task, "layer"), q), (routing.routes(task, "model"), q[:, :1])):
        with batch_context(batch["mask"], batch["key"]):
            output, stats = routing.soft(paths, model, model, weights, x, training=True)
        torch.testing.assert_close(output[:5], want[:5], rtol=1e-12, atol=1e-12)
        close(stats, moved, 1e-12)
        assert stats["buffer:1.running_mean"].abs().sum() > 0


def test_pi_flow_has_two_shared_models_and_trains_nothing_to_predict():
    run = trained(ft.Flow(lr=0.2, variant="pi"))
    assert set(run.shared) == {"model", "other", "router"}
    apart = tree.sub(run.shared["model"], run.shared["other"])
    assert max(float(leaf.abs().max()) for leaf in tree.leaves(apart)) > 1e-3
    close(run.personal[0], {"local": run.shared["other"]}, 0.0)


@pytest.mark.parametrize(
    ("deploy", "parts"), [("router", {"local", "router"}), ("local", {"local"}), ("all", {"local", "router", "model"})]
)
def test_what_a_client_trains_to_predict_is_an_option(deploy, parts):
    run = trained(ft.Flow(lr=0.2, deploy=deploy), rounds=1)
    mine = run.personal[0]
    assert set(mine) == parts
    for part in parts - {"local"}:
        assert any(not torch.equal(mine[part][k], run.shared[part][k]) for k in mine[part])


# -- along chosen paths ------------------------------------------------------------------------------------------------


class Counted:
    """Which version of which block ran on how many rows."""

    def __init__(self, monkeypatch, g):
        self.rows: dict[tuple[str, str], int] = {}
        layer = Block.layer

        def counting(block, model, x, training=False):
            version = "global" if model is g else "local"
            self.rows[block.name, version] = self.rows.get((block.name, version), 0) + len(x)
            return layer(block, model, x, training)

        monkeypatch.setattr(Block, "layer", counting)


def two_versions(rows=40, make_model=mlp, shape=(3,)):
    task = Task.from_module(make_model())
    draw = torch.Generator().manual_seed(5)
    g = task.init()
    v = {k: p + 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=draw).abs() for k, p in g.items()}
    x = torch.randn(rows, *shape, dtype=torch.float64, generator=draw)
    return task, g, v, x


@pytest.mark.parametrize("make_model", [mlp, lambda: network().double()], ids=["mlp", "batch norm and dropout"])
def test_hard_routing_runs_every_layer_only_on_the_rows_that_chose_it_and_is_soft_routing_with_zeros_and_ones(
    make_model, monkeypatch
):
    task, g, v, x = two_versions(make_model=make_model, shape=(3,) if make_model is mlp else (4,))
    paths = routing.routes(task, "layer")
    to_global = torch.rand(len(x), len(paths), generator=torch.Generator().manual_seed(1)) < 0.6
    q = torch.stack([to_global, ~to_global], -1).double()
    want = routing.soft(paths, g, v, q, x)[0]
    counted = Counted(monkeypatch, g)
    torch.testing.assert_close(routing.hard(paths, g, v, to_global, x), want, rtol=1e-12, atol=1e-12)
    for j, path in enumerate(paths):
        assert counted.rows[path.name, "global"] == int(to_global[:, j].sum())
        assert counted.rows[path.name, "local"] == int((~to_global[:, j]).sum())


@pytest.mark.parametrize("version", ["global", "local"])
def test_where_all_rows_take_one_path_the_other_version_is_never_run(version, monkeypatch):
    task, g, v, x = two_versions()
    paths = routing.routes(task, "layer")
    counted = Counted(monkeypatch, g)
    output = routing.hard(paths, g, v, torch.full((len(x), 3), version == "global"), x)
    assert {which for _, which in counted.rows} == {version}
    torch.testing.assert_close(output, task.apply(g if version == "global" else v, x), rtol=1e-12, atol=1e-12)


def test_no_rows_give_no_predictions():
    task, g, v, x = two_versions(rows=0)
    assert routing.hard(routing.routes(task, "layer"), g, v, torch.zeros(0, 3, dtype=torch.bool), x).shape == (0, 2)


@pytest.mark.parametrize(("q0", "version"), [(0.5, "model"), (0.75, "model"), (0.25, "local")])
def test_a_fixed_q0_is_rounded_to_predict_and_a_tie_goes_to_the_global_path(q0, version):
    run = trained(ft.Flow(lr=0.2, q0=q0))
    assert set(run.shared) == {"model"}
    x = federation(SIZES).test.x.double()
    one = run.shared["model"] if version == "model" else run.personal[1]["local"]
    close({"p": run.predict(1, x)}, {"p": run.task.apply(one, x)})


def test_a_tie_of_the_router_goes_to_the_global_path():
    run = trained(ft.Flow(lr=0.2, deploy="local"))
    tied = {k: torch.zeros_like(p) for k, p in run.shared["router"].items()}
    x = federation(SIZES).test.x.double()
    output = run.algorithm.predict(run.task, {**run.shared, "router": tied}, run.personal[0], x)
    close({"p": output}, {"p": run.task.apply(run.shared["model"], x)})


@pytest.mark.parametrize("inference", ["hard", "soft"])
@pytest.mark.parametrize("deploy", ["router", "local"])
def test_both_engines_predict_alike(inference, deploy):
    plan = plan_of(ft.Flow(lr=0.4, epochs=2, inference=inference, deploy=deploy, router_lr=3.0, gamma=0.0))
    ids, by_engine = np.arange(len(SIZES)), {}
    for engine in (LoopEngine(plan, workers=1), VectorizedEngine(plan)):
        shared, store = plan.algorithm.init_server(plan.task)[0], Store(len(SIZES))
        out = {}
        for p in engine.predictions(shared, ids, store, plan.federation.test):
            out |= {int(i): own for i, own in zip(p.ids, p.personal, strict=True)}
        x = plan.federation.test.x
        common = {
            int(i): row for some, rows in engine.on_common(shared, ids, store, x) for i, row in zip(some, rows, strict=True)
        }
        by_engine[engine.name] = {"own": {str(i): out[i] for i in ids}, "common": {str(i): common[i] for i in ids}}
    close(by_engine["loop"], by_engine["vectorized"])


@pytest.mark.parametrize(
    "algorithm",
    [
        ft.Flow(lr=0.3, epochs=2, router_lr=2.0, router_dropout=0.3, deploy="all", order="global-first"),
        ft.Flow(variant="eased", lr=0.3, local_epochs=2, local_lr=0.1, inference="soft", redraw=True),
        ft.Flow(variant="pi", inference="soft", redraw=True, opt=ft.SGD(momentum=0.5), server_opt=ft.FedYogi()),
        ft.Flow(routing="model", order="router-first", local_steps=4, router_widths=6, lr=ft.Exponential(0.2, 0.5), radius=2.0),
        ft.Flow(q0=0.5, deploy="all", split=0.3, opt=ft.Adam(), lr=0.01),
    ],
    ids=["all at the end", "eased", "pi", "whole models", "fixed q0"],
)
def test_the_variants_keep_the_laws_that_engines_and_padding_may_break(algorithm):
    assert {v.number for v in ft.check_algorithm(algorithm, network(), laws=(1, 2, 3, 4, 10))} == {1, 2, 3, 4, 10}


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_the_work_of_one_model_of_soft_and_of_hard_routing_is_what_can_be_counted_by_hand():
    plan = plan_of(ft.Flow(router_widths=(4,)))
    task, flow = plan.task, plan.algorithm
    shared, _ = flow.init_server(task)
    _, g, v, x = two_versions(rows=17)
    shared = {**shared, "model": g}
    one, routed = 17 * (3 * 6 + 6 * 5 + 5 * 2), 17 * (3 * 4 + 3 * 4 * 2)  # a level of 4 units, three exits of two
    assert work_of_prediction(flow, task, shared, {}, x) == one
    assert work_of_prediction(replace(flow, inference="soft"), task, shared, {"local": v}, x) == 2 * one + routed
    assert work_of_prediction(flow, task, shared, {"local": v}, x) == one + routed
    assert multiply_adds(lambda: nn.Conv2d(2, 3, 3, padding=1)(torch.zeros(5, 2, 8, 8))) == 5 * 3 * 2 * 9 * 8 * 8


def header(message):
    data = tree.pack(message)
    return 8 + int.from_bytes(data[:8], "little")


def test_storage_and_traffic_are_those_of_table_4():
    """FLOW, Table 4: a client holds 2 |w| + |psi| numbers to predict and sends |w| + |psi| (and here n, once for each)."""
    fed = federation(SIZES)
    fed = fed.to(torch.float32)
    task = build_task(mlp().float(), fed, 0, torch.float32, bias=True)
    plan = make_plan(ft.Flow(), task, fed, 3, 0, "uniform")
    flow = plan.algorithm
    shared, _ = flow.init_server(task)
    w, psi = tree.size(task.init()), router.size(3, 3, router.default_widths(3, 3))
    upload, personal = flow.client_update(task, shared, {}, plan.feed.one(0, 0), the_round())
    costs = probe(plan)
    assert costs["bytes_down"] - header(shared) == 4 * (w + psi)
    assert costs["bytes_up"] - header(upload) == 4 * (w + psi + 2)
    assert costs["trained_parameters"] == 2 * w + psi
    assert personal == {}
    ready = flow.personalize(task, shared, {}, plan.feed.one(0, NO_ROUND, "personalize"))
    assert tree.size({**shared, **ready}) == 2 * w + psi
    plain = probe(make_plan(ft.FedAvgFT(), task, fed, 3, 0, "uniform"))
    assert plain["bytes_down"] - header({"model": task.init()}) == 4 * w
    assert wire_bytes(shared) == costs["bytes_down"]


# -- what is refused, and words ----------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Not a chain of its children: the activation is in forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_a_model_without_blocks_is_refused_with_the_way_to_declare_them():
    with pytest.raises(ModelMismatch, match=r"declares none.*blocks=\[.*routing='model'") as error:
        trained(ft.Flow(), model=Branches().double())
    assert "\n" not in str(error.value)
    assert trained(ft.Flow(routing="model"), rounds=1, model=Branches().double()).summary["rounds"] == 1


def test_blocks_that_are_not_the_model_are_refused():
    task = Task.from_module(Branches().double(), blocks=["first", "last"])
    with pytest.raises(ModelMismatch, match=r"the declared blocks \(first, last\).*are not the model"):
        trained(ft.Flow(), model=task)


def test_rows_that_are_no_numbers_are_refused():
    task = replace(Task.from_module(mlp()), inputs=torch.zeros(0, 3, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match=r"rows of numbers.*int64"):
        ft.Flow(routing="model").init_server(task)
    with pytest.raises(InvalidArgument, match="size depends on the rows"):
        ft.Flow(routing="model").init_server(replace(task, inputs=None))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"variant": "per-instance"}, "variant must be one of paper, eased, pi, pc"),
        ({"routing": "block"}, "routing must be one of layer, model"),
        ({"order": "router"}, "order must be one of alternate, router-first, global-first"),
        ({"inference": "round"}, "inference must be one of hard, soft"),
        ({"global_risk": "local"}, "global_risk must be one of mixed, own"),
        ({"global_rows": "whole"}, "global_rows='whole' is for global_risk='own'"),
        ({"global_rows": "whole", "global_risk": "own", "deploy": "all"}, "which deploy='all' does not"),
        ({"global_rows": "whole", "global_risk": "own", "variant": "pi"}, "which variant='pi' does not"),
        ({"variant": "eased", "deploy": "all"}, "variant='eased' sets deploy"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"deploy": "nothing"}, "deploy must be one of router, local, all"),
        ({"split": 1.0}, "split must be less than 1"),
        ({"split": "half"}, "split must be a number or 'whole'"),
        ({"q0": 1.5}, "q0 must be at most 1"),
        ({"gamma": -1.0}, "gamma must be at least 0"),
        ({"router_dropout": 1.0}, "router_dropout must be less than 1"),
        ({"router_widths": (4, 0)}, "router_widths must be whole numbers"),
        ({"server_opt": "fedyogi"}, "server_opt must be a method such as"),
        ({"server_opt": ft.FedYogi(), "server_lr": 0.5}, "give server_lr to the server's method"),
        ({"local_steps": 2, "local_epochs": 2}, "give local_steps or local_epochs"),
        ({"deploy_steps": 2, "deploy_epochs": 2}, "give deploy_steps or deploy_epochs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_settings_that_make_no_sense_are_refused_in_a_line(settings, said):
    with pytest.raises(InvalidArgument, match=said) as error:
        ft.Flow(**settings)
    assert "\n" not in str(error.value)


def test_more_levels_than_routes_are_refused():
    with pytest.raises(InvalidArgument, match="at most 3 levels, not 4"):
        trained(ft.Flow(router_widths=(8, 8, 8, 8)))


def test_settings_survive_the_way_through_words_and_numbers(tmp_path):
    flow = ft.Flow(lr=0.2, server_opt=ft.FedYogi(server_lr=0.05), router_widths=(6, 4), split="whole", q0=None, redraw=True)
    assert make("flow", settings(flow)) == flow
    run = trained(ft.Flow(lr=0.2, router_widths=(6, 4)), rounds=2, model="mlp:5", out=tmp_path)
    x = federation(SIZES).test.x
    read = saved_models.read(tmp_path)
    for client in (None, "client 1"):
        name = next((n for n in read.clients if n.endswith("1")), read.clients[1]) if client else None
        want = run.predict(name, x) if name else run.predict_global(x)
        close({"p": read.predict(name, x)}, {"p": want}, 1e-12)
