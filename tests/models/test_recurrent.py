"""States of two LSTMs mixed position by position, against torch's cells taken one by one; Flow on top of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import fedtailor as ft
from fedtailor import Federation, Task, errors
from fedtailor.metrics.cost import multiply_adds
from fedtailor.models import LSTM, router
from fedtailor.models.lstm import LSTMLayer
from fedtailor.models.recurrent import mixed_recurrent, recurrent
from tests.make import normal, seeded
from tests.models.test_lstm import TOKENS, sequences

TOL = {"rtol": 0, "atol": 1e-12}
E, H = 3, 4
ROUTER = {k: 3 * v for k, v in router.init(E + 4 * H, 1, (6, 5), seed=1, dtype=torch.float64).items()}
ROUTER["exit.1.bias"] = torch.zeros(2, dtype=torch.float64)


def layers(seed: int) -> list[LSTMLayer]:
    return [seeded(LSTMLayer, E, H, seed=seed), seeded(LSTMLayer, H, H, seed=seed + 1)]


def weights(of: list[LSTMLayer]) -> list[dict[str, torch.Tensor]]:
    return [dict(layer.named_parameters()) for layer in of]


def torch_cell(layer: LSTMLayer) -> nn.LSTMCell:
    cell = nn.LSTMCell(layer.weight_ih.shape[1], H).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, layer.get_parameter(name))  # the same tensors: their gradients can be compared
    return cell


def chain(params, seen):
    """relu, relu, two scores."""
    for j in (1, 2):
        seen = torch.relu(seen @ params[f"base.{j}.weight"].T + params[f"base.{j}.bias"])
    return seen @ params["exit.1.weight"].T + params["exit.1.bias"]


def transcribed(embedded, ours, theirs, params, hard=False):
    """All layers at a position, then the next position: (mixed h of the last layer, scores)."""
    g, v = [torch_cell(layer) for layer in ours], [torch_cell(layer) for layer in theirs]
    zero = torch.zeros(len(embedded), H, dtype=torch.float64)
    state_g, state_v = [(zero, zero) for _ in g], [(zero, zero) for _ in v]
    out, scores = [], []
    for t in range(embedded.shape[1]):
        to_g = to_v = embedded[:, t]
        layer_scores = []
        for j in range(len(g)):
            h_g, c_g = g[j](to_g, state_g[j])
            h_v, c_v = state_v[j] = v[j](to_v, state_v[j])
            layer_scores.append(chain(params, torch.cat([embedded[:, t], h_g, c_g, h_v, c_v], 1)))
            q = layer_scores[-1].softmax(1)
            if hard:
                first = (q[:, 0] >= q[:, 1]).double()
                q = torch.stack([first, 1 - first], 1)
            state_g[j] = (q[:, :1] * h_g + q[:, 1:] * h_v, q[:, :1] * c_g + q[:, 1:] * c_v)
            to_g, to_v = state_g[j][0], h_v
        out.append(to_g)
        scores.append(torch.stack(layer_scores, 1))
    return torch.stack(out, 1), torch.stack(scores, 1)


def decide(params):
    return lambda seen: router.scores(params, seen)[:, 0]


def always(*scores):
    return lambda seen: torch.tensor(scores, dtype=torch.float64).expand(len(seen), 2)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_states_and_gradients_are_those_of_cells_taken_one_by_one(hard):
    ours, theirs, x = layers(0), layers(2), normal(5, 7, E).requires_grad_()
    params = {k: v.clone().requires_grad_() for k, v in ROUTER.items()}
    actual = mixed_recurrent(x, weights(ours), weights(theirs), decide(params), hard=hard)
    wanted = transcribed(x, ours, theirs, params, hard)
    for have, should in zip(actual, wanted, strict=True):
        torch.testing.assert_close(have, should, **TOL)
    if hard:
        picked = actual[1][..., 0] >= actual[1][..., 1]
        assert bool(picked.any())
        assert not bool(picked.all())
        return
    leaves = [x, *params.values(), *(p for layer in (*ours, *theirs) for p in layer.parameters())]
    probe = normal(5, 7, H, seed=4)
    have, should = (torch.autograd.grad((h * probe).sum() + s.sum(), leaves) for h, s in (actual, wanted))
    for a, b in zip(have, should, strict=True):
        torch.testing.assert_close(a, b, **TOL)


def test_where_one_version_is_chosen_throughout_it_is_that_version():
    ours, theirs, x = layers(0), layers(2), normal(5, 7, E)
    for scores, own in (((0.0, -torch.inf), ours), ((-torch.inf, 0.0), theirs)):
        mixed = mixed_recurrent(x, weights(ours), weights(theirs), always(*scores))[0]
        torch.testing.assert_close(mixed, own[1](own[0](x)), **TOL)
    tie = mixed_recurrent(x, weights(ours), weights(theirs), always(0.3, 0.3), hard=True)[0]
    torch.testing.assert_close(tie, ours[1](ours[0](x)), **TOL)


def test_two_equal_versions_are_one_whatever_the_router_says():
    ours, x = layers(0), normal(5, 7, E)
    mixed = mixed_recurrent(x, weights(ours), weights(layers(0)), decide(ROUTER))[0]
    torch.testing.assert_close(mixed, ours[1](ours[0](x)), **TOL)


def test_clients_under_vmap_are_clients_alone():
    ours, x = layers(0), normal(2, 5, 7, E)
    versions = [weights(layers(2)), weights(layers(6))]
    stacked = [{name: torch.stack([v[j][name] for v in versions]) for name in versions[0][j]} for j in range(2)]

    def one(local, rows):
        return mixed_recurrent(rows, weights(ours), local, decide(ROUTER))

    together = vmap(one)(stacked, x)
    for i in range(2):
        for have, should in zip(together, one(versions[i], x[i]), strict=True):
            torch.testing.assert_close(have[i], should, **TOL)


def test_the_papers_router_has_672002_parameters():
    """(8 + 4 x 256) - 500 - 250 - 100 - 50 - 2; the authors' has 18,302 more that nothing reads."""
    count = 1033 * 500 + 501 * 250 + 251 * 100 + 101 * 50 + 51 * 2
    assert count == 690_304 - 18_302
    assert router.size(8 + 4 * 256, 1, (500, 250, 100, 50)) == count
    with pytest.raises(errors.InvalidArgument, match="at most 2 levels"):
        router.size(8, 2, (5, 4, 3))


