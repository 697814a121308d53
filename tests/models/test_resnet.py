"""Residual networks against published counts and a forward pass written out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fedtailor as ft
from fedtailor import Task, errors, models
from fedtailor.task.layers import batch_context
from tests.make import normal, seeded
from tests.pictures import pictures

TINY = {"width": 4, "dropout": 0.0}


def tiny(seed: int = 0, **more):
    return seeded(lambda: models.resnet(8, 3, **{**TINY, **more}), seed=seed)


def parameters(net, moving: bool = False) -> int:
    return sum(p.numel() for p in net.parameters() if p.requires_grad or not moving)


@pytest.mark.parametrize(
    ("layers", "classes", "plain", "adapted", "moving"),
    [
        (18, 10, 11_181_642, 12_581_962, 1_413_258),
        (18, 65, 11_209_857, 12_610_177, 1_441_473),
        (18, 5, 11_179_077, 12_579_397, 1_410_693),
        (34, 65, 21_318_017, 23_848_065, 2_578_625),
    ],
)
def test_the_counts_are_those_of_the_paper(layers, classes, plain, adapted, moving):
    """PERADA's tables, to the digit (the paper truncates): full network, with adapters, and the adapter set."""
    assert parameters(models.resnet(layers, classes)) == plain
    net = models.resnet(layers, classes, adapters=True)
    assert (parameters(net), parameters(net, moving=True)) == (adapted, moving)
    task = Task.from_module(net)
    assert sum(v.numel() for k, v in task.init().items() if not k.startswith("buffer:")) == moving
    assert set(task.groups["adapter"]) == set(task.names)


def test_the_adapter_set_is_found_by_module():
    """Adapters 1,400,320; norms of blocks 7,680 and of the stem 128; head 5,130. The shortcuts' norms stay with the backbone."""
    net = models.resnet(18, 10, adapters=True)
    sizes = {name: p.numel() for name, p in net.named_parameters() if p.requires_grad}
    adapters = {name for name in sizes if name.split(".")[2:3] and name.split(".")[2].startswith("adapter")}
    assert sum(sizes[name] for name in adapters) == 1_400_320
    stem, head = {"bn1.weight", "bn1.bias"}, {"fc.weight", "fc.bias"}
    assert sum(sizes[n] for n in stem) == 128
    assert sum(sizes[n] for n in head) == 5_130
    assert sum(sizes[n] for n in sizes.keys() - adapters - stem - head) == 7_680
    assert not any("downsample" in name for name in sizes)
    task = Task.from_module(net)
    assert not any("downsample" in name for name in task.groups["norm"])
    assert "buffer:layer2.0.downsample.1.running_mean" in task.frozen
    assert "buffer:layer2.0.bn1.running_mean" in task.init()
    assert task.groups["head"] == ("fc.weight", "fc.bias")


