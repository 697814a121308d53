"""Results of a benchmark's parts, kept beside each other in runs/bench/, so that a page can be measured piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path("runs/bench")


def keep(page: str, part: str, result: Any) -> dict[str, Any]:
    """Add what a part of a page came to (in the place of what it came to before) and return all of its parts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{page}.json"
    parts = {**kept(page), part: result}
    path.write_text(json.dumps(parts, indent=1))
    return parts


def kept(page: str) -> dict[str, Any]:
    """Return the parts of a page that have been measured."""
    path = FOLDER / f"{page}.json"
    return json.loads(path.read_text()) if path.exists() else {}
