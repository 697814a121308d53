"""The advice page says what the advice says, in every case that JSON can hold, and needs nothing from elsewhere."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.advisor.curves import facts
from fedtailor.cli import app
from fedtailor.errors import BadRun
from fedtailor.report import advice_figures
from fedtailor.report.advice import page, read, readable, write
from fedtailor.report.advice_words import lead, traffic
from tests.report.test_report import NASTY, Reader

SECTIONS = (
    "Error over lam",
    "Where this federation stands",
    "The race on validation rows",
    "The trade-off with communication",
    "Who gains over training alone",
    "The advice as the command line says it",
    "How to reproduce it",
    "What the words mean",
)


def curves(lams=(0.1, 1.0, 10.0), **changes):
    count = len(lams)
    at = {"loss": 0.52, "score": 0.75, "excess": 0.01, "se": 0.004, "distance": None, "distance_of": None, "true": None}
    measured = {key: None if value is None else [value] * count for key, value in at.items()}
    return {
        "kind": "classification",
        "score": "acc",
        "weight_decay": 0.0125,
        "constants": {"mu": 0.0125, "L": 1.25, "rho2": 2.5, "R2": 0.75, "n": 30, "m": 8, "N": 240},
        "bound": {"lam": [0.1, 1.0, 1e4], "local": [5.0, 50.0, 1e9], "shared": [None, None, 70.0], "bound": [5.0, 50.0, 70.0]},
        "optimal": {"regime": "local", "least": 0.0, "most": 3.0},
        "measured": {**measured, "excess": [0.02, 0.0, 0.03][:count], "lam": list(lams)},
        "ends": {"local": {**at, "excess": 0.05}, "shared": {**at, "excess": 0.04}},
        **changes,
    }


def sweep(**changes):
    """A sweep of two lams whose numbers are easy to find again."""

    def line(lam, top):
        curve = [{"round": r, "bytes": r * 2e6, "val_score": top - 0.2 / r, "val_loss": 0.5, "error": None} for r in (1, 5, 20)]
        return {"lam": lam, "curve": curve, "end": curve[-1], "rounds_used": 20, "estimated": False}

    return {
        "kind": "classification",
        "score": "acc",
        "path": [line(0.01, 0.7), line(0.5, 0.8), line(None, 0.75)],
        "dynamic": line(None, 0.81),
        "ends": {"local": {"val_score": 0.71}, "shared": {"val_score": 0.74}},
        "front": [{"lam": 0.5, "round": 20, "bytes": 4e7, "val_score": 0.79}],
        "fewest": [
            {"target": 0.72, "lam": 0.5, "rounds": 5, "bytes": 1e7},
            {"target": 0.99, "lam": None, "rounds": None, "bytes": None},
        ],
        "rounds_used": 61,
        "rounds_separate": 203,
        "share": 0.3,
        **changes,
    }


def advice(**changes):
    """An advice as ``Advice.json`` gives it, with curves and map beside it."""
    estimate = {
        "r2": 0.75,
        "interval": [0.25, 1.5],
        "noise": 0.5,
        "zero": False,
        "trusted": "",
        "n": 30,
        "d": 9,
        "m": 8,
        "unbiased": 0.75,
        "population": 0.8,
        "left_out": [],
        "per_client": [],
    }
    return {
        "algorithm": "FedCLUP(lr=0.5, steps=10, lam=0.29)",
        "collaborate": True,
        "regime": "between",
        "lam": 0.29,
        "theory_lam": 0.4375,
        "r2": 0.75,
        "r2_interval": [0.25, 1.5],
        "heterogeneity": estimate,
        "clusters": 1,
        "groups": [],
        "steps_used": 10560,
        "rounds": 50,
        "bytes_total": 211_000,
        "gains": {"Cork": 0.125, "Delft": -0.0625, "Ghent": 0.0, "Lyon": 0.1875},
        "race": [
            {"method": "FedCLUP lam=0.29", "val_acc": 0.76, "se": None, "val_loss": 0.52, "rounds": 25},
            {"method": "FedAvg", "val_acc": 0.75, "se": 0.02, "val_loss": 0.55, "rounds": 25},
            {"method": "Local", "val_acc": 0.72, "se": 0.02, "val_loss": 0.57, "rounds": 10},
        ],
        "notes": ["One client has few rows."],
        "text": "8 clients, 540 training rows.",
        "curves": curves(),
        "map": {"m": 8, "N": 480, "rows": {"least": 30, "median": 60.0, "most": 90}},
        "about": {"data": "patients.csv", "command": "fedtailor advise patients.csv", "version": "9.9"},
        **changes,
    }


def named(changes):
    """What a case changes, for its name."""
    return "-".join(changes) or "nothing"


def checked(advised, **options):
    """The page, checked: well formed, no drawing at a place that is no number, nothing fetched."""
    text = page(advised, **options)
    reader = Reader(text)
    for tag in ("script", "link", "img", "iframe"):
        assert tag not in reader.tags
    for key, value in reader.attributes:
        assert key not in ("src", "href")
        assert not key.startswith("on")
        if key in ("d", "points", "x", "y", "cx", "cy", "width", "height", "transform", "viewbox"):
            assert not re.search(r"nan|inf|None", value), (key, value)
    assert not re.search(r"@import|url[(]", text)
    return reader


def heads(advised, **options):
    return re.findall(r"<h2>(.*?)</h2>", page(advised, **options))


def test_every_section_is_there_in_order():
    assert heads(advice(), sweep=sweep()) == list(SECTIONS)
    assert heads(advice()) == [title for title in SECTIONS if title != "The trade-off with communication"]


@pytest.mark.parametrize(
    ("regime", "algorithm", "lam", "said"),
    [
        (
            "between",
            "FedCLUP(lam=0.29)",
            0.29,
            "Learn together, and let each client keep a model of its own: FedCLUP, lam = 0.29 .",
        ),
        ("between", "FedAvgFT(lr=0.1)", 0.0, "Learn together, and let each client keep a model of its own: FedAvgFT ."),
        ("shared", "FedAvg(lr=0.1)", None, "Learn together, with one model for all: FedAvg ."),
        ("clusters", "HypCluster(k=2)", None, "Learn together, but inside the groups: HypCluster ."),
        ("local", "Local(lr=0.1)", 0.0, "Do not learn together: train alone: Local ."),
    ],
    ids=["between", "finetuned", "shared", "clusters", "local"],
)
def test_the_first_sentence_says_what_to_do(regime, algorithm, lam, said):
    advised = advice(regime=regime, algorithm=algorithm, lam=lam, collaborate=regime != "local")
    reader = checked(advised)
    assert reader.text.split("spread, how far")[0].endswith(said + " ")
    assert (("class", "verdict no") in reader.attributes) == (regime == "local")


def test_the_numbers_are_those_of_the_advice():
    text = checked(advice(), sweep=sweep()).text
    for said in (
        "0.75 90 % interval 0.25 to 1.5",  # R²
        "0.5 the spread is 1.5 times that",  # noise
        "0.29 partial pooling by the spread asks for 0.4375",
        "50 rounds about 211 kB in all",
        "2 of 4 1 loses",
        "not clearly ahead of FedAvg: 0.5 standard errors",  # (0.76 - 0.75)/0.02
        "10,560 gradient steps",
        "8 clients with 9 parameters each",
        "One client has few rows.",
        "FedCLUP(lr=0.5, steps=10, lam=0.29)",
        "mu = 0.0125, L = 1.25, rho² = 2.5, spread = 0.75",
        "a weight decay of 0.0125 is added",
        "the bound is 10 times the noise",  # 5/0.5
        "level at about 35 training rows per client; there are 60",  # 60 * (7/8 * 0.5)/0.75
        "2 of 4 clients gain, 1 loses, 1 is level; the plain mean of their gains is 0.0625. Loses: Delft.",
        "FedCLUP lam=0.29 leads with an accuracy of 0.76. FedAvg follows with 0.75, 0.5 standard errors behind.",
        "61 rounds in all, where separate runs would have taken 203 (30 %)",
        "0.72 0.5 5 10 MB 0.99 - not reached -",
        "8 clients, 540 training rows.",
        "fedtailor advise patients.csv",
        "fedtailor 9.9",
    ):
        assert said in text, said


def test_the_best_lam_and_those_close_to_it_are_named():
    assert "the loss is least at lam = 1." in checked(advice()).text
    near = curves()
    near["measured"]["excess"], near["measured"]["se"] = [0.002, 0.0, 0.03], [0.004, 0.0, 0.004]
    text = checked(advice(curves=near)).text
    assert "least at lam = 1; from 0.1 to 1 it is within a standard error of that." in text
    far = curves(ends={**near["ends"], "local": {**near["ends"]["local"], "excess": 0.0, "se": 0.0}})
    far["measured"]["excess"] = [0.02, 0.03, 0.04]
    assert "least at lam = 0, training alone." in checked(advice(curves=far)).text


def test_an_advised_lam_that_the_exact_solution_does_not_like_is_said():
    drawn_curves = curves(lams=(0.3, 1.0, 10.0))
    assert "At the advised lam it is 0.02 ± 0.004 higher" in checked(advice(curves=drawn_curves)).text
    assert "At the advised lam it is 0.04 ± 0.004 higher" in checked(advice(curves=drawn_curves, regime="shared", lam=None)).text
    assert "At the advised lam" not in checked(advice(curves=drawn_curves, lam=1.1)).text


def test_the_map_and_the_race_at_odds_are_said():
    far = {**advice()["heterogeneity"], "r2": 50.0, "interval": [40.0, 60.0]}
    advised = advice(heterogeneity=far, r2=50.0, regime="shared", lam=None)
    assert "The race on validation rows says otherwise" in checked(advised).text
    assert "says otherwise" not in checked(advice(heterogeneity=far, r2=50.0, regime="local", lam=0.0)).text


@pytest.mark.parametrize(
    "changes",
    [
        {"r2": None, "r2_interval": None, "heterogeneity": None, "theory_lam": None},
        {"curves": None},
        {"curves": {"refused": "too dear"}},
        {"map": None},
        {"gains": {}},
        {"gains": {"a": 0.0, "b": 0.0}},
        {"gains": {"a": math.nan, "b": math.inf, "c": None, "d": 0.5}},
        {"gains": {"a": math.nan}},
        {"race": []},
        {"race": [{"method": "Local", "val_acc": math.nan, "rounds": 3}]},
        {"race": [{"method": "Local", "val_acc": 0.5, "rounds": 3}]},
        {"race": [{"method": "A", "val_mse": math.inf}, {"method": "B", "val_mse": 2.0, "se": math.nan, "rounds": 1}]},
        {"lam": math.nan, "theory_lam": math.inf, "rounds": None, "bytes_total": math.nan, "steps_used": None},
        {"clusters": 2, "groups": [0, 1, 1, -1], "regime": "clusters", "algorithm": "HypCluster(k=2)", "lam": None},
        {"notes": [], "text": None, "about": None},
        {"curves": curves(bound=None, constants=None)},
        {"curves": curves(lams=(1.0,))},
        {"theory_lam": 0.29},
        {"theory_lam": 1e-12},
    ],
    ids=named,
)
def test_whatever_is_missing_or_no_number_the_page_is_written(changes):
    reader = checked(advice(**changes))
    assert [title for title in SECTIONS if title in reader.text] == [t for t in SECTIONS if "trade-off" not in t]


@pytest.mark.parametrize(
    "changes",
    [
        {"r2": 0.0, "interval": [0.0, 0.0], "zero": True},
        {"r2": 0.0, "interval": [0.0, 2.0], "zero": True},
        {"r2": 0.5, "interval": [0.0, 2.0], "zero": True},
        {"r2": 0.5, "interval": [0.1, None]},
        {"r2": 0.5, "interval": [0.1, math.inf]},
        {"r2": None, "interval": None},
        {"r2": 1e-30, "interval": [1e-31, 1e30]},
        {"noise": 0.0},
        {"noise": None},
        {"noise": math.nan},
    ],
    ids=named,
)
def test_intervals_of_every_kind_are_drawn(changes):
    estimate = {**advice()["heterogeneity"], **changes}
    reader = checked(advice(heterogeneity=estimate, r2=estimate["r2"], r2_interval=estimate["interval"]))
    drawn = bool(estimate["noise"]) and not math.isnan(estimate["noise"])
    title = "Spread against m/N: where training alone, one model, or something between is best"
    assert (("aria-label", title) in reader.attributes) == drawn
    if estimate["zero"] and drawn:
        assert "not distinguishable from zero" in reader.text


def test_the_point_lies_on_its_side_of_the_edge():
    """The dashed edge is at R² = edge at the federation's own m/N; an interval from 0 has an arrow and no lower bar."""
    for r2, side in ((4.0, -1), (0.01, 1)):
        text = advice_figures.regimes(60, 0.5, r2, r2 / 2, r2 * 2, 3.0)
        x, y = (float(v) for v in re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text).groups())
        (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in re.search(r'<polyline points="(\S+) (\S+)"', text).groups())
        edge = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        assert (y - edge) * side > 5  # the picture's y grows downwards
        assert "not distinguishable" not in text
    assert "not distinguishable from zero" in advice_figures.regimes(60, 0.5, 0.1, 0.0, 1.0, 3.0)


