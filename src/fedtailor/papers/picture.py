"""A figure of measured rows as SVG and PDF, by altair (extra ``papers``): means over seeds, bars from the least to the most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.errors import InvalidArgument
from fedtailor.papers.base import Experiment, Figure
from fedtailor.papers.results import BySeed, as_csv
from fedtailor.runs import files

MISSING = 'figures need the packages altair and vl-convert: pip install "fedtailor[papers]"'
SIZE, SMALL = {"width": 320, "height": 220}, {"width": 130, "height": 90}
FEW = 60  # points, up to which a thumbnail shows each of them


def points(figure: Figure, by_seed: BySeed) -> list[dict[str, Any]]:
    """Return a point per x, series and panel that all seeds have: their mean, least and most, and the bound's mean."""
    together: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    keys = [figure.x, figure.series, *([figure.panel] if figure.panel else [])]
    for rows in by_seed.values():
        for row in (row for row in rows if row[figure.y] is not None):
            pair = float(row[figure.y]), float(row[figure.bound]) if figure.bound else 0.0
            together.setdefault(tuple(row[key] for key in keys), []).append(pair)
    out = []
    for key, pairs in together.items():
        values, bounds = (np.array(column) for column in zip(*pairs, strict=True))
        if len(pairs) < len(by_seed) or not np.isfinite(values).all() or (figure.log_y and values.min() <= 0):
            continue
        point = {"mean": float(values.mean()), "least": float(values.min()), "most": float(values.max())}
        beside = {"bound": float(bounds.mean())} if figure.bound else {}
        out.append({**dict(zip(keys, key, strict=True)), **point, **beside})
    return out


def chart(experiment: Experiment, by_seed: BySeed, small: bool = False) -> Any:
    """Return the figure as an altair chart; a small one has neither bars nor a title."""
    try:
        import altair as alt
    except ImportError as error:
        raise InvalidArgument(MISSING) from error
    figure = experiment.figure
    values = points(figure, by_seed)
    x = alt.X(f"{figure.x}:Q", title=figure.x_title, scale=alt.Scale(type="log" if figure.log_x else "linear"))
    y = alt.Y("mean:Q", title=figure.y_title, scale=alt.Scale(type="log" if figure.log_y else "linear", zero=False))
    order = list(dict.fromkeys(point[figure.series] for point in values))
    base = alt.Chart().encode(x=x, color=alt.Color(f"{figure.series}:N", title=figure.series, sort=order))
    marked = not small or len(values) <= FEW
    lines = base.mark_line(point=marked).encode(y=y)
    layers = [lines.encode(shape=alt.Shape(f"{figure.series}:N", title=figure.series, sort=order)) if marked else lines]
    if not small:
        layers.append(base.mark_rule(opacity=0.5).encode(y=alt.Y("least:Q"), y2=alt.Y2("most:Q")))
    if figure.bound:
        layers.append(base.mark_line(strokeDash=[4, 4]).encode(y=alt.Y("bound:Q")))
    both = alt.layer(*layers, data=alt.Data(values=values)).properties(**(SMALL if small else SIZE))
    whole = both.facet(facet=alt.Facet(f"{figure.panel}:N", title=None), columns=2 if small else 4) if figure.panel else both
    return whole if small else whole.properties(title=f"{experiment.title} ({experiment.source})")


def thumbnail(experiment: Experiment, by_seed: BySeed) -> str:
    """Return the figure as a small SVG."""
    try:
        import vl_convert
    except ImportError as error:
        raise InvalidArgument(MISSING) from error
    return str(vl_convert.vegalite_to_svg(chart(experiment, by_seed, small=True).to_json()))


def write(experiment: Experiment, by_seed: BySeed, folder: Path) -> list[Path]:
    """Write figure.svg, figure.pdf and figure.csv to a folder and return where they are."""
    try:
        import vl_convert
    except ImportError as error:
        raise InvalidArgument(MISSING) from error
    spec = chart(experiment, by_seed).to_json()
    contents: dict[str, bytes | str] = {
        "figure.svg": vl_convert.vegalite_to_svg(spec),
        "figure.pdf": vl_convert.vegalite_to_pdf(spec),
        "figure.csv": as_csv(by_seed),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        files.write(folder / name, content)
    return [folder / name for name in contents]
