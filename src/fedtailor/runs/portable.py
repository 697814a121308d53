"""A model for other programs: its weights in safetensors, with all that is needed to read a row in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from fedtailor.data.schema import Column, Schema
from fedtailor.runs.models import Saved
from fedtailor.runs.weights import pack

FACTS = ("algorithm", "model", "kind", "dtype")


def safetensors_of(saved: Saved, client: str | None) -> bytes:
    """Return the file of a client's model, or of the shared one: torch's names, and ``metadata_of`` it."""
    return pack(saved.weights(client), metadata_of(saved, client))


def metadata_of(saved: Saved, client: str | None) -> dict[str, str]:
    """Return what the file says about the model: words, and JSON for what is a list, a number or more."""
    schema, facts = saved.schema, saved.facts
    out = {name: str(facts[name]) for name in FACTS} | {"client": "" if client is None else client}
    lists: dict[str, Any] = {"shape": facts["shape"], "outputs": facts["outputs"], "classes": facts["classes"]}
    if facts.get("threshold") is not None:  # the second class is said from this probability on
        lists["threshold"] = facts["threshold"]
    if schema is not None:
        lists |= {
            "features": schema.names(),
            "columns": [asdict(column) for column in columns_as_scaled(schema, client)],
            "missing": list(schema.marks),
            "label": {"name": schema.label, "mean": schema.label_mean, "scale": schema.label_scale},
        }
    return out | {name: json.dumps(value, ensure_ascii=False) for name, value in lists.items()}


def columns_as_scaled(schema: Schema, client: str | None) -> Sequence[Column]:
    """Return the columns with the mean and the scale that this client's rows are brought to."""
    own = schema.clients.get(client, ()) if client is not None else ()
    if not own:
        return schema.columns
    return [replace(column, mean=mean, scale=scale) for column, (mean, scale) in zip(schema.columns, own, strict=True)]
