"""Rows that count more than others, as in a survey: a weight of 2 is the row twice."""

import numpy as np
from made import clients

import fedtailor as ft


def main():
    train = clients(seed=0)
    weights = [np.where(y == 1, 3.0, 1.0) for _, y in train]
    weighted = ft.Federation.from_arrays(train, clients(seed=100), weights=weights)
    repeated = [(x.repeat(w.astype(int), 0), y.repeat(w.astype(int))) for (x, y), w in zip(train, weights, strict=True)]
    twice = ft.Federation.from_arrays(repeated, clients(seed=100))
    one, other = (ft.run(ft.FedAvg(lr=0.5, steps=5), federation, rounds=5, dtype="float64") for federation in (weighted, twice))
    apart = (one.shared["model"]["weight"] - other.shared["model"]["weight"]).abs().max()
    print("weights and repeated rows differ by", float(apart))


if __name__ == "__main__":
    main()
