"""Adapters by their formulas, and those of another library on a frozen network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import Task, models
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
