"""Modules and losses that do what is rarely done: right on every engine, or refused by name."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import fedtailor as ft
from fedtailor import tree
from fedtailor.errors import Diverged, InvalidArgument, ModelMismatch
from fedtailor.task import Task
from tests.make import federation, seeded

DATA = federation((7, 5, 9, 6))
SETTINGS: dict[str, Any] = {"rounds": 2, "batch_size": 6, "seed": 4, "dtype": "float64", "evaluate_every": 0}
ENGINES = {"loop": {"engine": "loop", "workers": 1}, "workers": {"engine": "loop", "workers": 2}, "auto": {"workers": 1}}


class Net(nn.Module):
    """Two layers, with something done to them, and a forward pass that may be another."""

    def __init__(self, change=lambda net: None, forward=None):
        super().__init__()
        self.first, self.out, self.other = nn.Linear(3, 6), nn.Linear(6, 2), forward
        change(self)

    def forward(self, x):
        return self.usual(x) if self.other is None else self.other(self, x)

    def usual(self, x):
        return self.out(torch.tanh(self.first(x)))


class Words(nn.Module):
    """Means of embeddings of whole numbers."""

    def __init__(self, functional=False, **options):
        super().__init__()
        self.words, self.out, self.functional = nn.Embedding(9, 4, **options), nn.Linear(4, 2), functional

    def forward(self, ids):
        found = F.embedding(ids, self.words.weight, sparse=True) if self.functional else self.words(ids)
        return self.out(found.mean(1))


def words():
    split = [
        [({"ids": (np.abs(x.numpy()) * 3).astype(int) % 9}, y) for x, y in map(part.client, range(4))]
        for part in (DATA.train, DATA.test)
    ]
    return ft.Federation.from_arrays(*split)


def trained(make, data=DATA, **settings):
    torch.manual_seed(int(np.random.default_rng().integers(2**31)))  # what is outside must not matter
    np.random.seed(None)
    return ft.run(ft.Ditto(lr=0.2, epochs=2), data, seeded(make), **{**SETTINGS, **settings})


def assert_close(a, b):
    for p, q in zip(tree.leaves([a.shared, a.store.dump()]), tree.leaves([b.shared, b.store.dump()]), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def by_hand(module, loss=F.cross_entropy, client=1, lr=0.3):
    """A module's parameters after one step on a client's rows, taken by torch."""
    x, y = DATA.to(torch.float64).train.client(client)
    module.train()
    loss(module(x.clone()), y).backward()
    return {name: (p - lr * (0 if p.grad is None else p.grad.to_dense())).detach() for name, p in module.named_parameters()}


def in_place_between(net, x):
    h = net.first(x)
    h.tanh_()
    return net.out((h * 1).add_(1))


def halve(layer, inputs, output):
    return output * 0.5


def halve_gradient(layer, inputs, outputs):
    return tuple(gradient * 0.5 for gradient in inputs)


def scaled(net):
    net.level = nn.Parameter(torch.tensor(1.5))
    net.other = lambda net, x: net.usual(x) * net.level


def turned(net):
    """A constant complex buffer, as rotary positions have."""
    net.register_buffer("turn", torch.exp(1j * torch.arange(3).double()))
    net.other = lambda net, x: net.usual((x * net.turn).imag.to(x.dtype))


def twice(net):
    """One layer at two places. Before: torch left the last client's weights in the module, and workers could not be sent it."""
    net.again = net.middle = nn.Linear(6, 6)
    net.other = lambda net, x: net.out(torch.tanh(net.again(torch.tanh(net.middle(torch.tanh(net.first(x)))))))


def keep_seen(net, x):
    """Keeps what it saw, to be looked at. Before: what the trial under vmap had left there could not be sent to workers."""
    net.seen = net.first(x)
    return net.out(torch.tanh(net.seen))