def test_names_cannot_break_the_page():
    names = [NASTY, "北京 клиент 🏥", "x" * 500, "a&b", "' onload='alert(1)"]
    advised = advice(
        gains={name: 0.1 * (i - 2) for i, name in enumerate(names)},
        race=[{"method": name, "val_acc": 0.5, "se": 0.1, "rounds": 2} for name in names],
        notes=names,
        text=NASTY,
        algorithm=NASTY,
        curves={"refused": NASTY},
        about={"data": NASTY, "command": NASTY, "version": NASTY},
    )
    reader = checked(advised)
    for name in (NASTY, names[1], names[3]):
        assert name in reader.text


def test_ten_thousand_clients_make_a_small_page():
    values = np.linspace(-0.5, 1.0, 10_000)
    advised = advice(gains={f"client {i}": float(v) for i, v in enumerate(values)})
    assert len(page(advised)) < 200_000
    text = checked(advised).text
    assert f"{(values > 0).sum():,} of 10,000 clients gain, {(values < 0).sum():,} lose" in text
    assert "first: client 9999" in text
    assert "last: client 0" in text
    assert "240 evenly spaced ones are drawn" in text


def test_regression_is_in_errors_and_falls():
    race = [{"method": "A", "val_mse": 2.0, "rounds": 5}, {"method": "B", "val_mse": 2.5, "se": 0.1, "rounds": 5}]
    text = checked(advice(race=race)).text
    assert "a mean squared error of 2" in text
    assert "lower is better" in text
    assert "fall of the mean squared error" in text
    assert lead(race) == pytest.approx(5)
    assert "clearly ahead of B: 5 standard errors" in text


