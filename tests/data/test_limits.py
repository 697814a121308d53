"""A small file cannot fill the memory: what unpacks to too much, or says it holds too much, is refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import zipfile

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from fedtailor.data import limits
from fedtailor.data.readers import files
from fedtailor.data.tables import read_table
from fedtailor.errors import InvalidArgument, InvalidData

MILLION = 1_000_000


@pytest.fixture
def low(monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, str(MILLION))


def packed(path, data):
    path.write_bytes(gzip.compress(data))
    return path


def assert_says_how(caught):
    assert "\n" not in str(caught.value)
    assert "unpacks to" in str(caught.value)
    assert f"set {limits.VARIABLE}" in str(caught.value)


@pytest.mark.parametrize("line", [b"0,0\n", b"0" * 100], ids=["many lines", "one long line"])
def test_a_table_that_unpacks_to_too_much(line, low, tmp_path):
    path = packed(tmp_path / "t.csv.gz", b"a,b\n" + line * (2 * MILLION // len(line)))
    with pytest.raises(InvalidData) as caught:
        read_table(path)
    assert_says_how(caught)


def test_the_header_of_a_table_that_unpacks_to_too_much(low, tmp_path):
    with pytest.raises(InvalidData) as caught:
        read_table(packed(tmp_path / "t.csv.gz", b"a" * (2 * MILLION)))
    assert_says_how(caught)


def test_json_and_idx_that_unpack_to_too_much(low, tmp_path):
    for name, read in (("j.json.gz", files.read_json), ("i.gz", files.read_idx)):
        with pytest.raises(InvalidData) as caught:
            read(packed(tmp_path / name, b" " * (2 * MILLION)))
        assert_says_how(caught)


def test_arrays_that_unpack_to_too_much(low, tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((MILLION, 1)), y=np.zeros(MILLION))
    with pytest.raises(InvalidData) as caught:
        files.read_npz(tmp_path / "a.npz")
    assert_says_how(caught)
    with pytest.raises(InvalidData) as caught:
        ft.Federation.from_folder(tmp_path)
    assert_says_how(caught)


def test_parquet_that_unpacks_to_too_much(low, tmp_path):
    pd.DataFrame({"a": np.zeros(MILLION), "b": ["x"] * MILLION}).to_parquet(tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < MILLION / 10
    with pytest.raises(InvalidData) as caught:
        read_table(tmp_path / "t.parquet")
    assert_says_how(caught)


def test_whoever_trusts_a_file_may_raise_the_limit(tmp_path, monkeypatch):
    path = packed(tmp_path / "t.csv.gz", b"a,b\n" + b"0,0\n" * MILLION)
    monkeypatch.setenv(limits.VARIABLE, "5e6")
    assert len(read_table(path)) == MILLION
    monkeypatch.setenv(limits.VARIABLE, "much")
    with pytest.raises(InvalidArgument, match="is no number of bytes"):
        read_table(path)


def test_without_a_choice_the_limit_is_generous_and_grows_with_the_file(tmp_path, monkeypatch):
    monkeypatch.delenv(limits.VARIABLE, raising=False)
    (tmp_path / "small").write_bytes(b"x")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(limits.LEAST)
    assert limits.allowance(tmp_path / "small") == limits.LEAST
    assert limits.allowance(tmp_path / "large") == limits.RATIO * limits.LEAST


def npy(shape):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(80)


ABSURD = (
    "(99999999999999,)",
    "(-5,)",
    "(1 << 60, 9)",
    "(9999999999, 9999999999, 9999999999)",
    "(1," * 300,
    "(" * 900 + ")" * 900,
)


@pytest.mark.parametrize("shape", ABSURD)
def test_an_array_whose_header_is_absurd(shape, tmp_path):
    (tmp_path / "x.npy").write_bytes(npy(shape))
    with pytest.raises(InvalidData, match="cannot read"):
        files.read_npy(tmp_path / "x.npy")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", npy(shape))
        archive.writestr("y.npy", npy("(10,)"))
    with pytest.raises(InvalidData, match="cannot read"):
        files.read_npz(tmp_path / "x.npz")
    (tmp_path / "x.npy").unlink()
    with pytest.raises(InvalidData, match="cannot be read"):
        ft.Federation.from_folder(tmp_path)


def test_an_idx_file_whose_header_is_absurd(tmp_path):
    (tmp_path / "x").write_bytes(b"\0\0\x0e\4" + b"\xff\xff\xff\xff" * 4 + bytes(80))
    with pytest.raises(InvalidData, match="cut short or too long"):
        files.read_idx(tmp_path / "x")


def test_json_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(InvalidData, match="cannot read"):
        files.read_json(tmp_path / "x.json")


def test_tables_are_read_as_before(tmp_path):
    frame = pd.DataFrame({"a": [1, 2], "b": ["x,y", 'q"']})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    frame.to_csv(tmp_path / "t.TSV.GZ", index=False, sep="\t", compression="gzip")
    frame.to_parquet(tmp_path / "t.parquet")
    for path in tmp_path.iterdir():
        pd.testing.assert_frame_equal(read_table(path), frame)
    buffer = io.StringIO(json.dumps({"k": 1}))
    assert files.read_json(packed(tmp_path / "j.json.gz", buffer.read().encode())) == {"k": 1}