RIGHT = {
    "in place between layers": lambda: Net(forward=in_place_between),
    "forward hook": lambda: Net(lambda net: net.first.register_forward_hook(halve)),
    "weight norm": lambda: Net(lambda net: setattr(net, "out", parametrizations.weight_norm(net.out))),
    "single number": lambda: Net(scaled),
    "a layer that is not used": lambda: Net(lambda net: setattr(net, "idle", nn.Linear(3, 3))),
    "a frozen layer": lambda: Net(lambda net: net.first.requires_grad_(False)),
    "complex buffer": lambda: Net(turned),
    "backward hook": lambda: Net(lambda net: net.out.register_full_backward_hook(halve_gradient)),
    "a layer twice": lambda: Net(twice),
    "keeps what it saw": lambda: Net(forward=keep_seen),
    "a branch on numbers": lambda: Net(forward=lambda net, x: net.usual(x) if x.sum() > 0 else net.out(net.first(x))),
}
NOT_STACKED = ("backward hook", "a branch on numbers")  # vmap cannot take these
NOT_SENT = ("weight norm",)  # torch does not pickle what is parametrized


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of weight norm under vmap
@pytest.mark.parametrize("kind", RIGHT)
def test_a_step_is_the_one_that_torch_takes_on_every_engine(kind):
    want = by_hand(seeded(RIGHT[kind]))
    for how in (*ENGINES.values(), {"engine": "vectorized"}):
        call = partial(ft.run, ft.Local(lr=0.3, steps=1), DATA, seeded(RIGHT[kind]), rounds=1, dtype="float64", **how)
        refused = (kind in NOT_STACKED and how == {"engine": "vectorized"}) or (kind in NOT_SENT and how == ENGINES["workers"])
        if refused:
            with pytest.raises(InvalidArgument, match=r"use (engine='loop'|workers=1)"):
                call()
            continue
        run = call()
        found = run.store.get(np.array([1]))["model"]
        for name, leaf in found.items():
            torch.testing.assert_close(leaf[0], want[name], rtol=1e-9, atol=1e-11)


def test_spectral_norm_moves_its_vectors_with_the_client_and_takes_the_loop_engine():
    make = lambda: Net(lambda net: setattr(net, "out", parametrizations.spectral_norm(net.out)))  # noqa: E731
    one, auto = (trained(make, **ENGINES[how]) for how in ("loop", "auto"))
    assert_close(one, auto)
    with pytest.raises(InvalidArgument, match="use workers=1"):
        trained(make, **ENGINES["workers"])
    assert any(name.startswith("buffer:out.parametrizations") for name in one.shared["model"])


def test_the_head_of_a_network_with_weight_norm_is_the_whole_last_layer():
    """Before: its bias was taken for a part of the body, and its input could not be found."""
    task = Task.from_module(seeded(RIGHT["weight norm"]))
    assert set(task.groups["head"]) == {name for name in task.names if name.startswith("out.")}
    assert task.head == "out"
    x, model = DATA.to(torch.float64).train.x[:4], task.init()
    torch.testing.assert_close(task.features(model, x), torch.tanh(F.linear(x, model["first.weight"], model["first.bias"])))


@pytest.mark.parametrize("kind", [{"sparse": True}, {}], ids=["sparse", "dense"])
def test_a_sparse_embedding_is_trained_with_the_same_dense_gradient(kind):
    data = words()
    runs = [trained(lambda: Words(**kind), data, **how) for how in (*ENGINES.values(), {"engine": "vectorized"})]
    dense = trained(Words, data, **ENGINES["loop"])
    for run in runs:
        assert_close(run, dense)


def test_half_precision_is_trained_in_that_of_the_run():
    module = seeded(Net).half()
    run = ft.run(ft.FedAvg(lr=1e-30), DATA, module, **SETTINGS)
    assert all(leaf.dtype is torch.float64 for leaf in run.shared["model"].values())
    assert torch.equal(run.shared["model"]["out.bias"], module.out.bias.detach().double())


def write_rows(net, x):
    return net.usual(x.mul_(2))


def write_parameters(net, x):
    net.first.weight.data.mul_(0.999)
    return net.usual(x)


def drawn_if(condition):
    def forward(net, x):
        return net.usual(x) * (1 + 0.1 * np.random.rand() if condition(net, x) else 1)

    return lambda: Net(forward=forward)


def with_generator(net):
    net.draw = np.random.default_rng(0)
    net.other = lambda net, x: net.usual(x) * (1.0 if net.training else 1 + 0.1 * net.draw.random())


