"""How numbers and dates are written as text: plain, with a decimal comma, with thousands, in per cent; day or month first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
PLAIN = ""
SAMPLE = 500  # texts that are looked at first, of many
GAPS = " '\u00a0\u202f"  # between thousands, beside a comma or a dot
NUMBER = rf"[+-]?\d+(?:\.\d+)?|[+-]?\d{{1,3}}(?:[,{GAPS}]\d{{3}})+(?:\.\d+)?"
COMMA_NUMBER = rf"[+-]?\d+(?:,\d+)?|[+-]?\d{{1,3}}(?:[.{GAPS}]\d{{3}})+(?:,\d+)?"
TIME = r"(?:[ T](\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?)?"
ENDS_WITH_YEAR = r"(\d{1,2})([/.-])(\d{1,2})\2(\d{4})" + TIME
BEGINS_WITH_YEAR = r"(\d{4})([/.])(\d{1,2})\2(\d{1,2})" + TIME
_DAY = np.timedelta64(1, "D")


class Style(NamedTuple):
    """A way of writing: the ``kind`` of column, what messages call its content, how it is read, and what a note says."""

    kind: str
    content: str
    parse: Callable[[Sequence[str]], Floats]
    note: str = ""


class Guess(NamedTuple):
    """The style of some texts and their values, NaN where a text does not fit it."""

    style: str
    kind: str
    values: Floats


def as_numbers(texts: Sequence[str]) -> Floats:
    """Return texts as numbers, NaN where a text is no number."""
    import pandas as pd

    # whole numbers beyond 64 bits make pandas answer in objects
    parsed: pd.Series[Any] = pd.to_numeric(_series(texts), errors="coerce")
    return np.array([number(value) for value in parsed], float) if parsed.dtype == object else parsed.to_numpy(np.float64)


def number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_days(texts: Sequence[str]) -> Floats:
    """Return texts as days since 1970, NaN where a text is no date of the form YYYY-MM-DD, with or without a time."""
    import pandas as pd

    series = _series(texts)
    dated = series.str.match(r"\d{4}-\d{2}-\d{2}(?:$|[T ])").to_numpy(bool)
    days = np.full(len(series), np.nan)
    if dated.any():
        days[dated] = days_of(pd.to_datetime(series[dated], format="ISO8601", errors="coerce", utc=True))
    return days


def days_of(values: pd.Series[Any]) -> Floats:
    """Return dates as days since 1970, NaN where missing."""
    naive = values.dt.tz_convert(None) if getattr(values.dtype, "tz", None) is not None else values
    stamps = naive.to_numpy("datetime64[us]")
    days = (stamps - np.datetime64(0, "us")) / _DAY
    days[np.isnat(stamps)] = np.nan
    return days


def guess(texts: Sequence[str]) -> Guess | None:
    """Return the first style that all texts have; otherwise the one that most have, or None where none has any."""
    best: Guess | None = None
    sample = texts[:: max(1, len(texts) // SAMPLE)]
    for name, style in STYLES.items():
        if len(texts) > 2 * SAMPLE and np.isnan(style.parse(sample)).all():
            continue  # names and the like: reading all of them in every style takes long
        reading = Guess(name, style.kind, style.parse(texts))
        good = int((~np.isnan(reading.values)).sum())
        if good and good == len(texts):
            return reading
        if good > (0 if best is None else int((~np.isnan(best.values)).sum())):
            best = reading
    return best


def _grouped(texts: Sequence[str]) -> Floats:
    return _spelled(texts, NUMBER, f"[,{GAPS}]", ".")


def _with_comma(texts: Sequence[str]) -> Floats:
    return _spelled(texts, COMMA_NUMBER, f"[.{GAPS}]", ",")


def _percent(texts: Sequence[str]) -> Floats:
    return _of_percent(texts, as_numbers)


def _percent_with_comma(texts: Sequence[str]) -> Floats:
    return _of_percent(texts, _with_comma)


def _of_percent(texts: Sequence[str], parse: Callable[[Sequence[str]], Floats]) -> Floats:
    series = _series(texts).str.strip()
    ends = series.str.endswith("%").to_numpy(bool)
    values = np.full(len(series), np.nan)
    if ends.any():
        values[ends] = parse(series[ends].str.removesuffix("%").str.rstrip().tolist())
    return values


def _spelled(texts: Sequence[str], pattern: str, gap: str, point: str) -> Floats:
    """Return texts of a pattern as numbers, without their gaps and with a point for what they have in its place."""
    series = _series(texts).str.strip()
    fits = series.str.fullmatch(pattern).to_numpy(bool)
    values = np.full(len(series), np.nan)
    if fits.any():
        values[fits] = as_numbers(series[fits].str.replace(gap, "", regex=True).str.replace(point, ".", regex=False).tolist())
    return values


def _day_first(texts: Sequence[str]) -> Floats:
    return _dated(texts, ENDS_WITH_YEAR, year=3, month=2, day=0)


def _month_first(texts: Sequence[str]) -> Floats:
    return _dated(texts, ENDS_WITH_YEAR, year=3, month=0, day=2)


def _year_first(texts: Sequence[str]) -> Floats:
    return _dated(texts, BEGINS_WITH_YEAR, year=0, month=2, day=3)


def _dated(texts: Sequence[str], pattern: str, year: int, month: int, day: int) -> Floats:
    """Return texts of a pattern as days since 1970; its groups are numbers, then hour, minute and second."""
    import pandas as pd

    groups = _series(texts).str.strip().str.extract(f"^{pattern}$", expand=True)
    fits = groups[0].notna().to_numpy(bool)
    days = np.full(len(groups), np.nan)
    if not fits.any():
        return days
    parts = groups[fits]
    stamps = pd.to_datetime(
        pd.DataFrame({"year": parts[year].astype(int), "month": parts[month].astype(int), "day": parts[day].astype(int)}),
        errors="coerce",
    )
    hours, minutes, seconds = (parts[i].fillna("0").astype(float).to_numpy() for i in (4, 5, 6))
    valid = (hours < 24) & (minutes < 60) & (seconds < 60)
    time = (hours * 3600 + minutes * 60 + seconds) / 86_400
    days[fits] = np.where(valid, days_of(stamps) + time, np.nan)
    return days


def _series(texts: Sequence[str]) -> pd.Series[Any]:
    import pandas as pd

    return pd.Series(list(texts), dtype=object)


# in the order in which they are tried; what is read in one of them is read so again in new rows
STYLES: dict[str, Style] = {
    PLAIN: Style("numeric", "numbers", as_numbers),
    "percent": Style("numeric", "percentages", _percent, "'12%' is 12"),
    "thousands": Style("numeric", "numbers", _grouped, "the comma (or space) stands between thousands: '1,000' is 1000"),
    "decimal comma": Style("numeric", "numbers", _with_comma, "the comma is the decimal sign: '1,5' is 1.5"),
    "percent, decimal comma": Style("numeric", "percentages", _percent_with_comma, "'12,5%' is 12.5"),
    "iso": Style("date", "dates", as_days),
    "year first": Style("date", "dates", _year_first, "'2020/12/31' is 31 December"),
    "day first": Style("date", "dates", _day_first, "day first: '1/2/2020' is 1 February"),
    "month first": Style("date", "dates", _month_first, "month first: '1/2/2020' is 2 January"),
}


def unsure(style: str, texts: Sequence[str]) -> bool:
    """Return whether the texts could as well be read in another style, with other values."""
    if style == "day first":
        return not np.isnan(_month_first(texts)).any() and any("/" in text or "-" in text for text in texts)
    if style == "thousands":
        return not np.isnan(_with_comma(texts)).any()
    return False
