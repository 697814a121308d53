"""Experiments that take long: what is kept of them counts, and how routing between two models is judged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedtailor.papers import adapters, chosen, experiments, fair_routing, ledger, results, routing_page
from fedtailor.papers.flow import clients, dilution, instances, variants
from fedtailor.papers.flow import map as routing_map


def test_what_is_stored_belongs_to_an_experiment_and_counts_only_with_its_settings(tmp_path):
    every = {name.replace("/", "-"): name for name in experiments()}
    files = sorted(results.STORED.glob("*.json"))
    assert {"perada-cifar10", "perada-pacs"} <= {path.stem for path in files} <= set(every)
    for path in files:
        name = every[path.stem]
        experiment = experiments()[name]
        stored = json.loads(path.read_text())
        assert stored["provenance"]
        known = results.read(tmp_path, name, experiment, "laptop", 3)
        assert known == {int(seed): rows for seed, rows in stored["seeds"].items()}
        other = replace(experiment, settings={**experiment.settings, "laptop": {"rounds": 1}})
        assert results.read(tmp_path, name, other, "laptop", 3) == {}
        assert results.read(tmp_path, name, experiment, "paper", 3) == {}


def test_peradas_claims_are_those_of_its_page(tmp_path):
    """The page says of these which held."""
    experiment = chosen("perada/cifar10")["perada/cifar10"]
    rows = ledger.rows_of("perada/cifar10", experiment, results.measured(tmp_path, "perada/cifar10", experiment, "laptop", 3))
    held = {row["claim"]: row["held"] for row in rows}
    assert held["Global-test: distillation helps"] is True
    assert held["Local-test: within one point of the best rival"] is False
    assert held["Local-test: distillation costs at most one point"] is False
    assert {row["seeds"] for row in rows} == {3}
    assert {row["convex"] for row in rows} == {False}


def test_means_over_seeds_are_all_that_counts_at_their_scale(tmp_path):
    experiment = chosen("perada/pacs")["perada/pacs"]
    assert list(results.measured(tmp_path, "perada/pacs", experiment, "laptop", 3)) == [0]
    assert not list(tmp_path.iterdir())


def test_the_area_under_the_curve_by_hand():
    q, right = np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.0, 1.0, 0.0, 1.0])
    assert fair_routing.area(q, right) == pytest.approx(3.5 / 4)  # of four pairs one is a tie
    assert fair_routing.area(q, np.ones(4)) is None


def test_calibration_by_hand():
    q, right = np.array([0.2, 0.2, 0.8, 0.8]), np.array([0.0, 1.0, 1.0, 1.0])
    assert fair_routing.calibration(q, right, bins=2) == pytest.approx((0.3 + 0.2) / 2)


def test_the_paired_interval_is_students():
    found = fair_routing.paired(np.array([1.0, 2.0, 3.0]))
    assert (found["gain"], found["low"]) == pytest.approx((2.0, 2 - 4.30265 / np.sqrt(3)), rel=1e-5)


def test_the_fair_test_in_small():
    small = {**instances.LAPTOP, "clients": 4, "rounds": 2, "cohort": 4, "law": {"share": 0.5, "rows": 20, "test_rows": 30}}
    rows = fair_routing.measure(small, 0)
    scores = {row["method"]: row["accuracy"] for row in rows}
    assert list(scores) == list(fair_routing.METHODS)
    assert scores[fair_routing.ORACLE] >= max(scores[fair_routing.FEDAVG], scores[fair_routing.TUNED], scores[fair_routing.GATE])
    by = {row["method"]: row for row in rows}
    best = by[fair_routing.GATE]["yardstick"]
    assert by[best]["gain"] == 0
    assert all(np.isfinite(claim.number(rows)) for claim in fair_routing.CLAIMS[:4])


def test_the_page_of_routing_shows_every_method_of_a_set_and_what_the_gates_gain():
    def measured(seed):
        nothing = {"yardstick": "FedAvgFT", "auc": None, "calibration": None}
        numbers = {"accuracy": 0.5 + seed / 10, "gain": 0.01, "low": -0.02, "high": 0.04}
        told = {fair_routing.POOL: {"gain": 0.02, "low": 0.01, "high": 0.03}, fair_routing.GATE: {"auc": 0.75}}
        return [{"method": label, **nothing, **numbers, **told.get(label, {})} for label in fair_routing.METHODS]

    experiment = chosen("flow/instances")["flow/instances"]
    text = routing_page.page({"flow/instances": (experiment, {0: measured(0), 1: measured(1)}), "flow/map": (experiment, {})})
    assert routing_page.page({"flow/map": (experiment, {})}) is None
    assert "pool +2.00 (+1.00 to +3.00), +2.00 (+1.00 to +3.00)" in text
    gate = next(line for line in text.splitlines() if line.startswith("| FlowGate |"))
    assert gate == "| FlowGate | 0.5500 | +0.0100 (-0.0200 to +0.0400); +0.0100 (-0.0200 to +0.0400) | 0.7500 | - |"
    assert sum(line.startswith("| ") for line in text.splitlines()) == 1 + len(fair_routing.METHODS)


def test_the_map_finds_the_best_rival_of_every_cell():
    cells = routing_map.cells({"share": [0.5], "rows": [60], "visible": [0.0, 4.0]})
    assert list(cells) == ["share 0.5, rows 60, visible 0", "share 0.5, rows 60, visible 4"]
    scores = {routing_map.PAPER: 0.7, routing_map.EASED: 0.82, "FedAvg": 0.5, "FedAvgFT": 0.8, "Ditto": 0.79, "APFL": 0.6}
    rows = [
        {"cell": name, **cell, "method": label, "accuracy": score - (0.03 if cell["visible"] == 0 and "eased" in label else 0)}
        for name, cell in cells.items()
        for label, score in scores.items()
    ]
    assert routing_map.gains(rows, routing_map.EASED) == pytest.approx([-0.01, 0.02])
    assert routing_map.gains(rows, routing_map.EASED, 4.0) == pytest.approx([0.02])
    assert routing_map.gains(rows, routing_map.PAPER) == pytest.approx([-0.1, -0.1])


def test_who_benefits_is_judged_against_the_rivals_that_have_a_shared_model():
    numbers = {"personal": 0.8, "shared": 0.7, "share_benefit": 0.6, "global_only": 0.05, "both_correct": 0.6}
    rows = [{"method": label, **numbers} for label in ("FedAvg", *clients.RIVALS[:-1])]
    rows += [{"method": clients.RIVALS[-1], **dict.fromkeys(numbers)} | {"personal": 0.9}]
    rows += [{"method": clients.FLOW, **numbers, "share_benefit": 0.7, "global_only": 0.01}]
    found = [claim.number(rows) for claim in clients.EXPERIMENT.claims]
    assert found == pytest.approx([-0.1, 0.0, 0.1, -0.04, 0.0, 0.6])


def test_a_variant_is_measured_on_rows_of_each_kind():
    settings = {
        **variants.LAPTOP,
        "clients": 3,
        "rounds": 2,
        "local_epochs": 1,
        "law": {"share": 0.5, "rows": 20, "test_rows": 30},
    }
    (row,) = variants.measure(settings, 0, "half the rounds FedAvg first")
    assert min(row["common"], row["own"]) <= row["personal"] <= max(row["common"], row["own"])


def test_the_whole_update_is_left_where_all_goes_the_global_way():
    rows = dilution.measure({**dilution.LAPTOP, "clients": 3, "warmup": 1, "q0": [0.0, 1.0]}, 0)
    left = {row["q0"]: row["projection"] for row in rows if row["risk"] == dilution.MIXED}
    assert left[0.0] == pytest.approx(0.0, abs=1e-12)
    assert left[1.0] == pytest.approx(1.0, abs=1e-9)


def test_how_far_a_method_is_above_others():
    rows = [{"method": name, "x": value} for name, value in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert adapters.gap(rows, "x", "a", "b") == 2.0
    assert adapters.over_best(rows, "x", "a", ("b", "c")) == 1.0
