"""The page says what the runs say, in words, numbers and settings, and needs nothing from elsewhere."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

import fedtailor as ft
from fedtailor.metrics.paired import holm
from fedtailor.metrics.verdict import plain
from fedtailor.report import figures
from fedtailor.report.evidence import Evidence
from fedtailor.report.page import averaged, cell, columns, headline, page, settings_of, write
from fedtailor.runs.record import Record

VOID = {"meta", "br"}
NASTY = "<b>\"A\" & 'B'</b><script>alert(1)</script>"


class Reader(HTMLParser):
    """The page's text and tags; refuses tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read(results, **options):
    """The page, checked: well formed, no drawing at a place that is no number, nothing fetched."""
    text = page(results, **options)
    reader = Reader(text)
    for tag in ("script", "link", "img", "iframe"):
        assert tag not in reader.tags
    for key, value in reader.attributes:
        assert key not in ("src", "href")
        assert not key.startswith("on")
        if key in ("d", "points", "x", "y", "width", "height", "transform", "viewbox"):
            assert not re.search(r"nan|inf|None", value), (key, value)
            assert not (key in ("width", "height") and value.startswith("-"))
    assert not re.search(r"@import|url[(]", text)
    return reader


def record(
    label="Ditto", personal=(0.9, 0.8), shared=None, *, kind="classification", val=0.5, seed=0, names=None, rounds=3, **more
):
    """A record as a run would leave it, with the numbers that matter given."""
    name = "mse" if kind == "regression" else "acc"
    personal = np.asarray(personal, float)
    clients = {"rows": np.full(len(personal), 10.0), f"{name}_personal": personal}
    if shared is not None:
        clients[f"{name}_global"] = np.asarray(shared, float)
    known = personal[np.isfinite(personal)]
    mean = float(known.mean()) if len(known) else None
    common = None if shared is None else float(np.mean(shared))
    summary = {
        "algorithm": more.pop("algorithm", label),
        "dataset": "made up",
        "clients": len(personal),
        "rounds": rounds,
        "seed": seed,
        "engine": "loop",
        f"{name}_personal": mean,
        f"{name}_global": common,
        f"val_{name}_personal": val,
        "bytes_up": 2_000_000,
        "bytes_down": 4_000_000,
        "trained_parameters": 1300,
        "seconds": 1.25,
        **more.pop("summary", {}),
    }
    lines = [{"round": i, "bytes_down": 1e6, "bytes_up": 5e5, f"{name}_personal": mean} for i in range(rounds)]
    return Record(
        label=label,
        kind=kind,
        summary=summary,
        rounds=more.pop("lines", lines),
        names=[f"client {i}" for i in range(len(personal))] if names is None else names,
        clients=clients,
        settings=f"{label}()",
        **more,
    )


def of(run, label):
    return Record(
        label=label,
        kind=run.task.kind,
        summary=run.summary,
        rounds=run.history,
        names=run.engine.plan.federation.names,
        clients=run.clients,
        settings=settings_of(run.algorithm),
    )


@pytest.fixture(scope="module")
def results():
    fed = ft.Federation.load("digits", clients=8, partition="dirichlet:0.5")
    methods = [ft.Local(epochs=1), ft.FedAvg(epochs=1), ft.Ditto(lam=0.2, epochs=2)]
    out = {}
    for seed in (0, 1):
        for label, run in ft.compare(methods, fed, rounds=2, batch_size=16, seed=seed, new_clients=0.25).items():
            out.setdefault(label, []).append(of(run, label))
    return out


