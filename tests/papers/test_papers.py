"""The papers' experiments: found by being there, measured once, drawn, and judged by their claims."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtailor.cli import app
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.papers import PAPERS, chosen, experiments, front, ledger, picture, results
from fedtailor.papers.base import Claim, Experiment, Figure, Pieces, by_value, column, interval, one, slope

KEYS = {"paper", "experiment", "claim", "held", "convex", "ours", "theirs", "interval", "seeds"}


def invoke(*words, code=0):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return done


FIGURE = Figure("x", "y", "name", "x", "y", log_y=True)


def toy(measure=None, *claims):
    def rows(settings, seed):
        return [{"x": x, "y": float(x + seed + 1), "name": name} for x in settings["x"] for name in "ab"]

    return Experiment("Toy", "nowhere", {"laptop": {"x": [1, 2, 4]}, "paper": {"x": [1, 2]}}, measure or rows, FIGURE, claims)


def test_every_experiment_is_complete():
    every = experiments()
    assert {name.partition("/")[0] for name in every} == set(PAPERS)
    for name, experiment in every.items():
        assert set(experiment.settings) == {"laptop", "paper"}, name
        assert experiment.claims, name
        assert len({claim.words for claim in experiment.claims}) == len(experiment.claims), name
        for claim in experiment.claims:
            assert claim.above is not None or claim.below is not None, f"{name}: {claim.words} cannot fail"
        assert json.loads(json.dumps(experiment.settings)) == experiment.settings, name


def test_an_experiment_is_chosen_by_name_and_an_unknown_one_is_refused():
    assert list(chosen("clup/fronts")) == ["clup/fronts"]
    assert set(chosen("minimax")) == {name for name in experiments() if name.startswith("minimax/")}
    with pytest.raises(InvalidArgument, match="no paper or experiment 'clup/front'"):
        chosen("clup/front")


@pytest.mark.parametrize(
    ("numbers", "holds"),
    [([1.0, 2.0], True), ([1.0, 0.0], False), ([1.0, 3.0], False), ([np.nan], False), ([], None)],
)
def test_a_claim_holds_where_its_number_is_within_the_limits_in_every_seed(numbers, holds):
    assert Claim("", lambda rows: 0.0, above=0.0, below=3.0).holds(numbers) is holds


def test_the_interval_is_students():
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30265 / np.sqrt(3), 2 + 4.30265 / np.sqrt(3)), rel=1e-5)
    assert interval([1.0]) is None


def test_rows_are_read_by_what_they_have():
    rows = [{"x": x, "y": 3 * x**-1.5, "name": "a"} for x in (1, 2, 4)]
    assert column(rows, "y", name="a").tolist() == [row["y"] for row in rows]
    assert one(rows, "y", x=1) == 3
    assert slope(column(rows, "x"), column(rows, "y")) == pytest.approx(-1.5)
    with pytest.raises(LookupError, match="3 rows"):
        one(rows, "y", name="a")


def test_what_is_kept_is_not_measured_again_unless_settings_change(tmp_path):
    calls = []

    def measure(settings, seed):
        calls.append(seed)
        return [{"x": 1, "y": 1.0, "name": "a"}]

    experiment = toy(measure)
    results.measured(tmp_path, "toy/one", experiment, "laptop", 2)
    results.measured(tmp_path, "toy/one", experiment, "laptop", 3)
    assert calls == [0, 1, 2]
    other = replace(experiment, settings={"laptop": {"x": [9]}, "paper": {}})
    assert results.read(tmp_path, "toy/one", other, "laptop", 3) == {}
    (tmp_path / "toy" / "one" / "laptop" / "seed-0.json").write_text("{")
    with pytest.raises(InvalidData, match=r"seed-0\.json is not a file of results"):
        results.read(tmp_path, "toy/one", experiment, "laptop", 3)


def test_a_seed_that_was_stopped_goes_on_where_it_was(tmp_path):
    calls, broken = [], ["b"]

    def rows(settings, seed, name):
        calls.append(name)
        if name in broken:
            raise KeyboardInterrupt
        return [{"x": 1, "y": 1.0, "name": name}]

    experiment = toy(Pieces(lambda settings: ["a", "b", "c"], rows))
    with pytest.raises(KeyboardInterrupt):
        results.measured(tmp_path, "toy/one", experiment, "laptop", 1)
    broken.clear()
    found = results.measured(tmp_path, "toy/one", experiment, "laptop", 1)
    assert (calls, [row["name"] for row in found[0]]) == (["a", "b", "b", "c"], ["a", "b", "c"])
    assert [path.name for path in results.place(tmp_path, "toy/one", "laptop").iterdir()] == ["seed-0.json"]
    assert experiment.measure({}, 0) == found[0]


def test_a_measurement_over_values_is_cut_at_them():
    def measure(settings, seed):
        return [{"x": x, "seed": seed, "d": settings["d"]} for x in settings["x"]]

    pieces, settings = by_value("x", measure), {"x": [1, 2], "d": 3}
    assert pieces.names(settings) == ["1", "2"]
    assert pieces.rows(settings, 7, "2") == [{"x": 2, "seed": 7, "d": 3}]
    assert pieces(settings, 7) == measure(settings, 7)


def test_pieces_of_other_settings_are_measured_again(tmp_path):
    calls = []

    def rows(settings, seed, name):
        calls.append(settings["x"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [{"x": 1, "y": 1.0, "name": name}]

    experiment = toy(Pieces(lambda settings: ["a", "b"], rows))
    with pytest.raises(KeyboardInterrupt):
        results.measured(tmp_path, "toy/one", experiment, "laptop", 1)
    other = replace(experiment, settings={"laptop": {"x": [9]}, "paper": {}})
    results.measured(tmp_path, "toy/one", other, "laptop", 1)
    assert calls[2:] == [[9], [9]]


def test_the_ledger_says_what_held_and_what_must():
    claims = (
        Claim("grows", lambda rows: column(rows, "y", name="a")[-1], above=0.0, theirs="4"),
        Claim("is small", lambda rows: rows[0]["y"], below=1.5, must=False),
        Claim("is tiny", lambda rows: rows[0]["y"], below=1.0),
    )
    experiment = toy(None, *claims)
    by_seed = {seed: experiment.measure(experiment.settings["laptop"], seed) for seed in (0, 1)}
    rows = ledger.rows_of("toy/one", experiment, by_seed)
    assert all(set(row) >= KEYS for row in rows)
    assert [row["held"] for row in rows] == [True, False, False]
    assert (rows[0]["ours"], rows[0]["theirs"], rows[0]["seeds"]) == (5.5, "4", 2)
    assert [row["claim"] for row in ledger.failures(rows)] == ["is tiny"]
    assert [row["held"] for row in ledger.rows_of("toy/one", experiment, {})] == [None] * 3
    page = ledger.page({"toy/one": (experiment, by_seed)}, "laptop")
    assert "3 claims at the scale `laptop`: 1 held, 2 not held, 0 not tried" in page


def test_a_figure_is_written_as_svg_pdf_and_csv(tmp_path):
    pytest.importorskip("vl_convert")
    experiment = toy()
    by_seed = {seed: experiment.measure(experiment.settings["laptop"], seed) for seed in (0, 1)}
    point = picture.points(FIGURE, by_seed)[0]
    assert point == {"x": 1, "name": "a", "mean": 2.5, "least": 2.0, "most": 3.0}
    written = {path.name: path.read_bytes() for path in picture.write(experiment, by_seed, tmp_path / "deep" / "er")}
    assert written["figure.svg"].startswith(b"<svg")
    assert written["figure.pdf"].startswith(b"%PDF")
    assert written["figure.csv"].decode().splitlines()[:2] == ["seed,x,y,name", "0,1,2.0,a"]


def test_the_pages_show_every_figure_and_what_was_not_tried(tmp_path):
    pytest.importorskip("vl_convert")
    experiment = toy(None, Claim("grows", lambda rows: rows[-1]["y"], above=0.0), Claim("falls", lambda rows: 1.0, below=0.0))
    by_seed = results.measured(tmp_path, "toy/one", experiment, "laptop", 2)
    took = front.times(tmp_path, ["toy/one", "toy/two"], "laptop", 2)
    assert list(took) == ["toy/one"]
    sections = {"toy/one": (experiment, by_seed), "toy/two": (experiment, {})}
    written = front.write(tmp_path / "docs", sections, "laptop", took)
    assert [str(path.relative_to(tmp_path / "docs")) for path in written] == [
        "papers.md",
        "results/papers.md",
        "papers/toy-one.svg",
    ]
    page, ledger_page = written[0].read_text(), written[1].read_text()
    assert "![Toy](papers/toy-one.svg)" in page
    assert "1 of 2 claims held, 2 seeds" in page
    assert "**toy/two**: Toy (nowhere); not tried" in page
    assert "1 convex experiments took" in ledger_page
    assert written[2].read_text().startswith("<svg")
    small, whole = (len(picture.chart(experiment, by_seed, small=s).to_dict()["layer"]) for s in (True, False))
    assert small < whole


def test_what_is_drawn_leaves_out_what_was_not_measured():
    rows = [{"x": 1, "y": None, "name": "a"}, {"x": 2, "y": 3.0, "name": "a"}]
    assert [point["x"] for point in picture.points(FIGURE, {0: rows})] == [2]


def test_the_commands_list_measure_and_judge(tmp_path):
    listed = json.loads(invoke("papers", "list", "--json").stdout)
    assert {row["experiment"] for row in listed} == set(experiments())
    where = ["--out", str(tmp_path), "--seeds", "1", "--json"]
    nothing = json.loads(invoke("papers", "check", "minimax", "--kept", *where).stdout)
    assert {row["held"] for row in nothing} == {None}
    checked = json.loads(invoke("papers", "check", "clup/bound", *where).stdout)
    assert all(set(row) >= KEYS and row["held"] is True and row["convex"] for row in checked)
    assert invoke("papers", "check", "nobody", code=2).stderr
