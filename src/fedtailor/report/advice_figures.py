"""The advice page's pictures: the error over lam, the map of regimes, the race, the trade-off between score and traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.report.advice_words import lam_text, stated
from fedtailor.report.draw import (
    COLORS,
    FAINT,
    INK,
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
from fedtailor.report.evidence import number
from fedtailor.task.scores import score_named

BLUE, ORANGE, GREEN = COLORS[:3]
REGIMES = {"local": (ORANGE, "training alone"), "between": (GREEN, "between"), "shared": (BLUE, "one model for all")}
ROOM = 300.0  # the bound is drawn up to so many times the larger of its two flat ends
REACH = 15.0  # times more and less than here: what the map shows
TINY = 1e-300

Pairs = list[tuple[float, float]]


# -- error over lam -------------------------------------------------------------------------------------------------------
def over_lam(curves: Mapping[str, Any], guides: Mapping[str, float], score: str) -> str:
    """Above, squared distances by lam: the bound's branches, the estimate, the truth. Below, the validation loss. One lam axis,
    with a place for 0 at its left and one for infinity at its right; ``guides`` are lams to be pointed at, by their names."""
    measured, ends = curves["measured"], curves["ends"]
    lams = [float(lam) for lam in measured["lam"]]
    bound = curves.get("bound") or {}
    all_lams = [*lams, *(float(lam) for lam in bound.get("lam", ())), *(g for g in guides.values() if 0 < g < math.inf)]
    across = Axis(min(all_lams) / 1.2, max(all_lams) * 1.2, 158, WIDTH - 84, log=True)
    lines = {
        "bound, local branch": (ORANGE, "7 3", None, _pairs(bound.get("lam"), bound.get("local"))),
        "bound, shared branch": (BLUE, "9 3 2 3", None, _pairs(bound.get("lam"), bound.get("shared"))),
        "estimated error": (GREEN, "", 0, _with_ends(lams, measured, ends, "distance")),
        "true error": (INK, "2 3", 3, _with_ends(lams, measured, ends, "true")),
    }
    lines = {name: line for name, line in lines.items() if line[3]}
    out: list[str] = []
    top = 14.0
    if lines:
        out.append(_legend([(name, color, dash, shape) for name, (color, dash, shape, _) in lines.items()], 106))
        out.append(_distances(lines, across, 34, 262))
        out.append(text(6, 316, "(b)", "start"))
        top = 306.0
    base = top + (190 if lines else 240)
    out.append(_validation(curves, lams, across, top, base, score))
    out.append(_guides(guides, across, 34 if lines else top, base, top - 12 if lines else base - 8))
    for x, words in ((122, "0"), (WIDTH - 48, "∞")):
        out.append(text(x, base + 18, words, "middle"))
    out.append(text(122, base + 34, "alone", "middle") + text(WIDTH - 48, base + 34, "one model", "middle"))
    out.append(text((across.start + across.end) / 2, base + 38, "lam, the pull of each client to the shared model", "middle"))
    return svg(out, base + 50, "error by lam: Theorem 1's bound and what is measured")


def _distances(lines: Mapping[str, tuple[str, str, int | None, Pairs]], across: Axis, top: float, base: float) -> str:
    flat = [pairs[0 if "local" in name else -1][1] for name, (_, _, _, pairs) in lines.items() if name.startswith("bound")]
    most = ROOM * max(flat) if flat else math.inf
    heights = [y for *_, pairs in lines.values() for _, y in pairs if TINY < y <= most]
    if not heights:
        return ""
    upward = _log(heights, base, top)
    out = [_wide_frame(across, top, base, upward), vertical_text(18, (top + base) / 2, "squared distance to the truth")]
    out.append(text(6, top + 10, "(a)", "start"))
    for name, (color, dash, shape, pairs) in lines.items():
        shown = [(lam, y) for lam, y in pairs if TINY < y <= most]
        points = [(_at(across, lam), upward.at(y)) for lam, y in shown]
        if shape is None:
            out.append(f"<g>{hint(name)}{_line(points, color, dash, 2.5)}</g>")
        else:
            out.append(_line([p for p, (lam, _) in zip(points, shown, strict=True) if 0 < lam < math.inf], color, dash, 2))
            for point, (lam, y) in zip(points, shown, strict=True):
                out.append(f"<g>{hint(f'{name} at lam {lam_text(lam)}: {rounded(y)}')}{mark(point, shape, color)}</g>")
    return "".join(out)


def _validation(curves: Mapping[str, Any], lams: Sequence[float], across: Axis, top: float, base: float, score: str) -> str:
    """Draw the loss above that of the best lam, with the standard error of the difference as a band."""
    measured, ends = curves["measured"], curves["ends"]
    columns = ("excess", "se", "loss", "score")
    rows = [(lam, *(measured[key][i] for key in columns)) for i, lam in enumerate(lams)]
    rows = [(0.0, *(ends["local"][key] for key in columns)), *rows, (math.inf, *(ends["shared"][key] for key in columns))]
    known = [(lam, e, number(s) or 0.0, loss, value) for lam, e, s, loss, value in rows if number(e) is not None]
    if not known:
        return ""
    upward = axis([0.0, *(e + s for _, e, s, _, _ in known), *(e - s for _, e, s, _, _ in known)], base, top)
    out = [_wide_frame(across, top, base, upward, across.ticks()), vertical_text(18, (top + base) / 2, "excess validation loss")]
    inner = [(_at(across, lam), e, s) for lam, e, s, _, _ in known if 0 < lam < math.inf]
    ring = [*((x, upward.at(e + s)) for x, e, s in inner), *((x, upward.at(e - s)) for x, e, s in reversed(inner))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ring)
    out.append(f'<polygon points="{path}" fill="{GREEN}" fill-opacity="0.18"/>')
    out.append(f'<path d="M106 {upward.at(0):.1f}H{WIDTH - 24}" stroke="{INK}" stroke-dasharray="2 3"/>')
    out.append(_line([(x, upward.at(e)) for x, e, _ in inner], GREEN, "", 2))
    for lam, e, s, loss, value in known:
        x, y = _at(across, lam), upward.at(e)
        bar = "" if 0 < lam < math.inf else f'<path d="M{x:.1f} {upward.at(e - s):.1f}V{upward.at(e + s):.1f}" stroke="{GREEN}"/>'
        tooltip = f"lam {lam_text(lam)}: validation loss {stated(loss)}, {score} {stated(value)}"
        tooltip += f", {stated(e)} ± {stated(s)} above the best"
        star = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{INK}" stroke-width="1.5"/>' if e == 0 else ""
        out.append(f"<g>{hint(tooltip)}{bar}{mark((x, y), 0, GREEN, filled=True)}{star}</g>")
    return "".join(out)


def _guides(guides: Mapping[str, float], across: Axis, top: float, base: float, level: float) -> str:
    """Draw vertical lines with their names: the left one's to the left, the right one's to the right."""
    out = []
    ranked = sorted(guides.items(), key=lambda pair: pair[1])
    if len(ranked) == 2 and (ranked[0][1] == ranked[1][1] or abs(_at(across, ranked[0][1]) - _at(across, ranked[1][1])) < 2):
        ranked = [(" and ".join(name for name, _ in ranked), ranked[0][1])]
    for place, (name, lam) in enumerate(ranked):
        x = _at(across, lam)
        anchor = "end" if (place == 0 and len(ranked) > 1 and x > 250) or x > WIDTH - 200 else "start"
        shift = 6 if anchor == "start" else -6
        out.append(f'<path d="M{x:.1f} {top}V{base}" stroke="{INK}" stroke-dasharray="{"" if "advised" in name else "5 4"}"/>')
        words = name if not 0 < lam < math.inf else f"{name} {lam_text(lam)}"
        out.append(text(x + shift, level, words, anchor))
    return "".join(out)


def _wide_frame(across: Axis, top: float, base: float, upward: Axis, ticks: Sequence[tuple[float, str]] = ()) -> str:
    """Draw grid lines over the axis and both its outer places, which are set apart by a gap."""
    out = []
    for value, words in upward.ticks():
        y = upward.at(value)
        out.append(f'<path d="M106 {y:.1f}H{WIDTH - 24}" stroke="{FAINT}"/>' + text(99, y + 4, words, "end"))
    out.append(
        f'<path d="M106 {top}V{base}M106 {base}h32M{across.start} {base}H{across.end}M{WIDTH - 64} {base}h40" stroke="{INK}"/>'
    )
    for value, words in ticks:
        x = across.at(value)
        out.append(f'<path d="M{x:.1f} {base}v4" stroke="{INK}"/>' + text(x, base + 18, words, "middle"))
    return "".join(out)


def _at(across: Axis, lam: float) -> float:
    return 122.0 if lam <= 0 else WIDTH - 48.0 if math.isinf(lam) else across.at(lam)


# -- the map --------------------------------------------------------------------------------------------------------------
def regimes(rows: float, edge: float, r2: float | None, low: float | None, high: float | None, width: float) -> str:
    """Draw R^2 against m/N. ``rows`` is N/m here, ``edge`` the R^2 at which both ends are level with so many rows, ``width`` how
    far from it (as a factor) counts as between. With ``low`` of 0 the bar becomes an arrow to the lower edge; with ``high`` of
    None it has no upper end."""
    heights = [edge, *(v for v in (r2, low, high) if v is not None and v > 0)]
    across = Axis(1 / (rows * REACH), REACH / rows, 96, WIDTH - 24, log=True)
    upward = Axis(min(heights) / REACH, max(heights) * REACH, 322, 18, log=True)
    out = []
    for name, (color, title) in REGIMES.items():
        factors = {"local": (width, math.inf), "between": (1 / width, width), "shared": (0.0, 1 / width)}[name]
        out.append(f"<g>{hint(title)}{_band(across, upward, edge * rows, factors, color)}</g>")
    round_ = (step * 10**power for power in range(max(1, math.ceil(math.log10(rows * REACH)))) for step in (1, 2, 5))
    ticks = [(1 / n, f"1/{rounded(n)}") for n in round_ if rows / REACH <= n <= rows * REACH]
    out.append(frame(96, WIDTH - 24, 18, 322, None, upward, labels=True))
    for value, words in ticks:
        x = across.at(value)
        out.append(f'<path d="M{x:.1f} 322v4" stroke="{INK}"/>' + text(x, 340, words, "middle"))
    left, right = _inside(across, upward, edge * rows)
    middle = left**0.85 * right**0.15
    out.append(_line([(across.at(t), upward.at(edge * rows * t)) for t in (left, right)], INK, "5 4", 1.2))
    out.append(text(across.at(middle), upward.at(edge * rows * middle) - 12, "between", "middle"))
    out.append(text(112, 42, "training alone", "start") + text(WIDTH - 40, 312, "one model for all", "end"))
    out.append(vertical_text(18, 170, "spread, how far apart the clients are"))
    out.append(text(528, 362, "m/N: 1/20 is 20 training rows per client; fewer rows to the right", "middle"))
    out.append(_federation(across.at(1 / rows), upward, r2, low, high, "end" if (r2 or 0.0) > edge else "start"))
    return svg(out, 374, "Spread against m/N: where training alone, one model, or something between is best")


def _band(across: Axis, upward: Axis, c: float, factors: tuple[float, float], color: str) -> str:
    """Fill the region between two multiples of R^2 = c m/N, cut at the frame."""
    steps = [math.exp(math.log(across.low) + i / 120 * math.log(across.high / across.low)) for i in range(121)]

    def line(factor: float) -> list[Point]:
        heights = (upward.low if factor == 0 else min(max(factor * c * t, upward.low), upward.high) for t in steps)
        return [(across.at(t), upward.at(height)) for t, height in zip(steps, heights, strict=True)]

    outline = line(factors[0]) + line(factors[1])[::-1]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
    return f'<polygon points="{path}" fill="{color}" fill-opacity="0.2"/>'


def _inside(across: Axis, upward: Axis, c: float) -> list[float]:
    """Return the two m/N between which the line c m/N is inside the frame."""
    return [max(across.low, upward.low / c), min(across.high, upward.high / c)]


def _federation(x: float, upward: Axis, r2: float | None, low: float | None, high: float | None, side: str) -> str:
    """Draw the federation: its R^2 as a point, the interval as a bar, its name on the side where the edge does not run."""
    top = upward.end if high is None else upward.at(high) if high > 0 else None
    open_below = low is None or low <= 0
    bottom = upward.start if open_below else upward.at(low)  # type: ignore[arg-type]
    out = []
    if top is not None:
        out.append(f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{INK}" stroke-width="3"/>')
        if high is not None:
            out.append(f'<path d="M{x - 7:.1f} {top:.1f}h14" stroke="{INK}" stroke-width="2"/>')
    if open_below:
        tip = f"M{x - 6:.1f} {bottom - 11:.1f}L{x:.1f} {bottom:.1f}L{x + 6:.1f} {bottom - 11:.1f}"
        out.append(f'<path d="{tip}" fill="none" stroke="{INK}" stroke-width="3"/>')
    else:
        out.append(f'<path d="M{x - 7:.1f} {bottom:.1f}h14" stroke="{INK}" stroke-width="2"/>')
    y = bottom if r2 is None or r2 <= 0 else upward.at(r2)
    words = "here" if r2 is None or r2 <= 0 else f"here: spread {rounded(r2, 3)}"
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5" fill="{INK if r2 else "#fff"}" stroke="{INK}" stroke-width="2"/>'
    out.append(ring + text(x + (14 if side == "start" else -14), min(y, upward.start - 14) + 4, words, side))
    if open_below:
        out.append(text(x - 12, upward.start - 10, "not distinguishable from zero", "end"))
    tooltip = f"spread {stated(r2)}, 90 % interval {stated(low)} to {stated(high)}"
    return f"<g>{hint(tooltip)}{''.join(out)}</g>"


# -- the race -------------------------------------------------------------------------------------------------------------
def race(rows: Sequence[Mapping[str, Any]], score: str, long: str, advised: int = 0) -> str:
    """Draw a row per method: its mean validation score, with the standard error of its difference to the advised one where known.
    Hollow marks are methods that were stopped before the others."""
    known = [(row, value) for row in rows if (value := number(row.get(f"val_{score}"))) is not None]
    if not known:
        return ""
    spread = [(row, value, number(row.get("se")) or 0.0) for row, value in known]
    longest = max((number(row.get("rounds")) or 0 for row, _ in known), default=0)
    horizontal = axis([v + s for _, v, s in spread] + [v - s for _, v, s in spread], 210, WIDTH - 110)
    top, step = 12, 26
    base = top + step * len(spread)
    out = [grid(horizontal, top, base), text((210 + WIDTH - 110) / 2, base + 38, f"{long} on validation rows", "middle")]
    best = horizontal.at(spread[advised][1])
    out.append(f'<path d="M{best:.1f} {top}V{base}" stroke="{INK}" stroke-dasharray="5 4"/>')
    for place, (row, value, se) in enumerate(spread):
        y, x = top + step * (place + 0.5), horizontal.at(value)
        rounds = number(row.get("rounds")) or 0
        color = BLUE if place == advised else ORANGE
        bar = (
            f'<path d="M{horizontal.at(value - se):.1f} {y}H{horizontal.at(value + se):.1f}" stroke="{color}" stroke-width="2"/>'
        )
        label = str(row.get("method", "?"))
        tooltip = f"{label}: {long} {rounded(value)}" + (f", difference to the first ± {rounded(se)}" if se else "")
        words = text(200, y + 4, clip(label, 26), "end") + text(WIDTH - 100, y + 4, f"{rounds:g} rounds", "start")
        out.append(f"<g>{hint(tooltip)}{words}{bar if se else ''}{mark((x, y), 0, color, rounds >= longest)}</g>")
    return svg(out, base + 50, f"{long} of every method in the race")


# -- the trade-off --------------------------------------------------------------------------------------------------------
def trade_off(sweep: Mapping[str, Any], up: str) -> str:
    """Draw the score against rounds and against megabytes, a line per lam from orange (alone) to blue (one model); the front
    in rings, the dynamic schedule in black, both ends as levels."""
    entries = [(f"lam {lam_text(entry.get('lam'))}", entry) for entry in sweep.get("path") or ()]
    colors = [_between(i / max(1, len(entries) - 1)) for i in range(len(entries))]
    lines = [(name, color, "", _walk(entry)) for (name, entry), color in zip(entries, colors, strict=True)]
    if isinstance(sweep.get("dynamic"), Mapping):
        lines.append(("dynamic lam", INK, "6 3", _walk(sweep["dynamic"])))
    front = [p for entry in sweep.get("front") or () if (p := _step(entry)) is not None]
    lines = [line for line in lines if line[3]]
    levels = {
        name: number((sweep.get("ends") or {}).get(key, {}).get("val_score"))
        for key, name in (("local", "alone"), ("shared", "one model"))
    }
    heights = [
        *(s for *_, walk in lines for _, _, s in walk),
        *(p[2] for p in front),
        *(v for v in levels.values() if v is not None),
    ]
    if not heights or not lines:
        return ""
    top, base, left, between, legend = 14, 330, 82, 40, 150
    width = (WIDTH - left - legend - between) / 2
    upward = axis(heights, base, top, log=not score_named(sweep.get("score")).share)
    out = [vertical_text(18, (top + base) / 2, up)]
    for side, title in enumerate(("rounds", "megabytes, down and up")):
        start = left + side * (width + between)
        values = [0.0, *(step[side] for *_, walk in lines for step in walk), *(step[side] for step in front)]
        across = axis(values, start, start + width)
        out.append(frame(start, start + width, top, base, across, upward, labels=side == 0))
        out.append(text(start + width / 2, base + 38, title, "middle"))
        for name, level in levels.items():
            if level is not None:
                y = upward.at(level)
                higher = level == max(v for v in levels.values() if v is not None)
                words = text(start + width - 4, y - 5 if higher else y + 14, name, "end")
                line = f'<path d="M{start:.1f} {y:.1f}h{width:.1f}" stroke="{INK}" stroke-dasharray="2 3"/>'
                out.append(f"<g>{hint(f'{name}: {rounded(level)}')}{line}{words}</g>")
        for name, color, dash, walk in lines:
            out.append(f"<g>{hint(name)}{_line([(across.at(s[side]), upward.at(s[2])) for s in walk], color, dash, 2)}</g>")
        ranked = sorted(front, key=lambda step: step[side])
        for rounds, sent, score in ranked:
            x, y = across.at((rounds, sent)[side]), upward.at(score)
            tooltip = f"on the front: {rounded(score)} after {rounds:g} rounds, {rounded(sent)} MB"
            out.append(
                f'<g>{hint(tooltip)}<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="none" stroke="{INK}" stroke-width="1.8"/></g>'
            )
    for i, (name, color, dash, _) in enumerate(lines):
        x, y = WIDTH - legend + 16, top + 10 + 22 * i
        out.append(_line([(x, y), (x + 28, y)], color, dash, 2.5) + text(x + 36, y + 4, clip(name, 14), "start"))
    if front:
        x, y = WIDTH - legend + 30, top + 10 + 22 * len(lines)
        out.append(
            f'<circle cx="{x}" cy="{y}" r="5.5" fill="none" stroke="{INK}" stroke-width="1.8"/>'
            + text(x + 22, y + 4, "Pareto front", "start")
        )
    return svg(out, max(base + 50, top + 22 * (len(lines) + 2)), f"{up} by rounds and by traffic, for every lam")


def _walk(entry: Mapping[str, Any]) -> list[tuple[float, float, float]]:
    return [step for at in entry.get("curve") or () if (step := _step(at)) is not None]


def _step(at: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Return (rounds, megabytes, score), where all three are known."""
    rounds, sent, score = (number(at.get(key)) for key in ("round", "bytes", "val_score"))
    return None if rounds is None or sent is None or score is None else (rounds, sent / 1e6, score)


