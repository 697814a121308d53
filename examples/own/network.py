"""A network of one's own: looked over, made anew for every seed, and started from weights.

fedtailor run ditto digits --model network.py:deep --rounds 5
"""

from made import clients
from torch import nn

import fedtailor as ft


def deep(shape, outputs):
    """A factory: it may ask for the shape of a row, the number of outputs and the seed."""
    size = 1
    for length in shape:
        size *= length
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, outputs)
    )


class Centred(nn.Module):
    """Subtracts the mean of the batch: rows are mixed, so clients cannot be padded and stacked."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x - x.mean(0))


def main():
    federation = ft.Federation.from_arrays(clients(seed=0), clients(seed=100))
    print("deep:", ft.check_model(deep((4,), 2), federation.train.x[:8]) or "keeps every promise")
    for finding in ft.check_model(Centred(), federation.train.x[:8]):
        print("Centred:", finding.promise, "-", finding.words)

    both = ft.compare([ft.FedAvg(), ft.Ditto(lam=0.1)], federation, deep, seeds=2, rounds=5, batch_size=16)
    for row in both.table("acc_personal"):
        print(row["method"], row["acc_personal"])

    first = ft.run(ft.FedAvg(), federation, deep, rounds=5, batch_size=16)
    warm = ft.run(ft.Ditto(lam=0.1), federation, deep, rounds=2, batch_size=16, start=first.state_dict())
    print("warm start:", warm.summary["acc_personal"])


if __name__ == "__main__":
    main()
