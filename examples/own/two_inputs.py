"""Rows of several parts: tokens and their mask by name, an image and a table in order."""

import numpy as np
import torch
from torch import nn

import fedtailor as ft


class Reader(nn.Module):
    """A dict of parts comes by name, since the forward names them (otherwise it would come as the dict)."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, ids, mask):
        real = mask.unsqueeze(-1)
        return self.out((self.words(ids) * real).sum(1) / real.sum(1))


class Scan(nn.Module):
    """A tuple of parts comes in order."""

    def __init__(self):
        super().__init__()
        self.image, self.table, self.out = nn.Conv2d(1, 4, 3), nn.Linear(3, 8), nn.Linear(4 * 4 * 4 + 8, 2)

    def forward(self, image, table):
        return self.out(torch.cat([self.image(image).relu().flatten(1), self.table(table)], 1))


def texts(seed):
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 20, (30, 6))
    mask = np.arange(6) < draw.integers(1, 7, 30)[:, None]
    return {"ids": ids, "mask": mask}, ((ids < 10) & mask).sum(1) * 2 > mask.sum(1)


def scans(seed):
    draw = np.random.default_rng(seed)
    image, table = draw.normal(size=(30, 1, 6, 6)), draw.normal(size=(30, 3))
    return (image, table), (image.mean((1, 2, 3)) + 0.1 * table[:, 0] > 0).astype(int)


def main():
    for module, made in ((Reader(), texts), (Scan(), scans)):
        data = ft.Federation.from_arrays([made(i) for i in range(4)], [made(i + 50) for i in range(4)])
        run = ft.run(ft.Ditto(lam=0.1, lr=0.3, epochs=2), data, module, rounds=5, batch_size=10)
        x, _ = made(99)
        print(type(module).__name__, run.summary["acc_personal"], run.predict(2, x).shape)


if __name__ == "__main__":
    main()