# -- the whole page --------------------------------------------------------------------------------------------------------
def test_the_page_holds_every_method_with_its_figures_and_nothing_from_outside(results, tmp_path):
    reader = read(results, command="fedtailor compare a b")
    for label, records in results.items():
        assert label in reader.text
        assert f"{np.mean([r.summary['acc_personal'] for r in records]):.4f}" in reader.text
        assert records[0].settings in reader.text
    for title in ("The methods", "Client by client", "New clients", "Settings", "How to reproduce it", "What the columns mean"):
        assert title in reader.text
    assert "fedtailor compare a b" in reader.text
    assert ft.__version__ in reader.text
    path = write(results, tmp_path / "report.html", command="fedtailor compare a b")
    assert path.read_text() == page(results, command="fedtailor compare a b")
    assert list(tmp_path.iterdir()) == [path]


def test_every_column_of_the_table_is_explained(results):
    explained = re.findall(r"<dt>(.*?)</dt>", page(results))
    titles = [*columns("acc").values(), "validation", "p"]
    for title in titles:
        assert any(title.removesuffix(" accuracy") in entry for entry in explained), title


def test_a_page_that_cannot_be_written_is_refused_in_one_line(results, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ft.errors.FedtailorError, match="cannot write"):
        write(results, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# -- the choice ------------------------------------------------------------------------------------------------------------
def test_the_best_method_is_chosen_on_validation(results):
    scores = {label: np.mean([r.summary["val_score"] for r in records]) for label, records in results.items()}
    summary = headline(results)
    assert summary["best"] == max(scores, key=scores.get)
    assert summary["chosen_by"] == "val_score"
    assert summary["acc_personal"] == pytest.approx(np.mean([r.summary["acc_personal"] for r in results[summary["best"]]]))


def test_a_better_score_on_test_does_not_make_a_method_the_best():
    results = {"A": [record("A", [0.6] * 7, val=0.7)], "B": [record("B", [0.9] * 7, val=0.6)]}
    assert headline(results)["best"] == "A"
    assert "Best on validation is A" in read(results).text


def test_the_least_error_on_validation_is_the_best():
    results = {"A": [record("A", [4.0], kind="regression", val=3.0)], "B": [record("B", [5.0], kind="regression", val=2.0)]}
    assert headline(results)["best"] == "B"


def test_without_validation_rows_no_method_is_called_the_best():
    results = {"A": [record("A", [0.6] * 7, val=None)], "B": [record("B", [0.9] * 7, val=None)]}
    assert headline(results) == {"best": None, "chosen_by": None}
    text = read(results).text
    assert "no validation rows" in text
    assert "Best on validation" not in text
    assert "★" not in page(results).split("</style>")[1]


def test_a_method_with_no_score_in_one_seed_is_left_out_of_the_choice():
    results = {
        "A": [record("A", val=0.9), record("A", val=float("nan"), seed=1)],
        "B": [record("B", val=0.2), record("B", val=0.3, seed=1)],
    }
    assert headline(results)["best"] == "B"
    assert "left out of the choice: A." in read(results).text


def test_a_single_run_is_the_same_page():
    results = {"Ditto": [record("Ditto", [0.9] * 8, [0.7] * 8, val=None)]}
    assert headline(results)["best"] == "Ditto"
    text = read(results).text
    assert "Personalising helps" in text
    assert "Local is not among the methods" in text


def test_summaries_over_seeds_are_means_and_unknown_where_a_seed_is():
    summary = averaged(
        [record(seed=0, summary={"a": 1.0, "b": None, "c": "x"}), record(seed=1, summary={"a": 2.0, "b": 3.0, "c": "x"})]
    )
    assert (summary["a"], summary["b"], summary["c"]) == (1.5, None, "x")


# -- the words -------------------------------------------------------------------------------------------------------------
def trio(personal, local, shared):
    return {
        "Local": [record("Local", local, val=0.1)],
        "FedAvg": [record("FedAvg", shared, shared, val=0.2)],
        "Ditto": [record("Ditto", personal, shared, val=0.9)],
    }


def test_a_clear_gain_says_that_learning_together_helps_and_whom_it_hurts():
    local = np.full(10, 0.5)
    personal = local + np.array([0.2, 0.21, 0.22, 0.23, 0.24, 0.25, 0.26, 0.27, 0.0, -0.01])
    text = read(trio(personal, local, local - 0.1)).text
    assert text.count("Learning together helps") == 1
    assert "8 of 10 clients gain by Ditto , 1 loses and 1 is level" in text
    assert "mean gain is +0.1870" in text  # (0.2 + ... + 0.27) / 10 - 0.001
    assert "client 9 (\u22120.0100)" in text
    assert ttest_1samp(personal - local, 0).pvalue < 0.001
    assert "p < 0.001" in text
    assert "10 of 10 clients gain" not in text.split("one shared model")[0]


def test_a_clear_loss_says_that_learning_together_hurts():
    assert "Learning together hurts" in read(trio(np.linspace(0.4, 0.5, 8), np.full(8, 0.9), np.full(8, 0.3))).text


def test_no_difference_says_that_local_training_is_as_good():
    text = read(trio([0.5] * 8, [0.5] * 8, [0.5] * 8)).text
    assert "Local training may be as good" in text
    assert "p = 1.00" in text


def test_less_error_than_local_training_is_a_gain():
    results = {
        "Local": [record("Local", np.arange(20.0, 28.0), kind="regression", val=20.0)],
        "Ditto": [record("Ditto", np.arange(10.0, 18.0), kind="regression", val=10.0)],
    }
    text = read(results).text
    assert "Learning together helps" in text
    assert "+10.00" in text
    assert "fall of the mean squared error" in text


@pytest.mark.parametrize(("clients", "tested"), [(1, False), (5, False), (6, True)])
def test_few_clients_are_described_and_not_tested(clients, tested):
    text = read(trio(np.linspace(0.8, 0.9, clients), np.full(clients, 0.5), np.full(clients, 0.4))).text
    assert ("no test is possible" in text) is not tested
    assert ("p < 0.001" in text) is tested
    assert ("Learning together helps" in text) is tested


def test_where_local_training_is_best_the_best_method_that_learns_together_is_shown_against_it():
    results = trio([0.6] * 7, [0.7] * 7, [0.5] * 7)
    results["Local"] = [record("Local", [0.7] * 7, val=0.99)]
    text = read(results).text
    assert "Best on validation is Local" in text
    assert "The best method that learns together is Ditto" in text
    assert "Learning together hurts" in text


def test_p_values_in_the_table_are_corrected_for_the_number_of_methods():
    rng = np.random.default_rng(0)
    values = {label: rng.normal(0.6, 0.1, 12) for label in "ABC"}
    values["A"] += 0.1
    results = {label: [record(label, values[label], val=float(label == "A"))] for label in "ABC"}
    raw = [float(ttest_1samp(values["A"] - values[label], 0).pvalue) for label in "BC"]
    row = re.search(r"<tr><td>B</td>.*?</tr>", page(results)).group()
    expected = holm(raw)[0]
    assert re.sub(r"<[^>]+>", " ", row).split()[-1] == (f"{expected:.3f}" if expected < 0.1 else f"{expected:.2f}")


@pytest.mark.parametrize("best", ["Ditto", "Local"])
def test_the_pair_of_the_verdict_has_one_p_value_however_many_methods_are_compared(best):
    draw = np.random.default_rng(3)
    values = {"Local": np.full(12, 0.6), "Ditto": np.full(12, 0.62)}
    values["Ditto"] += np.linspace(-1, 1, 12) * 0.042  # p is 0.03 and, times the methods, 0.2
    values |= {f"other {i}": values[best] + draw.normal(0, 0.1, 12) for i in range(6)}
    chosen = {"Ditto": 0.9, best: 1.0}
    evidence = Evidence({label: [record(label, scores, val=chosen.get(label, 0.1))] for label, scores in values.items()})
    p = float(ttest_1samp(values["Ditto"] - values["Local"], 0).pvalue)
    assert 0.01 < p < 0.05
    rival = "Local" if best == "Ditto" else "Ditto"
    assert evidence.p_values[rival] == pytest.approx(p)
    assert evidence.verdict.p == pytest.approx(p)
    assert evidence.verdict.sentence.startswith("Learning together helps")
    assert rival not in evidence.alike
    raw = [float(ttest_1samp(values[best] - values[f"other {i}"], 0).pvalue) for i in range(6)]
    assert [evidence.p_values[f"other {i}"] for i in range(6)] == pytest.approx(holm(raw))


def test_clients_are_paired_by_name_and_not_by_place():
    names = [f"c{i}" for i in range(8)]
    values = np.linspace(0.2, 0.9, 8)
    results = {
        "Local": [record("Local", values, names=names, val=0.1)],
        "Ditto": [record("Ditto", values[::-1] + 0.05, names=names[::-1], val=0.9)],
    }
    assert "8 of 8 clients gain" in read(results).text


def test_runs_are_paired_by_seed_and_not_by_place():
    a, b = np.linspace(0.1, 0.5, 7), np.linspace(0.9, 0.5, 7)
    results = {
        "Local": [record("Local", a, seed=0), record("Local", b, seed=1)],
        "Ditto": [record("Ditto", b + 0.05, seed=1, val=0.9), record("Ditto", a + 0.05, seed=0, val=0.9)],
    }
    assert "+0.0500 (95 % interval +0.0500 to +0.0500, over 7 clients)" in read(results).text


def test_clients_tested_on_other_rows_are_not_paired():
    results = trio([0.9] * 8, [0.5] * 8, [0.4] * 8)
    results["Local"][0].clients["rows"][0] = 3.0
    text = read(results).text
    assert "7 of 7 clients gain" in text
    assert "tested on different rows" in text


def test_methods_without_a_client_in_common_are_not_compared():
    text = read({"Local": [record("Local", names=["a", "b"])], "Ditto": [record("Ditto", names=["c", "d"], val=0.9)]}).text
    assert "Local and Ditto measured no client in common" in text
    assert "Against Local" not in text


def test_runs_on_different_data_are_pointed_out():
    results = {"A": [record("A")], "B": [record("B", summary={"dataset": "other", "rounds": 5})]}
    text = read(results).text
    assert "different data" in text
    assert "different lengths" in text


# -- the rest of the page --------------------------------------------------------------------------------------------------
def test_the_choice_of_settings_is_shown_with_its_grid_and_scores():
    trials = [{"settings": {"lam": lam}, "score": score, "rounds": 10} for lam, score in ((0.1, 0.5), (1.0, 0.75), (10.0, None))]
    tuning = {"grid": {"lam": [0.1, 1.0, 10.0]}, "trials": trials, "chosen": {"lam": 1.0}}
    results = {"Ditto": [record(seed=0, tuning=tuning), record(seed=1, tuning=dict(tuning))]}
    text = page(results)
    assert text.count("<details>") == 1
    assert "lam=1 chosen of 3 tried" in text
    assert "lam in 0.1, 1, 10" in text
    assert "<tr class=best><td>lam=1</td><td>0.7500</td><td>10</td></tr>" in text


def test_seeds_tuned_apart_are_shown_apart():
    tunings = [{"grid": {}, "trials": [], "chosen": {"lam": lam}} for lam in (0.1, 1.0)]
    text = page({"Ditto": [record(seed=seed, tuning=tuning) for seed, tuning in enumerate(tunings)]})
    assert "Ditto (seed 0): lam=0.1" in text
    assert "Ditto (seed 1): lam=1" in text


def test_notes_are_listed_once_and_options_say_who_differs():
    results = {
        "A": [record("A", notes=["same", "mine"], options={"rounds": 3, "cohort": 0.5})],
        "B": [record("B", notes=["same"], options={"rounds": 3, "cohort": 1.0})],
    }
    text = page(results, notes=["given"])
    assert re.findall(r"<li>(same|mine|given)</li>", text) == ["same", "mine", "given"]
    assert "<td>rounds</td><td>3</td>" in text
    assert "<td>cohort</td><td>0.5 (A)<br>1 (B)</td>" in text


def test_shares_of_rows_are_drawn_with_what_neither_model_gets_right():
    parts = {"both_correct": 0.5, "personal_only": 0.25, "global_only": 0.125}
    text = page({"Ditto": [record("Ditto", summary=parts)], "Local": [record("Local")]})
    for words in ("both right: 50.0 %", "only personal: 25.0 %", "only shared: 12.5 %", "neither: 12.5 %"):
        assert f"Ditto, {words}" in text
    assert "Local, both right" not in text


def test_settings_are_written_as_one_would_write_them():
    assert settings_of(ft.Ditto(lam=0.2, epochs=2)) == "Ditto(epochs=2, lam=0.2)"
    assert settings_of(ft.FedAvg(opt=ft.SGD(momentum=0.9))) == "FedAvg(opt=SGD(weight_decay=0.0, momentum=0.9))"


def test_a_step_size_given_to_the_optimizer_is_not_silently_ignored():
    with pytest.raises(ft.errors.InvalidArgument, match=r"ft\.FedAvg\(lr=0\.5\)"):
        ft.FedAvg(opt=ft.SGD(lr=0.5))


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("acc_personal", 0.5, "0.5000"),
        ("acc_personal", None, "-"),
        ("acc_personal", float("nan"), "-"),
        ("mse_personal", 1234.5678, "1,235"),
        ("mse_personal", 12.345678, "12.35"),
        ("mse_personal", 1.5e9, "1.5e+09"),
        ("mse_personal", 2.5e-6, "2.5e-06"),
        ("bytes_up", 1_500_000, "1.50"),
        ("share_benefit", 0.25, "25 %"),
        ("trained_parameters", 1300.0, "1,300"),
        ("clients", 20, "20"),
        ("seconds", 1.25, "1.2"),
    ],
)
def test_cells_are_written_for_reading(key, value, shown):
    assert cell(key, value) == shown