def counted(training):
    """A layer that weakens after some calls; a worker process would count for itself."""

    def forward(net, x):
        net.calls = getattr(net, "calls", 0) + (net.training == training)
        return net.usual(x) * (1.0 if net.calls < 30 else 0.1)

    return lambda: Net(forward=forward)


def with_list(net):
    net.levels = {"seen": []}

    def forward(net, x):
        net.levels["seen"].append(net.first(x).mean().item())
        return net.usual(x) + (net.levels["seen"][-8] if len(net.levels["seen"]) > 20 else 0.0)

    net.other = forward


def normed_by_function(net):
    net.register_buffer("mean", torch.zeros(6))
    net.register_buffer("var", torch.ones(6))
    net.other = lambda net, x: net.out(F.batch_norm(net.first(x), net.mean, net.var, training=net.training))


def complex_weight(net):
    net.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))


REFUSED = {
    "writes to rows": (lambda: Net(forward=write_rows), "writes to the rows in place"),
    "activation in place first": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), "writes to the rows in place"),
    "writes to parameters": (lambda: Net(forward=write_parameters), "writes to its first.weight in place"),
    "draws on long batches": (drawn_if(lambda net, x: net.training and len(x) >= 5), "NumPy's global generator"),
    "draws when it predicts": (drawn_if(lambda net, x: not net.training), "predicts other numbers the second time"),
    "own generator": (lambda: Net(with_generator), "predicts other numbers the second time"),
    "counts its calls": (counted(True), "the module changes calls when it is called"),
    "counts its predictions": (counted(False), "the module changes calls when it is called"),
    "keeps a list": (lambda: Net(with_list), "the module changes levels when it is called"),
    "batches of one row": (lambda: Net(normed_by_function), r"fails on a batch of 1 row .*use another batch_size"),
    "spread over devices": (lambda: nn.DataParallel(Net()), "give what it holds: .module"),
    "complex parameter": (lambda: Net(complex_weight), "parameter turn is complex"),
    "hook of a parameter": (lambda: Net(lambda net: net.out.bias.register_hook(lambda g: g / 2)), "out.bias has a hook"),
    "a lock": (lambda: Net(lambda net: setattr(net, "lock", threading.Lock())), "cannot be copied"),
    "all frozen": (lambda: Net(lambda net: net.requires_grad_(False)), "no parameters to train"),
    "two outputs in training": (
        lambda: Net(forward=lambda net, x: (net.usual(x), x) if net.training else net.usual(x)),
        "fails in a training step",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_engine_gets_right_is_refused_by_name(kind):
    make, says = REFUSED[kind]
    rows = DATA.train.x.clone()
    for how in (*ENGINES.values(), {"engine": "vectorized"}):
        with pytest.raises(InvalidArgument, match=says):
            trained(make, **how)
    assert torch.equal(DATA.train.x, rows)


def test_old_weight_norm_is_refused_with_what_to_use():
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(3, 2))
    with pytest.raises(InvalidArgument, match=r"cannot be copied.*parametrizations"):
        ft.run(ft.Local(), DATA, layer, **SETTINGS)


def test_embeddings_that_are_sparse_by_a_function_or_renormed_in_place_are_refused():
    """Before: evaluating a model with max_norm changed it."""
    with pytest.raises(InvalidArgument, match="sparse gradients"):
        trained(lambda: Words(functional=True), words())
    with pytest.raises(InvalidArgument, match=r"writes to its words.weight in place.*max_norm"):
        trained(lambda: Words(max_norm=0.01), words())


def test_several_outputs_are_refused():
    with pytest.raises(ModelMismatch, match="output is a tuple"):
        trained(lambda: Net(forward=lambda net, x: (net.usual(x), x)))


def test_an_activation_in_place_in_frozen_first_layers_leaves_the_rows_alone():
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Linear(4, 2)).double()
    module[1].requires_grad_(False)
    data = DATA.to(torch.float64)
    rows = data.train.x.clone(), data.test.x.clone()
    run = ft.run(ft.Local(), data, module, **SETTINGS)
    assert any("computed once" in note for note in run.summary["notes"])
    assert torch.equal(data.train.x, rows[0])
    assert torch.equal(data.test.x, rows[1])


# -- losses ------------------------------------------------------------------------------------------------------------
def each(logits, y):
    return F.cross_entropy(logits, y, reduction="none")


