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
SIZE = {"width": 320, "height": 220}


def points(figure: Figure, by_seed: BySeed) -> list[dict[str, Any]]:
    """Return a point per x, series and panel: the mean over seeds, the least and the most."""
    together: dict[tuple[Any, ...], list[float]] = {}
    keys = [figure.x, figure.series, *([figure.panel] if figure.panel else [])]
    for rows in by_seed.values():
        for row in rows:
            together.setdefault(tuple(row[key] for key in keys), []).append(float(row[figure.y]))
    return [
        {**dict(zip(keys, key, strict=True)), "mean": float(np.mean(values)), "least": min(values), "most": max(values)}
        for key, values in together.items()
        if np.isfinite(values).all() and not (figure.log_y and min(values) <= 0)
    ]


def chart(experiment: Experiment, by_seed: BySeed) -> Any:
    """Return the figure as an altair chart."""
    try:
        import altair as alt
    except ImportError as error:
        raise InvalidArgument(MISSING) from error
    figure = experiment.figure
    x = alt.X(f"{figure.x}:Q", title=figure.x_title, scale=alt.Scale(type="log" if figure.log_x else "linear"))
    y = alt.Y("mean:Q", title=figure.y_title, scale=alt.Scale(type="log" if figure.log_y else "linear", zero=False))
    order = list(dict.fromkeys(point[figure.series] for point in points(figure, by_seed)))
    color = alt.Color(f"{figure.series}:N", title=figure.series, sort=order)
    base = alt.Chart().encode(x=x, color=color)
    lines = base.mark_line(point=True).encode(y=y, shape=alt.Shape(f"{figure.series}:N", sort=order))
    spread = base.mark_rule(opacity=0.5).encode(y=alt.Y("least:Q"), y2=alt.Y2("most:Q"))
    both = alt.layer(lines, spread, data=alt.Data(values=points(figure, by_seed))).properties(**SIZE)
    whole = both.facet(column=alt.Column(f"{figure.panel}:N", title=None)) if figure.panel else both
    return whole.properties(title=f"{experiment.title} ({experiment.source})")


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
