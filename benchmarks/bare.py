"""What a careful user writes without a framework: a module, torch.optim.SGD, tensor slicing, one client after another."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pairs = list[tuple[Tensor, Tensor]]


def sgd(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    batch: int,
    lr: float,
    pull: float = 0.0,
    center: list[Tensor] | None = None,
) -> None:
    """Epochs of SGD on one client; with ``center``, the gradient of pull/2 ||w - center||^2 is added."""
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(epochs):
        order = torch.randperm(len(y))
        for start in range(0, len(y), batch):
            rows = order[start : start + batch]
            opt.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            if center is not None:
                for p, c in zip(net.parameters(), center, strict=True):
                    p.grad.add_(p.detach() - c, alpha=pull)
            opt.step()


def fedavg_round(net: nn.Module, clients: Pairs, epochs: int, batch: int, lr: float) -> None:
    """One round of FedAvg; ``net`` becomes the average."""
    state = {k: v.clone() for k, v in net.state_dict().items()}
    total = {k: torch.zeros_like(v) if v.is_floating_point() else v for k, v in state.items()}
    for x, y in clients:
        net.load_state_dict(state)
        sgd(net, x, y, epochs, batch, lr)
        for k, v in net.state_dict().items():
            if v.is_floating_point():
                total[k] += v / len(clients)
    net.load_state_dict(total)


def fedclup_round(
    net: nn.Module, own: list[dict[str, Tensor]], clients: Pairs, epochs: int, batch: int, lr: float, lam: float
) -> None:
    """One round of FedCLUP with server_lr = 1/lam; ``own`` holds the personal models."""
    center = [p.detach().clone() for p in net.parameters()]
    total = {k: torch.zeros_like(v) for k, v in net.state_dict().items()}
    for i, (x, y) in enumerate(clients):
        net.load_state_dict(own[i])
        sgd(net, x, y, epochs, batch, lr, lam, center)
        own[i] = {k: v.clone() for k, v in net.state_dict().items()}
        for k, v in own[i].items():
            total[k] += v / len(clients)
    net.load_state_dict(total)


def ditto_round(
    net: nn.Module, own: list[dict[str, Tensor]], clients: Pairs, epochs: int, batch: int, lr: float, lam: float
) -> None:
    """One round of Ditto: FedAvg, and a personal model beside it."""
    center = [p.detach().clone() for p in net.parameters()]
    personal = copy.deepcopy(net)
    for i, (x, y) in enumerate(clients):
        personal.load_state_dict(own[i])
        sgd(personal, x, y, epochs, batch, lr, lam, center)
        own[i] = {k: v.clone() for k, v in personal.state_dict().items()}
    fedavg_round(net, clients, epochs, batch, lr)
