"""Models of clients that came after a run was finished: ``onboarded/`` in its directory, a file of weights and one of facts each.

They are no part of the run's manifest, which stays as it was signed. Each is tied to the shared model that it was made with, and
carries its own digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor import tree
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.contents import Contents, digest, parsed
from fedtailor.runs.layout import ONBOARDED

SHARED = "shared.safetensors"


@dataclass(frozen=True, eq=False)
class Newcomer:
    """The tree a newcomer predicts with, its (mean, scale) of every column or none, and how it was made and judged."""

    personal: Any
    moments: tuple[tuple[float, float], ...]
    record: Mapping[str, Any]


def write(folder: Path, client: str, newcomer: Newcomer, sha256: Mapping[str, str]) -> Path:
    """Write a newcomer's model beside those of a finished run, whose files of weights have the digests ``sha256``."""
    stem = folder / ONBOARDED / digest(client.encode())[:16]
    data = tree.pack(newcomer.personal)
    facts = {
        "client": client,
        "sha256": digest(data),
        "shared": sha256[SHARED],
        "moments": [list(pair) for pair in newcomer.moments],
        "record": dict(newcomer.record),
    }
    files.write(stem.with_suffix(".safetensors"), data)
    files.write_json(stem.with_suffix(".json"), {**facts, "seal": _seal(facts)})
    return stem.with_suffix(".safetensors")


def read(contents: Contents, sha256: Mapping[str, str]) -> dict[str, Newcomer]:
    """Return the newcomers of a run by name; one that was changed, or made with another shared model, is refused."""
    folder = contents.folder / ONBOARDED
    out: dict[str, Newcomer] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        facts = parsed(files.read(path), path)
        if facts.pop("seal", None) != _seal(facts):
            raise BadRun(f"{path} was changed; restore it from a copy, or onboard the client again")
        if facts["shared"] != sha256[SHARED]:
            raise BadRun(f"{path} was made with another shared model than that of {contents.folder}; onboard the client again")
        data = files.read(path.with_suffix(".safetensors"))
        if digest(data) != facts["sha256"]:
            raise BadRun(f"{path.with_suffix('.safetensors')} was changed or cut short; onboard the client again")
        moments = tuple((float(mean), float(scale)) for mean, scale in facts["moments"])
        out[facts["client"]] = Newcomer(tree.unpack(data), moments, facts["record"])
    return out


def _seal(facts: Mapping[str, Any]) -> str:
    return digest(json.dumps(facts, sort_keys=True).encode())
