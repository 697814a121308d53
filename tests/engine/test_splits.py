"""``splits``: which rows test is drawn again, and chance is what it leaves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.data.redeal import overlap, redealt
from fedtailor.metrics.verdict import HELPS, OPEN
from fedtailor.report.evidence import Evidence
from fedtailor.runs.folder import read

OPTIONS = {"rounds": 2, "yardsticks": ("none",)}


@pytest.fixture(scope="module")
def fed():
    draw = np.random.default_rng(0)

    def part(rows):
        x = draw.normal(size=(4, rows, 3))
        return [(a, (a[:, 0] + draw.normal(size=rows) > 0).astype(int)) for a in x]

    return ft.Federation.from_arrays(part(30), part(20), part(10))


def test_a_split_is_the_run_on_the_rows_dealt_anew(fed):
    found = ft.compare([ft.Local(), ft.FedAvg()], fed, splits=3, **OPTIONS)
    for split, summary in enumerate(found.summaries("FedAvg")):
        alone = ft.run(ft.FedAvg(), redealt(fed, split), rounds=2)
        assert summary["split"] == split
        assert summary["acc_personal"] == alone.summary["acc_personal"]
    mean = np.mean([s["acc_personal"] for s in found.summaries("FedAvg")])
    assert next(r for r in found.table() if r["method"] == "FedAvg")["acc_personal"] == pytest.approx(mean)


def test_four_clients_are_tested_over_splits_with_the_correction(fed):
    found = ft.compare([ft.Local(), ft.FedAvg()], fed, splits=4, **OPTIONS)
    evidence = Evidence(found.records())
    own, rival = (evidence.measures(label, "acc_personal") for label in ("FedAvg", "Local"))
    means = (own - rival).mean(1)  # equal numbers of rows, so equal weights
    error = np.sqrt((1 / 4 + overlap(fed)) * means.var(ddof=1))
    verdict = evidence.verdict
    assert (verdict.over, verdict.splits, verdict.gain) == ("splits", 4, pytest.approx(means.mean()))
    assert verdict.high - verdict.low == pytest.approx(2 * 3.182446305 * error)  # Student's 97.5 % with three degrees of freedom
    assert "over 4 splits" in verdict.sentence


def test_the_deviation_is_over_splits_and_not_zero(fed):
    evidence = Evidence(ft.compare([ft.FedAvg()], fed, splits=3, seeds=2, **OPTIONS).records())
    average = evidence.average("FedAvg", "acc_personal")
    by_split = evidence.measures("FedAvg", "acc_personal").mean(1).reshape(3, 2).mean(1)
    assert average.deviation == pytest.approx(by_split.std(ddof=1))
    assert average.deviation > 0


def test_each_split_is_tuned_on_its_own_validation_rows(fed, tmp_path):
    out = tmp_path / "a"
    found = ft.compare([ft.FedAvg()], fed, splits=2, tune={"lr": [0.01, 1.0]}, out=out, **OPTIONS)
    first, second = (json.loads((out / "tuning" / name).read_text()) for name in ("fedavg.json", "fedavg-split-1.json"))
    assert first == found.tuning["FedAvg"]
    assert [t["score"] for t in first["trials"]] != [t["score"] for t in second["trials"]]
    again = ft.compare([ft.FedAvg()], fed, splits=2, tune={"lr": [0.01, 1.0]}, out=out, resume=True, **OPTIONS)
    assert [s["acc_personal"] for s in again.summaries("FedAvg")] == [s["acc_personal"] for s in found.summaries("FedAvg")]
    stored = read(out)["FedAvg"]
    assert [r.summary["split"] for r in stored] == [0, 1]
    assert [r.tuning for r in stored] == [first, second]


def test_a_method_is_judged_by_the_score_asked_for(fed):
    """Of log loss less is a gain, also where the kind's own score is better when higher."""
    found = ft.compare([ft.Local(lr=1e-4), ft.FedAvg(lr=0.3, steps=5)], fed, splits=3, score="log_loss", **OPTIONS)
    verdict = Evidence(found.records()).verdict
    assert (verdict.outcome, verdict.score) == (HELPS, "log_loss")
    assert verdict.gain > 0


def test_terminal_page_and_json_say_the_same_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "digits", "--clients", "3", "--methods", "local,fedavg", "--rounds", "1", "--splits", "2"]
    told = CliRunner().invoke(app, [*words, "--json", "--out", "a"])
    values = json.loads(told.stdout)
    shown = CliRunner().invoke(app, [*words, "--out", "b"])
    sentence = values["verdict"]["sentence"]
    assert sentence in shown.stdout
    assert sentence.replace("'", "&#x27;") in (tmp_path / "a" / "report.html").read_text()
    assert "Settings were not tuned" in sentence
    assert {row["yardstick"] for row in values["yardsticks"]} == {"majority class", "all rows pooled"}
    assert "(majority class)" in shown.stdout


def test_a_gain_that_may_be_chance_is_said_to_be(fed):
    copies = replace(fed, test=fed.test)
    verdict = Evidence(
        ft.compare({"Local": ft.Local(), "Again": ft.Ditto(lam=0.0)}, copies, splits=3, **OPTIONS).records()
    ).verdict
    assert verdict.outcome in (OPEN, HELPS)
    assert "-0." not in verdict.sentence
    assert "rises by" not in verdict.sentence


def test_a_column_that_says_which_rows_test_is_not_drawn_again(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("site,x,part,y\n" + "".join(f"{i % 3},{i},{'train' if i % 2 else 'test'},{i % 5 // 3}\n" for i in range(60)))
    words = ["compare", str(path), "--client", "site", "--label", "y", "--split", "part", "--splits", "3"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    with pytest.raises(ft.errors.InvalidArgument, match="splits must be"):
        ft.compare([ft.Local()], None, splits=0)
