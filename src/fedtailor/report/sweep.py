"""A sweep over lam as one self-contained page: the verdict, the trade-off, the fewest rounds for every target."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from fedtailor.report.advice import STYLE, trade_off
from fedtailor.report.pieces import document, listed, section
from fedtailor.runs import files
from fedtailor.version import __version__


def page(sweep: Mapping[str, Any], command: str | None = None) -> str:
    """Return the page of a sweep as ``Sweep.json`` gives it; ``command`` is what made it."""
    verdict = sweep.get("verdict") or {}
    source = f"<pre>{escape(command)}</pre>" if command else "<p>Made from Python.</p>"
    sections = [
        section("", f"<h1>What does a stronger pull buy?</h1><p><strong>{escape(str(verdict.get('sentence', '')))}</strong></p>"),
        section("The trade-off with communication", *trade_off(sweep)),
        section("What to know", listed(str(note) for note in sweep.get("notes") or ())),
        section("How to reproduce it", source + listed([f"fedtailor {__version__}", "Test rows were not looked at."])),
    ]
    return document("fedtailor: sweep over lam", "".join(sections), STYLE)


def write(sweep: Mapping[str, Any], path: Path, command: str | None = None) -> Path:
    """Write the page; the file is replaced whole or not at all."""
    files.write(path, page(sweep, command))
    return path
