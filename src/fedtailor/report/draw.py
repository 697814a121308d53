"""Strokes of the report's pictures: axes, ticks, markers and text as SVG, with no script."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
INK, FAINT, REST = "#333", "#e4e4e4", "#b8b8b8"

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` laid between two places of the picture, evenly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False  # only whole numbers have ticks

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round values inside the range and how they are written."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = max(1, len(powers) // 6)
            steps = (1.0,) if len(powers) > 4 else (1.0, 2.0, 5.0)
            candidates = [step * 10.0**power for power in powers[::every] for step in steps]
            return [(value, rounded(value)) for value in candidates if self.low <= value <= self.high]
        step = max(_round_step((self.high - self.low) / 7), float(self.whole))
        values = [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]
        biggest = max((abs(value) for value in values), default=0.0)
        digits = max(3, math.ceil(math.log10(biggest / step)) + 2) if biggest else 3
        return [(value, rounded(value, digits)) for value in values]


def axis(values: Sequence[float], start: float, end: float, log: bool = False) -> Axis:
    """Return an axis that holds these values with a little room; for equal values, one around them."""
    low, high = min(values), max(values)
    if log and low > 0 and high / low > 50:
        return Axis(low / 1.1, high * 1.1, start, end, log=True)
    room = 0.04 * (high - low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.05 * abs(low) or 0.5
    return Axis(low - room, high + room, start, end)


def rounded(value: float, digits: int = 4) -> str:
    """Return a number as text with so many digits; with a power of ten only where the plain one would be long."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return re.sub(r"e([+]|(-))0*", r"e\2", f"{value:.{digits}g}")
    plain = f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def clip(words: str, length: int) -> str:
    """Cut words in the middle so that they fit: names that begin alike often end in a number."""
    end = length // 3
    return words if len(words) <= length else words[: length - end - 1] + "…" + words[-end:]


def frame(left: float, right: float, top: float, base: float, across: Axis | None, upward: Axis, labels: bool) -> str:
    """Draw grid lines of the values upwards, the two axes, and their ticks."""
    out = []
    for value, words in upward.ticks():
        y = upward.at(value)
        out.append(
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{FAINT}"/>'
            + (text(left - 7, y + 4, words, "end") if labels else "")
        )
    if across is not None:
        for value, words in across.ticks():
            x = across.at(value)
            out.append(f'<path d="M{x:.1f} {base}v4" stroke="{INK}"/>' + text(x, base + 18, words, "middle"))
    return "".join(out) + f'<path d="M{left:.1f} {top}V{base}H{right:.1f}" fill="none" stroke="{INK}"/>'


def grid(across: Axis, top: float, base: float) -> str:
    out = [f'<path d="M{across.start} {base}H{across.end}" stroke="{INK}"/>']
    for value, words in across.ticks():
        x = across.at(value)
        out.append(f'<path d="M{x:.1f} {top}V{base}" stroke="{FAINT}"/>' + text(x, base + 18, words, "middle"))
    return "".join(out)


def mark(point: Point, shape: int, color: str, filled: bool = True) -> str:
    """Draw one of eight markers around a point."""
    x, y = point
    outline = (
        "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",  # circle
        "M-3.5 -3.5h7v7h-7z",  # square
        "M0 -4.5L4.5 3.5H-4.5z",  # triangle
        "M0 -5L5 0L0 5L-5 0z",  # diamond
        "M0 4.5L4.5 -3.5H-4.5z",  # triangle, down
        "M-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",  # plus
        "M-5 -2.5h10v5h-10z",  # bar, lying
        "M-2.5 -5h5v10h-5z",  # bar, standing
    )[shape % 8]
    fill, size = (color, "") if filled else ("none", " scale(1.35)")  # a hollow mark shows around a filled one
    return f'<path transform="translate({x:.1f} {y:.1f}){size}" d="{outline}" fill="{fill}" stroke="{color}" stroke-width="1.5"/>'


def _round_step(rough: float) -> float:
    """Return the next round number above (1, 2 or 5 and zeros)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= rough * (1 - 1e-9))


def text(x: float, y: float, words: str, anchor: str, title: str = "", fill: str = "") -> str:
    style = f' style="fill:{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{hint(title) if title else ""}{escape(words)}</text>'


def vertical_text(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}" transform="rotate(-90 {x} {y})" text-anchor="middle">{escape(words)}</text>'


def hint(words: str) -> str:
    return f"<title>{escape(words)}</title>"


def svg(parts: Sequence[str], height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
