"""PACS, a domain a client: stands for Office-Home."""

from __future__ import annotations

from fedtailor.papers.adapters import CIFAR, TABLE, experiment, of_office_home, table

LAPTOP = {
    **CIFAR,
    **{"set": "pacs", "images": 3000, "partition": "domain", "clients": 4, "cohort": 1.0, "lr": 0.03, "lrs": {}, "kd_lr": 1e-4},
}
EXPERIMENT = experiment(
    "PACS by domain, in the place of Office-Home",
    "Tables 1 and 2",
    LAPTOP,
    table,
    of_office_home(TABLE),
    full={"images": 9991},
    means_of=3,
)
