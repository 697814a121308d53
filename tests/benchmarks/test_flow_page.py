"""The benchmark of Flow goes on where it was stopped, and its page says of each claim whether it held."""

from __future__ import annotations

import pytest

from benchmarks import flow, flow_map, flow_real


def measured(acc, benefit, only, routing=None):
    keys = {"acc_personal": acc, "acc_global": 0.5, "share_benefit": benefit, "global_only": only, "settings": "X()"}
    return {**keys, "trained_parameters": 30, "bytes_up": 400.0, "routing": routing}


ROUTING = {"model_parameters": 100, "router_parameters": 7, "multiply_adds_personal": 150, "multiply_adds_shared": 100}


def test_claims_are_held_or_not_by_the_numbers():
    runs = {
        "Flow": [measured(0.8, 0.6, 0.1, ROUTING), measured(0.9, 0.8, 0.2, ROUTING)],
        "FedAvgFT": [measured(0.86, 0.5, 0.12)],
        "PI-Flow": [measured(0.85, 0.9, 0.2)],
        "Flow, no regulariser": [measured(0.84, 0.9, 0.0, ROUTING)],
    }
    text = "\n".join(flow_real.tables("digits, Dirichlet 0.3", {label: {"runs": mine} for label, mine in runs.items()}))
    assert "personal accuracy at least FedAvgFT's: **not held** (0.8500 against 0.8600)" in text
    assert "personal accuracy at least PI-Flow's: held (0.8500 against 0.8500)" in text
    assert "benefit: **not held** (0.7000 against PI-Flow's 0.9000)" in text
    assert "global-only rows: **not held** (0.1500 against FedAvgFT's 0.1200)" in text
    assert "the regulariser helps: held (0.8500 with, 0.8400 without)" in text
    assert "| Flow | 207 | 107 | 100 | 30 | 1.50 |" in text  # 2|w| + |psi|, |w| + |psi|, 400 bytes of four
    assert "| FedAvgFT | 100 | 100 | 100 | 30 | 1 (one model) |" in text
    assert flow_real.tables("digits, Dirichlet 0.3", {"Flow": {"missing": "no files"}}) == ["Not run: no files"]


def test_the_map_counts_the_cells_where_flow_is_above_its_best_rival():
    names = list(flow_map.cells())[:2]
    scores = {label: {"personal": 0.8, "auc": [0.5, 0.9]} for label in flow_map.METHODS}
    won = {**scores, "Flow, eased": {"personal": 0.82, "auc": [0.5, 0.7]}, "Flow": {"personal": 0.7, "auc": [0.1, 0.2]}}
    text = "\n".join(flow_map.table({names[0]: {"0": scores}, names[1]: {"0": won, "1": won}}))
    assert f"in 0 of 2 cells. The eased one in 1: {names[1]}." in text
    assert "| +0.020 ± 0.000 | 0.10, 0.20; 0.50, 0.70 |" in text


def test_what_is_done_is_not_done_again_and_nothing_begins_after_the_time(tmp_path):
    calls = []
    results = flow.Results(tmp_path, 1.0)
    assert results.do("map", "a", "0", lambda: calls.append(0) or {"x": 1})
    again = flow.Results(tmp_path, 0.0)
    assert again.do("map", "a", "0", lambda: calls.append(1))
    assert not again.do("map", "b", "0", lambda: calls.append(2))
    assert (calls, again.of("map")) == ([0], {"a": {"0": {"x": 1}}})


@pytest.mark.parametrize("part", ["map", "trials", "real"])
def test_every_part_has_jobs_with_names_of_their_own(part, tmp_path):
    jobs = [(name, key) for name, key, _ in flow.jobs(part, 2, False, tmp_path)]
    assert len(jobs) == len(set(jobs)) > 20
