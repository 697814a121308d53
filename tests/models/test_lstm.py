"""The LSTM against torch's, on and off vmap; its parameters counted; its parts; both engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fedtailor as ft
from fedtailor import Task, errors, models
from fedtailor.models.lstm import LSTM, LSTMLayer
from tests.make import normal, seeded

TOL = {"rtol": 0, "atol": 1e-12}
TOKENS = 7


def network(per_position=True, hidden=(5, 4), dense=(), dropout=0.0, seed=0):
    return seeded(lambda: LSTM(TOKENS, TOKENS, 3, hidden, dense, per_position=per_position, dropout=dropout), seed=seed)


def rows(count=4, length=6, seed=0):
    return torch.randint(TOKENS, (count, length), generator=torch.Generator().manual_seed(seed))


def torch_layer(layer: LSTMLayer) -> nn.LSTM:
    """torch's layer with the same weights."""
    theirs = nn.LSTM(layer.weight_ih.shape[1], layer.hidden, batch_first=True).double()
    theirs.load_state_dict({f"{name}_l0": value for name, value in layer.state_dict().items()})
    return theirs


# -- against torch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 9])
def test_a_layer_under_vmap_is_torchs_for_every_client(length):
    layers = [seeded(LSTMLayer, 3, 5, seed=seed) for seed in range(2)]
    x, probe = normal(2, 4, length, 3), normal(2, 4, length, 5, seed=1)
    stacked = {name: torch.stack([layer.get_parameter(name).detach() for layer in layers]) for name in layers[0].state_dict()}
    for leaf in stacked.values():
        leaf.requires_grad_()
    x.requires_grad_()
    out = vmap(lambda weights, rows: functional_call(layers[0], weights, (rows,)))(stacked, x)
    gradients = torch.autograd.grad((out * probe).sum(), [*stacked.values(), x])
    for i, layer in enumerate(layers):
        theirs, mine = torch_layer(layer), x[i].detach().requires_grad_()
        wanted = theirs(mine)[0]
        torch.testing.assert_close(out[i], wanted, **TOL)
        want = torch.autograd.grad((wanted * probe[i]).sum(), [*theirs.parameters(), mine])
        for have, should in zip(gradients, want, strict=True):
            torch.testing.assert_close(have[i], should, **TOL)


@pytest.mark.parametrize("per_position", [True, False], ids=["per-position", "last"])
def test_the_network_is_embedding_two_layers_of_torch_and_a_linear_map(per_position):
    net, x = network(per_position, dense=(6,)), rows()
    hidden = net.embedding.weight[x]
    for layer in net.layers:
        hidden = torch_layer(layer)(hidden)[0]
    hidden = hidden if per_position else hidden[:, -1]
    flat = hidden @ net.dense[0].weight.T + net.dense[0].bias
    torch.testing.assert_close(net(x), flat @ net.head.weight.T + net.head.bias, **TOL)


def test_torch_func_grad_and_autograd_agree():
    task, x, y = Task.from_module(network()), rows(), rows(seed=1)
    model = {k: v.requires_grad_() for k, v in task.init().items()}
    want = torch.autograd.grad(task.risk(model, {"x": x, "y": y}), list(model.values()))
    for have, should in zip(grad(task.risk)(task.init(), {"x": x, "y": y}).values(), want, strict=True):
        torch.testing.assert_close(have, should, **TOL)


def test_every_batch_starts_from_zero_state():
    net, x = network(), rows()
    assert torch.equal(net(x), net(x))
    torch.testing.assert_close(net(x)[:1], net(x[:1]), **TOL)  # no row sees another


def test_the_state_at_a_position_depends_on_nothing_after_it():
    net, x = network(), rows()
    other = torch.cat([x[:, :4], (x[:, 4:] + 1) % TOKENS], 1)
    torch.testing.assert_close(net(x)[:, :4], net(other)[:, :4], **TOL)
    assert not torch.allclose(net(x)[:, 4], net(other)[:, 4])


