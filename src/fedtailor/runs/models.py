"""The models a finished run leaves: enough to predict with, without the training data and without the code that trained them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import models as networks
from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import make, settings, slug
from fedtailor.data.schema import Schema
from fedtailor.data.tokens import as_tokens
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import BadRun, InvalidArgument, ModelMismatch
from fedtailor.runs import files
from fedtailor.runs.checkpoint import digest
from fedtailor.runs.folder import readable
from fedtailor.runs.history import Run
from fedtailor.runs.layout import MODELS, check_version, read_json
from fedtailor.task import Task
from fedtailor.task.losses import BY_KIND

LARGEST = 4 << 30  # bytes of personal models that are written out; beyond, they are in the checkpoint only


@dataclass(frozen=True, eq=False)
class Saved:
    """A finished run's models, read from its directory."""

    facts: dict[str, Any]
    algorithm: Algorithm
    task: Task
    shared: Any
    personal: dict[str, Any]  # by client
    schema: Schema | None

    @property
    def tokens(self) -> int:
        """The size of the vocabulary, where the model reads tokens."""
        return int(self.facts.get("tokens", 0))

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What the tokens stand for, where it is known."""
        kept = self.facts.get("vocabulary")
        return None if kept is None else Vocabulary.from_json(kept)

    @property
    def clients(self) -> list[str]:
        return list(self.facts["clients"])

    def of(self, client: str | None) -> Any:
        """The tree a client predicts with; None is a newcomer, who has the shared model only."""
        if client is None:
            if not tree.leaves(self.shared):
                raise ModelMismatch(f"{self.facts['algorithm']} has no shared model; name a client")
            return self.personal.get("", {})
        if client not in self.facts["clients"]:
            more = ", ..." if len(self.clients) > 8 else ""
            raise InvalidArgument(f"no client {client!r}; the clients are {', '.join(self.clients[:8])}{more}")
        return self.personal[client]

    def predict(self, client: str | None, x: Any) -> Tensor:
        """Logits (regression: the numbers) for rows of features, or of tokens."""
        shape = tuple(self.facts["shape"])
        if self.tokens:
            rows = as_tokens(x, self.tokens, shape[0])
        else:
            rows = torch.tensor(np.asarray(x)).to(getattr(torch, self.facts["dtype"]))
            if tuple(rows.shape[1:]) != shape:
                raise ModelMismatch(f"rows have shape {tuple(rows.shape[1:])} but the model was trained on {shape}")
        with torch.no_grad():
            return self.algorithm.predict(self.task, self.shared, self.of(client), rows)

    def weights(self, client: str | None) -> dict[str, Tensor]:
        """A client's model (or the shared one) with torch's names; refused where no single model predicts."""
        state = self.of(client)
        parts = {**self.shared.get("model", {}), **state.get("model", {})}
        found = {name: parts[name] for name in self.task.names if name in parts}
        whole = tuple(found) == self.task.names
        if whole:
            rows = torch.randint(2, (4, *self.facts["shape"]), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                like = rows if self.tokens else rows.to(next(iter(found.values())))
                whole = torch.allclose(self.task.apply(found, like), self.predict(client, rows))
        if not whole:
            raise ModelMismatch(f"{self.facts['algorithm']} does not predict with a single model; use predict")
        whole_model = {**self.task.held, **found}
        return {name.removeprefix(tree.BUFFER): value.contiguous() for name, value in whole_model.items()}


def save(run: Run, model: Any, bias: bool, seed: int, dtype: str, folder: Path) -> None:
    """Write ``models/``: the shared state, everyone's own, and how to put them to use."""
    names = run.federation.names
    own = {name: run.personal[i] for i, name in enumerate(names)}
    heavy = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(own)) > LARGEST
    personal = {str(i): own[name] for i, name in enumerate(names)} if not heavy else {}
    personal["new"] = run.engine.newborn(run.shared) if tree.leaves(run.shared) else {}
    packed = {"shared.safetensors": tree.pack(run.shared), "personal.safetensors": tree.pack(personal)}
    if run.task.held:  # once for everyone
        packed["frozen.safetensors"] = tree.pack(run.task.held)
    for name, data in packed.items():
        files.write(folder / MODELS / name, data)
    schema = run.federation.schema
    facts = {
        "algorithm": type(run.algorithm).__name__,
        "method": slug(run.algorithm),
        "set": settings(run.algorithm),
        "model": model if isinstance(model, str) else None,
        "bias": bias,
        "seed": seed,
        "dtype": dtype,
        "shape": list(run.federation.train.x.shape[1:]),
        "outputs": run.federation.outputs,
        "kind": run.federation.kind,
        "labels": run.federation.labels,
        "classes": list(run.federation.classes),
        "tokens": run.federation.tokens,
        "per_position": run.federation.per_position,
        "vocabulary": None if run.federation.vocabulary is None else run.federation.vocabulary.to_json(),
        "flat": run.federation.train.y.dim() == 1,
        "clients": list(names),
        "schema": None if schema is None else schema.to_json(),
        "sha256": {name: digest(data) for name, data in packed.items()},
    }
    files.write_json(folder / MODELS / "models.json", facts)


def read(folder: Path) -> Saved:
    """The models of a finished run."""
    with readable(folder):
        return _read(folder)


def _read(folder: Path) -> Saved:
    check_version(folder)
    facts = read_json(folder / MODELS / "models.json")
    if facts is None:
        raise BadRun(f"the run in {folder} is not finished; go on with it: fedtailor resume {folder}")
    if facts["model"] is None:
        raise BadRun(f"the run in {folder} trained a module of your own; load it in Python, with ft.run(..., resume=True)")
    trees = {name: _tree(folder / MODELS / name, sha256) for name, sha256 in facts["sha256"].items()}
    words = {"tokens": facts.get("tokens", 0), "per_position": facts.get("per_position", False)}
    options = {"seed": facts["seed"], "bias": facts["bias"], **words}
    network = networks.build(facts["model"], tuple(facts["shape"]), facts["outputs"], **options)
    if "frozen.safetensors" in trees:
        held = {name.removeprefix(tree.BUFFER): value for name, value in trees["frozen.safetensors"].items()}
        network.load_state_dict(held, strict=False)
    task = Task.from_module(network.to(getattr(torch, facts["dtype"])), BY_KIND[facts["kind"]].name, classes=facts["labels"])
    everyone = trees["personal.safetensors"]
    personal = {name: everyone[str(i)] for i, name in enumerate(facts["clients"]) if str(i) in everyone}
    if not personal:
        raise BadRun(f"the personal models of {folder} are too large to be kept apart; load them with ft.run(..., resume=True)")
    return Saved(
        facts=facts,
        algorithm=make(facts["method"], facts["set"]),
        task=task,
        shared=trees["shared.safetensors"],
        personal={**personal, "": everyone["new"]},
        schema=None if facts["schema"] is None else Schema.from_json(facts["schema"]),
    )


def _tree(path: Path, sha256: str) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadRun(f"{path} cannot be read ({error.strerror}); the run is damaged") from error
    if digest(data) != sha256:
        raise BadRun(f"{path} was changed or cut short (its checksum does not fit); the run is damaged")
    return tree.unpack(data)
