"""Optimisers of torch, an optimiser and a step size of one's own.

fedtailor run fedavg digits --opt torch.optim.RMSprop --lr optimizers.py:warm --rounds 5
fedtailor run fedavg digits --opt optimizers.py:Lion --rounds 5
"""

from dataclasses import dataclass

import torch
from made import clients

import fedtailor as ft


def warm(round):
    """Grows for three rounds, then falls."""
    return 0.05 * min(round + 1, 3) / 3 * 0.95**round


@dataclass(frozen=True)
class Lion(ft.Optimizer):
    """Sign of a running mean (Chen et al. 2023): ``init`` makes the memory, ``_move_`` takes a step in place."""

    keep: float = 0.9

    def init(self, params):
        return [[torch.zeros_like(p)] for p in params]

    def _move_(self, param, grad, memory, lr, step):
        param.sub_((self.keep * memory[0] + (1 - self.keep) * grad).sign() * lr)
        memory[0].mul_(0.99).add_(grad, alpha=0.01)


def main():
    federation = ft.Federation.from_arrays(clients(seed=0), clients(seed=100))
    for opt in (ft.SGD(momentum=0.9), ft.Adam(), ft.TorchOptimizer("RMSprop", {"alpha": 0.9}), Lion()):
        run = ft.run(ft.FedAvg(lr=warm, epochs=2, opt=opt), federation, rounds=5, batch_size=16)
        print(opt, run.summary["acc_global"])
    try:
        ft.TorchOptimizer("LBFGS")
    except ft.errors.FedtailorError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
