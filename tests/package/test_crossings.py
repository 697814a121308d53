"""Where two parts of the package meet: frozen networks with routing, privacy, distillation and tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor import errors, models, tree
from fedtailor.algorithms.routing import routes
from fedtailor.data.secret import NO_USE
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.setup import build_task
from fedtailor.local import Private
from fedtailor.local.private import private_gradient
from fedtailor.models.lstm import LSTM
from fedtailor.runs.models import read
from fedtailor.task.parts import joined
from tests.make import normal, seeded
from tests.pictures import pictures

OPEN = Private(clip=math.inf, noise=0.0, force=True, sampling="shuffle")  # private in form only
SMALL = {"rounds": 2, "batch_size": 4, "dtype": "float64", "evaluate_every": 0, "workers": 1}


def trained(method: ft.Algorithm, model: Any, fed: ft.Federation | None = None, **options: Any) -> ft.Run:
    return ft.run(method, pictures(public=6) if fed is None else fed, model, **{**SMALL, "engine": "loop", **options})


def apart(a: Any, b: Any) -> float:
    pairs = zip(tree.items(a), tree.items(b), strict=True)
    assert all(mine[0] == theirs[0] for mine, theirs in zip(tree.items(a), tree.items(b), strict=True))
    return max(float((x - y).abs().max()) for (_, x), (_, y) in pairs)


def task_of(model: str) -> ft.Task:
    return ft.Task.from_module(models.build(model, (3, 8, 8), 3, seed=1).double(), classes=3)


# -- privacy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    ["resnet8:group,width=8", "resnet8:adapters,group,width=8,dropout=0", "resnet8:head,width=8", "vit:adapters,dim=8,depth=1"],
    ids=["all", "adapters", "frozen batch norm", "transformer"],
)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "after the frozen layers"])
def test_clipped_sums_on_networks_with_frozen_parts_are_those_of_a_loop_over_rows(model: str, cut: bool) -> None:
    task = task_of(model)
    assert task.layers is not None  # no gradient of a row is written down
    x, y = normal(5, 3, 8, 8, seed=2), torch.arange(5) % 3
    if cut and task.prefix is not None:
        task, x = task.prefix.rest, task.prefix.apply(x)
    names = [name for name in task.names if not tree.is_buffer(name)]
    assert names == list(task.names)

    def of_row(i: int) -> dict[str, Tensor]:
        own = {name: p.requires_grad_() for name, p in task.init().items()}
        task.risk(own, {"x": x[i : i + 1], "y": y[i : i + 1]}).backward()
        return {name: p.grad for name, p in own.items() if p.grad is not None}

    rows = [of_row(i) for i in range(5)]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in row.values())) for row in rows]
    clip = sorted(norms)[2] * 1.0001
    batch = {"x": x, "y": y, "key": torch.tensor(3)}
    found = private_gradient(
        Private(clip=clip, noise=0.0, force=True), task.risk, task, task.init(), batch, [True] * len(names), NO_USE
    )
    for name, have in zip(names, found, strict=True):
        want = sum(row[name] * min(1.0, clip / norm) for row, norm in zip(rows, norms, strict=True))
        torch.testing.assert_close(have * 5, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", ["resnet8:width=8", "resnet8:adapters,width=8"], ids=["all", "adapters"])
def test_batch_norms_that_move_are_refused_under_privacy(model: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"mixes the rows[^\n]*group norm"):
        trained(ft.FedAvg(opt=Private()), model)


def test_batch_norms_that_rest_are_none_under_privacy() -> None:
    plain, private = (trained(ft.FedAvg(lr=0.1, opt=opt), "resnet8:head,width=8") for opt in (ft.SGD(), OPEN))
    assert apart(plain.shared, private.shared) < 1e-12
    assert trained(ft.FedAvg(opt=Private()), "resnet8:head,width=8").summary["epsilon"] > 0


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_perada_is_private_as_ditto_is_and_the_plain_method_without_noise(engine: str) -> None:
    """Both descend twice on a batch; the server distils on public rows, of which nobody is charged."""
    model = "resnet8:adapters,group,width=8,dropout=0"
    method = ft.PerAda(lr=0.1, lam=0.5, kd_steps=2)
    plain, private = (trained(replace(method, opt=opt), model, engine=engine) for opt in (ft.SGD(), OPEN))
    assert apart(plain.shared, private.shared) < 1e-9
    assert apart(plain.personal[1], private.personal[1]) < 1e-9
    noisy, ditto = (trained(replace(m, opt=Private()), model, engine=engine) for m in (method, ft.Ditto(lr=0.1, lam=0.5)))
    assert noisy.summary["epsilon"] == pytest.approx(ditto.summary["epsilon"], rel=1e-12)
    once = trained(ft.FedAvg(opt=Private()), model, engine=engine)
    assert noisy.summary["epsilon"] > once.summary["epsilon"] > 0


def test_group_norm_behind_a_frozen_convolution_in_channels_last_layout() -> None:
    """torch 2.13 itself crashes there, in the backward pass."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
    net[0].requires_grad_(False)
    x, y = normal(5, 3, 4, 4), torch.arange(5) % 2
    task = ft.Task.from_module(net, classes=2)
    model = {name: p.requires_grad_() for name, p in task.init().items()}
    task.risk(model, {"x": x.contiguous(memory_format=torch.channels_last), "y": y}).backward()
    nn.functional.cross_entropy(net(x), y).backward()
    for name, p in model.items():
        torch.testing.assert_close(p.grad, net.get_parameter(name).grad, rtol=0, atol=1e-12)