def test_the_work_of_a_layer_is_counted():
    """Per row and position 4 H (inputs + H) multiply-adds, of both versions and of the router when states are mixed."""
    ours, theirs, x = layers(0), layers(2), normal(5, 7, E)
    one = 4 * H * (E + H) + 4 * H * (H + H)
    assert multiply_adds(lambda: ours[1](ours[0](x))) == 5 * 7 * one
    reads = (E + 4 * H) * 6 + 6 * 5 + 5 * 2
    mixed = multiply_adds(lambda: mixed_recurrent(x, weights(ours), weights(theirs), decide(ROUTER), hard=True))
    assert mixed == 5 * 7 * (2 * one + 2 * reads)


# -- Flow --------------------------------------------------------------------------------------------------------------


def network(dropout=0.0, seed=0):
    return seeded(lambda: LSTM(TOKENS, TOKENS, E, (H, H), per_position=True, dropout=dropout), seed=seed)


def test_the_mixed_model_is_mixed_layers_and_the_global_embedding_and_head():
    task, x = Task.from_module(network()), torch.randint(TOKENS, (5, 6), generator=torch.Generator().manual_seed(0))
    g, v = task.init(), Task.from_module(network(seed=3)).init()
    states = recurrent(task)
    assert states.inputs == E + 4 * H
    out, scores = states(g, v, decide(ROUTER), x)
    pairs = [
        [{k: m[f"layers.{j}.{k}"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")} for j in range(2)] for m in (g, v)
    ]
    hidden, wanted = mixed_recurrent(g["embedding.weight"][x], *pairs, decide(ROUTER))
    torch.testing.assert_close(out, hidden @ g["head.weight"].T + g["head.bias"], **TOL)
    torch.testing.assert_close(scores, wanted, **TOL)
    assert recurrent(Task.from_module(nn.Sequential(nn.Linear(3, 2)))) is None


def test_a_round_of_flow_by_hand():
    """One client, all rows in every step: v by a step of SGD, then a step on the router, then one on the model."""
    lr, gamma = 0.7, 0.5
    whole = sequences(sizes=(7,))
    x, y = whole.train.client(0)
    run = ft.run(
        ft.Flow(lr=lr, steps=1, local_steps=1, gamma=gamma, split="whole", router_widths=(6, 5)),
        whole,
        network(),
        rounds=1,
        dtype="float64",
        engine="loop",
        workers=1,
    )
    task = Task.from_module(network())
    w, psi = task.init(), router.init(E + 4 * H, 1, (6, 5), seed=0, dtype=torch.float64)

    def step(tree, loss):
        free = {k: leaf.clone().requires_grad_() for k, leaf in tree.items()}
        grads = torch.autograd.grad(loss(free), list(free.values()), allow_unused=True)
        return {k: tree[k] - (0 if d is None else lr * d) for k, d in zip(tree, grads, strict=True)}

    def token_loss(logits):
        return F.cross_entropy(logits[y >= 0], y[y >= 0])

    def mixed(w, psi):
        """Loss and -log q_0 over real tokens, the cells given as tensors so that gradients reach w."""
        e = w["embedding.weight"][x]
        zero = torch.zeros(len(x), H, dtype=torch.float64)
        states = {(m, j): (zero, zero) for m in "gv" for j in range(2)}
        out, pulls = [], []
        for t in range(x.shape[1]):
            to_g = to_v = e[:, t]
            for j in range(2):
                names = [f"layers.{j}.{k}" for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
                g = torch._VF.lstm_cell(to_g, states["g", j], *(w[n] for n in names))
                own = states["v", j] = torch._VF.lstm_cell(to_v, states["v", j], *(v[n] for n in names))
                scores = chain(psi, torch.cat([e[:, t], *g, *own], 1))
                q = scores.softmax(1)
                states["g", j] = tuple(q[:, :1] * a + q[:, 1:] * b for a, b in zip(g, own, strict=True))
                pulls.append(-q[:, 0].log())
                to_g, to_v = states["g", j][0], own[0]
            out.append(to_g @ w["head.weight"].T + w["head.bias"])
        pull = torch.stack(pulls, 1).view(len(x), x.shape[1], 2).mean(2)[y >= 0].mean()
        return token_loss(torch.stack(out, 1)), pull

    v = step(w, lambda free: token_loss(task.apply(free, x)))
    psi = step(psi, lambda free: (lambda losses: losses[0] + gamma * losses[1])(mixed(w, free)))
    w = step(w, lambda free: mixed(free, psi)[0])
    for name, value in w.items():
        torch.testing.assert_close(run.shared["model"][name], value, rtol=0, atol=1e-11)
    for name, value in psi.items():
        torch.testing.assert_close(run.shared["router"][name], value, rtol=0, atol=1e-11)


@pytest.mark.parametrize("law", [3, 4, 8, 10])
def test_flow_keeps_the_laws_on_a_recurrent_network_with_dropout(law):
    flow = ft.Flow(lr=0.5, router_dropout=0.2, gamma=0.1)
    ft.check_algorithm(flow, network(dropout=0.3), sequences(sizes=(7, 4, 6)), laws=[law])


def test_padded_positions_do_not_pull_the_router():
    fed = sequences(sizes=(7, 4))
    x = torch.where(fed.train.y < 0, (fed.train.x + 1) % TOKENS, fed.train.x)
    pairs = [[(x[:7], fed.train.y[:7]), (x[7:], fed.train.y[7:])], [fed.test.client(i) for i in range(2)]]
    other = Federation.from_arrays(*pairs, tokens=TOKENS, task="classification")
    assert not torch.equal(other.train.x, fed.train.x)
    flow = ft.Flow(lr=0.5, steps=2, gamma=10.0)
    one, two = (ft.run(flow, f, network(), rounds=1, dtype="float64", engine="loop", workers=1) for f in (fed, other))
    for part in ("model", "router"):
        assert all(torch.equal(one.shared[part][k], two.shared[part][k]) for k in one.shared[part])


@pytest.mark.parametrize("options", [{"inference": "soft"}, {"q0": 0.5}, {"variant": "pi"}, {"variant": "pc"}], ids=str)
def test_variants_run_and_say_where_they_went(options):
    fed = sequences(sizes=(7, 4))
    flow = ft.Flow(lr=0.5, steps=2, **options)
    runs = [ft.run(flow, fed, network(), rounds=2, dtype="float64", engine=e, workers=1) for e in ("loop", "vectorized")]
    x = fed.test.client(1)[0]
    torch.testing.assert_close(runs[0].predict(1, x), runs[1].predict(1, x), rtol=0, atol=1e-9)
    if options.get("variant") != "pc":
        q = flow.routes(runs[0].task, runs[0].shared, runs[0].personal[1], x)
        assert q.shape == (len(x), 2, 2)
        torch.testing.assert_close(q.sum(-1), torch.ones(len(x), 2, dtype=q.dtype), **TOL)


def test_layers_of_two_widths_and_whole_models_of_tokens_are_refused():
    net = seeded(lambda: LSTM(TOKENS, TOKENS, E, (H, H + 1), per_position=True))
    with pytest.raises(errors.ModelMismatch, match=r"give them one width, not \[4, 5\]"):
        ft.run(ft.Flow(), sequences(), net, rounds=1)
    with pytest.raises(errors.InvalidArgument, match="tokens to an lstm with routing='layer'"):
        ft.run(ft.Flow(routing="model"), sequences(), network(), rounds=1)
