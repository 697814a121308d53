"""The models a finished run leaves: enough to predict with, without the training data and without the code that trained them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor import models as networks
from fedtailor import tree
from fedtailor.algorithms import origin
from fedtailor.algorithms.base import RECEIVED, Algorithm, opened
from fedtailor.algorithms.settings import build, recall, settings, spec
from fedtailor.data.federation import Federation
from fedtailor.data.schema import Schema
from fedtailor.data.tokens import as_tokens
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import BadRun, DamagedRun, InvalidArgument, ModelMismatch
from fedtailor.models.factory import made_by
from fedtailor.models.mixed import Mixed
from fedtailor.models.several import is_several, several
from fedtailor.runs import files, onboarded, shards
from fedtailor.runs.contents import Contents, digest, note_missing_digests, open_contents, readable
from fedtailor.runs.history import Run
from fedtailor.runs.layout import MANY, MODELS
from fedtailor.runs.nearest import middles, nearest
from fedtailor.runs.personal import STACKS, PersonalTrees, stacked
from fedtailor.task import Task
from fedtailor.task.kinds import kind_of
from fedtailor.task.own import with_dtype
from fedtailor.task.packing import Packing

SMALL = 1 << 20  # parameters that a network may always have
LARGEST = 4 << 30  # bytes of personal models that are written out; beyond, they are in the checkpoint only


@dataclass(frozen=True, eq=False)
class Saved:
    """A finished run's models, read from its directory."""

    facts: dict[str, Any]
    algorithm: Algorithm
    task: Task
    shared: Any
    personal: Mapping[str, Any]  # by client
    newcomer: Any  # what a client that was not there predicts with, beside ``shared``
    schema: Schema | None
    config: Mapping[str, Any]  # what the run was asked to do
    onboarded: tuple[str, ...] = ()  # the clients that came later

    @property
    def tokens(self) -> int:
        """Return the size of the vocabulary, where the model reads tokens."""
        return int(self.facts.get("tokens", 0))

    @property
    def packing(self) -> Packing | None:
        """Return how rows of several parts are put together."""
        parts = self.facts.get("packing")
        return None if parts is None else Packing.from_json(parts)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return what the tokens stand for, where it is known."""
        vocabulary = self.facts.get("vocabulary")
        return None if vocabulary is None else Vocabulary.from_json(vocabulary)

    @cached_property
    def clients(self) -> list[str]:
        return [*self.facts["clients"], *self.onboarded]

    @property
    def has_shared(self) -> bool:
        """Return whether there is a model for clients that were not there."""
        differ = self.packing is not None and self.packing.mixed
        return not differ and (bool(tree.leaves(self.shared)) or RECEIVED in self.newcomer)

    def of(self, client: str | None) -> Any:
        """Return the tree a client predicts with; None is a newcomer, who has the shared model only."""
        if client is None:
            if not self.has_shared:
                raise ModelMismatch(f"{self.facts['algorithm']} has no shared model; name a client")
            return self.newcomer
        if client not in self.personal:
            more = ", ..." if len(self.clients) > 8 else ""
            raise InvalidArgument(f"no client {client!r}; the clients are {', '.join(self.clients[:8])}{more}")
        return self.personal[client]

    def predict(self, client: str | None, x: Any) -> Tensor:
        """Return logits (regression: the numbers) for rows of features, or of tokens."""
        shape = tuple(self.facts["shape"])
        if self.tokens:
            rows = as_tokens(x, self.tokens, shape[0])
        elif self.packing is not None:
            rows = self.packing.pack(self._of_client(client, x)).to(getattr(torch, self.facts["dtype"]))
        else:
            rows = torch.tensor(np.asarray(x)).to(getattr(torch, self.facts["dtype"]))
            if tuple(rows.shape[1:]) != shape:
                raise ModelMismatch(f"rows have shape {tuple(rows.shape[1:])} but the model was trained on {shape}")
        with torch.no_grad():
            return self.algorithm.predict(self.task, *opened(self.shared, self.of(client)), rows)

    def nearest(self, x: Any) -> str | None:
        """Return the client whose training rows are most like rows x, scaled by everyone's; None where the run does not know."""
        known = self.facts.get("middles")
        return None if known is None else nearest(known, self.facts["clients"], x)

    def _of_client(self, client: str | None, x: Any) -> Any:
        """Return rows with the number of the client's network among their parts, where clients have different ones."""
        networks = self.task.trainer
        if self.packing is None or not isinstance(networks, Mixed):
            return x
        if client is None:
            raise ModelMismatch("clients have different networks, and there is no shared model; name a client")
        return self.packing.with_architecture(x, networks.number_of(client))

    def ensemble(self, x: Any) -> Tensor:
        """Return logits (regression: the numbers) whose prediction is the mean of all clients'."""
        kind = self.task.kind
        mean = torch.stack([kind.soft(self.predict(client, x)) for client in self.clients]).mean(0)
        if kind.least_squares:
            return mean
        return mean.log() if kind.softmax else mean.logit()

    def weights(self, client: str | None) -> dict[str, Tensor]:
        """Return a client's model (or the shared one) with torch's names; refused where no single model predicts."""
        if self.packing is not None and self.packing.mixed:
            raise ModelMismatch("clients have different networks, each beside the others' starts; use predict")
        received, own = opened(self.shared, self.of(client))
        parts = {**received.get("model", {}), **own.get("model", {})}
        model = {name: parts[name] for name in self.task.names if name in parts}
        whole = tuple(model) == self.task.names
        if whole:
            rows = torch.randint(2, (4, *self.facts["shape"]), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                like = rows if self.tokens else rows.to(next(iter(model.values())))
                whole = torch.allclose(self.task.apply(model, like), self.predict(client, rows))
        if not whole:
            raise ModelMismatch(f"{self.facts['algorithm']} does not predict with a single model; use predict")
        return {name.removeprefix(tree.BUFFER): value.contiguous() for name, value in {**self.task.frozen, **model}.items()}


def save(run: Run, model: Any, options: Mapping[str, Any], folder: Path) -> None:
    """Write ``models/``: the shared state, everyone's own, and how to put them to use."""
    personal: dict[str, Any] = {STACKS: {}}
    shard_facts = None
    if len(run.federation) > MANY:
        shard_facts = shards.write(folder / MODELS, run.federation.names, run.personal_chunks(), LARGEST)
    else:
        personal = stacked(run.personal_chunks(), LARGEST)
    personal["new"] = run.engine.newborn(run.sent) if tree.leaves(run.sent.newcomer) else {}
    asked = {**options, "cut": run.summary.get("threshold")}
    write(folder, (run.algorithm, run.task, run.federation), model, asked, run.shared, personal, shard_facts)


def write(
    folder: Path,
    trained: tuple[Algorithm, Task, Federation],
    model: Any,
    options: Mapping[str, Any],
    shared: Any,
    personal: Mapping[str, Any],
    kept: Mapping[str, Any] | None = None,
) -> None:
    """Write ``models/`` from its trees: ``personal`` as ``stacked`` gives it, with a newcomer's as ``new``; ``kept`` says where
    those of very many clients were written (``shards``)."""
    algorithm, task, federation = trained
    packed = {"shared.safetensors": tree.pack(shared), "personal.safetensors": tree.pack(personal)}
    if task.frozen:  # once for everyone
        packed["frozen.safetensors"] = tree.pack(task.frozen)
    for name, data in packed.items():
        files.write(folder / MODELS / name, data)
    schema = federation.schema
    facts = {
        "algorithm": type(algorithm).__name__,
        "method": spec(algorithm),
        "set": settings(algorithm),
        "model": model if isinstance(model, str) else None,
        **{name: options[name] for name in ("bias", "seed", "dtype")},
        "shape": list(federation.train.x.shape[1:]),
        "outputs": federation.outputs,
        "kind": federation.kind,
        "labels": federation.labels,
        "score": task.score.name,
        **({} if options.get("cut") is None else {"threshold": options["cut"]}),
        **_middles(algorithm, federation, shared),
        "classes": list(federation.classes),
        "tokens": federation.tokens,
        "per_position": federation.per_position,
        "vocabulary": None if federation.vocabulary is None else federation.vocabulary.to_json(),
        "packing": None if federation.packing is None else federation.packing.to_json(),
        "flat": federation.train.y.dim() == 1,
        **({"clients": list(federation.names)} if kept is None else {"shards": kept}),
        "schema": None if schema is None else schema.to_json(),
        "sha256": {name: digest(data) for name, data in packed.items()},
    }
    files.write_json(folder / MODELS / "models.json", facts)


def _middles(algorithm: Algorithm, federation: Federation, shared: Any) -> dict[str, Any]:
    """Return what tells whose rows are most like a stranger's, for methods that share nothing; nothing of private rows."""
    flat = federation.schema is not None and federation.train.x.dim() == 2 and federation.shards is None
    known = flat and algorithm.opt.privacy is None and len(federation) > 0 and not tree.leaves(shared)
    return {"middles": middles(federation)} if known else {}


def read(folder: Path | str) -> Saved:
    """Return the models of a finished run."""
    folder = Path(folder)
    with readable(folder):
        contents = open_contents(folder)
        note_missing_digests(contents)
        return read_from(contents)


def read_from(contents: Contents) -> Saved:
    """Return the models among the contents of a finished run."""
    folder = contents.folder
    contents.require_finished()
    with readable(folder):
        return _read(contents)


def _read(contents: Contents) -> Saved:
    folder = contents.folder
    facts = contents.json(f"{MODELS}/models.json")
    if facts is None:
        raise DamagedRun(f"{folder / MODELS / 'models.json'} is missing; restore it from a copy, or train anew")
    if facts["model"] is None:
        raise BadRun(f"the run in {folder} trained a module of your own; load it in Python, with ft.run(..., resume=True)")
    origin.refuse_inside(contents.config, folder)
    trees = {name: _tree(contents, f"{MODELS}/{name}", sha256) for name, sha256 in facts["sha256"].items()}
    written, sharded = sum(leaf.numel() for leaf in tree.leaves(trees)), None
    if "shards" in facts:
        index = _tree(contents, f"{MODELS}/{shards.INDEX}", facts["shards"]["index"])
        sharded = shards.Shards(folder / MODELS, index, facts["shards"])
        facts, written = {**facts, "clients": sharded.names}, written + sharded.numbers
    words = {"tokens": facts.get("tokens", 0), "per_position": facts.get("per_position", False)}
    options = {"seed": facts["seed"], "bias": facts["bias"], **words}
    network = _network(facts, options, 2 * written + SMALL, folder)
    if "frozen.safetensors" in trees:
        frozen = {name.removeprefix(tree.BUFFER): value for name, value in trees["frozen.safetensors"].items()}
        network.load_state_dict(frozen, strict=False)
    packing = None if facts.get("packing") is None else Packing.from_json(facts["packing"])
    task = Task.from_module(
        with_dtype(network, getattr(torch, facts["dtype"])), kind_of(facts["kind"]).loss, classes=facts["labels"], packing=packing
    )
    everyone = trees["personal.safetensors"]
    personal = PersonalTrees(facts["clients"], everyone) if sharded is None else sharded
    if not personal and len(facts["clients"]):
        raise BadRun(f"the personal models of {folder} are too large to be kept apart; load them with ft.run(..., resume=True)")
    schema = None if facts["schema"] is None else Schema.from_json(facts["schema"])
    later = onboarded.read(contents, facts["sha256"])
    if schema is not None:
        schema = replace(schema, clients={**schema.clients, **{name: new.moments for name, new in later.items() if new.moments}})
    return Saved(
        facts=facts,
        algorithm=build(recall(facts["method"], folder), facts["set"]),
        task=task,
        shared=trees["shared.safetensors"],
        personal=ChainMap({name: new.personal for name, new in later.items()}, cast(Any, personal)) if later else personal,
        newcomer=everyone["new"],
        schema=schema,
        config=contents.config,
        onboarded=tuple(later),
    )


def _network(facts: Mapping[str, Any], options: Mapping[str, Any], most: int, folder: Path) -> nn.Module:
    """Return the network, refused before it takes memory if it has more parameters than ``most``; one that a function of the
    user's made is made again by the same function, which is never one that lies inside the run directory."""
    shape = tuple(facts["shape"])
    if is_several(facts["model"]):
        rows = Packing.from_json(facts["packing"]).parts[0].shape
        with torch.device("meta"):
            _check_size(several(facts["model"], rows, facts["outputs"], facts["clients"]), most, facts)
        return several(facts["model"], rows, facts["outputs"], facts["clients"], facts["seed"])
    if origin.is_spec(facts["model"]):
        if "@" not in facts["model"]:
            raise DamagedRun(
                f"{folder} does not say which source {facts['model']} had; the directory was changed by hand: restore it"
            )
        factory = origin.function_of(facts["model"], folder)
        shapes = shape if facts.get("packing") is None else Packing.from_json(facts["packing"]).given
        return made_by(factory, origin.name_of(facts["model"]), shapes, facts["outputs"], facts["seed"], facts["clients"])
    with torch.device("meta"):
        _check_size(networks.build(facts["model"], shape, facts["outputs"], **options), most, facts)
    return networks.build(facts["model"], shape, facts["outputs"], **options)


def _check_size(network: nn.Module, most: int, facts: Mapping[str, Any]) -> None:
    if sum(parameter.numel() for parameter in network.parameters()) > most:
        shape = tuple(facts["shape"])
        raise DamagedRun(
            f"the model {facts['model']!r} on rows of {shape} has more parameters than the run's files; restore models.json"
        )


def _tree(contents: Contents, name: str, sha256: str) -> Any:
    path = contents.folder / name
    data = contents.read(name)
    if data is None:
        raise DamagedRun(f"{path} is missing; restore it from a copy, or train anew")
    if digest(data) != sha256:
        raise DamagedRun(f"{path} was changed or cut short (its checksum does not fit); restore it from a copy, or train anew")
    return tree.unpack(data)