# -- routing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("resnet8:adapters,width=8,dropout=0", ["conv1", "layer1.0", "layer2.0", "layer3.0", "fc"]),
        ("vit:adapters,dim=8,depth=2", ["layers.0", "layers.1", "head"]),
        ("resnet8:head,width=8", ["fc"]),
    ],
    ids=["adapters", "transformer", "head"],
)
def test_routes_are_the_blocks_in_which_something_moves_and_one_after_another_the_network(model: str, names: list[str]) -> None:
    task = task_of(model)
    paths = routes(task, "layer")
    assert [block.name for block in paths] == names
    x = want = normal(4, 3, 8, 8)
    for block in paths:
        x = block(task.init(), x)
    torch.testing.assert_close(x, task.apply(task.init(), want), rtol=0, atol=1e-12)
    frozen = [path for block in task.blocks if not block.parameters for path in block.path]
    assert [
        path for block in paths for path in block.path[: block.bare] if path in frozen
    ] == frozen  # run once, for both versions


def test_frozen_blocks_at_the_end_are_joined_to_the_last_that_moves() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    net[4].requires_grad_(False)
    task = ft.Task.from_module(net, classes=2)
    assert [block.path for block in joined(task.blocks)] == [("0",), ("1", "2", "3", "4")]


def test_flow_with_all_weight_on_the_shared_version_is_fedavg_on_adapters() -> None:
    model = "resnet8:adapters,width=8,dropout=0"
    flow = trained(ft.Flow(lr=0.1, q0=1.0, split="whole"), model)
    fedavg = trained(ft.FedAvg(lr=0.1), model, weights="size")
    assert set(flow.shared["model"]) == set(fedavg.task.names)
    assert apart(flow.shared["model"], fedavg.shared["model"]) < 1e-9
    assert flow.summary["bytes_up"] < 1.2 * fedavg.summary["bytes_up"]  # what is frozen is not sent


def test_where_only_the_head_moves_routing_by_layer_is_routing_whole_models() -> None:
    fed, method = pictures(public=6), ft.Flow(lr=0.3, gamma=0.1, epochs=2)
    one, other = (trained(replace(method, routing=routing), "resnet8:head,width=8", fed) for routing in ("layer", "model"))
    assert apart(one.shared, other.shared) < 1e-12
    x = fed.test.x.double()
    torch.testing.assert_close(one.predict(1, x), other.predict(1, x), rtol=0, atol=1e-12)
    assert one.shared["router"]["base.1.weight"].shape[1] == 3 * 8 * 8  # it reads the row, not what the frozen layers make of it


def test_a_routed_network_with_a_frozen_part_predicts_from_its_directory_as_in_memory(tmp_path) -> None:
    fed = pictures()
    done = trained(ft.Flow(lr=0.3), "resnet8:adapters,width=8", fed, out=tmp_path / "run")
    x = fed.test.x.double()
    torch.testing.assert_close(read(tmp_path / "run").predict("1", x), done.predict(1, x), rtol=0, atol=1e-12)
    assert done.summary["routing"]["routes"] == ["conv1", "layer1.0", "layer2.0", "layer3.0", "fc"]


def test_engines_agree_on_flow_with_adapters() -> None:
    method = ft.Flow(lr=0.1, gamma=0.1)
    one, other = (
        trained(method, "resnet8:adapters,group,width=8,dropout=0", engine=engine, rounds=1) for engine in ("loop", "vectorized")
    )
    assert apart(one.shared, other.shared) < 1e-9


# -- tokens ----------------------------------------------------------------------------------------------------------------


def sentences() -> ft.Federation:
    draw = torch.Generator().manual_seed(0)

    def split(count: int) -> list[tuple[Tensor, Tensor]]:
        made = [torch.randint(7, (n, 6), generator=draw) for n in (count, count + 3)]
        return [(x[:, :-1], x[:, 1:]) for x in made]

    return ft.Federation.from_arrays(split(6), split(4), tokens=7)


def lstm(*frozen: str) -> nn.Module:
    net = seeded(lambda: LSTM(7, 7, 3, (4, 4), per_position=True))
    for name, p in net.named_parameters():
        p.requires_grad_(name not in frozen)
    return net


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_flow_on_an_lstm_with_frozen_weights_is_fedavg_where_all_weight_is_on_the_shared_version(engine: str) -> None:
    net = lstm("embedding.weight", "layers.0.weight_ih", "layers.1.bias_hh")
    flow = trained(ft.Flow(lr=0.2, q0=1.0, split="whole"), net, sentences(), engine=engine)
    fedavg = trained(ft.FedAvg(lr=0.2), net, sentences(), weights="size", engine=engine)
    assert set(flow.task.frozen) == {"embedding.weight", "layers.0.weight_ih", "layers.1.bias_hh"}
    assert apart(flow.shared["model"], fedavg.shared["model"]) < 1e-12
    moved = trained(ft.Flow(lr=0.2), net, sentences(), engine=engine)
    assert apart(moved.shared["model"], moved.task.init()) > 1e-3


def test_rows_of_tokens_stay_tokens_where_the_embedding_is_frozen() -> None:
    task, fed = ft.Task.from_module(lstm("embedding.weight"), classes=7), sentences()
    assert task.prefix is not None
    assert after_prefix(task, fed) == (task, fed, ())


# -- what the layers after a prefix know -------------------------------------------------------------------------------------


def test_the_task_after_the_frozen_layers_knows_its_rows_and_the_seed() -> None:
    fed = pictures(public=4)
    task = build_task("resnet8:head,width=8", fed, 5, torch.float64, True)
    rest, rows, _ = after_prefix(replace(task, unscored=2), fed)
    assert rest.inputs is not None
    assert rest.inputs.shape == (0, *rows.train.x.shape[1:])
    assert (rest.seed, rest.unscored) == (5, 2)
