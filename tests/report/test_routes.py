"""The routing report: quantiles by group, the AUC against known kinds, what a run's summary keeps, and the page's part."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.metrics.rows import QUANTILES, spread_of
from fedtailor.report import diagnostics
from fedtailor.report.page import page
from fedtailor.runs import record
from fedtailor.runs.contents import open_contents

TITLE = "Which path rows take"
OPTIONS = {"rounds": 2, "batch_size": 8, "evaluate_every": 0, "engine": "loop", "workers": 1}


def instances(**options):
    return ft.Federation.load("instances", **{"clients": 3, "rows": 24, "test_rows": 40, "val_rows": 8, "d": 4, **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    fed = instances()
    flow, tuned = ft.Flow(lr=0.3), ft.FedAvgFT(lr=0.3)
    return (
        fed,
        ft.run(flow, fed, "mlp:5", out=folder / "flow", **OPTIONS),
        ft.run(tuned, fed, "mlp:5", **OPTIONS),
        folder / "flow",
    )


def test_groups_are_by_who_is_right_and_have_the_quantiles_of_their_rows():
    draw = np.random.default_rng(0)
    q, mine, theirs = draw.uniform(size=(200, 2)), draw.integers(0, 2, 200) * 1.0, draw.integers(0, 2, 200) * 1.0
    spread = spread_of("classification", q, mine, theirs)
    want = {"all": [True] * 200, "both_correct": mine + theirs == 2, "global_only": theirs > mine, "personal_only": mine > theirs}
    assert set(spread["groups"]) == set(want)
    for name, rows in want.items():
        part = q[np.array(rows)]
        assert spread["groups"][name]["rows"] == len(part)
        for j in range(2):
            ordered = np.sort(part[:, j])
            places = np.array(QUANTILES) * (len(part) - 1)
            assert spread["groups"][name]["quantiles"][j] == pytest.approx(np.interp(places, np.arange(len(part)), ordered))
            assert spread["groups"][name]["mean"][j] == pytest.approx(part[:, j].mean())
    assert "kind_auc" not in spread


def test_a_group_without_rows_and_targets_that_are_no_classes():
    q = np.full((3, 1), 0.25)
    groups = spread_of("classification", q, np.ones(3), np.ones(3))["groups"]
    assert groups["global_only"] == {"rows": 0, "mean": None, "quantiles": None}
    assert groups["both_correct"]["quantiles"] == [[0.25] * 5]
    assert list(spread_of("regression", q, np.ones(3), np.ones(3))["groups"]) == ["all"]


def test_the_area_says_how_well_the_global_path_goes_with_the_common_kind():
    kinds = np.array([True, True, False, False, True])
    q = np.array([[0.9, 0.1, 0.5], [0.8, 0.2, 0.5], [0.1, 0.9, 0.5], [0.2, 0.8, 0.5], [0.15, 0.85, 0.5]])
    area = spread_of("classification", q, np.ones(5), np.ones(5), kinds)["kind_auc"]
    assert area == pytest.approx([5 / 6, 1 / 6, 0.5])  # of the six pairs one is the wrong way round
    assert spread_of("classification", q, np.ones(5), np.ones(5), kinds | True)["kind_auc"] == [None] * 3


def test_a_runs_summary_holds_the_routes_of_its_test_rows(trained):
    fed, run, _, _ = trained
    routing = run.summary["routing"]
    fed = fed.to(torch.float32)
    q, groups = [], []
    for i in range(3):
        x, y = fed.test.client(i)
        q.append(run.algorithm.routes(run.task, run.shared, run.personal[i], x)[..., 0])
        right = [(logits.argmax(1) == y).int() for logits in (run.predict(i, x), run.predict_global(x))]
        groups.append(right[0] - right[1] + 3 * (right[0] & right[1]))  # 1: only personal, -1: only shared, 3: both
    q, groups = torch.cat(q).double().numpy(), torch.cat(groups).numpy()
    assert routing["mean"] == pytest.approx(q.mean(0), abs=1e-6)
    assert routing["to_shared"] == pytest.approx((q >= 0.5).mean(0))
    for name, code in (("both_correct", 3), ("global_only", -1), ("personal_only", 1)):
        assert routing["groups"][name]["rows"] == (groups == code).sum()
        assert run.summary[name] == pytest.approx((groups == code).mean())
        if (groups == code).any():
            assert routing["groups"][name]["mean"] == pytest.approx(q[groups == code].mean(0), abs=1e-6)
    assert len(routing["routes"]) == len(routing["kind_auc"]) == 2
    assert routing["model_parameters"] == 4 * 5 + 5 + 5 * 2 + 2
    assert routing["router_parameters"] == tree.size(run.shared["router"])
    assert routing["multiply_adds_shared"] == 4 * 5 + 5 * 2
    psi = {name: p.numel() for name, p in run.shared["router"].items() if name.endswith("weight")}
    assert routing["multiply_adds_personal"] == 4 * 5 + 5 * 2 + sum(psi.values())  # one path, and the router


def test_the_engines_keep_the_same_routes(trained):
    fed, run, _, _ = trained
    other = ft.run(run.algorithm, fed, "mlp:5", **{**OPTIONS, "engine": "vectorized", "workers": None})
    assert other.summary["routing"]["mean"] == pytest.approx(run.summary["routing"]["mean"], abs=1e-5)


def test_routes_come_back_from_the_run_directory_and_are_small(trained):
    _, run, _, folder = trained
    saved = record.read(open_contents(folder)).summary["routing"]
    assert saved == run.summary["routing"]
    assert len(json.dumps(saved)) < 4000


def test_methods_without_a_router_keep_no_routes(trained):
    fed, _, tuned, _ = trained
    assert "routing" not in tuned.summary
    assert "routing" not in ft.run(ft.Flow(q0=0.3), fed, "mlp:5", **OPTIONS).summary
    assert "figures" not in tuned.summary
    assert tuned.algorithm.diagnose(tuned.task, tuned.shared, {}, fed.test.x) == {}


def test_the_report_draws_a_box_per_layer_and_group_and_shows_table_4(trained):
    _, run, tuned, _ = trained
    html = page({"Flow": [run.record("Flow")], "FedAvgFT": [tuned.record("FedAvgFT")]})
    section = html[html.index(TITLE) :].split("</section>")[0]
    groups = [g for name, g in run.summary["routing"]["groups"].items() if name != "all" and g["rows"]]
    assert section.count("<g><title>") == 2 * len(groups)
    w, psi = run.summary["routing"]["model_parameters"], run.summary["routing"]["router_parameters"]
    assert f"<td>{2 * w + psi:,}<small>2|w| + |psi|</small></td><td>{w + psi:,}<small>|w| + |psi|</small></td>" in section
    assert f"<td>{w:,}<small>|w|</small></td>" in section
    assert "AUC" in section
    without_flow = page({"FedAvgFT": [tuned.record("FedAvgFT")]})
    assert TITLE not in without_flow


def test_a_box_stands_where_its_quantiles_are():
    svg = diagnostics.boxes(["first"], {"both_correct": [[0.0, 0.25, 0.5, 0.75, 1.0, 0.4]]}, "Flow")
    unnamed = diagnostics.boxes(["1", "3"], {"both_correct": [[0.0, 0.25, 0.5, 0.75, 1.0, 0.4]] * 2}, "Flow")
    assert ">layer 1<" in unnamed
    assert ">layer 2<" in unnamed
    base, height = diagnostics.TOP + diagnostics.HEIGHT, diagnostics.HEIGHT
    line = re.search(r'<path d="M([\d.]+) ([\d.]+)V([\d.]+)M[\d.]+ ([\d.]+)V([\d.]+)M', svg)
    assert [float(v) for v in line.groups()[1:]] == pytest.approx([base, base - height / 4, base - 3 * height / 4, base - height])
    assert float(re.search(r'cy="([\d.]+)"', svg)[1]) == pytest.approx(base - 0.4 * height)


def test_sequences_have_routes_of_their_rows_and_layers_have_names():
    texts = {name: f"{name} met the quick brown fox and the lazy dog. " * 4 for name in ("ann", "bob")}
    fed = ft.Federation.from_texts(texts, length=10)
    routing = ft.run(ft.Flow(lr=0.3), fed, "lstm:4,6", **{**OPTIONS, "rounds": 1}).summary["routing"]
    assert routing["groups"].keys() == {"all"}  # a row has as many answers as positions
    assert routing["groups"]["all"]["rows"] == len(fed.test.y)
    assert routing["routes"] == ["layer 1"]
    whole = ft.run(ft.Flow(lr=0.3, routing="model"), instances(), "mlp:5", **{**OPTIONS, "rounds": 1}).summary["routing"]
    assert whole["routes"] == ["whole model"]
