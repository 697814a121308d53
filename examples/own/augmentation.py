"""Rows changed anew in every step, with numbers that are a function of (seed, round, client, step, row).

fedtailor run fedavg digits --with images=true --model cnn2 --augment augmentation.py:shifted --rounds 3
"""

import torch

import fedtailor as ft


def shifted(x, draw):
    """Roll half of the images by a column, and add a little noise. ``draw`` has uniform, normal, integers and chance."""
    rolled = torch.where(draw.chance(0.5, x), x.roll(1, -1), x)
    return rolled + 0.05 * draw.normal(*x.shape[1:])


def main():
    digits = ft.Federation.load("digits", clients=20, images=True).take([0, 1, 2])
    for workers, engine in ((1, "loop"), (2, "loop"), (1, "vectorized")):
        how = {"rounds": 2, "batch_size": 32, "workers": workers, "engine": engine, "evaluate_every": 0}
        run = ft.run(ft.FedAvg(lr=0.1, steps=3), digits, "cnn2:2,4", augment=shifted, **how)
        print(engine, workers, "workers:", float(next(iter(run.shared["model"].values())).double().sum()))


if __name__ == "__main__":
    main()
