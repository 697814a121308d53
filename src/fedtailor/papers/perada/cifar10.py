"""CIFAR-10, Dirichlet 0.1, with public images of CIFAR-100."""

from __future__ import annotations

from fedtailor.papers.adapters import CIFAR, TABLE, experiment, table

EXPERIMENT = experiment("CIFAR-10, Dirichlet 0.1, 20 clients", "Tables 1 and 2", CIFAR, table, TABLE, means_of=3)
