"""Adapters by their formulas, and those of another library on a frozen network."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import Task, errors, models
from fedtailor.models.adapters import Bottleneck, SeriesAdapter
from fedtailor.task.layers import batch_context
from tests.make import normal, seeded
from tests.pictures import pictures


def test_a_series_adapter_is_its_formula():
    """a(x) = x + W norm(x), W a matrix over channels, the norm with the batch's statistics when it trains."""
    a = seeded(lambda: SeriesAdapter(6, nn.BatchNorm2d, 0.0))
    x = normal(5, 6, 4, 4) * 3 + 1
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    matrix = a.conv.weight[:, :, 0, 0]
    want = x + torch.einsum("oc,nchw->nohw", matrix, (x - mean) / torch.sqrt(var + 1e-5))
    torch.testing.assert_close(a(x), want, rtol=0, atol=1e-12)
    assert {name for name, _ in a.named_parameters()} == {"norm.weight", "norm.bias", "conv.weight"}


def test_its_dropout_is_before_the_convolution_and_in_training_only():
    a = seeded(lambda: SeriesAdapter(3, lambda c: nn.GroupNorm(1, c), 0.5))
    with torch.no_grad():
        a.conv.weight.copy_(torch.eye(3, dtype=torch.float64)[:, :, None, None])
    task, x = Task.from_module(nn.Sequential(a, nn.Flatten(), nn.Linear(48, 2)).double()), normal(4, 3, 4, 4)
    block = task.blocks[0]
    normed = nn.functional.group_norm(x, 1)
    torch.testing.assert_close(block(task.init(), x), x + normed, rtol=0, atol=1e-12)
    with batch_context(None, torch.tensor(5)):
        share = (block(task.init(), x, training=True) - x) / normed  # 0 where dropped, 2 where kept
    assert set(share.round(decimals=9).unique().tolist()) == {0.0, 2.0}


def test_a_bottleneck_with_its_last_layer_at_zero_is_the_identity():
    a, x = seeded(lambda: Bottleneck(6, 2)), normal(3, 6)
    nn.init.zeros_(a.up.weight)
    assert torch.equal(a(x), x)


def test_low_rank_adapters_of_peft_train_as_they_are():
    """A network that peft has changed is a module with frozen parameters like any other."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = seeded(lambda: models.vit(3, shape=(3, 8, 8), dim=12, depth=2, heads=3))
    lora = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["head"]))
    runs = [
        ft.run(ft.Ditto(lr=0.1), pictures(), lora, rounds=2, batch_size=4, engine=engine, dtype="float64", workers=1)
        for engine in ("loop", "vectorized")
    ]
    moving = 2 * (2 * 12 + 2 * 36) + 3 * 12 + 3
    assert runs[0].summary["trained_parameters"] == 2 * moving
    for name, value in runs[0].model(0).items():
        torch.testing.assert_close(runs[1].model(0)[name], value, rtol=1e-9, atol=1e-11)


# -- adapters in the last blocks only --------------------------------------------------------------------------------------------


def block(width: int) -> int:
    """What moves in a block of a ResNet: two adapters (a matrix over channels and its norm), and the two norms after them."""
    return 2 * (width**2 + 2 * width) + 2 * 2 * width


@pytest.mark.parametrize(
    ("name", "frozen", "moving"),
    [
        ("resnet18:adapters,last=4", "layer2.1", 2 * block(256) + 2 * block(512) + 513 * 10),
        ("resnet18:adapters,last=1", "layer4.0", block(512) + 513 * 10),
        ("effnet-lite0:adapters,last=1", "layers.14", 320**2 + 4 * 320 + 1281 * 10),
        ("vit:adapters,last=1", "layers.2", 2 * (2 * 64 * 16 + 16 + 64) + 3 * 2 * 64 + 65 * 10),
        ("resnet8:last=1", "layer2.0", 9 * 32 * 64 + 9 * 64**2 + 32 * 64 + 3 * 2 * 64 + 65 * 10),  # all of the block
        ("resnet8:adapters,all,last=1", "layer2.0", 9 * 32 * 64 + 9 * 64**2 + 32 * 64 + 2 * 64 + block(64) + 65 * 10),
    ],
)
def test_the_blocks_before_the_last_are_frozen_and_run_once(name, frozen, moving):
    task = Task.from_module(models.build(name, (3, 32, 32), 10))
    assert task.prefix.layers[-1] == frozen
    assert sum(v.numel() for n, v in task.init().items() if not n.startswith("buffer:")) == moving
    task = Task.from_module(models.build(f"{name},dropout=0", (3, 32, 32), 10).double())
    x = normal(2, 3, 32, 32)
    torch.testing.assert_close(
        task.prefix.rest.apply(task.init(), task.prefix.apply(x)), task.apply(task.init(), x), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ["resnet8", "vit", "effnet-lite0"])
def test_as_many_as_there_are_blocks_is_all_of_them(name):
    count = {"resnet8": 3, "vit": 4, "effnet-lite0": 16}[name]
    nets = [models.build(f"{name}:adapters{more}", (3, 16, 16), 3) for more in ("", f",last={count}")]
    stem = {"bn1.weight", "bn1.bias"} if name == "resnet8" else set()  # it comes before the blocks
    moving = [{n for n, p in net.named_parameters() if p.requires_grad} for net in nets]
    assert moving[0] == moving[1] | stem
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet8:adapters,last=4", "last must be from 1 to 3, the number of blocks, not 4"),
        ("vit:last=5", "last must be from 1 to 4, the number of blocks, not 5"),
        ("effnet-lite0:adapters,last=0", "last must be a whole number from 1"),
    ],
)
def test_a_last_that_does_not_fit_is_refused(name, words):
    with pytest.raises(errors.InvalidArgument, match=re.escape(words)):
        models.build(name, (3, 16, 16), 3)


@pytest.mark.parametrize("name", ["resnet8", "vit", "effnet-lite0"])
def test_without_adapters_the_group_is_all_the_norms_and_the_head(name):
    plain, with_them = (Task.from_module(models.build(f"{name}{more}", (3, 16, 16), 3)) for more in ("", ":adapters,all"))
    assert plain.groups["adapter"]
    assert set(plain.groups["adapter"]) == {n for n in with_them.groups["adapter"] if ".adapter" not in n}