def by_hand(state, x, stem, stages, training):
    """The network written out; batch norm with the batch's statistics where it trains."""

    def norm(name, h):
        mean, var = state[f"{name}.running_mean"].clone(), state[f"{name}.running_var"].clone()
        use = training(name)
        return F.batch_norm(h, mean, var, state[f"{name}.weight"], state[f"{name}.bias"], use, 0.1, 1e-5)

    def adapter(name, h):
        if f"{name}.conv.weight" not in state:
            return h
        return h + F.conv2d(norm(f"{name}.norm", h), state[f"{name}.conv.weight"])

    h = F.conv2d(x, state["conv1.weight"], stride=2 if stem == "imagenet" else 1, padding=3 if stem == "imagenet" else 1)
    h = F.relu(norm("bn1", h))
    if stem == "imagenet":
        h = F.max_pool2d(h, 3, 2, 1)
    for stage, count in enumerate(stages, 1):
        for i in range(count):
            at = f"layer{stage}.{i}"
            stride = 2 if stage > 1 and i == 0 else 1
            g = F.conv2d(h, state[f"{at}.conv1.weight"], stride=stride, padding=1)
            g = F.relu(norm(f"{at}.bn1", adapter(f"{at}.adapter1", g)))
            g = norm(f"{at}.bn2", adapter(f"{at}.adapter2", F.conv2d(g, state[f"{at}.conv2.weight"], padding=1)))
            if f"{at}.downsample.0.weight" in state:
                h = norm(f"{at}.downsample.1", F.conv2d(h, state[f"{at}.downsample.0.weight"], stride=stride))
            h = F.relu(g + h)
    return F.linear(h.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def shaken(net):
    """Statistics and adapters away from where they start, so that every one of them shows."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=draw, dtype=torch.float64)
                value.add_(0.3 * noise if name.endswith(("var", "mean", "conv.weight")) else 0.0)
    return net


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("layers", [8, 14, 18])
@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "plain"])
def test_the_forward_pass_is_the_one_written_out(stem, layers, adapters):
    net = shaken(seeded(lambda: models.resnet(layers, 3, stem=stem, adapters=adapters, **TINY)))
    task, x = Task.from_module(net), normal(3, 3, 16, 16)
    stages = {8: (1, 1, 1), 14: (2, 2, 2), 18: (2, 2, 2, 2)}[layers]
    state = net.state_dict()
    want = by_hand(state, x, stem, stages, lambda name: False)
    torch.testing.assert_close(task.apply(task.init(), x), want, rtol=1e-10, atol=1e-10)
    frozen = "downsample" if adapters else "no such name"
    want = by_hand(state, x, stem, stages, lambda name: frozen not in name)
    logits, _ = task.forward(task.init(), {"x": x})
    torch.testing.assert_close(logits, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("more", [{"adapters": True, "dropout": 0.4}, {"norm": "group"}, {"stem": "imagenet"}], ids=str)
def test_the_blocks_in_order_are_the_network(more):
    task, x, key = Task.from_module(tiny(**more)), normal(5, 3, 8, 8), torch.tensor(7)
    model = task.init()
    assert [b.name for b in task.blocks] == ["conv1", "layer1.0", "layer2.0", "layer3.0", "fc"]
    h = x
    for block in task.blocks:
        h = block(model, h)
    assert torch.equal(h, task.apply(model, x))
    with batch_context(None, key):
        h = x
        for block in task.blocks:
            h = block(model, h, training=True)
    assert torch.equal(h, task.forward(model, {"x": x, "key": key})[0])
    assert {name for b in task.blocks for name in b.parameters} == set(task.names)


def test_adapters_start_nearly_as_the_identity():
    plain, adapted = tiny(), tiny(adapters=True)
    adapted.load_state_dict(plain.state_dict(), strict=False)
    x = normal(4, 3, 8, 8)
    near = adapted.eval()(x)
    weights = [p for name, p in adapted.named_parameters() if name.endswith("adapter1.conv.weight")]
    assert 0 < max(float(w.detach().abs().max()) for w in weights) < 1e-3
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if name.endswith(("adapter1.conv.weight", "adapter2.conv.weight")):
                p.zero_()
    assert torch.equal(adapted(x), plain.eval()(x))
    torch.testing.assert_close(near, plain(x), rtol=0, atol=1e-2)


def test_adapter_weights_start_with_a_deviation_of_1e_4():
    net = models.build("resnet18:adapters", (3, 32, 32), 10, seed=1)
    of = ("adapter1.conv.weight", "adapter2.conv.weight")
    weights = torch.cat([value.flatten() for name, value in net.state_dict().items() if name.endswith(of)])
    assert abs(float(weights.std()) / 1e-4 - 1) < 0.005  # 1.4 million draws: a deviation of 0.0006
    assert abs(float(weights.mean())) < 1e-6


def test_group_norm_looks_at_one_row_at_a_time():
    task = Task.from_module(tiny(norm="group", adapters=True))
    x = normal(4, 3, 8, 8)
    assert not any(name.startswith("buffer:") for name in (*task.names, *task.frozen))
    row_by_row = torch.cat([task.forward(task.init(), {"x": row[None]})[0] for row in x])
    torch.testing.assert_close(task.forward(task.init(), {"x": x})[0], row_by_row, rtol=0, atol=1e-12)
    norms = [m for m in models.resnet(18, 10, norm="group").modules() if isinstance(m, torch.nn.GroupNorm)]
    assert {(m.num_channels, m.num_groups) for m in norms} == {(64, 8), (128, 16), (256, 32), (512, 32)}


@pytest.mark.parametrize("more", [{"adapters": True, "dropout": 0.3}, {}, {"norm": "group"}], ids=["adapters", "all", "group"])
def test_engines_agree(more):
    runs = [
        ft.run(ft.FedAvg(lr=0.1, epochs=1), pictures(), tiny(**more), rounds=2, batch_size=4, dtype="float64", engine=engine)
        for engine in ("loop", "vectorized")
    ]
    for name, value in runs[0].model().items():
        torch.testing.assert_close(runs[1].model()[name], value, rtol=1e-9, atol=1e-11)


def test_one_grey_channel_and_no_channel_axis_are_the_same_picture():
    net = models.build("resnet8", (8, 8), 3).eval()
    x = normal(2, 8, 8).float()
    assert torch.equal(net(x), net(x[:, None]))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("resnet18:adaptors", (3, 8, 8), "did you mean 'adapters'"),
        ("resnet18:width=0", (3, 8, 8), "width must be a whole number from 1"),
        ("resnet18:depth=3", (3, 8, 8), "unknown option 'depth=3'"),
        ("resnet18:dropout=2", (3, 8, 8), r"dropout must be in \[0, 1\)"),
        ("resnet8", (64,), "needs images"),
        ("resnet50", (3, 8, 8), "unknown model 'resnet50'"),
    ],
)
def test_what_is_refused(name, shape, words):
    with pytest.raises(errors.FedtailorError, match=words):
        models.build(name, shape, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": 50}, "no resnet of 50 layers"),
        ({"stem": "big"}, "stem must be"),
        ({"norm": "layer"}, "norm must be"),
        ({"train": "body"}, "train must be one of all, adapter, head"),
    ],
    ids=str,
)
def test_what_the_function_refuses(settings, words):
    with pytest.raises(errors.InvalidArgument, match=words):
        models.resnet(**{"layers": 8, "classes": 3, **settings})