def _between(share: float) -> str:
    """Return a color from orange by green to blue, all of the same darkness."""
    stops = ((0xD9, 0x5F, 0x02), (0x2B, 0x9A, 0x66), (0x2F, 0x7F, 0xD0))
    i, rest = (0, share * 2) if share < 0.5 else (1, share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * rest):02x}" for a, b in zip(stops[i], stops[i + 1], strict=True))


# -- small things ---------------------------------------------------------------------------------------------------------
def _legend(items: Sequence[tuple[str, str, str, int | None]], left: float) -> str:
    out, x = [], left
    for name, color, dash, shape in items:
        out.append(_line([(x, 14), (x + 34, 14)], color, dash, 2.5) + ("" if shape is None else mark((x + 17, 14), shape, color)))
        out.append(text(x + 42, 18, name, "start"))
        x += 42 + 7 * len(name) + 26
    return "".join(out)


def _line(points: Sequence[Point], color: str, dash: str, width: float) -> str:
    if len(points) < 2:
        return "".join(mark(point, 0, color) for point in points)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"/>'


def _log(values: Sequence[float], start: float, end: float) -> Axis:
    """Return a logarithmic axis of at least a decade."""
    low, high = min(values), max(values)
    room = max(1.3, math.sqrt(10 * low / high) if high < 10 * low else 1.3)
    return Axis(low / room, high * room, start, end, log=True)


def _pairs(lams: Sequence[Any] | None, values: Sequence[Any] | None) -> Pairs:
    both = zip(lams or (), values or (), strict=False)
    return [(float(lam), value) for lam, raw in both if (value := number(raw)) is not None]


def _with_ends(lams: Sequence[float], measured: Mapping[str, Any], ends: Mapping[str, Any], key: str) -> Pairs:
    inner = _pairs(lams, measured.get(key))
    if not inner:
        return []
    outer = [(at, number(ends[end].get(key))) for at, end in ((0.0, "local"), (math.inf, "shared"))]
    known = [(at, value) for at, value in outer if value is not None]
    return sorted([*inner, *known])
