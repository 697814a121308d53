"""What models rest on, as a page: a picture per client."""

from __future__ import annotations

from typing import Any

from fedtailor.report.draw import axis, clip, grid, hint, mark, svg, text
from fedtailor.report.pieces import document, figure, section

LEFT, RIGHT, ROW, TOP = 190.0, 760.0, 22.0, 14.0
OWN, SHARED = "#1f77b4", "#888888"
MOST = 15  # columns in a picture


def page(explained: dict[str, Any], lines: list[str]) -> str:
    """Return the page of ``engine.explain.explain``."""
    clients = [
        section(entry["client"], figure(picture(entry), f"{entry['rows']} test rows; lines are 95 % intervals."))
        for entry in explained["clients"]
    ]
    about = (
        "By how much the loss on test rows grows when a column is dealt out anew among a client's rows: blue dots by the "
        f"client's own model ({explained['method']}), grey ones by the shared model."
    )
    return document(
        "What the models rest on", section("What the models rest on", f"<p>{text_of([about, *lines])}</p>") + "".join(clients)
    )


def text_of(lines: list[str]) -> str:
    from html import escape

    return "<br>".join(escape(line) for line in lines)


def picture(entry: dict[str, Any]) -> str:
    """Draw the importance of a client's columns, with its interval, and that in the shared model."""
    columns = entry["columns"][:MOST]
    ends = [v for c in columns for v in (c["importance"], c["low"], c["high"], shared_of(c)) if v is not None]
    across, base = axis([0.0, *ends], LEFT, RIGHT), TOP + ROW * len(columns)
    parts = [grid(across, TOP, base)]
    for i, column in enumerate(columns):
        y = TOP + ROW * (i + 0.5)
        parts.append(text(LEFT - 10, y + 4, clip(column["column"], 26), "end", column["column"]))
        if column["low"] is not None:
            parts.append(f'<path d="M{across.at(column["low"]):.1f} {y}H{across.at(column["high"]):.1f}" stroke="{OWN}"/>')
        shared = shared_of(column)
        if shared is not None:
            parts.append(mark((across.at(shared), y), 0, SHARED))
        parts.append(f"<g>{hint(column['column'])}{mark((across.at(column['importance']), y), 0, OWN)}</g>")
    return svg(parts, base + 30, f"What {entry['client']}'s model rests on")


def shared_of(column: dict[str, Any]) -> float | None:
    return column["importance"] - column["difference"] if "difference" in column else None
