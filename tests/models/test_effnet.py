"""EfficientNet-Lite0: against a forward pass written out, and its real weights where they are installed."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedtailor as ft
from fedtailor import Task, errors, models
from tests.make import normal, seeded
from tests.pictures import pictures

home = importlib.import_module("fedtailor.models.effnet")  # the function of this name hides it
HERE = importlib.util.find_spec(home.PACKAGE) is not None
installed = pytest.mark.skipif(not HERE, reason="the ImageNet weights are not installed; fedtailor data get effnet-lite0")


@pytest.fixture(scope="module")
def net():
    return shaken(seeded(lambda: models.effnet(3, adapters=True, dropout=0.0)))


def shaken(net):
    """Weights of a size that lets ReLU6 cut, statistics away from their start."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=draw, dtype=torch.float64)
                value.add_(0.2 * noise if name.endswith(("var", "mean")) else 0.02 * noise if "adapter.conv" in name else 0.0)
    return net.eval()


def same(x, weight, stride, groups=1):
    """TensorFlow's padding 'SAME', as its documentation gives it."""
    kernel = weight.shape[-1]
    pads = []
    for side in (x.shape[-1], x.shape[-2]):
        total = max(kernel - stride, 0) if side % stride == 0 else max(kernel - side % stride, 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(x, pads), weight, stride=stride, groups=groups)


def by_hand(state, x):
    def norm(at, h):
        names = ("running_mean", "running_var", "weight", "bias")
        mean, var, weight, bias = (state[f"{at}.{n}"].view(1, -1, 1, 1) for n in names)
        return (h - mean) / torch.sqrt(var + 1e-3) * weight + bias

    h = (x - 127 / 255) / (128 / 255)
    h = norm("bn0", same(h, state["conv_stem.weight"], 2)).clamp(0, 6)
    kernels = [(3, 1), (3, 2), (3, 1), (5, 2), (5, 1), (3, 2), (3, 1), (3, 1), *[(5, 1)] * 3, (5, 2), *[(5, 1)] * 3, (3, 1)]
    for i, (kernel, stride) in enumerate(kernels):
        at, g = f"layers.{i}", h
        if f"{at}.expand_conv.weight" in state:
            g = norm(f"{at}.bn0", F.conv2d(g, state[f"{at}.expand_conv.weight"])).clamp(0, 6)
        depthwise = state[f"{at}.depthwise_conv.weight"]
        assert depthwise.shape[-1] == kernel
        g = norm(f"{at}.bn1", same(g, depthwise, stride, len(depthwise))).clamp(0, 6)
        g = F.conv2d(g, state[f"{at}.project_conv.weight"])
        if f"{at}.adapter.conv.weight" in state:
            g = g + F.conv2d(norm(f"{at}.adapter.norm", g), state[f"{at}.adapter.conv.weight"])
        g = norm(f"{at}.bn2", g)
        h = g + h if g.shape == h.shape else g
    h = norm("bn1", F.conv2d(h, state["conv_head.weight"])).clamp(0, 6).mean((2, 3))
    return h @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize("side", [8, 13, 32])
