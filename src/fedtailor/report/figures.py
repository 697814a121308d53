"""The report's pictures, drawn as SVG: no script, no network. What colour says (Okabe and Ito's), a shape or a dash says too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedtailor.report.draw import (
    COLORS,
    DASHES,
    FAINT,
    INK,
    REST,
    WIDTH,
    Axis,
    Point,
    axis,
    clip,
    frame,
    grid,
    hint,
    mark,
    rounded,
    svg,
    text,
    vertical_text,
)

__all__ = ["COLORS", "Axis", "Line", "clip", "curves", "dots", "gains", "shares"]

MARKS = 8  # markers along a curve, at most
ROWS = 60  # clients drawn one by one, at most
BARS = 240
LOCAL = "local training"
DOTS = {  # marker, colour, filled
    LOCAL: (1, "#D55E00", False),
    "shared": (2, "#7F7F7F", False),
    "personal": (0, "#0072B2", True),
}
SHARES = (
    ("both right", "#0072B2", "#fff"),
    ("only personal", "#009E73", "#000"),
    ("only shared", "#E69F00", "#000"),
    ("neither", FAINT, "#000"),
)


@dataclass(frozen=True)
class Line:
    """A method's line in every panel; one that is not named is drawn thin and grey, behind the others."""

    label: str
    panels: Sequence[Sequence[Point]]
    named: bool = True


def curves(lines: Sequence[Line], across: Sequence[str], up: str, log: bool = False) -> str:
    """Draw panels side by side with the same values upwards, and one legend to their right."""
    heights = [y for line in lines for panel in line.panels for _, y in panel]
    if not heights:
        return ""
    top, base, left, between, legend = 14, 316, 78, 34, 216
    width = (WIDTH - left - legend - between * (len(across) - 1)) / len(across)
    vertical = axis(heights, base, top, log)
    out = [vertical_text(16, (top + base) / 2, up)]
    named = [line for line in lines if line.named]
    for i, title in enumerate(across):
        start = left + i * (width + between)
        points = [0.0, *(x for line in lines for x, _ in line.panels[i])]
        horizontal = replace(axis(points, start, start + width), whole=all(x % 1 == 0 for x in points))
        out.append(frame(start, start + width, top, base, horizontal, vertical, labels=i == 0))
        out.append(text((2 * start + width) / 2, base + 38, title, "middle"))
        for line in (*(c for c in lines if not c.named), *reversed(named)):
            place = [(horizontal.at(x), vertical.at(y)) for x, y in line.panels[i]]
            out.append(_curve(place, named.index(line) if line.named else None, line.label))
    for i, line in enumerate(named):
        y, x = top + 10 + 22 * i, WIDTH - legend + 14
        out.append(_curve([(x, y), (x + 17, y), (x + 34, y)], i, line.label, only=1))
        out.append(text(x + 42, y + 4, clip(line.label, 20), "start", line.label))
    if rest := len(lines) - len(named):
        y, x = top + 10 + 22 * len(named), WIDTH - legend + 14
        out.append(f'<path d="M{x} {y}h34" stroke="{REST}"/>' + text(x + 42, y + 4, f"{rest} others", "start"))
    return svg(out, base + 50, f"{up} by {' and by '.join(across)}")


def _curve(place: Sequence[Point], style: int | None, label: str, only: int | None = None) -> str:
    """Draw a line through the points; a style (its number) brings colour, dashes and markers (or ``only`` that one)."""
    if not place:
        return ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    if style is None:
        line = f'<polyline points="{path}" fill="none" stroke="{REST}"/>' if len(place) > 1 else mark(place[0], 0, REST)
        return f"<g>{hint(label)}{line}</g>"
    color = COLORS[style % len(COLORS)]
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{DASHES[style % 4]}"/>'
    every = math.ceil(len(place) / MARKS)
    shown = place[len(place) - 1 :: -every] if only is None else [place[only]]
    return f"<g>{hint(label)}{line}{''.join(mark(point, style, color) for point in shown)}</g>"


