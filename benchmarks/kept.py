"""What a long benchmark has done so far, so that it may be stopped and called again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Results:
    """results.json of a folder: what is done, by part, name and key."""

    def __init__(self, folder: Path, minutes: float = float("inf")) -> None:
        self.path, self.until = folder / "results.json", time.monotonic() + 60 * minutes
        folder.mkdir(parents=True, exist_ok=True)
        self.all: dict[str, dict[str, dict[str, Any]]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def of(self, part: str) -> dict[str, dict[str, Any]]:
        return self.all.get(part, {})

    def do(self, part: str, name: str, key: str, make: Callable[[], Any]) -> bool:
        """Make what is missing and keep it; False once the time is over."""
        if key in self.of(part).get(name, {}):
            return True
        if time.monotonic() > self.until:
            return False
        began = time.perf_counter()
        self.all.setdefault(part, {}).setdefault(name, {})[key] = make()
        self.path.write_text(json.dumps(self.all, indent=1))
        print(f"{part}: {name}, {key} ({time.perf_counter() - began:.0f} s)", flush=True)
        return True

    def sort(self, order: Iterable[tuple[str, str]]) -> None:
        """Names of parts in the order given, whatever was done first; those that are not in it go."""
        found, self.all = self.all, {}
        for part, name in order:
            if name in found.get(part, {}):
                self.all.setdefault(part, {})[name] = found[part][name]
