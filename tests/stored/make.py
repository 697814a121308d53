"""``python -m tests.stored.make``: write the summaries anew. Only a change that is meant to move numbers may do so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedtailor as ft

HERE = Path(__file__).parent
OPTIONS: dict[str, Any] = {"rounds": 4, "batch_size": 6, "seed": 5, "dtype": "float64", "evaluate_every": 2, "workers": 1}
EVERYONE = ("AL2SGD", "L2GD")
AS_IT_WAS = {"HypCluster": {"spread": 0.1}}  # settings whose defaults were others when the summaries were written
PASSING = ("seconds", "engine_reason", "workers", "notes")  # not of the mathematics


def federation(kind: str) -> ft.Federation:
    """Seven clients of uneven size, with validation and public rows."""
    draw = np.random.default_rng(23)
    law = draw.normal(size=(5, 3))
    splits: dict[str, list[Any]] = {"train": [], "test": [], "val": []}
    for i, size in enumerate((17, 9, 22, 12, 30, 8, 14)):
        own = law + 0.5 * draw.normal(size=law.shape)
        for what, rows in zip(splits, (size, 10, 6), strict=True):
            x = draw.normal(size=(rows, 5)) + 0.2 * i
            score = x @ own + 0.4 * draw.normal(size=(rows, 3))
            y = {"classification": score.argmax(1), "regression": score[:, 0], "multilabel": (score > 0).astype(int)}[kind]
            splits[what].append((x, y))
    names = [f"site {i}" for i in range(7)]
    return ft.Federation.from_arrays(**splits, public=draw.normal(size=(12, 5)), names=names, task=kind, name=kind)


def cases() -> dict[str, tuple[Any, str, str, dict[str, Any]]]:
    """Name -> (method, kind of the labels, model, options)."""
    from fedtailor.algorithms import METHODS

    out: dict[str, tuple[Any, str, str, dict[str, Any]]] = {}
    for method in METHODS:
        name = method.__name__
        algorithm = replace(method.example(), **AS_IT_WAS.get(name, {}))
        for engine in ("loop", "vectorized"):
            options = {**OPTIONS, "engine": engine, "cohort": 1.0 if name in EVERYONE else 0.6}
            for model in ("linear", "mlp:6"):
                out[f"{name} {model} {engine}"] = algorithm, "classification", model, options
    for engine in ("loop", "vectorized"):
        options = {**OPTIONS, "engine": engine, "weights": "size", "new_clients": 0.3}
        for name in ("FedAvg", "FedCLUP", "Ditto", "L2GD", "FedAvgFT"):
            for kind in ("classification", "regression", "multilabel"):
                out[f"{name} {kind} newcomers {engine}"] = getattr(ft, name)(), kind, "linear", options
        quiet = {**OPTIONS, "engine": engine, "evaluate_every": 0}
        out[f"FedCLUP theory {engine}"] = (
            ft.FedCLUP(steps="theory", opt=ft.SGD(weight_decay=0.1)),
            "classification",
            "linear",
            quiet,
        )
    return out


def summary(case: tuple[Any, str, str, dict[str, Any]]) -> dict[str, Any]:
    """What a case gives, or why it is refused."""
    algorithm, kind, model, options = case
    try:
        found = ft.run(algorithm, federation(kind), model, **options).summary
    except ft.errors.FedtailorError as error:
        return {"refused": type(error).__name__}
    return {key: value for key, value in found.items() if key not in PASSING}


if __name__ == "__main__":
    (HERE / "summaries.json").write_text(json.dumps({name: summary(case) for name, case in cases().items()}, indent=0))
