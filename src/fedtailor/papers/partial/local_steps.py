"""Local steps K: more of them are faster, and raise the floor of FedAvg-P under partial turnout only."""

from __future__ import annotations

from typing import Any

from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column
from fedtailor.papers.split_problem import LAPTOP, METHODS, PAPER, floor, path

FEDAVG, SCAFFOLD = METHODS


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the squared gradient over rounds, for both methods, every K, some and all clients.

    Where all take part FedAvg-P has the steps of Theorem 3.11, eta_u = T: with eta_u = 1 its drift makes a floor of its own.
    """
    everyone = settings["clients"]
    cases = [(name, m) for name in METHODS for m in (settings["cohort"], everyone)]
    out = []
    for name, m in cases:
        outer = settings["rounds"] if name == FEDAVG and m == everyone else 1
        case = f"{name}, {'all' if m == everyone else 'some'} clients"
        for K in settings["Ks"]:
            rows = path(name, settings, seed, steps=K, cohort=m, outer=outer)
            out += [{**row, "K": f"K = {K}", "case": case} for row in rows]
    return out


def curves(rows: Rows, method: str, turnout: str) -> list[Any]:
    """Return the curves of a case, from the fewest steps on."""
    return [column(rows, "norm", case=f"{method}, {turnout} clients", steps=K) for K in sorted({row["steps"] for row in rows})]


def faster(rows: Rows, method: str) -> float:
    """Return the gradient at the first look with the fewest steps over with the most, where all take part."""
    few, *_, many = curves(rows, method, "all")
    return float(few[0] / many[0])


def raised(rows: Rows, method: str, turnout: str) -> float:
    """Return the floor with the most steps over the floor with the fewest."""
    few, *_, many = curves(rows, method, turnout)
    return floor(many) / floor(few)


def relief(rows: Rows) -> float:
    """With the most steps, FedAvg-P's floor where some take part over that where all do."""
    return floor(curves(rows, FEDAVG, "some")[-1]) / floor(curves(rows, FEDAVG, "all")[-1])


def gap(rows: Rows) -> float:
    """With the most steps and some clients, FedAvg-P's floor over Scaffold-P's."""
    return floor(curves(rows, FEDAVG, "some")[-1]) / floor(curves(rows, SCAFFOLD, "some")[-1])


EXPERIMENT = Experiment(
    "Gradient over rounds by local steps",
    "section 5, local steps",
    {"laptop": {**LAPTOP, "Ks": [5, 25]}, "paper": {**PAPER, "Ks": [5, 25, 50]}},
    measure,
    Figure("round", "norm", "K", "rounds", "squared gradient", log_y=True, panel="case"),
    (
        Claim(
            "More local steps make FedAvg-P faster (first look, fewest over most)", lambda rows: faster(rows, FEDAVG), above=1.0
        ),
        Claim(
            "More local steps make Scaffold-P faster (first look, fewest over most)",
            lambda rows: faster(rows, SCAFFOLD),
            above=1.0,
        ),
        Claim(
            "They raise FedAvg-P's floor where some take part (most over fewest)",
            lambda rows: raised(rows, FEDAVG, "some"),
            above=1.0,
        ),
        Claim("They do not raise Scaffold-P's (most over fewest)", lambda rows: raised(rows, SCAFFOLD, "some"), below=1.0),
        Claim(  # of constant steps: with many of them a floor of about 1e-9 is left, which the theorem's L F_0/T allows
            "Nor FedAvg-P's where all take part (most over fewest)",
            lambda rows: raised(rows, FEDAVG, "all"),
            below=1.0,
            must=False,
        ),
        Claim("With many steps FedAvg-P's floor all but goes where all take part (some over all)", relief, above=100.0),
        Claim("With many steps Scaffold-P's floor is well below FedAvg-P's (ratio)", gap, above=3.0, theirs="≪"),
    ),
)
