"""Files to tables, and what a folder holds."""

from __future__ import annotations

import gzip
import re
import warnings
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.data.limits import check_parquet, open_unpacked
from fedtailor.data.words import one_line, shown
from fedtailor.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    import pandas as pd

TABLE_ENDS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
SAMPLE = 1_000  # rows that tell whether a label is a quantity
DECIMAL = r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?"
LAYOUTS = (
    "a folder holds one .csv, .tsv or .parquet per client, one .npz with x and y per client, one sub-folder per client with such "
    "tables (optionally train, val, test), or one sub-folder per client with a sub-folder of .png or .jpg images per class"
)


def read_table(path: Path, as_text: Collection[str] = ()) -> pd.DataFrame:
    """Read a table by its file's ending; whatever keeps it from being read is reported in one line.

    Cells are missing if they are empty, whatever words they hold. Columns ``as_text`` keep their cells as written (0071), unless
    they hold numbers with decimals.
    """
    import pandas as pd

    if not path.exists():
        raise InvalidArgument(f"no file {str(path)!r}; check the path")
    if has_ending(path, (".xlsx", ".xls", ".xlsm", ".ods")):
        raise InvalidArgument(f"{str(path)!r} is a spreadsheet; save it as .csv and give that")
    if not has_ending(path, TABLE_ENDS):
        raise InvalidArgument(f"{str(path)!r} is no table fedtailor reads; give a {', '.join(TABLE_ENDS)} file")
    try:
        frame = _read_parquet(path) if has_ending(path, (".parquet",)) else _read_text(path, as_text)
    except (InvalidArgument, InvalidData):
        raise
    except UnicodeDecodeError as error:
        raise InvalidData(f"{str(path)!r} is not UTF-8 text (byte {error.object[error.start]:#x}); save it as UTF-8") from error
    except pd.errors.EmptyDataError as error:
        raise InvalidData(f"{str(path)!r} is empty; give a file with a header and rows") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InvalidData(f"{str(path)!r} cannot be read as a table: {_parse_error(error)}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidData(f"{str(path)!r} is no complete gzip file ({one_line(error)}); compress it again") from error
    except ImportError as error:
        raise InvalidArgument("reading .parquet needs pyarrow; install fedtailor[data], or save the table as .csv") from error
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise InvalidData(f"{str(path)!r} cannot be read ({one_line(error)}); check the file or save it again") from error
    if not len(frame):
        raise InvalidData(f"{str(path)!r} has a header but no rows; give a file with rows")
    return frame


def has_ending(path: Path, endings: Iterable[str]) -> bool:
    return path.name.lower().endswith(tuple(endings))


def stem(path: Path) -> str:
    return path.name[: -len(next(end for end in sorted(TABLE_ENDS, key=len, reverse=True) if has_ending(path, (end,))))]


def entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files and the folders, without hidden ones, in order of their names."""
    seen = sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)
    return [entry for entry in seen if entry.is_file()], [entry for entry in seen if entry.is_dir()]


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    check_parquet(path)
    return pd.read_parquet(path)


def _read_text(path: Path, as_text: Collection[str]) -> pd.DataFrame:
    import pandas as pd

    with open_unpacked(path) as file:
        head = file.read(4096)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InvalidData(f"{str(path)!r} is UTF-16 text; save it as UTF-8")
    if b"\0" in head:
        raise InvalidData(
            f"{str(path)!r} is not text; give a table saved as text, or name the file by what it is (.csv.gz, .parquet)"
        )
    sep = "\t" if has_ending(path, (".tsv", ".tsv.gz")) else ","
    # pandas would rename a second column of the same name, so the header is read separately
    with open_unpacked(path) as file:
        header = pd.read_csv(file, sep=sep, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0].tolist()
    named = [name for name in header if name.strip()]
    if len(set(named)) < len(named):
        duplicate = next(name for name in named if named.count(name) > 1)
        raise InvalidData(f"{str(path)!r} has two columns called {shown(duplicate)}; rename one of them")
    if len(header) == 1 and re.search(r"[;\t|,]", header[0]):
        mark = next(mark for mark in ";\t|," if mark in header[0])
        raise InvalidData(f"{str(path)!r} seems to be separated by {mark!r}; save it with {sep!r} between the values")
    return _parse(path, sep, [name for name in dict.fromkeys(as_text) if name in header])


def _parse(path: Path, sep: str, as_text: Collection[str]) -> pd.DataFrame:
    import pandas as pd

    options: dict[str, Any] = {"sep": sep, "index_col": False, "keep_default_na": False, "na_values": [""]}

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        warnings.simplefilter("error", pd.errors.DtypeWarning)
        if as_text:
            with open_unpacked(path) as file:
                head = pd.read_csv(file, **options, nrows=SAMPLE, dtype=dict.fromkeys(as_text, "str"))
            # as objects: a text dtype would copy every cell once more
            options["dtype"] = {name: object for name in as_text if not head[name].str.fullmatch(DECIMAL, na=False).any()}
        try:
            if path.suffix.lower() != ".gz":  # given a path, pandas reads large files in threads
                return pd.read_csv(path.absolute(), **options)
            with open_unpacked(path) as file:
                return pd.read_csv(file, **options)
        except pd.errors.DtypeWarning:
            # a column's type was guessed differently in different pieces: read it in one
            with open_unpacked(path) as file:
                return pd.read_csv(file, **options, low_memory=False)


def _parse_error(error: Exception) -> str:
    """Return what pandas says about a malformed file, in our words where we know the message."""
    message = one_line(error)
    if match := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
        return f"line {match[2]} has {match[3]} values but the header has {match[1]}; fix it (quote a value that holds a comma)"
    if match := re.search(r"EOF inside string starting at row (\d+)", message):
        return f"a quote opened in line {int(match[1]) + 1} is never closed; close it"
    if "Length of header" in message:
        return "line 2 has more values than the header has names; name every column"
    return f"{message}; check the file or save it again"
