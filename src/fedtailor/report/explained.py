"""What models rest on, as a page: a picture per client."""

from __future__ import annotations

from html import escape
from typing import Any

from fedtailor.report.draw import axis, clip, grid, hint, mark, svg, text
from fedtailor.report.pieces import document, figure, section, table

LEFT, RIGHT, ROW, TOP = 190.0, 760.0, 22.0, 14.0
OWN, SHARED = "#1f77b4", "#888888"
MOST = 15  # columns in a picture


def page(explained: dict[str, Any], lines: list[str]) -> str:
    """Return the page of ``engine.explain.explain``."""
    title = "What the models rest on"
    return document(title, section(title, f"<p>{text_of([about(explained), *lines])}</p>") + "".join(clients_of(explained)))


def part(explained: dict[str, Any] | None, lines: list[str]) -> list[str]:
    """Return the same as parts of another page; nothing of nothing."""
    if not explained:
        return []
    return [section("What the models rest on", f"<p>{text_of([about(explained), *lines])}</p>"), *clients_of(explained)]


def about(explained: dict[str, Any]) -> str:
    return (
        "By how much the loss on test rows grows when a column is dealt out anew among a client's rows: blue dots by the "
        f"client's own model ({explained['method']}), grey ones by the shared model."
    )


def clients_of(explained: dict[str, Any]) -> list[str]:
    """Return a section per client: the picture, and of linear models the coefficients."""
    return [
        section(
            entry["client"],
            figure(picture(entry), f"{entry['rows']} test rows; lines are 95 % intervals."),
            coefficient_table(entry),
        )
        for entry in explained["clients"]
    ]


def coefficient_table(entry: dict[str, Any]) -> str:
    """Return the coefficients of a client's linear model beside the shared one's, with 95 % intervals; nothing for other models,
    and for more than two classes, which have one for each."""
    rows = []
    for column in entry["columns"]:
        for name, value in (column.get("coefficients") or {}).items():
            if not isinstance(value, float):
                return ""
            shared = (column["shared_coefficients"] or {}).get(name)
            within, around = ((column[key] or {}).get(name) for key in ("coefficient_intervals", "shared_coefficient_intervals"))
            cells = (name, _number(value, within), _number(shared, around))
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    if not rows:
        return ""
    note = "Coefficients of features as scaled, with the 95 % interval that the training rows leave to a model fitted to them; "
    note += "a pull to the shared model, or few rounds, is not in it."
    return table(["feature", "own (95 % interval)", "shared (95 % interval)"], rows) + f"<p>{note}</p>"


def _number(value: float | None, within: list[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + ("" if within is None else f" ({within[0]:.3f} to {within[1]:.3f})")


def text_of(lines: list[str]) -> str:
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
