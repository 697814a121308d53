"""Pieces of one's own on another device (the pretend one) give the CPU's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from tests import pretend
from tests.data.test_augment import noisy
from tests.data.test_parts import TEXT, Reader
from tests.data.test_weights import WEIGHTED
from tests.make import federation, seeded

NAMES = ("ann", "bob", "cid")
DATA = federation((7, 5, 9), names=NAMES)
OF = {"ann": "small", "bob": "large", "cid": "small"}


def mixed():
    bodies = {"small": nn.Linear(3, 4), "large": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))}
    return ft.Mixed(bodies, OF, nn.Linear(4, 2))


PIECES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "augment": (ft.Ditto(epochs=1), DATA, "mlp:4", {"augment": noisy}),
    "weights": (ft.Ditto(epochs=1), WEIGHTED, "linear", {}),
    "parts": (ft.Ditto(epochs=1), TEXT, Reader, {}),
    "torch's optimiser": (ft.Ditto(epochs=1, opt=ft.TorchOptimizer("Adam")), DATA, "mlp:4", {}),
    "networks that differ": (ft.FedProto(epochs=1), DATA, mixed, {}),
}


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_on_another_device_gives_the_cpus_numbers(piece, engine):
    method, data, model, settings = PIECES[piece]
    made = seeded(model) if callable(model) else model
    how = {"rounds": 2, "batch_size": 3, "engine": engine, "workers": 1, **settings}
    here, there = (ft.run(method, data, made, device=device, **how) for device in ("cpu", pretend.NAME))
    for one, other in ((here.shared, there.shared), (here.store.get(np.arange(3)), there.store.get(np.arange(3)))):
        for (path, p), q in zip(tree.items(one), tree.leaves(other), strict=True):
            assert torch.equal(p.cpu(), q.cpu()), path