# -- parameters and parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocabulary", "count"),
    [
        # embedding 90 x 8; layers 4 x 256 (8 + 256 + 2) and 4 x 256 (256 + 256 + 2); head (256 + 1) x 90
        ("lstm:8,256,256", 90, 90 * 8 + 1024 * 266 + 1024 * 514 + 257 * 90),
        # 10,000 words and four signs: embedding, one layer of 670, a linear map to 96, head
        ("lstm:96,670/96", 10_004, 10_004 * 96 + 2680 * 768 + 671 * 96 + 97 * 10_004),
        ("lstm", 76, 76 * 8 + 256 * 74 + 65 * 76),
        ("lstm:16", 1_000, 1_000 * 32 + 64 * 50 + 17 * 1_000),
    ],
    ids=["shakespeare", "stackoverflow", "default", "words"],
)
def test_parameters_by_arithmetic(name, vocabulary, count):
    net = models.build(name, (80,), vocabulary, tokens=vocabulary)
    assert sum(p.numel() for p in net.parameters()) == count


def test_the_papers_counts():
    assert 90 * 8 + 1024 * 266 + 1024 * 514 + 257 * 90 == 822_570
    assert 10_004 * 96 + 2680 * 768 + 671 * 96 + 97 * 10_004 == 4_053_428


@pytest.mark.parametrize("dense", [(), (6,)], ids=["head", "dense"])
@pytest.mark.parametrize("per_position", [True, False], ids=["per-position", "last"])
def test_the_blocks_in_order_are_the_model(per_position, dense):
    task, x = Task.from_module(network(per_position, dense=dense)), rows()
    values = x
    for block in task.blocks:
        values = block(task.init(), values)
    torch.testing.assert_close(values, task.apply(task.init(), x), **TOL)
    assert [b.name for b in task.blocks] == ["layers.0", "layers.1", *(["dense.0"] if dense else []), "head"]
    owned = [name for block in task.blocks for name in block.parameters]
    assert sorted(owned) == sorted(task.names)
    assert task.groups["embedding"] == ("embedding.weight",)
    assert task.groups["head"] == ("head.weight", "head.bias")


def test_a_block_of_no_weights_is_refused():
    with pytest.raises(errors.InvalidArgument, match="has no weights"):
        Task.from_module(network(), blocks=[("embedding", "layers.0"), ("dropouts.0",)])