def dots(names: Sequence[str], series: Mapping[str, ArrayLike], across: str, best_low: bool = False, log: bool = False) -> str:
    """Draw a row per client, sorted by its personal model, with a mark per series (of ``DOTS``); for many clients, quantiles.

    With ``best_low`` small values are good, so they come first. NaN is left out.
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
    out = [_legend(list(values), 170), grid(horizontal, top, base), text((170 + WIDTH - 24) / 2, base + 38, across, "middle")]
    for row, i in enumerate(ranked):
        y = top + step * (row + 0.5)
        here = {title: float(column[i]) for title, column in values.items() if np.isfinite(column[i])}
        ends = [horizontal.at(v) for v in here.values()]
        tooltip = f"{names[i]}: " + ", ".join(f"{title} {rounded(v)}" for title, v in here.items())
        marks = "".join(mark((horizontal.at(v), y), *DOTS[title]) for title, v in here.items())
        line = f'<path d="M{min(ends):.1f} {y}H{max(ends):.1f}" stroke="#999"/>'
        out.append(f"<g>{hint(tooltip)}{text(160, y + 4, clip(names[i], 19), 'end')}{line}{marks}</g>")
    return svg(out, base + 50, f"{across} of every client: {', '.join(values)}")


def _legend(titles: Sequence[str], left: float) -> str:
    out, x = [], left
    for title in titles:
        out.append(mark((x + 6, 14), *DOTS[title]) + text(x + 16, 18, title, "start"))
        x += 16 + 7.2 * len(title) + 24
    return "".join(out)


def _quantiles(values: Mapping[str, NDArray[np.float64]], across: str, log: bool) -> str:
    """Draw a bar per series: a line over 90 % of the clients, a box over half of them, the median."""
    cuts = {title: np.nanquantile(column, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist() for title, column in values.items()}
    horizontal = axis([cut for quantiles in cuts.values() for cut in quantiles], 170, WIDTH - 24, log)
    top, step = 12, 44
    base = top + step * len(cuts)
    out = [grid(horizontal, top, base), text((170 + WIDTH - 24) / 2, base + 38, across, "middle")]
    for row, (title, (five, quarter, half, three, most)) in enumerate(cuts.items()):
        y = top + step * (row + 0.5)
        a, b, c, d, e = (horizontal.at(q) for q in (five, quarter, half, three, most))
        _, color, filled = DOTS[title]
        tooltip = f"{title}: 5 % of the clients below {rounded(five)}, median {rounded(half)}, 5 % above {rounded(most)}"
        fill = color if filled else "#fff"
        box = f'<rect x="{b:.1f}" y="{y - 9}" width="{max(d - b, 1):.1f}" height="18" fill="{fill}" stroke="{color}"/>'
        line = f'<path d="M{a:.1f} {y}H{e:.1f}" stroke="{color}" stroke-width="2"/>'
        middle = f'<path d="M{c:.1f} {y - 13}v26" stroke="#000" stroke-width="3"/>'
        out.append(f"<g>{hint(tooltip)}{text(160, y + 4, clip(title, 22), 'end')}{line}{box}{middle}</g>")
    return svg(out, base + 50, f"{across} over the clients: {', '.join(values)}")


def gains(names: Sequence[str], panels: Mapping[str, Sequence[float]], up: str, ends: bool = False) -> str:
    """Draw sorted bars, one per client (of many: evenly spaced ranks): filled upwards for a gain, hollow downwards for a loss.

    ``ends`` writes the names of the first and the last.
    """
    known = {
        title: [(float(v), n) for v, n in zip(column, names, strict=True) if math.isfinite(v)] for title, column in panels.items()
    }
    known = {title: column for title, column in known.items() if column}
    if not known:
        return ""
    top, base, left, between = 14, 254, 76, 40
    width = (WIDTH - left - 10 - between * (len(known) - 1)) / len(known)
    vertical = axis([0.0, *(v for column in known.values() for v, _ in column)], base, top)
    out = [vertical_text(14, (top + base) / 2, up)]
    for i, (title, column) in enumerate(known.items()):
        start = left + i * (width + between)
        ranked = sorted(column, key=lambda pair: -pair[0])
        places = range(len(ranked)) if len(ranked) <= BARS else np.linspace(0, len(ranked) - 1, BARS).round().astype(int).tolist()
        out.append(frame(start, start + width, top, base, None, vertical, labels=i == 0))
        zero = vertical.at(0.0)
        slot = min(width / len(places), 60.0)
        for place, rank in enumerate(places):
            value, name = ranked[rank]
            y, size = min(zero, vertical.at(value)), abs(vertical.at(value) - zero)
            tooltip = f"{name}: {'+' if value > 0 else ''}{rounded(value)}"
            style = f'fill="{COLORS[0]}" stroke="{COLORS[0]}"' if value > 0 else f'fill="#fff" stroke="{COLORS[1]}"'
            box = f'x="{start + (place + 0.12) * slot:.2f}" y="{y:.1f}" width="{slot * 0.76:.2f}" height="{size:.1f}"'
            out.append(f"<rect {box} {style}>{hint(tooltip)}</rect>")
        out.append(f'<path d="M{start:.1f} {zero:.1f}h{width:.1f}" stroke="{INK}"/>')
        if ends and len(ranked) > 1:
            first, last = ranked[0][1], ranked[-1][1]
            out.append(text(start, base + 22, clip(f"first: {first}", 38), "start", first))
            out.append(text(start + width, base + 22, clip(f"last: {last}", 38), "end", last))
        count = f"{len(ranked):,} {'client' if len(ranked) == 1 else 'clients'}"
        out.append(text(start + width / 2, base + 22, f"{title} ({count}, sorted)", "middle"))
    return svg(out, base + 34, f"{up}: {', '.join(known)}")


def shares(rows: Mapping[str, Sequence[float]]) -> str:
    """Draw a bar of one length per method: the shares of test rows that both, one or neither of its models gets right."""
    if not rows:
        return ""
    left, top, step = 190, 34, 24
    span = WIDTH - left - 10
    out, x = [], float(left)
    for title, color, _ in SHARES:
        out.append(
            f'<rect x="{x:.1f}" y="6" width="14" height="14" fill="{color}" stroke="{INK}"/>' + text(x + 20, 18, title, "start")
        )
        x += 150
    for row, (label, parts) in enumerate(rows.items()):
        y, x = top + step * row, float(left)
        out.append(text(left - 10, y + 14, clip(label, 22), "end", label))
        for (title, color, ink), part in zip(SHARES, parts, strict=True):
            size = span * part
            box = f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="18" fill="{color}" stroke="#fff"/>'
            words = text(x + size / 2, y + 14, f"{100 * part:.1f} %", "middle", fill=ink) if size > 52 else ""
            out.append(f"<g>{hint(f'{label}, {title}: {100 * part:.1f} %')}{box}{words}</g>")
            x += size
    return svg(out, top + step * len(rows) + 6, "shares of test rows that both, one or neither of a method's models gets right")