def test_a_deviation_follows_the_digits_of_its_mean_and_rounding_is_nothing():
    assert plain(0.00042, 0.9) == "0.0004"
    assert plain(1.4e-16, 0.9) == "0.0000"
    assert plain(3.7, 123456.0) == "4"


# -- pictures --------------------------------------------------------------------------------------------------------------
def test_ticks_are_round_inside_the_range_and_all_different():
    for low, high in ((0.0, 1.0), (0.913, 0.9134), (1e9, 1.1e9), (-3e-7, 2e-7), (1e6, 1e6 + 3)):
        ticks = figures.Axis(low, high, 0, 100).ticks()
        assert 3 <= len(ticks) <= 8
        assert len({words for _, words in ticks}) == len(ticks)
        assert all(low - 1e-9 * abs(low) <= value <= high + 1e-9 * abs(high) for value, _ in ticks)


def test_an_axis_by_logarithm_puts_equal_ratios_at_equal_distances():
    axis = figures.Axis(1.0, 1e6, 0.0, 60.0, log=True)
    assert [axis.at(10.0**k) for k in range(7)] == pytest.approx([0, 10, 20, 30, 40, 50, 60])
    assert [words for _, words in axis.ticks()][:2] == ["1", "10"]


def test_curves_of_many_methods_are_told_apart_by_colour_dash_and_marker_only_for_a_few():
    results = {f"M{i}": [record(f"M{i}", val=i / 40)] for i in range(29)}
    results |= {"Local": [record("Local", val=0.0)], "FedAvg": [record("FedAvg", val=0.0)]}
    text = page(results)
    assert "24 others" in text
    legend = re.findall(r'<text x="8\d\d\.0" y="[\d.]+" text-anchor="start"><title>(.*?)</title>', text)
    assert legend == ["M28", "M27", "M26", "M25", "M24", "Local", "FedAvg"]
    read(results)


