"""Tables large enough for pandas to read them in pieces at once are read as small ones are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedtailor.data.tables import read_table
from fedtailor.errors import InvalidData

ROWS = 400_000  # above 5 MB, from where on pandas reads in threads


def lines() -> list[str]:
    return ["who,n,t,mixed", *(f"{i % 7:04d},{i},word {i % 5},{i}" for i in range(ROWS))]


def test_a_large_table_is_read_as_written(tmp_path):
    rows = lines()
    rows[ROWS - 10] = '0006,1,"two\nlines",none'  # in the last piece only: a word among numbers, a line break in a cell
    path = tmp_path / "large.csv"
    path.write_text("\n".join(rows))
    assert path.stat().st_size > 5 * 2**20
    frame = read_table(path, ("who",))
    assert len(frame) == ROWS
    assert frame["who"].tolist()[:8] == ["0000", "0001", "0002", "0003", "0004", "0005", "0006", "0000"]
    assert frame["n"].dtype == np.int64
    assert frame["t"][ROWS - 11] == "two\nlines"
    assert pd.Series(frame["mixed"]).map(str).tolist()[:3] == ["0", "1", "2"]
    assert frame["mixed"][ROWS - 11] == "none"


def test_a_bad_line_far_down_is_named_by_its_number_in_the_file(tmp_path):
    rows = lines()
    rows[ROWS - 10] += ",1,2"
    path = tmp_path / "large.csv"
    path.write_text("\n".join(rows))
    with pytest.raises(InvalidData, match=f"line {ROWS - 9} has 6 values but the header has 4"):
        read_table(path, ("who",))
