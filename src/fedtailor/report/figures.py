"""The report's pictures, drawn as SVG: no script, no network. What colour says (Okabe and Ito's), a shape or a dash says too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

WIDTH = 960
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
INK, FAINT, REST = "#333", "#e4e4e4", "#b8b8b8"
MARKS = 8  # markers along a curve, at most
ROWS = 60  # clients drawn one by one, at most
BARS = 240
DOTS = {  # marker, colour, filled
    "Local": (1, "#D55E00", False),
    "shared": (2, "#7F7F7F", False),
    "personal": (0, "#0072B2", True),
}
SHARES = (
    ("both right", "#0072B2", "#fff"),
    ("only personal", "#009E73", "#000"),
    ("only shared", "#E69F00", "#000"),
    ("neither", FAINT, "#000"),
)

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
        """Round values inside the range and how they are written."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = max(1, len(powers) // 6)
            steps = (1.0,) if len(powers) > 4 else (1.0, 2.0, 5.0)
            found = [step * 10.0**power for power in powers[::every] for step in steps]
            return [(value, short(value)) for value in found if self.low <= value <= self.high]
        step = max(_step((self.high - self.low) / 7), float(self.whole))
        values = [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]
        biggest = max((abs(value) for value in values), default=0.0)
        digits = max(3, math.ceil(math.log10(biggest / step)) + 2) if biggest else 3
        return [(value, short(value, digits)) for value in values]


