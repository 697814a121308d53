"""Random tables and files: a federation that holds together, or one line that says what is wrong; never anything else."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor import Federation
from fedtailor.data.columns import read_column
from fedtailor.data.schema import Schema
from fedtailor.errors import FedtailorError
from tests.fuzz import fuzz


def sound(make) -> Federation | None:
    """The federation that ``make`` gives, checked; None where it refuses in one line."""
    try:
        made = make()
    except FedtailorError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 2000
        return None
    assert len(made) >= 2
    assert len(set(made.names)) == len(made)
    for part in (made.train, made.test, made.val):
        if part is None:
            continue
        assert part.x.dtype == torch.float32
        assert bool(torch.isfinite(part.x).all())
        assert len(part.x) == len(part.y) == part.offsets[-1]
        assert len(part.sizes) == len(made)
        assert part.sizes.min() >= 1
    assert all(note.strip() == note and "\n" not in note for note in made.notes)
    if made.kind == "classification":
        assert made.labels == len(made.classes) >= 2
        assert all(int(part.y.min()) >= 0 and int(part.y.max()) < made.labels for part in (made.train, made.test))
    else:
        assert bool(torch.isfinite(made.train.y).all())
    assert made.keys is not None  # every name has a word of its own, whatever its letters
    if made.schema is not None:
        assert Schema.from_json(json.loads(json.dumps(made.schema.to_json()))) == made.schema
        assert len(made.schema.names()) == made.train.x.shape[1]
    return made


words = st.text(max_size=6) | st.sampled_from(
    ["", " ", "NA", "nan", "a", "b", "1", "2.5", "True", "1e999", "2020-02-30", "other", "missing"]
)
dates = st.dates(datetime.date(1, 1, 1), datetime.date(9999, 12, 31))
cells = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.integers(-(10**400), 10**400),
    st.floats(),
    words,
    dates,
    st.datetimes(),
    st.timedeltas(),
    st.decimals(),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.complex_numbers(),
    st.just(pd.NA),
    st.just(pd.NaT),
    st.just(np.float32(1.5)),
    st.just(decimal.Decimal("1e500")),
)
POOLS: list[list] = [
    [0, 1, 2, 3],
    [0.5, -1.25, 3.0, 1e3, None],
    [float("nan"), float("inf"), -0.0, 1e308, -1e308, 5e-324, 1.0],
    [True, False],
    [True, False, None],
    ["a", "b", "c"],
    ["a", "b", "", " ", "NA", None, "other", "missing"],
    [1, 2, None],
    ["2020-01-01", "2021-05-06", "1999-12-31T10:00", None],
    ["2020-01-01", "2020-02-30", "soon"],
    ["1", "2", "3", "x"],
    ["1", "2.5", "1e999", "nan"],
    [-(2**63), 2**63 - 1, 0],
    [2**64 - 1, 2**53 + 1, 10**400],
    [True, 1, "1", 1.0, None],
    [datetime.date(2020, 1, 1), datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
    [datetime.datetime(2020, 1, 1, 5), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), None],
    [datetime.timedelta(1), datetime.timedelta(hours=3)],
    [decimal.Decimal("1.5"), decimal.Decimal("NaN"), decimal.Decimal("1e500")],
    ["é", "日本", "\u202e", "a\nb", "\0", "\ud800"],
    [[1], {"a": 1}, (1, 2), b"x", 1 + 2j, object],
    [pd.NA, pd.NaT, None],
]
TAME = [POOLS[i] for i in (0, 1, 3, 4, 5, 6, 7, 8, 14, 15, 16, 17, 19)]
DTYPES = [None, None, None, object, "float32", "Int64", "boolean", "string", "category", "datetime64[ns]", "float64[pyarrow]"]
NAMES = ["x", "x missing", "a\nb", "Unnamed: 0", "", " ", "日本", "x=a", "a very long name " * 20, "y", "z", 0, 1.5]
options = st.fixed_dictionaries(
    {},
    optional={
        "missing": st.sampled_from(["fill", "drop", "refuse"]),
        "standardize": st.sampled_from(["pooled", "client", "none"]),
        "min_samples": st.integers(1, 6),
        "task": st.sampled_from(["classification", "regression"]),
        "val_share": st.sampled_from([0.0, 0.15]),
        "seed": st.integers(-3, 3),
        "standardize_label": st.booleans(),
        "split": st.just("split"),
    },
)


def column(draw: np.random.Generator, rows: int, pools: list[list]) -> pd.Series:
    pool = pools[draw.integers(len(pools))]
    if draw.random() < 0.1:
        pool = [cell for other in draw.permutation(len(POOLS))[:3] for cell in POOLS[other]]
    values = [pool[i] for i in draw.integers(len(pool), size=rows)]
    if draw.random() < 0.1:
        values = [f"name {i}" for i in range(rows)]
    try:
        return pd.Series(values, dtype=DTYPES[draw.integers(len(DTYPES))])
    except Exception:  # not every list can be of every type: then as Python objects
        return pd.Series(values, dtype=object)


def table(seed: int) -> pd.DataFrame:
    """A client, a label and some columns, mostly sensible so that many tables get far."""
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(0, 60))
    good = draw.random() < 0.7
    columns = {
        "client": column(draw, rows, [[0, 1, 2], ["ann", "bob"], [1.0, 2.0, 2.0, None]] if good else POOLS),
        "label": column(draw, rows, [[0, 1], ["yes", "no"], [0.5, 1.5, 2.5, 9.0], [True, False]] if good else POOLS),
    }
    if draw.random() < 0.2:
        columns["split"] = column(draw, rows, [["train", "TEST", "train"], ["train", "val", "test", "validation"], POOLS[5]])
    for i in draw.permutation(len(NAMES))[: draw.integers(0, 6)]:
        columns.setdefault(NAMES[i], column(draw, rows, TAME if good else POOLS))
    frame = pd.DataFrame(columns)
    if draw.random() < 0.05 and len(columns) > 2:
        frame.columns = [*list(frame.columns[:-1]), frame.columns[0]]
    return frame


seeds = st.integers(0, 2**32)


@given(seeds, options)
@fuzz(1500)
def test_any_table_is_a_federation_or_a_reason(seed, chosen):
    frame = table(seed)
    made = sound(lambda: Federation.from_table(frame, client="client", label="label", **chosen))
    if made is None or chosen.get("missing") == "drop":
        return
    owner, label = read_column("client", frame["client"], "category"), read_column("label", frame["label"], words=20)
    for i, name in enumerate(made.names):
        mine = (owner.values == owner.texts.index(name)) & ~label.missing
        parts = [part.client(i)[0].numpy() for part in (made.train, made.test, made.val) if part is not None]
        again = made.schema.encode(frame[mine], name)
        assert sorted(again.tolist()) == sorted(np.concatenate(parts).tolist())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1]), cells), min_size=12, max_size=30))
@fuzz(200)
def test_any_column_beside_good_ones_is_a_feature_or_a_reason(rows):
    frame = pd.DataFrame({"client": [r[0] for r in rows], "label": [r[1] for r in rows], "good": np.arange(len(rows)) % 5})
    frame["wild"] = pd.Series([r[2] for r in rows], dtype=object)
    sound(lambda: Federation.from_table(frame, client="client", label="label"))


@given(seeds, options, st.sampled_from([",", "\t", ";"]))
@fuzz(300)
def test_any_written_table_is_a_federation_or_a_reason(tmp_path_factory, seed, chosen, sep):
    frame = table(seed)
    path = tmp_path_factory.mktemp("t") / ("table.tsv" if sep == "\t" else "table.csv")
    try:
        frame.to_csv(path, index=False, sep=sep)
    except Exception:  # pandas cannot write every object
        return
    sound(lambda: Federation.from_table(path, client="client", label="label", **chosen))


lines = st.lists(st.text("ab1.,\"'\n\r\t;\0é 2-", max_size=12), max_size=12).map("\n".join)


@given(st.binary(max_size=200) | lines.map(str.encode) | lines.map(lambda t: ("client,label,x\n" + t).encode()), st.data())
@fuzz(800)
def test_any_bytes_are_a_federation_or_a_reason(tmp_path_factory, content, data):
    end = data.draw(st.sampled_from([".csv", ".tsv", ".csv.gz", ".parquet"]))
    if end == ".csv.gz" and data.draw(st.booleans()):
        content = gzip.compress(content)[: data.draw(st.integers(0, 300))]
    path = tmp_path_factory.mktemp("b") / f"table{end}"
    path.write_bytes(content)
    sound(lambda: Federation.from_table(path, client="client", label="label"))


@given(
    st.dictionaries(
        st.sampled_from(["a.csv", "b.csv", "c.npz", "d.txt", ".hidden", "e/train.csv", "e/x/1.png"]), st.binary(max_size=60)
    )
)
@fuzz(200)
def test_any_folder_is_a_federation_or_a_reason(tmp_path_factory, contents):
    root = tmp_path_factory.mktemp("f")
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"label,x\n0,1\n1,2\n0,3\n1,1\n0,2\n" if content.startswith(b"\0") else content)
    sound(lambda: Federation.from_folder(root, label="label"))


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("inf"), 1e308, 5e-324, 2**63, "\ud800", b"x", 1 + 2j, [1], {"a": 1}, object()]
)
def test_one_strange_cell_is_a_feature_or_a_reason(value):
    frame = pd.DataFrame({"client": list("aaaabbbb"), "label": [0, 1] * 4, "x": range(8)})
    frame["odd"] = pd.Series([1, 2, 3, 4, 5, 6, 7, value], dtype=object)
    sound(lambda: Federation.from_table(frame, client="client", label="label"))