def test_errors_that_were_measured_are_drawn_beside_the_bound():
    drawn_curves = curves()
    for key, value in (("distance", 0.2), ("true", 0.3), ("distance_of", 7)):
        drawn_curves["measured"][key] = [value] * 3
        drawn_curves["ends"]["local"][key] = drawn_curves["ends"]["shared"][key] = value
    reader = checked(advice(curves=drawn_curves))
    assert "mean over 7 clients with rows to spare" in reader.text
    assert "true parameters, which these generated data know" in reader.text
    assert "estimated error at lam ∞: 0.2" in reader.text
    assert "true error at lam 0: 0.3" in reader.text
    drawn_curves["measured"]["distance"] = [-0.1, 0.0, 0.2]  # an unbiased estimate can come out below zero: not on a log axis
    checked(advice(curves=drawn_curves))
    assert "The distance itself cannot be measured here" in checked(advice()).text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dynamic": None},
        {"front": []},
        {"ends": {}},
        {"ends": {"local": {"val_score": None}, "shared": {}}},
        {"path": []},
        {"fewest": []},
        {"score": "mse"},
        {"rounds_used": None, "share": None},
        {"path": [{"lam": 0.1, "curve": [{"round": 1, "bytes": 0, "val_score": math.nan}]}], "dynamic": None},
    ],
    ids=named,
)
def test_sweeps_of_every_kind_are_drawn(changes):
    reader = checked(advice(), sweep=sweep(**changes))
    assert "The trade-off with communication" in reader.text