def test_the_forward_pass_is_the_one_written_out(net, side):
    x = torch.rand(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
    with torch.no_grad():
        torch.testing.assert_close(net(x), by_hand(net.state_dict(), x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("side", "kernel", "stride"), [(8, 3, 2), (7, 3, 2), (8, 5, 2), (5, 5, 1), (1, 5, 2)])
def test_padding_keeps_the_size_over_the_stride_rounded_up(side, kernel, stride):
    layer = home.same(1, 1, kernel, stride).double()
    x = normal(1, 1, side, side)
    assert layer(x).shape[-1] == math.ceil(side / stride)
    assert torch.equal(layer(x), same(x, layer.weight, stride))


def test_counts():
    """Convolutions and norms of Table 1 of the paper's B0 without squeeze-and-excitation; the head for 1,000 classes."""
    total, inputs = 3 * 32 * 9 + 2 * 32, 32
    plan = [(1, 3, 1, 16), (2, 3, 6, 24), (2, 5, 6, 40), (3, 3, 6, 80), (3, 5, 6, 112), (4, 5, 6, 192), (1, 3, 6, 320)]
    adapters = 0
    for repeats, kernel, expand, outputs in plan:
        for _ in range(repeats):
            wide = inputs * expand
            total += (inputs * wide + 2 * wide if expand > 1 else 0) + wide * kernel**2 + 2 * wide + wide * outputs + 2 * outputs
            adapters += outputs**2 + 2 * outputs + 2 * outputs  # the adapter, and the norm after it
            inputs = outputs
    total += 320 * 1280 + 2 * 1280
    net = models.effnet(1000)
    assert sum(p.numel() for p in net.parameters()) == total + 1281 * 1000 == 4_652_008
    net = models.effnet(10, adapters=True)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == adapters + 1281 * 10


def test_blocks_prefix_and_groups(net):
    task = Task.from_module(net)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    assert [b.name for b in task.blocks] == ["conv_stem", *(f"layers.{i}" for i in range(16)), "conv_head", "fc"]
    h = x
    for block in task.blocks:
        h = block(task.init(), h)
    assert torch.equal(h, task.apply(task.init(), x))
    assert task.prefix.layers == ("image", "conv_stem", "bn0", "act0")
    assert "buffer:layers.3.bn2.running_mean" in task.names
    assert "buffer:layers.3.bn1.running_mean" in task.frozen
    assert Task.from_module(models.effnet(3, train="head")).prefix.layers[-1] == "pool"


def test_grey_and_small_pictures(net):
    grey = torch.rand(2, 8, 8, dtype=torch.float64)
    assert torch.equal(net(grey), net(grey[:, None].repeat(1, 3, 1, 1)))
    larger = models.build("effnet-lite0:size=16", (8, 8), 3)
    assert larger.image(grey.float()).shape == (2, 3, 16, 16)
    assert torch.allclose(larger.image(torch.full((1, 8, 8), 0.5)), torch.full((1, 3, 16, 16), 0.5 / 128))


def test_engines_agree(monkeypatch):
    monkeypatch.setattr(home, "STAGES", ((1, 3, 1, 1, 8), (2, 5, 2, 6, 12)))
    monkeypatch.setattr(home, "FEATURES", 16)
    short = seeded(lambda: models.effnet(3, adapters=True, dropout=0.3))
    options = {"rounds": 2, "batch_size": 4, "dtype": "float64"}
    runs = [ft.run(ft.FedAvg(lr=0.1, epochs=1), pictures(), short, engine=engine, **options) for engine in ("loop", "vectorized")]
    for name, value in runs[0].model().items():
        torch.testing.assert_close(runs[1].model()[name], value, rtol=1e-9, atol=1e-11)


def test_a_file_with_the_packages_names_is_read(tmp_path):
    net = models.effnet(7)
    theirs = {}
    for name, value in net.state_dict().items():
        *modules, last = name.split(".")
        path = [part if part.isdigit() else f"_{part}" for part in modules]
        theirs[".".join([*path, last]).replace("_layers.", "_blocks.")] = value
    assert "_blocks.15._project_conv.weight" in theirs
    torch.save(theirs, tmp_path / "w.pth")
    again = models.effnet(3, adapters=True, backbone=tmp_path / "w.pth")
    assert torch.equal(again.state_dict()["layers.4.bn2.weight"], net.state_dict()["layers.4.bn2.weight"])
    assert "for 7 classes, not 3" in again.notes[1]


def test_weights_that_are_not_there_are_said_and_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(home, "find_spec", lambda name: None)
    with pytest.raises(errors.InvalidData, match="run: fedtailor data get effnet-lite0"):
        models.effnet(3, backbone="imagenet")
    (tmp_path / "models").mkdir()
    (tmp_path / home.FILE).write_bytes(b"something else")
    monkeypatch.setattr(home, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / "__init__.py")}))
    with pytest.raises(errors.InvalidData, match="not the published file"):
        models.effnet(3, backbone="imagenet")


def test_what_is_refused():
    with pytest.raises(errors.ModelMismatch, match="not of 4 channels"):
        models.build("effnet-lite0", (4, 8, 8), 3)
    with pytest.raises(errors.InvalidArgument, match="unknown option 'group'"):
        models.build("effnet-lite0:group", (3, 8, 8), 3)


@installed
def test_the_real_weights_are_those_written_out():
    net = models.effnet(1000, backbone="imagenet").eval()
    x = torch.from_numpy(np.random.default_rng(0).random((2, 3, 40, 40)))
    with torch.no_grad():
        want = by_hand({k: v.double() for k, v in net.state_dict().items()}, x)
        torch.testing.assert_close(net.double()(x), want, rtol=1e-9, atol=1e-9)


@installed
@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite_pytorch") is None,
    reason="to compare with its authors' code, pip install efficientnet_lite_pytorch",
)
def test_the_real_weights_give_what_their_own_code_gives():
    from efficientnet_lite_pytorch import EfficientNet

    theirs = EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(torch.load(home.imagenet(), weights_only=True))
    x = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = models.effnet(1000, backbone="imagenet").eval()(x)
        torch.testing.assert_close(ours, theirs((x * 255 - 127) / 128), rtol=0, atol=1e-5)
