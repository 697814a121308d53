"""The schema that sites agree on: what fits is read without looking at anybody's rows, what does not is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import tomli_w

from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.sites.table import AgreedTable, written_like

SCHEMA = {
    "label": "outcome",
    "classes": ["ill", "well"],
    "columns": [
        {"name": "age", "kind": "numeric", "range": [0, 120]},
        {"name": "sex", "kind": "category", "categories": ["f", "m"]},
        {"name": "weight", "kind": "numeric", "range": [20, 220], "may_be_missing": True},
    ],
}


def agreed(tmp_path, **changes) -> AgreedTable:
    path = tmp_path / "schema.toml"
    path.write_text(tomli_w.dumps({**SCHEMA, **changes}))
    return AgreedTable.read(path)


def table(tmp_path, **changes):
    count = 20
    frame = pd.DataFrame(
        {
            "age": np.arange(count) + 30.0,
            "sex": ["f", "m"] * (count // 2),
            "weight": [np.nan, *np.linspace(50, 90, count - 1)],
            "outcome": ["well", "ill"] * (count // 2),
            "name": ["x"] * count,
        }
    )
    for column, (row, value) in changes.items():
        frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value
    path = tmp_path / "site.csv"
    frame.to_csv(path, index=False)
    return path


def test_numbers_are_scaled_by_the_range_agreed_on_and_by_nothing_else(tmp_path):
    own = agreed(tmp_path).federation(table(tmp_path), "Aarhus")
    assert own.names == ("Aarhus",)
    assert own.schema.names() == ["age", "sex=f", "sex=m", "weight", "weight missing"]
    x = np.concatenate([own.train.x, own.test.x, own.val.x])
    assert np.allclose(np.sort(x[:, 0]), (np.arange(20) + 30 - 60) / (120 / 12**0.5), atol=1e-6)
    assert sorted(x[:, 4]) == [0.0] * 19 + [1.0]
    assert (len(own.train.y), len(own.test.y), len(own.val.y)) == (12, 5, 3)
    assert agreed(tmp_path).rows().shape == (5,)


def test_a_client_has_the_same_split_whoever_else_is_there(tmp_path):
    first, again = (agreed(tmp_path).federation(table(tmp_path), "Aarhus") for _ in range(2))
    other = agreed(tmp_path).federation(table(tmp_path), "Bern")
    assert (first.train.x == again.train.x).all()
    assert not (first.train.x == other.train.x).all()


@pytest.mark.parametrize(
    ("column", "row", "value", "words"),
    [
        ("age", 4, 130.0, "1 value outside 0 to 120"),
        ("age", 4, None, "was not agreed on"),
        ("sex", 2, "x", "agreed on: 'f', 'm'"),
        ("outcome", 3, "dead", "'dead'"),
        ("outcome", 3, None, "missing"),
        ("age", 4, "many", "age"),
    ],
)
def test_a_row_that_was_not_agreed_on_is_refused(tmp_path, column, row, value, words):
    with pytest.raises(InvalidData, match=words):
        agreed(tmp_path).federation(table(tmp_path, **{column: (row, value)}), "Aarhus")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ["one"]}, "two classes"),
        ({"classes": []}, "needs a range"),
        ({"columns": [{"name": "age", "kind": "numeric"}]}, "needs a range"),
        ({"columns": [{"name": "sex", "kind": "category", "categories": ["f"]}]}, "two categories"),
        ({"columns": [{"name": "age", "kind": "numbers", "range": [0, 1]}]}, "kind"),
        ({"columns": 3}, "lists no columns"),
        ({"label": "age"}, "listed twice"),
        ({"test_share": 0.9}, "leave no rows"),
        ({"colums": []}, "colums"),
    ],
)
def test_a_schema_that_cannot_be_used_says_why(tmp_path, changes, words):
    with pytest.raises(InvalidArgument, match=words):
        agreed(tmp_path, **changes)


def test_a_number_to_predict_is_scaled_by_its_range(tmp_path):
    columns = SCHEMA["columns"][1:]
    own = agreed(tmp_path, label="age", classes=[], range=[0, 120], columns=columns).federation(table(tmp_path), "Aarhus")
    assert own.labels == 0
    values = np.sort(np.concatenate([own.train.y, own.test.y, own.val.y]))
    assert np.allclose(own.schema.restore(values), np.arange(20) + 30, atol=1e-4)


def test_a_schema_taken_from_a_table_fits_it(tmp_path):
    path = tmp_path / "like.toml"
    path.write_text(tomli_w.dumps(written_like(table(tmp_path), "outcome", "name")))
    seen = AgreedTable.read(path)
    assert [column.name for column in seen.columns] == ["age", "sex", "weight"]
    assert seen.columns[0].range == (30.0, 49.0)
    assert len(seen.federation(table(tmp_path), "Aarhus").train.y) == 12


def test_too_few_rows_are_refused(tmp_path):
    path = table(tmp_path)
    path.write_text("\n".join(path.read_text().splitlines()[:6]) + "\n")
    with pytest.raises(InvalidData, match="5 rows"):
        agreed(tmp_path).federation(path, "Aarhus")
