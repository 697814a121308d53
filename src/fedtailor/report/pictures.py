"""The pictures of a report as files of their own: SVG, and PDF by vl-convert (extra ``papers``)."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from fedtailor.errors import InvalidArgument
from fedtailor.runs import files

MISSING = 'figures as PDF need the package vl-convert: pip install "fedtailor[papers]"'
SECTION = re.compile(r"<section>(?:<h2>(.*?)</h2>)?(.*?)</section>", re.DOTALL)
PICTURE = re.compile(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"(.*?)</svg>', re.DOTALL)
LOOK = "<style>text{font:13px sans-serif;fill:#222}</style>"  # what the page's own style sheet says of them


def pictures(page: str) -> dict[str, str]:
    """Return every picture of a page by a name made from its section, as an SVG document that stands alone."""
    out = {}
    for title, inside in SECTION.findall(page):
        name = re.sub(r"[^a-z0-9]+", "-", unescape(title).lower()).strip("-") or "figure"
        for number, (width, height, rest) in enumerate(PICTURE.findall(inside), 1):
            opening, _, drawn = rest.partition(">")
            size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}{opening}>'
            out[name if number == 1 else f"{name}-{number}"] = f"{head}{LOOK}{drawn}</svg>\n"
    return out


def write(page: str, folder: Path) -> list[Path]:
    """Write every picture of a page to a folder, as NAME.svg and NAME.pdf, and return where they are."""
    try:
        import vl_convert
    except ImportError as error:
        raise InvalidArgument(MISSING) from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in pictures(page).items():
        for ending, content in (("svg", svg), ("pdf", vl_convert.svg_to_pdf(svg))):
            files.write(folder / f"{name}.{ending}", content)
            written.append(folder / f"{name}.{ending}")
    return written
