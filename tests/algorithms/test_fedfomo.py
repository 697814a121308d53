"""FedFomo: its weights in closed form, whose models are sent, and that it finds its like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "batch_size": None, "workers": 1, "bias": False}


def rows(seed, slope, n=10):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 2))
    return x, x @ np.asarray(slope) + 0.01 * draw.normal(size=n)


def federation(slopes, val=True):
    split = [[rows(10 * k + i, s) for i, s in enumerate(slopes)] for k in range(3)]
    return ft.Federation.from_arrays(split[0], split[1], split[2] if val else None, task="regression")


def loss(x, y, w):
    return 0.5 * np.mean((x @ w - y) ** 2)


@pytest.mark.parametrize("val", [True, False])
def test_weights_are_gains_in_loss_over_distance(val):
    fed = federation([(1, 0)] * 3, val)
    task = build_task("linear", fed, 0, torch.float64, bias=False)
    theta, others = np.array([0.2, 0.1]), np.array([[0.9, 0.0], [-1.0, 0.3], [0.2, 0.1], [5.0, 5.0]])
    received = {"models": {"weight": torch.tensor(others)[:, None]}, "known": torch.tensor([1.0, 1, 1, 0])}
    x, y = (part.double() for part in (fed.val or fed.train).client(0))
    whole = {"x": x, "y": y, "mask": torch.ones(len(y)).double()}
    data = {"val": whole} if val else {"look": {k: v[None] for k, v in whole.items()} | {"key": torch.zeros(1)}}
    w = ft.FedFomo().weigh(task, {"weight": torch.tensor(theta)[None]}, received, data)
    x, y = x.numpy(), y.numpy().ravel()
    want = [(loss(x, y, theta) - loss(x, y, o)) / np.linalg.norm(o - theta) for o in others[:2]]
    np.testing.assert_allclose(w, [*want, 0, 0], atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_round_moves_towards_better_models_before_training(engine):
    """Two clients: the second round starts at the other's model if it does better on the own validation rows."""
    fed, lr = federation([(1.0, -1.0)] * 2), 0.1
    method = ft.FedFomo(lr=lr, steps=1, explore=0.0)
    first, both = (ft.run(method, fed, "linear", rounds=r, engine=engine, **OPTIONS) for r in (1, 2))
    was = [first.personal[i]["model"]["weight"].numpy()[0] for i in range(2)]
    for i in range(2):
        x, y = (part.double().numpy() for part in fed.train.client(i))
        seen, target = (part.double().numpy() for part in fed.val.client(i))
        better = loss(seen, target.ravel(), was[1 - i]) < loss(seen, target.ravel(), was[i])
        start = was[1 - i] if better else was[i]
        want = start - lr * x.T @ (x @ start - y.ravel()) / len(x)
        np.testing.assert_allclose(both.personal[i]["model"]["weight"][0], want, atol=1e-12)


def test_the_best_known_are_sent_and_never_the_own():
    method = ft.FedFomo(downloads=2, explore=0.0)
    fed = federation([(1, 0)] * 4)
    task = build_task("linear", fed, 0, torch.float64, bias=False)
    (_, server), rnd = method.init_server(task), Known()
    who, known = method.chosen(server, torch.arange(4), rnd)
    assert not known.any()
    affinity = torch.tensor([[9.0, 1, 2, 3], [0, 9, 0, 0], [-1, -2, 9, -3], [5, 4, 3, 9]]).double()
    server = {**server, "present": torch.tensor([1.0, 1, 1, 1]).double(), "affinity": affinity}
    who, known = method.chosen(server, torch.tensor([0, 2, 3]), rnd)
    assert who.tolist() == [[3, 2], [0, 1], [0, 1]]
    assert known.all()
    server["present"][3] = 0
    who, known = method.chosen(server, torch.tensor([0]), rnd)
    assert who.tolist() == [[2, 1]]


class Known:
    """What choosing reads of a round."""

    seed, number = 0, 1


def test_clients_find_their_like():
    """Two kinds of clients with opposite slopes: everyone's affinities within its kind are higher than across."""
    fed = federation([(1, 1), (1, 1), (1, 1), (-1, -1), (-1, -1), (-1, -1)])
    run = ft.run(ft.FedFomo(lr=0.05, steps=2, downloads=5), fed, "linear", rounds=8, **OPTIONS)
    affinity = run.server["affinity"].numpy()
    kind = np.array([0 if name in fed.names[:3] else 1 for name in np.array(fed.names)[fed.order]])
    same = kind[:, None] == kind[None, :]
    within = np.where(same & ~np.eye(6, dtype=bool), affinity, np.inf).min(1)
    assert (within > np.where(same, -np.inf, affinity).max(1)).all()


def test_it_refuses_privacy():
    with pytest.raises(InvalidArgument, match="weighs others' models"):
        ft.run(ft.FedFomo(opt=ft.Private()), federation([(1, 0)] * 2), "linear", rounds=1)
