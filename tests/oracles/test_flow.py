"""The transcription of Flow itself: against a NumPy forward pass differentiated by differences, and against its limits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.oracles import flow
from tests.oracles.differences import arrays, moved, relu, risk, rows, soft
from tests.oracles.harness import D, K, gap

RATES = {"local_lr": 0.3, "router_lr": 0.4, "lr": 0.2, "gamma": 0.05}
LOCAL, GLOBAL = [[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9, 5], [6, 10, 7]]


def dense(draw, *widths):
    return [(draw.normal(size=(b, a)) * 0.7, draw.normal(size=b) * 0.3) for a, b in pairwise(widths)]


def start(seed=1, routes=3):
    draw = np.random.default_rng(seed)
    base = dense(draw, D, *[5, 4, 4][:routes])
    return dense(draw, D, 5, 4, K), {"base": base, "exit": [dense(draw, len(a), 2)[0] for _, a in base]}


def double(tree):
    return flow.each(flow.as_double, tree)


def routes_of(psi, X, pre):
    h, found = X, []
    for (B, a), (E, e) in zip(psi["base"], psi["exit"], strict=True):
        z = h @ B.T + a
        h = relu(z)
        found.append(soft((z if pre else h) @ E.T + e))
    return found


def output(g, w, psi, X, pre=False, q0=None, post=False):
    """The layer-wise mixture in NumPy."""
    q = [np.full((len(X), 2), [q0, 1 - q0])] * len(g) if q0 is not None else routes_of(psi, X, pre)
    for j in range(len(g)):
        one, two = (X @ layer[j][0].T + layer[j][1] for layer in (g, w))
        if post and j < len(g) - 1:
            one, two = relu(one), relu(two)
        X = q[j][:, :1] * one + q[j][:, 1:] * two
        X = relu(X) if j < len(g) - 1 else X
    return X


def half(out, y):
    return ((out - y) ** 2).mean() / 2


@pytest.mark.parametrize("order", ["alternate", "router-first", "global-first"])
@pytest.mark.parametrize("exits", ["post", "pre"])
@pytest.mark.parametrize("loss", ["ce", "half"])
def test_a_round_of_flow_by_differences(order, exits, loss):
    X, y = rows()
    if loss == "half":
        y = np.random.default_rng(8).normal(size=(len(X), K))
    measure, pre = (risk if loss == "ce" else half), exits == "pre"
    w_g, psi = start()
    found_g, found_psi, n = flow.client_round(w_g, psi, X, y, LOCAL, GLOBAL, *RATES.values(), order=order, exits=exits, loss=loss)
    g = w = w_g
    p = psi
    for r in LOCAL:
        w = moved(w, 0.3, lambda m, r=r: measure(output(m, m, None, X[r], q0=1.0), y[r]))

    def router(p, g, r):
        def objective(p):
            logs = sum(np.log(q[:, 0]) for q in routes_of(p, X[r], pre))
            return measure(output(g, w, p, X[r], pre), y[r]) - 0.05 / 3 * logs.mean()

        return moved(p, 0.4, objective)

    def shared(p, g, r):
        return moved(g, 0.2, lambda g: measure(output(g, w, p, X[r], pre), y[r]))

    if order == "alternate":
        for r in GLOBAL:
            p = router(p, g, r)
            g = shared(p, g, r)
    for r in GLOBAL if order == "router-first" else []:
        p = router(p, g, r)
    for r in GLOBAL if order != "alternate" else []:
        g = shared(p, g, r)
    for r in GLOBAL if order == "global-first" else []:
        p = router(p, g, r)
    assert n == 6
    assert gap(found_g, g) < 1e-8
    assert gap(found_psi, p) < 1e-8
    assert gap(found_g, w_g) > 1e-2
    assert gap(found_psi, psi) > 1e-3


def test_the_three_orders_differ():
    X, y = rows()
    w_g, psi = start()
    orders = ("alternate", "router-first", "global-first")
    found = [flow.client_round(w_g, psi, X, y, LOCAL, GLOBAL, *RATES.values(), order=order)[:2] for order in orders]
    assert min(gap(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 1e-5


def plain_sgd(w, X, y, batches, lr):
    X, y, w = flow.as_double(X), flow.as_double(y), double(w)
    for r in batches:
        w = flow.step(w, lr, lambda m, r=r: torch.nn.functional.cross_entropy(flow.block(m, X[r], False), y[r]))
    return w


@pytest.mark.parametrize("told", [{"q0": 1.0}, {"variant": "pi-tied"}], ids=["q0=1", "pi-tied"])
def test_a_global_path_alone_is_fedavg_on_the_global_half(told):
    X, y = rows()
    w_g, psi = start()
    found, router, _ = flow.client_round(w_g, psi, X, y, LOCAL, GLOBAL, *RATES.values(), **told)
    assert gap(found, plain_sgd(w_g, X, y, GLOBAL, 0.2)) < 1e-14
    if "q0" in told:
        assert gap(router, psi) == 0


def test_q0_of_zero_leaves_the_shared_model_alone():
    X, y = rows()
    w_g, psi = start()
    found, router, _ = flow.client_round(w_g, psi, X, y, LOCAL, GLOBAL, *RATES.values(), q0=0.0)
    assert gap(found, w_g) == 0
    assert gap(router, psi) == 0


def test_the_regulariser_moves_the_router_alone_and_to_the_global_path():
    X, y = rows()
    w_g, psi = start()
    rates = [0.3, 0.4, 0.2]
    one, other = (flow.client_round(w_g, psi, X, y, LOCAL, GLOBAL, *rates, gamma, order="global-first") for gamma in (0.0, 1.0))
    assert gap(one[0], other[0]) == 0
    assert gap(one[1], other[1]) > 1e-2
    for gamma, held in ((0.0, True), (1.0, False)):  # both paths are the same model: the risk does not see the router
        _, found, _ = flow.client_round(w_g, psi, X, y, [], [GLOBAL[0]], *rates, gamma)
        assert (gap(found, psi) < 1e-15) == held
    before, after = (flow.regulariser(p, flow.as_double(X[GLOBAL[0]]), 1.0) for p in (double(psi), found))
    assert after < before - 1e-2


def test_w_l_is_rebuilt_from_the_model_received_and_stands_still():
    X, y = rows()
    w_g, psi = start()
    _, w_l, _ = flow.train(w_g, psi, X, y, LOCAL, GLOBAL, **RATES)
    assert gap(w_l, plain_sgd(w_g, X, y, LOCAL, 0.3)) == 0


def test_equal_scores_go_global_and_hard_routes_are_those_of_each_row():
    X, _ = rows(n=40)
    w_g, psi = start()
    w_l, _ = start(5)
    none = flow.each(lambda a: np.zeros_like(a), psi)
    pair = double(w_g), double(w_l)
    assert gap([flow.predict((*pair, double(none)), X)], [flow.block(pair[0], flow.as_double(X), False)]) == 0
    found = flow.predict((*pair, double(psi)), X)
    routes = np.stack([q[:, 0] >= 0.5 for q in routes_of(psi, X, False)], 1)
    assert 0 < routes.mean() < 1
    assert (routes.any(1) & ~routes.all(1)).any()
    for i, route in enumerate(routes):
        mine = [pair[0][j] if yes else pair[1][j] for j, yes in enumerate(route)]
        assert float((flow.block(mine, flow.as_double(X[i : i + 1]), False) - found[i]).abs().max()) < 1e-14
    for q0, path in ((0.25, 1), (0.5, 0), (0.75, 0)):
        assert gap([flow.predict((*pair, None), X, q0=q0)], [flow.block(pair[path], flow.as_double(X), False)]) == 0


def test_one_block_is_the_mixture_of_whole_models():
    X, _ = rows()
    w_g, psi = start(routes=1)
    w_l, _ = start(5)
    found = flow.personalised(double(w_g), double(w_l), double(psi), flow.as_double(X), [3])
    q = routes_of(psi, X, False)[0]
    expected = q[:, :1] * output(w_g, w_g, None, X, q0=1.0) + q[:, 1:] * output(w_l, w_l, None, X, q0=1.0)
    assert np.abs(found.numpy() - expected).max() < 1e-14


def test_mixing_after_the_activation_and_a_last_exit_without_a_layer():
    X, _ = rows()
    w_g, psi = start()
    w_l, _ = start(5)
    pair, x = (double(w_g), double(w_l)), flow.as_double(X)
    assert (
        np.abs(flow.personalised(*pair, double(psi), x, mix="post").numpy() - output(w_g, w_l, psi, X, post=True)).max() < 1e-14
    )
    short = {"base": psi["base"][:2], "exit": psi["exit"]}
    (B, a), (C, c), (E, e) = *psi["base"][:2], psi["exit"][2]
    expected = relu(relu(X @ B.T + a) @ C.T + c) @ E.T + e
    assert np.abs(flow.scores(double(short), x, "pre")[2].numpy() - expected).max() < 1e-14


def test_two_global_models_train_both_paths():
    X, y = rows()
    first, psi = start()
    second, _ = start(5)
    (one, two), router, _ = flow.client_round((first, second), psi, X, y, [], [GLOBAL[0]], *RATES.values(), variant="pi")
    r = GLOBAL[0]
    p = arrays(router)
    assert gap(one, moved(first, 0.2, lambda m: risk(output(m, second, p, X[r]), y[r]))) < 1e-8
    assert gap(two, moved(second, 0.2, lambda m: risk(output(first, m, p, X[r]), y[r]))) < 1e-8
    held, _, _ = flow.client_round(first, psi, X, y, LOCAL, GLOBAL, *RATES.values(), variant="pi-start")
    frozen, _, _ = flow.client_round(first, psi, X, y, [], GLOBAL, *RATES.values())
    assert gap(held, frozen) == 0


def test_the_server_weighs_by_the_global_half_and_nobody_keeps_anything():
    clients = [rows(i, 11) for i in range(3)]
    w_g, psi = start()
    parts = {"local": [[0, 1], [2]], "global": [[3, 4, 5], [6, 7, 3]]}

    def batches(t, i, phase):
        cut = parts[phase.removeprefix("deploy-")]
        return cut[: 1 + i % 2] if phase == "global" else cut

    history = flow.rounds(w_g, psi, clients, [[0, 2], [1, 2]], batches, RATES, adapt="all")
    updates = [flow.client_round(w_g, psi, *clients[i], batches(0, i, "local"), batches(0, i, "global"), **RATES) for i in (0, 2)]
    expected = [(3 * a + 3 * b) / 6 for a, b in zip(*(flow.leaves(u[0]) for u in updates), strict=True)]
    assert gap(flow.leaves(history[0]["w_g"]), expected) < 1e-15
    one, two = (flow.client_round(w_g, psi, *clients[i], *([[0]], [[1]] * 2), **RATES, n=n) for i, n in ((0, 1), (1, 4)))
    for part, found in enumerate(flow.server([one, two])):  # the model, then the router
        expected = [(a + 4 * b) / 5 for a, b in zip(flow.leaves(one[part]), flow.leaves(two[part]), strict=True)]
        assert gap(flow.leaves(found), expected) < 1e-15
    assert history[1]["n"] == [5, 3]
    again = flow.rounds(history[0]["w_g"], history[0]["psi"], clients, [[1, 2]], lambda t, i, p: batches(1, i, p), RATES)
    assert gap(again[0]["w_g"], history[1]["w_g"]) == 0
    assert gap(again[0]["psi"], history[1]["psi"]) == 0
    assert len(history[1]["personal"]) == 3


def test_pc_flow_is_fedavg_and_then_finetuning():
    X, y = rows()
    w_g, psi = start()
    everything = [list(range(6)), list(range(6, 11))]
    shared, _, n = flow.client_round(w_g, psi, X, y, [], everything, *RATES.values(), q0=1.0)
    assert (gap(shared, plain_sgd(w_g, X, y, everything, 0.2)) < 1e-14, n) == (True, 11)
    tuned = flow.deploy(shared, psi, X, y, everything, [], q0=0.0, **RATES)
    expected = flow.block(plain_sgd(shared, X, y, everything, 0.3), flow.as_double(X), False)
    assert gap([flow.predict(tuned, X, q0=0.0)], [expected]) == 0


def test_two_global_models_are_both_averaged():
    clients, (first, psi), (second, _) = [rows(i) for i in range(2)], start(), start(5)
    told = {**RATES, "variant": "pi"}
    history = flow.rounds((first, second), psi, clients, [[0, 1]], lambda t, i, p: GLOBAL[: 1 + i], told, adapt="router")
    sent = [flow.client_round((first, second), psi, *clients[i], [], GLOBAL[: 1 + i], **told) for i in (0, 1)]
    expected = [(3 * a + 5 * b) / 8 for a, b in zip(*(flow.leaves(s[0]) for s in sent), strict=True)]
    assert gap(flow.leaves(history[0]["w_g"]), expected) < 1e-15
    g, _, router = model = history[0]["personal"][0]
    assert gap(g, history[0]["w_g"]) == 0
    hard = flow.predict(model, clients[0][0], variant="pi")
    assert gap([hard], [flow.predict((*g, router), clients[0][0])]) == 0


@pytest.mark.parametrize(("adapt", "g", "p"), [("local", False, False), ("router", False, True), ("all", True, True)])
def test_what_deploying_moves(adapt, g, p):
    X, y = rows()
    w_g, psi = start()
    model = flow.deploy(w_g, psi, X, y, LOCAL, GLOBAL, adapt=adapt, **RATES)
    assert (gap(model[0], w_g) > 1e-3, gap(model[2], psi) > 1e-4) == (g, p)
    assert gap(model[1], plain_sgd(w_g, X, y, LOCAL, 0.3)) == 0