def test_the_traffic_is_what_was_sent_in_all_rounds_up_to_the_one_evaluated():
    lines = [
        {"round": 0, "bytes_down": 3_000_000, "bytes_up": 1_000_000},
        {"round": 1, "bytes_down": 3_000_000, "bytes_up": 1_000_000, "acc_personal": 0.5},
        {"round": 2, "bytes_down": 0, "bytes_up": 0, "acc_personal": 0.75},
    ]
    from fedtailor.report.evidence import Evidence
    from fedtailor.report.page import _path

    results = {"A": [record("A", lines=lines), record("A", lines=lines, seed=1)]}
    assert _path(Evidence(results), "A") == [(2.0, 8.0, 0.5), (3.0, 8.0, 0.75)]


def test_a_method_that_sends_nothing_is_a_level_in_the_picture_of_the_traffic():
    quiet = [{"round": 0, "bytes_down": 0, "bytes_up": 0, "acc_personal": 0.5}]
    text = read({"Local": [record("Local", lines=quiet)], "A": [record("A")]}).text
    assert "Local: nothing is sent" in text
    assert "megabytes" not in page({"Local": [record("Local", lines=quiet)]}).split("What the columns mean")[0]


def test_a_bar_says_whose_it_is():
    text = figures.gains(["north", "south"], {"over Local": [0.25, -0.5]}, "gain")
    assert "<title>north: +0.25</title>" in text
    assert "<title>south: -0.5</title>" in text


