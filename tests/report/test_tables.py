"""The table of a comparison for a paper, and the pictures of its page as files."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from fedtailor.report.evidence import Evidence
from fedtailor.report.pictures import pictures, write
from fedtailor.report.tables import lines_of, table
from fedtailor.runs.record import Record

NAMES = tuple(f"client {i}" for i in range(8))
GAINS = np.linspace(-0.02, 0.02, 8)


def record(label, level, seed, wiggle=0.0):
    scores = level + GAINS + wiggle * np.array([1, -1] * 4) + 0.01 * seed
    summary = {
        "algorithm": label,
        "seed": seed,
        "acc_personal": float(scores.mean()),
        "kind": "classification",
        "val_score": level,
    }
    clients = {"acc_personal": scores, "rows": np.full(8, 10.0)}
    return Record(label, "classification", summary, (), NAMES, clients, label)


@pytest.fixture
def evidence():
    levels = {"A_1 & co": (0.8, 0.0), "Close": (0.799, 0.01), "Far": (0.5, 0.01)}
    return Evidence({label: [record(label, level, seed, w) for seed in (0, 1)] for label, (level, w) in levels.items()})


def test_the_best_mean_is_bold_and_what_the_test_cannot_tell_apart_is_marked(evidence):
    _, lines = lines_of(evidence)
    assert [line.label for line in lines] == ["A_1 & co", "Close", "Far"]
    assert [line.chosen for line in lines] == [True, False, False]
    assert [line.alike for line in lines] == [False, True, False]
    assert [line.entries[0].best for line in lines] == [True, False, False]
    assert lines[0].entries[0].mean == pytest.approx(0.805)
    assert lines[0].entries[0].deviation == pytest.approx(np.std([0.8, 0.81], ddof=1))


def test_markdown_latex_and_csv_say_the_same(evidence):
    markdown = table(evidence, "markdown").splitlines()
    assert markdown[2] == "| A_1 & co \\* | **0.8050 ± 0.0071** | - |"
    assert markdown[3].startswith("| Close † | 0.8040 ± 0.0071 |")
    latex = table(evidence, "latex")
    assert r"A\_1 \& co$^{*}$ & {\boldmath$0.8050\pm 0.0071$} & -- \\" in latex
    assert r"Close$^{\dagger}$ &" in latex
    assert "Far & $0.5050" in latex
    rows = list(csv.DictReader(io.StringIO(table(evidence, "csv"))))
    assert [float(row["personal accuracy"]) for row in rows] == pytest.approx([0.805, 0.804, 0.505])
    assert [row["chosen on validation"] for row in rows] == ["1", "0", "0"]


def test_pictures_stand_alone(tmp_path):
    pytest.importorskip("vl_convert")
    drawn = '<svg viewBox="0 0 960 200" role="img" aria-label="a &amp; b"><text x="1" y="9">a &amp; b</text></svg>'
    page = f"<section><h2>Client by client</h2>{drawn}<p>-</p>{drawn}</section><section><p>no picture</p></section>"
    assert list(pictures(page)) == ["client-by-client", "client-by-client-2"]
    root = ET.fromstring(pictures(page)["client-by-client"])
    assert (root.tag, root.get("width"), root.get("height")) == ("{http://www.w3.org/2000/svg}svg", "960", "200")
    written = write(page, tmp_path / "new")
    assert sorted(path.name for path in written) == sorted(f"client-by-client{n}.{e}" for n in ("", "-2") for e in ("pdf", "svg"))
    assert all(path.read_bytes().startswith(b"%PDF") for path in written if path.suffix == ".pdf")
