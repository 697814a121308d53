"""The vision transformer against torch's own encoder layer, and its adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import Task, errors, models
from tests.make import normal, seeded
from tests.pictures import pictures

SIZE = {"shape": (3, 8, 8), "dim": 12, "depth": 2, "heads": 3}


def tiny(**more):
    return seeded(lambda: models.vit(3, **{**SIZE, **more}))


def test_a_layer_is_torchs_encoder_layer():
    """torch.nn.TransformerEncoderLayer, pre-norm, with the same weights."""
    net = tiny()
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", batch_first=True, norm_first=True).double().eval()
    ours = net.layers[0]
    names = {
        "norm1": ours.norm1,
        "norm2": ours.norm2,
        "linear1": ours.mlp[0],
        "linear2": ours.mlp[2],
        "self_attn.out_proj": ours.attention.proj,
    }
    state = {f"{at}.{k}": v for at, module in names.items() for k, v in module.state_dict().items()}
    state |= {f"self_attn.in_proj_{k}": v for k, v in ours.attention.qkv.state_dict().items()}
    theirs.load_state_dict(state)
    x = normal(4, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


def test_patches_are_those_of_a_convolution_by_its_own_width():
    net, x = tiny(), normal(2, 3, 8, 8)
    weight = net.embed.proj.weight.view(12, 3, 4, 4)
    tokens = nn.functional.conv2d(x, weight, net.embed.proj.bias, stride=4).flatten(2).transpose(1, 2)
    out = net.embed(x)
    torch.testing.assert_close(out[:, 1:], tokens + net.embed.place[1:], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[:, 0], (net.embed.token + net.embed.place[:1]).expand(2, -1), rtol=0, atol=0)


def test_counts():
    """Per layer 12 d^2 + 13 d; an adapter 2 d h + h + d; patches 16 c d + d; places and token; last norm; head."""
    d, h, depth = 12, 5, 2
    body = 48 * d + d + (4 + 1) * d + d + depth * (12 * d * d + 13 * d) + 2 * d
    head = 3 * d + 3
    plain = models.vit(3, **SIZE)
    assert sum(p.numel() for p in plain.parameters()) == body + head
    net = models.vit(3, **SIZE, adapters=True, hidden=h)
    adapters = 2 * depth * (2 * d * h + h + d)
    assert sum(p.numel() for p in net.parameters()) == body + head + adapters
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == adapters + (2 * depth + 1) * 2 * d + head


def test_an_adapter_is_a_bottleneck_with_a_skip():
    net = tiny(adapters=True, hidden=5)
    a, x = net.layers[0].adapter1, normal(2, 5, 12)
    want = x + torch.relu(x @ a.down.weight.T + a.down.bias) @ a.up.weight.T + a.up.bias
    torch.testing.assert_close(a(x), want, rtol=0, atol=1e-12)
    assert not a.down.bias.any()
    assert not a.up.bias.any()
    big = seeded(lambda: models.vit(3, shape=(3, 8, 8), dim=256, heads=4, adapters=True, hidden=64))
    assert abs(float(big.layers[0].adapter1.down.weight.detach().std()) / 1e-2 - 1) < 0.03


def test_no_row_sees_another_and_there_is_nothing_to_average_but_weights():
    task, x = Task.from_module(tiny(adapters=True)), normal(4, 3, 8, 8)
    assert not any(name.startswith("buffer:") for name in (*task.names, *task.frozen))
    row_by_row = torch.cat([task.forward(task.init(), {"x": row[None]})[0] for row in x])
    torch.testing.assert_close(task.forward(task.init(), {"x": x})[0], row_by_row, rtol=0, atol=1e-12)


def test_the_blocks_are_the_network_and_the_patches_its_frozen_beginning():
    task, x = Task.from_module(tiny(adapters=True)), normal(4, 3, 8, 8)
    assert [b.name for b in task.blocks] == ["embed", "layers.0", "layers.1", "head"]
    h = x
    for block in task.blocks:
        h = block(task.init(), h)
    assert torch.equal(h, task.apply(task.init(), x))
    assert task.prefix.layers == ("image", "embed")
    assert torch.equal(task.prefix.rest.apply(task.init(), task.prefix.apply(x)), task.apply(task.init(), x))


@pytest.mark.parametrize("more", [{}, {"adapters": True}, {"dropout": 0.2}], ids=["all", "adapters", "dropout"])
def test_engines_agree(more):
    runs = [
        ft.run(ft.Ditto(lr=0.1, epochs=1), pictures(), tiny(**more), rounds=2, batch_size=4, dtype="float64", engine=engine)
        for engine in ("loop", "vectorized")
    ]
    for i in range(3):
        for name, value in runs[0].model(i).items():
            torch.testing.assert_close(runs[1].model(i)[name], value, rtol=1e-9, atol=1e-11)


def test_it_learns_where_the_stripe_is():
    run = ft.run(ft.FedAvg(lr=0.1, epochs=5), pictures((30, 30)), "vit:dim=16,depth=1", rounds=8, batch_size=10, engine="loop")
    assert run.summary["acc_global"] > 0.8


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("vit:patch=3", (3, 8, 8), "patches of 3 do not cut images of 8x8; use a patch of 1, 2, 4, 8"),
        ("vit:heads=5", (3, 8, 8), "dim must be a multiple of heads"),
        ("vit", (64,), "vit needs images"),
        ("vit:group", (3, 8, 8), "unknown option 'group'"),
    ],
)
def test_what_is_refused(name, shape, words):
    with pytest.raises(errors.FedtailorError, match=words):
        models.build(name, shape, 3)