def test_the_seed_fixes_the_start():
    one, again, other = (models.build("lstm", (5,), 9, tokens=9, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


# -- engines -----------------------------------------------------------------------------------------------------------


def sequences(per_position=True, sizes=(11, 4, 7, 12)):
    """Clients of uneven size whose rows have uneven length; the next token is a rotation of the last with some noise."""
    draw = np.random.default_rng(2)

    def split(counts):
        out = []
        for i, n in enumerate(counts):
            x = draw.integers(0, TOKENS, (n, 6))
            y = np.where(draw.random((n, 6)) < 0.8, (x + 1 + i % 2) % TOKENS, draw.integers(0, TOKENS, (n, 6)))
            lengths = draw.integers(1, 7, n)
            out.append((x, np.where(np.arange(6) < lengths[:, None], y, -1) if per_position else y[:, -1]))
        return out

    few = [3] * len(sizes)
    return ft.Federation.from_arrays(split(sizes), split(few), split(few), tokens=TOKENS, task="classification")


@pytest.mark.parametrize(
    ("method", "per_position"),
    [(ft.FedAvg, True), (ft.Ditto, True), (ft.FedAvgFT, True), (ft.Ditto, False)],
    ids=["FedAvg", "Ditto", "FedAvgFT", "Ditto-last"],
)
def test_the_laws_hold_on_a_recurrent_network_with_dropout(method, per_position):
    ft.check_algorithm(method(lr=0.5), network(per_position, (4, 3), dropout=0.3), sequences(per_position))


@pytest.mark.parametrize(
    "algorithm",
    [
        ft.HypCluster(lr=0.5),
        ft.FedCLUPDynamic(lr=0.5),
        ft.AL2SGD(lr=0.1, mu=0.1, smoothness=10.0),
        ft.FedRep(lr=0.5),
        ft.PerFedAvg(lr=0.2),
        ft.APFL(lr=0.5),
    ],
    ids=lambda a: type(a).__name__,
)
def test_engines_agree_on_methods_that_weigh_rows_or_step_by_themselves(algorithm):
    runs = [
        ft.run(algorithm, sequences(), "lstm:3,4", rounds=2, batch_size=5, dtype="float64", engine=engine, workers=1)
        for engine in ("loop", "vectorized")
    ]
    x = sequences().test.client(0)[0]
    for client in range(4):
        torch.testing.assert_close(runs[0].predict(client, x), runs[1].predict(client, x), rtol=0, atol=1e-9)
    for name, values in runs[0].clients.items():
        np.testing.assert_allclose(runs[1].clients[name], values, atol=1e-9, err_msg=name)


def test_it_learns_a_rotation():
    fed = sequences(sizes=(60, 60))
    run = ft.run(ft.Local(lr=2.0, epochs=4), fed, "lstm:4,16", rounds=10, batch_size=10, engine="loop", workers=1)
    assert run.summary["acc_personal"] > 0.6  # chance is 1/7; 0.8 + 0.2/7 is the most there is


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lstm:0", "lstm:a", "lstm:8,", "lstm:8,16/", "lstm:8/x"])
def test_options_that_cannot_be_read(name):
    with pytest.raises(errors.InvalidArgument, match="cannot read"):
        models.build(name, (5,), 9, tokens=9)


def test_tokens_need_an_lstm_and_an_lstm_needs_tokens():
    with pytest.raises(errors.ModelMismatch, match="'linear' does not read rows of tokens; use the model 'lstm'"):
        ft.run(ft.FedAvg(), sequences(), rounds=1)
    with pytest.raises(errors.ModelMismatch, match="'lstm' does not read rows of numbers"):
        models.build("lstm", (5,), 9)
    with pytest.raises(errors.ModelMismatch, match="rows of tokens"):
        network()(normal(4, 6))


def test_sequences_longer_than_the_model_allows_are_refused():
    run = ft.run(ft.FedAvg(), sequences(), "lstm:4", rounds=1, workers=1)
    assert run.predict(0, rows(2, 3)).shape == (2, 3, TOKENS)  # shorter ones are fine
    with pytest.raises(errors.ModelMismatch, match="1 to 6 tokens"):
        run.predict(0, rows(2, 7))
    with pytest.raises(errors.ModelMismatch, match="1 to 6 tokens"):
        run.predict(0, rows(2, 0))
    with pytest.raises(errors.ModelMismatch, match="the model takes 1 to 6"):
        models.build("lstm", (6,), TOKENS, tokens=TOKENS)(rows(2, 7))


@pytest.mark.parametrize("value", [TOKENS, -1, 1.5])
def test_predicting_what_is_no_token_is_refused(value):
    run = ft.run(ft.FedAvg(), sequences(), "lstm:4", rounds=1, workers=1)
    with pytest.raises(errors.ModelMismatch, match="is not a token of this model"):
        run.predict(0, np.full((1, 4), value))


def test_knn_needs_one_label_per_row():
    with pytest.raises(errors.InvalidArgument, match="one label per row"):
        ft.run(ft.KNNPer(), sequences(), "lstm:4", rounds=1)
    run = ft.run(ft.KNNPer(), sequences(per_position=False), "lstm:4", rounds=1, batch_size=4, engine="vectorized")
    assert run.summary["acc_personal"] is not None


def test_a_model_of_the_wrong_output_is_refused():
    with pytest.raises(errors.ModelMismatch, match=r"a label for each of 6 positions; let it return \[rows, 6, 7\]"):
        ft.run(ft.FedAvg(), sequences(), network(per_position=False), rounds=1)
    with pytest.raises(errors.ModelMismatch, match="labels have 7 classes"):
        ft.run(ft.FedAvg(), sequences(per_position=False), network(per_position=True), rounds=1)