def test_dots_stand_where_their_values_are_and_the_best_client_comes_first():
    text = figures.dots(["a", "b"], {figures.LOCAL: [0.0, 0.5], "personal": [0.5, 1.0]}, "accuracy")
    assert re.findall(r"<title>(.*?)</title>", text) == ["b: local training 0.5, personal 1", "a: local training 0, personal 0.5"]
    places = [float(x) for x in re.findall(r"translate\(([\d.]+) [\d.]+\)", text)[2:]]  # after the key
    local_b, own_b, local_a, own_a = places
    assert local_b == own_a
    assert own_b - local_b == pytest.approx(own_a - local_a, abs=0.2)
    by_error = figures.dots(["a", "b"], {"personal": [0.5, 1.0]}, "MSE", best_low=True)
    assert re.findall(r"<title>(.*?)</title>", by_error) == ["a: personal 0.5", "b: personal 1"]


def test_a_long_name_keeps_its_beginning_and_its_end():
    assert figures.clip("a method with a long name 12", 12) == "a metho…e 12"
    assert figures.clip("short", 12) == "short"


def test_ten_thousand_clients_make_a_page_of_bearable_size():
    rng = np.random.default_rng(0)
    local = rng.random(10_000)
    text = page(trio(np.clip(local + rng.normal(0.05, 0.1, 10_000), 0, 1), local, rng.random(10_000)))
    assert len(text) < 200_000
    assert "10,000 clients" in text