def noisy(logits, y):
    return each(logits, y) * torch.rand(len(y))


def in_place(logits, y):
    return each(logits.mul_(2), y)


def test_a_loss_may_write_to_the_logits():
    """Before: measuring failed with torch's error, or measured the logits that the loss had left."""
    twice = lambda logits, y: each(2 * logits, y)  # noqa: E731
    for how in (*ENGINES.values(), {"engine": "vectorized"}):
        one, other = (trained(Net, loss=loss, evaluate_every=1, **how) for loss in (in_place, twice))
        assert_close(one, other)
        for key in ("loss_personal", "loss_global", "acc_personal", "log_loss_personal"):
            assert one.summary[key] == pytest.approx(other.summary[key], rel=1e-9)


def test_a_loss_below_zero_is_no_divergence():
    """Before: what is larger than a million times the (negative) loss of predicting zero was taken for one."""
    shifted = lambda logits, y: each(logits, y) - 5  # noqa: E731
    for how in (ENGINES["loop"], {"engine": "vectorized"}):
        one, other = (trained(Net, loss=loss, evaluate_every=1, **how) for loss in (shifted, each))
        assert_close(one, other)
        assert one.summary["loss_personal"] == pytest.approx(other.summary["loss_personal"] - 5, rel=1e-9)


def relative(logits, y):
    return each(logits, y) / (0.1 + each(logits, y).mean())


@pytest.mark.parametrize("loss", [noisy, relative], ids=["draws", "mixes rows"])
def test_a_loss_that_draws_or_mixes_rows_takes_the_loop_engine(loss):
    one, two, auto = (trained(Net, loss=loss, **how) for how in ENGINES.values())
    assert auto.summary["engine"] == "loop"
    assert_close(one, two)
    assert_close(one, auto)
    with pytest.raises(InvalidArgument, match="use engine='loop'"):
        trained(Net, loss=loss, engine="vectorized")


def test_a_loss_that_writes_to_the_labels_is_refused():
    labels = DATA.train.y.clone()
    with pytest.raises(InvalidArgument, match="writes to the labels in place"):
        trained(Net, loss=lambda logits, y: each(logits, y.clamp_(max=0)))
    assert torch.equal(DATA.train.y, labels)


@pytest.mark.parametrize("how", [*ENGINES.values(), {"engine": "vectorized"}], ids=[*ENGINES, "vectorized"])
def test_a_loss_that_is_no_number_names_the_clients(how):
    with pytest.raises(Diverged, match="client"):
        trained(Net, loss=lambda logits, y: each(logits, y) * float("nan"), **how)


@pytest.mark.parametrize("loss", [lambda out, y: each(out.detach(), y), lambda out, y: (out.argmax(1) != y).double()])
def test_a_loss_without_a_gradient_is_refused(loss):
    with pytest.raises(InvalidArgument, match="fails in a training step"):
        trained(Net, loss=loss)


# -- measures ----------------------------------------------------------------------------------------------------------
def strict(logits, y):
    if len(y.unique()) < 2:
        raise ValueError("only one class")
    return 1.0


def test_a_measure_that_fails_for_one_client_says_what_to_return():
    x, y = DATA.test.client(0)
    tests = [(x, y * 0 if i == 2 else (y * 0).index_fill(0, torch.tensor([1]), 1)) for i in range(4)]
    data = ft.Federation.from_arrays([DATA.train.client(i) for i in range(4)], tests)
    with pytest.raises(InvalidArgument, match=r"metric strict fails on a client's 4 rows \(only one class\).*nan where"):
        trained(Net, data, metrics=[strict])
    run = trained(Net, data, metrics={"strict": lambda out, y: strict(out, y) if len(y.unique()) > 1 else float("nan")})
    assert run.summary["strict_personal"] == 1.0  # of the three that have it
    assert np.isnan(run.clients["strict_personal"]).tolist() == [False, False, True, False]


def test_a_measure_that_draws_is_a_function_of_what_it_measures():
    """Before: it was another number in every run."""
    draws = {"torch": lambda out, y: torch.rand(1), "numpy": lambda out, y: np.random.rand()}
    for draw in draws.values():
        one, again = (trained(Net, metrics={"m": draw}) for _ in range(2))
        assert one.summary["m_personal"] == again.summary["m_personal"]
