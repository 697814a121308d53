"""Two small pictures, drawn as SVG: no script, no network, readable in print. Colours are Okabe and Ito's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 70, 150, 14, 44


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    return [low + (high - low) * i / (count - 1) for i in range(count)]


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Curves of (x, y) points with a legend; told apart by colour and by dashes."""
    points = [p for curve in curves.values() for p in curve]
    if not points:
        return ""
    (x0, x1), (y0, y1) = _range([p[0] for p in points]), _range([p[1] for p in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        )

    out = [_axes(across, up)]
    out += [_text(LEFT - 6, place(x0, y)[1] + 4, f"{y:.3g}", "end") for y in _ticks(y0, y1)]
    out += [_text(place(x, y0)[0], HEIGHT - BOTTOM + 16, f"{x:.0f}", "middle") for x in _ticks(x0, x1)]
    for i, (label, curve) in enumerate(curves.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // 2 % len(DASHES)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in curve))
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        out.append(f'<polyline points="{path}" {style}/>')
        level = TOP + 10 + 18 * i
        start = WIDTH - RIGHT + 8
        out.append(f'<line x1="{start}" x2="{start + 26}" y1="{level}" y2="{level}" {style}/>')
        out.append(_text(start + 32, level + 4, label, "start"))
    return _svg(out, f"{up} by {across}")


def gains(values: Sequence[float], across: str, up: str) -> str:
    """One bar per client, sorted: up where it gains, down (and hatched darker) where it loses."""
    ranked = sorted(values, reverse=True)
    span = max(map(abs, ranked)) or 1.0
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    slot = (WIDTH - LEFT - 20) / len(ranked)
    out = [_axes(across, up), f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{middle}" y2="{middle}" stroke="#333"/>']
    half = (HEIGHT - TOP - BOTTOM) / 2
    out += [_text(LEFT - 6, middle - y / span * half + 4, f"{y:+.2f}", "end") for y in (span, 0.0, -span)]
    for i, value in enumerate(ranked):
        size = abs(value) / span * half
        top = middle - size if value > 0 else middle
        colour = COLOURS[0] if value > 0 else COLOURS[1]
        out.append(
            f'<rect x="{LEFT + i * slot:.1f}" y="{top:.1f}" width="{slot * 0.8:.1f}" height="{size:.1f}" fill="{colour}"/>'
        )
    return _svg(out, f"{up} by {across}")


def _axes(across: str, up: str) -> str:
    base = HEIGHT - BOTTOM
    frame = f'<path d="M{LEFT} {TOP} V{base} H{WIDTH - 20}" fill="none" stroke="#333"/>'
    turned = f'<text x="16" y="{base / 2}" transform="rotate(-90 16 {base / 2})" text-anchor="middle">{escape(up)}</text>'
    return frame + turned + _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, across, "middle")


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Sequence[str], title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"