def test_the_sweep_shows_every_lam_the_front_and_the_ends():
    text = advice_figures.trade_off(sweep(), "accuracy")
    for said in ("lam 0.01", "lam 0.5", "lam ∞", "dynamic lam", "Pareto front", "alone: 0.71", "one model: 0.74"):
        assert said in text
    assert text.count("on the front: 0.79 after 20 rounds, 40 MB") == 2  # in either panel


def test_traffic_has_a_unit_that_suits_it():
    assert [traffic(v) for v in (None, 12, 1500, 2.5e6, 3e9)] == ["-", "12 bytes", "1.5 kB", "2.5 MB", "3 GB"]


# -- on disk --------------------------------------------------------------------------------------------------------------
def test_the_command_writes_the_page_and_report_writes_it_anew(tmp_path):
    draw = np.random.default_rng(0)
    lines = ["owner,a,b,y"]
    for owner in "pqrs":
        w = draw.normal(size=2)
        lines += [f"{owner},{x[0]:.4f},{x[1]:.4f},{x @ w + draw.normal():.4f}" for x in draw.normal(size=(30, 2))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    out = tmp_path / "out"
    asked = ["advise", str(tmp_path / "t.csv"), "--client", "owner", "--label", "y", "--rounds", "10", "--out", str(out)]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    saved = json.loads((out / "advice.json").read_text())
    assert json.loads(result.stdout) == saved
    assert saved["curves"]["measured"]["distance"]
    assert saved["map"]["m"] == 4
    first = (out / "report.html").read_text()
    Reader(first)
    (out / "report.html").unlink()
    again = CliRunner().invoke(app, ["report", str(out), "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["best"] == saved["algorithm"]
    assert (out / "report.html").read_text() == first
    assert "The trade-off with communication" not in first
    (out / "sweep.json").write_text(json.dumps(sweep()))
    assert CliRunner().invoke(app, ["report", str(out), "--to", str(out / "b.html")]).exit_code == 0
    assert "The trade-off with communication" in (out / "b.html").read_text()


def test_an_advice_does_not_replace_the_report_of_a_run(tmp_path):
    (tmp_path / "history.jsonl").write_text("")
    result = CliRunner().invoke(app, ["advise", "digits", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds a run" in result.output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("advice.json", ""),
        ("advice.json", json.dumps(advice())[:500]),
        ("advice.json", "[]"),
        ("advice.json", "{}"),
        ("advice.json", json.dumps({**advice(), "regime": "elsewhere"})),
        ("advice.json", json.dumps({**advice(), "gains": [1, 2]})),
        ("advice.json", json.dumps({**advice(), "race": [1]})),
        ("advice.json", json.dumps({**advice(), "heterogeneity": 3})),
        ("advice.json", json.dumps({**advice(), "curves": {"measured": {}}})),
        ("advice.json", "\udcff".encode("utf-8", "surrogateescape")),
        ("sweep.json", "nonsense"),
        ("sweep.json", "[1]"),
        ("sweep.json", json.dumps({"path": 3})),
    ],
    ids=range(13),
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, file, content):
    (tmp_path / "advice.json").write_text(json.dumps(advice()))
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_anything_in_any_place_is_drawn_or_refused():
    """Every value of the advice and of what it holds, replaced by two of several others."""
    whole = {**advice(), "sweep": sweep()}

    def places(value, path=()):
        if path:
            yield path
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in inside:
            yield from places(part, (*path, key))

    drawn = 0
    others = (None, "x", -1, [], {}, 1e308, math.nan)
    for place, path in enumerate(places(whole)):
        for other in (others[place % 7], others[(place + 3) % 7]):
            changed = copy.deepcopy(whole)
            spot = changed
            for key in path[:-1]:
                spot = spot[key]
            spot[path[-1]] = other
            beside = changed.pop("sweep")
            with contextlib.suppress(BadRun), readable(Path("advice.json")):
                page(changed, sweep=beside)
                drawn += 1
    assert drawn > 300


def test_an_advice_of_python_can_be_written_with_its_facts(tmp_path):
    draw = np.random.default_rng(1)
    rows = [(x := draw.normal(size=(30, 2)), (x @ draw.normal(size=2) > 0) * 1) for _ in range(4)]
    fed = ft.Federation.from_arrays(rows, rows)
    advised = ft.advise(fed, rounds=10)
    where = write(advised.json(), tmp_path / "a.html", **facts(fed, "linear", advised))
    text = Reader(where.read_text()).text
    assert "Solved exactly at every lam" in text
    assert all(row["method"] in text for row in advised.race)
    (tmp_path / "advice.json").write_text(json.dumps(advised.json()))
    assert read(tmp_path) == (json.loads(json.dumps(advised.json())), None)
