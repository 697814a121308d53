"""Questions: what a private site was asked to release, so that no server gets more noisy answers than was agreed on.

The same question has the same answer, noise included, and costs once. Every other question has noise of its own and is charged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor import tree
from fedtailor.errors import BadRun, InvalidData
from fedtailor.runs import files
from fedtailor.runs.checkpoint import digest
from fedtailor.sites.wire import Parcel

NAME = "questions.json"


@dataclass(frozen=True)
class Questions:
    """The questions that a site has answered, by run, kept below ``folder``; ``most`` may be asked in a run."""

    folder: Path
    most: int

    def admit(self, run: str, asked: Parcel, personal: Any) -> str:
        """Return the word that stands for a question, written down before it is answered; refuse one too many."""
        word = digest(b"\0".join((tree.pack(asked.tree), _round(asked.facts), b"" if personal is None else tree.pack(personal))))
        known = self._read(run)
        if word not in known:
            if len(known) >= self.most:
                raise InvalidData(
                    f"the server asks for more than the {self.most} answers of a run that the epsilon agreed on covers; "
                    "begin another run, whose epsilon comes on top, or agree on more rounds"
                )
            files.write_json(self.folder / run / NAME, [*known, word])
        return word

    def counts(self) -> dict[str, int]:
        """Return how many questions were answered in each run."""
        runs = self.folder.iterdir() if self.folder.is_dir() else ()
        return {path.name: len(self._read(path.name)) for path in runs if (path / NAME).exists()}

    def _read(self, run: str) -> list[str]:
        path = self.folder / run / NAME
        try:
            known = json.loads(files.read(path))
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError):
            known = None
        if not isinstance(known, list) or not all(isinstance(word, str) for word in known):
            raise BadRun(f"{path} cannot be read; restore it: without it nobody knows what this site has released")
        return known


def _round(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts["round"], sort_keys=True).encode()