def axis(values: Sequence[float], start: float, end: float, log: bool = False) -> Axis:
    """The axis of these values, with a little room; of equal values, one around them."""
    low, high = min(values), max(values)
    if log and low > 0 and high / low > 50:
        return Axis(low / 1.1, high * 1.1, start, end, log=True)
    room = 0.04 * (high - low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.05 * abs(low) or 0.5
    return Axis(low - room, high + room, start, end)


def short(value: float, digits: int = 4) -> str:
    """A number for a tick or a tooltip; a power of ten only where the plain one would be long."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return re.sub(r"e([+]|(-))0*", r"e\2", f"{value:.{digits}g}")
    plain = f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


@dataclass(frozen=True)
class Curve:
    """A method's points in every panel; one that is not named is drawn thin and grey, behind the others."""

    label: str
    panels: Sequence[Sequence[Point]]
    named: bool = True


def curves(found: Sequence[Curve], across: Sequence[str], up: str, log: bool = False) -> str:
    """Panels side by side with the same values upwards, and one legend to their right."""
    heights = [y for curve in found for panel in curve.panels for _, y in panel]
    if not heights:
        return ""
    top, base, left, between, legend = 14, 316, 78, 34, 216
    width = (WIDTH - left - legend - between * (len(across) - 1)) / len(across)
    vertical = axis(heights, base, top, log)
    out = [_turned(16, (top + base) / 2, up)]
    named = [curve for curve in found if curve.named]
    for i, title in enumerate(across):
        start = left + i * (width + between)
        points = [0.0, *(x for curve in found for x, _ in curve.panels[i])]
        horizontal = replace(axis(points, start, start + width), whole=all(x % 1 == 0 for x in points))
        out.append(_frame(start, start + width, top, base, horizontal, vertical, labels=i == 0))
        out.append(_text((2 * start + width) / 2, base + 38, title, "middle"))
        for curve in (*(c for c in found if not c.named), *reversed(named)):
            place = [(horizontal.at(x), vertical.at(y)) for x, y in curve.panels[i]]
            out.append(_curve(place, named.index(curve) if curve.named else None, curve.label))
    for i, curve in enumerate(named):
        y, x = top + 10 + 22 * i, WIDTH - legend + 14
        out.append(_curve([(x, y), (x + 17, y), (x + 34, y)], i, curve.label, only=1))
        out.append(_text(x + 42, y + 4, clip(curve.label, 20), "start", curve.label))
    if rest := len(found) - len(named):
        y, x = top + 10 + 22 * len(named), WIDTH - legend + 14
        out.append(f'<path d="M{x} {y}h34" stroke="{REST}"/>' + _text(x + 42, y + 4, f"{rest} others", "start"))
    return _svg(out, base + 50, f"{up} by {' and by '.join(across)}")


def _curve(place: Sequence[Point], style: int | None, label: str, only: int | None = None) -> str:
    """A line through the points; a style (its number) brings colour, dashes and markers (or ``only`` the one there)."""
    if not place:
        return ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    if style is None:
        line = f'<polyline points="{path}" fill="none" stroke="{REST}"/>' if len(place) > 1 else _mark(place[0], 0, REST)
        return f"<g>{_title(label)}{line}</g>"
    colour = COLOURS[style % len(COLOURS)]
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{DASHES[style % 4]}"/>'
    every = math.ceil(len(place) / MARKS)
    shown = place[len(place) - 1 :: -every] if only is None else [place[only]]
    return f"<g>{_title(label)}{line}{''.join(_mark(point, style, colour) for point in shown)}</g>"


def dots(names: Sequence[str], series: Mapping[str, ArrayLike], across: str, best_low: bool = False, log: bool = False) -> str:
    """A row per client, sorted by its personal model, with a mark per series (of ``DOTS``); of many clients, their quantiles.

    ``best_low``: small values are good, so they come first. NaN is left out.
    """
    values = {title: np.asarray(column, np.float64) for title, column in series.items()}
    known = np.flatnonzero(np.isfinite(values["personal"]))
    values = {title: column for title, column in values.items() if np.isfinite(column[known]).any()}
    if not len(known):
        return ""
    if len(known) > ROWS:
        return _quantiles({title: column[known] for title, column in values.items()}, across, log)
    shown = np.concatenate([column[known] for column in values.values()])
    horizontal = axis(shown[np.isfinite(shown)].tolist(), 170, WIDTH - 24, log)
    ranked = known[np.argsort(values["personal"][known] * (1 if best_low else -1), kind="stable")]
    top, step = 34, 17
    base = top + step * len(ranked)
    out = [_key(list(values), 170), _grid(horizontal, top, base), _text((170 + WIDTH - 24) / 2, base + 38, across, "middle")]
    for row, i in enumerate(ranked):
        y = top + step * (row + 0.5)
        here = {title: float(column[i]) for title, column in values.items() if np.isfinite(column[i])}
        ends = [horizontal.at(v) for v in here.values()]
        said = f"{names[i]}: " + ", ".join(f"{title} {short(v)}" for title, v in here.items())
        marks = "".join(_mark((horizontal.at(v), y), *DOTS[title]) for title, v in here.items())
        line = f'<path d="M{min(ends):.1f} {y}H{max(ends):.1f}" stroke="#999"/>'
        out.append(f"<g>{_title(said)}{_text(160, y + 4, clip(names[i], 19), 'end')}{line}{marks}</g>")
    return _svg(out, base + 50, f"{across} of every client: {', '.join(values)}")


def _key(titles: Sequence[str], left: float) -> str:
    out, x = [], left
    for title in titles:
        out.append(_mark((x + 6, 14), *DOTS[title]) + _text(x + 16, 18, title, "start"))
        x += 16 + 7.2 * len(title) + 24
    return "".join(out)


def _quantiles(values: Mapping[str, NDArray[np.float64]], across: str, log: bool) -> str:
    """A bar per series: a line over 90 % of the clients, a box over half of them, the median."""
    cuts = {title: np.nanquantile(column, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist() for title, column in values.items()}
    horizontal = axis([cut for found in cuts.values() for cut in found], 170, WIDTH - 24, log)
    top, step = 12, 44
    base = top + step * len(cuts)
    out = [_grid(horizontal, top, base), _text((170 + WIDTH - 24) / 2, base + 38, across, "middle")]
    for row, (title, (five, quarter, half, three, most)) in enumerate(cuts.items()):
        y = top + step * (row + 0.5)
        a, b, c, d, e = (horizontal.at(q) for q in (five, quarter, half, three, most))
        _, colour, filled = DOTS[title]
        said = f"{title}: 5 % of the clients below {short(five)}, median {short(half)}, 5 % above {short(most)}"
        fill = colour if filled else "#fff"
        box = f'<rect x="{b:.1f}" y="{y - 9}" width="{max(d - b, 1):.1f}" height="18" fill="{fill}" stroke="{colour}"/>'
        line = f'<path d="M{a:.1f} {y}H{e:.1f}" stroke="{colour}" stroke-width="2"/>'
        middle = f'<path d="M{c:.1f} {y - 13}v26" stroke="#000" stroke-width="3"/>'
        out.append(f"<g>{_title(said)}{_text(160, y + 4, clip(title, 22), 'end')}{line}{box}{middle}</g>")
    return _svg(out, base + 50, f"{across} over the clients: {', '.join(values)}")


def gains(names: Sequence[str], panels: Mapping[str, Sequence[float]], up: str) -> str:
    """Sorted bars, one per client (of many: evenly spaced ranks): filled upwards for a gain, hollow downwards for a loss."""
    known = {
        title: [(float(v), n) for v, n in zip(column, names, strict=True) if math.isfinite(v)] for title, column in panels.items()
    }
    known = {title: column for title, column in known.items() if column}
    if not known:
        return ""
    top, base, left, between = 14, 254, 76, 40
    width = (WIDTH - left - 10 - between * (len(known) - 1)) / len(known)
    vertical = axis([0.0, *(v for column in known.values() for v, _ in column)], base, top)
    out = [_turned(14, (top + base) / 2, up)]
    for i, (title, column) in enumerate(known.items()):
        start = left + i * (width + between)
        ranked = sorted(column, key=lambda pair: -pair[0])
        places = range(len(ranked)) if len(ranked) <= BARS else np.linspace(0, len(ranked) - 1, BARS).round().astype(int).tolist()
        out.append(_frame(start, start + width, top, base, None, vertical, labels=i == 0))
        zero = vertical.at(0.0)
        slot = min(width / len(places), 60.0)
        for place, rank in enumerate(places):
            value, name = ranked[rank]
            y, size = min(zero, vertical.at(value)), abs(vertical.at(value) - zero)
            said = f"{name}: {'+' if value > 0 else ''}{short(value)}"
            look = f'fill="{COLOURS[0]}" stroke="{COLOURS[0]}"' if value > 0 else f'fill="#fff" stroke="{COLOURS[1]}"'
            box = f'x="{start + (place + 0.12) * slot:.2f}" y="{y:.1f}" width="{slot * 0.76:.2f}" height="{size:.1f}"'
            out.append(f"<rect {box} {look}>{_title(said)}</rect>")
        out.append(f'<path d="M{start:.1f} {zero:.1f}h{width:.1f}" stroke="{INK}"/>')
        count = f"{len(ranked):,} {'client' if len(ranked) == 1 else 'clients'}"
        out.append(_text(start + width / 2, base + 22, f"{title} ({count}, sorted)", "middle"))
    return _svg(out, base + 34, f"{up}: {', '.join(known)}")


def shares(rows: Mapping[str, Sequence[float]]) -> str:
    """A bar of one length per method, cut into the shares of test rows that both, one or neither of its models gets right."""
    if not rows:
        return ""
    left, top, step = 190, 34, 24
    span = WIDTH - left - 10
    out, x = [], float(left)
    for title, colour, _ in SHARES:
        out.append(
            f'<rect x="{x:.1f}" y="6" width="14" height="14" fill="{colour}" stroke="{INK}"/>' + _text(x + 20, 18, title, "start")
        )
        x += 150
    for row, (label, parts) in enumerate(rows.items()):
        y, x = top + step * row, float(left)
        out.append(_text(left - 10, y + 14, clip(label, 22), "end", label))
        for (title, colour, ink), part in zip(SHARES, parts, strict=True):
            size = span * part
            box = f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="18" fill="{colour}" stroke="#fff"/>'
            words = _text(x + size / 2, y + 14, f"{100 * part:.1f} %", "middle", fill=ink) if size > 52 else ""
            out.append(f"<g>{_title(f'{label}, {title}: {100 * part:.1f} %')}{box}{words}</g>")
            x += size
    return _svg(out, top + step * len(rows) + 6, "shares of test rows that both, one or neither of a method's models gets right")


def clip(words: str, length: int) -> str:
    """Words that fit, cut in the middle: names that begin alike often end in a number."""
    end = length // 3
    return words if len(words) <= length else words[: length - end - 1] + "…" + words[-end:]


def _frame(left: float, right: float, top: float, base: float, across: Axis | None, upward: Axis, labels: bool) -> str:
    """Grid lines of the values upwards, the two axes, and their ticks."""
    out = []
    for value, words in upward.ticks():
        y = upward.at(value)
        out.append(
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{FAINT}"/>'
            + (_text(left - 7, y + 4, words, "end") if labels else "")
        )
    if across is not None:
        for value, words in across.ticks():
            x = across.at(value)
            out.append(f'<path d="M{x:.1f} {base}v4" stroke="{INK}"/>' + _text(x, base + 18, words, "middle"))
    return "".join(out) + f'<path d="M{left:.1f} {top}V{base}H{right:.1f}" fill="none" stroke="{INK}"/>'


def _grid(across: Axis, top: float, base: float) -> str:
    out = [f'<path d="M{across.start} {base}H{across.end}" stroke="{INK}"/>']
    for value, words in across.ticks():
        x = across.at(value)
        out.append(f'<path d="M{x:.1f} {top}V{base}" stroke="{FAINT}"/>' + _text(x, base + 18, words, "middle"))
    return "".join(out)


def _mark(point: Point, shape: int, colour: str, filled: bool = True) -> str:
    """One of eight markers around a point."""
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
    fill, size = (colour, "") if filled else ("none", " scale(1.35)")  # a hollow mark shows around a filled one
    return (
        f'<path transform="translate({x:.1f} {y:.1f}){size}" d="{outline}" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
    )


def _step(rough: float) -> float:
    """The round number (1, 2 or 5 and zeros) next above."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= rough * (1 - 1e-9))


def _text(x: float, y: float, words: str, anchor: str, title: str = "", fill: str = "") -> str:
    look = f' style="fill:{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{_title(title) if title else ""}{escape(words)}</text>'


def _turned(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}" transform="rotate(-90 {x} {y})" text-anchor="middle">{escape(words)}</text>'


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>"


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