SHAPES = {
    "nothing evaluated": lambda: {"A": [record("A", lines=[])]},
    "one evaluated round": lambda: {"A": [record("A", rounds=1)]},
    "one client": lambda: trio([0.9], [0.8], [0.7]),
    "no client measured": lambda: {"A": [record("A", [np.nan] * 3, val=None)]},
    "no clients": lambda: {"A": [record("A", [])]},
    "some clients not measured": lambda: trio([np.nan, *[0.8] * 7], [0.7] * 8, [0.6] * 8),
    "all equal": lambda: trio([0.5] * 70, [0.5] * 70, [0.5] * 70),
    "all zero": lambda: {"A": [record("A", [0.0] * 8, [0.0] * 8)]},
    "large errors": lambda: {
        "A": [record("A", np.geomspace(1, 1e12, 9), np.geomspace(1e3, 1e11, 9), kind="regression", val=1e10)]
    },
    "tiny errors": lambda: {"A": [record("A", [1e-9, 2e-9, 3e-9], [1e-9, 3e-9, 2e-9], kind="regression", val=1e-9)]},
    "zero errors": lambda: {"A": [record("A", [0.0, 5.0], [0.0, 0.0], kind="regression", val=0.0)]},
    "many labels": lambda: {"A": [record("A", [0.5] * 8, kind="multilabel")]},
    "61 clients": lambda: trio(np.linspace(0, 1, 61), np.linspace(0, 0.9, 61), [0.5] * 61),
    "300 clients": lambda: trio(np.linspace(0, 1, 300), np.linspace(0, 0.9, 300), [0.5] * 300),
    "unequal seeds": lambda: {"A": [record("A", seed=0)], "B": [record("B", seed=0), record("B", seed=1)]},
    "no common client": lambda: {"Local": [record("Local", names=["a", "b"])], "B": [record("B", names=["c", "d"])]},
    "only Local": lambda: {"Local": [record("Local")]},
    "two Locals": lambda: {"Local": [record("Local")], "Local 2": [record("Local 2", algorithm="Local")]},
    "a bare summary": lambda: {"A": [Record("A", "classification", {}, [], [], {}, "A()")]},
    "a thousand rounds": lambda: {"A": [record("A", rounds=1000)]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_page_can_be_made_of_runs_of_any_shape(shape):
    assert "What the columns mean" in read(SHAPES[shape]()).text


def test_labels_names_and_notes_are_shown_as_they_are_and_never_run():
    tuning = {
        "grid": {NASTY: [NASTY]},
        "trials": [{"settings": {NASTY: NASTY}, "score": 0.5, "rounds": 1}],
        "chosen": {NASTY: NASTY},
    }
    more = {"names": [f"{NASTY} {i}" for i in range(8)], "options": {NASTY: NASTY}, "notes": [NASTY], "tuning": tuning}
    results = {
        NASTY: [record(NASTY, [0.5] * 8, [0.6] * 8, val=0.9, summary={"dataset": NASTY, "engine": NASTY}, **more)],
        "Local": [record("Local", [0.9] * 8, names=more["names"])],
    }
    assert NASTY in read(results, command=NASTY, notes=[NASTY]).text
    assert "<script>" not in page(results, command=NASTY, notes=[NASTY])
    assert escape(NASTY) in page(results)


measures = st.one_of(st.none(), st.floats(-1e12, 1e12, allow_subnormal=False))


@settings(deadline=None, max_examples=60)
@given(
    st.data(),
    st.sampled_from(["classification", "regression", "multilabel"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_any_numbers_make_a_sound_page(data, kind, methods, clients, seeds):
    def some():
        return [np.nan if v is None else v for v in data.draw(st.lists(measures, min_size=clients, max_size=clients))]

    labels = ["Local", "FedAvg", "Ditto", "Other"][:methods]
    results = {
        label: [
            record(label, some(), None if label == "Local" else some(), kind=kind, val=data.draw(measures), seed=s)
            for s in range(seeds)
        ]
        for label in labels
    }
    read(results)


# -- refusals --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({}, "nothing to report"),
        ({"A": []}, "has no run"),
        ({"A": [record("A"), record("A")]}, "same seed"),
        ({"A": [record("A")], "B": [record("B", kind="regression")]}, "different kinds"),
        ({"A": [record("A", names=["only one"])]}, "measures of other clients"),
        ({"A": [record("A", names=["twice", "twice"])]}, "names a client twice"),
    ],
)
def test_what_makes_no_report_is_refused(results, words):
    with pytest.raises(ft.errors.FedtailorError, match=words):
        page(results)


def test_columns_of_what_was_asked_for_are_there_only_where_it_was():
    plain = list(columns("acc"))
    assert list(columns("acc", [{"epsilon_max": None}, {"acc_shifted_test": 0.5}])) == [
        *plain[:3], "acc_shifted_test", *plain[3:]
    ]  # fmt: skip
    assert "epsilon_max" in columns("mse", [{}, {"epsilon_max": 2.0}])
