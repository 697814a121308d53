"""Compressed: any method whose uploads are averaged, with uploads of few numbers, or of 8 bits each.

What it does
    ``keep`` sends of every tensor only that share of its numbers (rounded to a whole number, at least one), the largest in
    magnitude, with their positions; ``bits=8`` sends each number as a multiple, rounded to the nearest of -127 ... 127, of the
    tensor's largest magnitude / 127; together, the numbers that are kept are sent in 8 bits. What was left out is remembered by
    the client and added to what it sends next time (error feedback). The server decodes and goes on as the method does; the bytes
    counted are those of the encoded upload.
Reference
    Stich et al. 2018 (Sparsified SGD with memory), Algorithm 1.
    The memory m is at each client as in their appendix on distributed workers; top-k per tensor; 8 bits with a scale per tensor
    as in Seide et al. 2014 with more levels.
Differs from the paper
    It compresses the upload of a round, after the method's local work, not single gradients. A client that is not sampled keeps
    its memory until it is. Where a method uploads a whole ``model``, its change from the shared one is compressed. Buffers,
    single numbers and integers travel as they are. Of magnitudes that are equal in single precision the earlier is sent first.
    The download is not compressed.
Limits
    keep = 1 is the method itself.
When to use
    When uploads cost more than rounds. The server sees encoded uploads one by one: not for secure aggregation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, Round, param
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.data.batches import Batches
from fedtailor.data.guard import Guarded
from fedtailor.errors import InvalidArgument
from fedtailor.local.descent import LEAVES
from fedtailor.local.meter import metered
from fedtailor.server.reduce import Mean, Reduce

LOCAL = ("lr", "steps", "epochs", "opt", "radius")
VALUES, PLACES, SHAPE, SCALE = "encoded:values", "encoded:places", "encoded:shape", "encoded:scale"
LEVELS = 127
ERROR = "left out"  # in the personal tree, beside the method's own


@dataclass(frozen=True, kw_only=True)
class Compressed(Algorithm):
    """``method`` with compressed uploads; ``lr`` and local work are the method's, and may be set in either place."""

    method: Algorithm = field(default_factory=FedAvg)
    keep: float | None = param(None, gt=0, le=1)  # 0.1, or all where bits is given
    bits: int | None = param(None, ge=8, le=8)
    lr: Any = param(None, gt=0)
    steps: int | None = param(None, ge=1)
    epochs: int | None = param(None, ge=1)
    opt: Any = None
    radius: float | None = param(None, gt=0)

    family = "around another method"

    def __post_init__(self) -> None:
        method = self.method
        if not isinstance(method, Algorithm) or isinstance(method, Compressed):
            raise InvalidArgument(f"Compressed: method must be a method such as ft.FedAvg(lr=0.1), not {method!r}")
        set_here = {name: getattr(self, name) for name in LOCAL}
        changed = {name: value for name, value in set_here.items() if value not in (None, getattr(method, name))}
        if len(changed.keys() & {"steps", "epochs"}) == 1:  # one takes the place of the other
            changed["epochs" if "steps" in changed else "steps"] = None
        method = replace(method, **changed)
        for name, value in {"method": method, **{name: getattr(method, name) for name in LOCAL}}.items():
            object.__setattr__(self, name, value)
        super().__post_init__()
        name = type(method).__name__
        if type(method).silent is not Algorithm.silent:
            raise InvalidArgument(f"Compressed: in some rounds of {name} nothing travels; use another method")
        if method.exchanges > 1:
            raise InvalidArgument(f"Compressed: {name} sends more than one upload in a round; use another method")

    # -- what engines ask is the method's to answer ---------------------------------------------------------------
    @property
    def limits(self):  # type: ignore[override]
        settings = {f.name: getattr(self.method, f.name) for f in fields(self.method)}
        return (Limit({"keep": 1.0, "bits": None}, type(self.method).__name__, also=settings),)

    roll_call = property(lambda self: self.method.roll_call)
    needs_everyone = property(lambda self: self.method.needs_everyone)
    reads_rows = property(lambda self: self.method.reads_rows)
    leak = property(lambda self: self.method.leak)
    diagnostics = property(lambda self: self.method.diagnostics)
    stateless = property(lambda self: self.method.stateless)
    personalizes = property(lambda self: self.method.personalizes)
    has_downlink = property(lambda self: self.method.has_downlink)

    def work(self):
        return self.method.work()

    def measures(self, server, rnd):
        return self.method.measures(server, rnd)

    def looks(self, rnd):
        return self.method.looks(rnd)

    def init_server(self, task):
        return self.method.init_server(task)

    def server_update(self, task, shared, server, upload, rnd):
        return self.method.server_update(task, shared, server, upload, rnd)

    def downlink(self, task, shared, server, clients, rnd):
        return self.method.downlink(task, shared, server, clients, rnd)

    def personalize(self, task, shared, personal, data):
        return {**self.method.personalize(task, shared, inside(personal), data), ERROR: personal[ERROR]}

    def predict(self, task, shared, personal, x):
        return self.method.predict(task, shared, inside(personal), x)

    def diagnose(self, task, shared, personal, x):
        return self.method.diagnose(task, shared, inside(personal), x)

    def condense(self, seen):
        return self.method.condense(seen)

    def stages(self):
        return self.method.stages()

    def resolve(self, problem):
        method, constants = self.method.resolve(problem)
        return replace(self, method=method, **dict.fromkeys(LOCAL)), constants

    # -- what is new ----------------------------------------------------------------------------------------------
    def reducer(self, task, shared, rnd):
        inner = self.method.reducer(task, shared, rnd)
        if type(inner) is not Mean:
            name = type(self.method).__name__
            raise InvalidArgument(f"Compressed: the server does not average {name}'s uploads as they are; use another method")
        return Decoded(inner, self.compared(shared))

    def compared(self, shared):
        """Return what an upload of the same name is compared with before it is compressed: the shared model."""
        return {"model": shared["model"]} if "model" in shared and not self.has_downlink else {}

    def init_client(self, task, shared, data):
        inner = self.method.init_client(task, shared, data)
        with metered(None):  # a visit of no steps shows what the upload looks like
            where = next((leaf.device for leaf in tree.leaves(shared)), None)
            one, first = torch.ones(1, device=where), torch.zeros(1, dtype=torch.int64, device=where)
            rnd = Round(number=0, rounds=1, clients=1, cohort=1, mass=1.0, weights=one, ranks=first, seed=0, exchange=0)
            upload, _ = self.method.client_update(task, shared, inner, idle(data), rnd)
        error = {path: torch.zeros_like(leaf) for path, leaf in tree.items(upload) if self.encodes(path, leaf)}
        return {**inner, ERROR: error}

    def client_update(self, task, shared, personal, data, rnd):
        upload, inner = self.method.client_update(task, shared, inside(personal), data, rnd)
        start, error, sent = dict(tree.items(self.compared(shared))), {}, []
        for path, leaf in tree.items(upload):
            if path in personal[ERROR]:
                signal = leaf - start.get(path, 0.0) + personal[ERROR][path]
                leaf = self.encode(signal)
                stack = tree.map(lambda part: part.unsqueeze(0), tree.drop(leaf, (SHAPE,)))
                error[path] = signal - dense(stack, signal.shape)[0]
            sent.append(leaf)
        return tree.refill(upload, iter(sent)), {**inner, ERROR: error}

    def count(self, size: int) -> int:
        """Return how many of a tensor's numbers are sent."""
        keep = self.keep if self.keep is not None else 1.0 if self.bits else 0.1
        return max(1, min(size, math.floor(keep * size + 0.5)))

    def encodes(self, path: str, leaf: Tensor) -> bool:
        plain = tree.is_buffer(path) or not leaf.is_floating_point() or leaf.numel() < 2
        return not plain and (self.bits is not None or self.count(leaf.numel()) < leaf.numel())

    def encode(self, leaf: Tensor) -> dict[str, Tensor]:
        """Return the largest numbers and where they stand in the flat tensor (unless all are sent), in 8 bits if asked for."""
        out, count = {VALUES: leaf}, self.count(leaf.numel())
        if count < leaf.numel():
            flat = leaf.flatten()
            size = flat.abs().to(torch.float32)  # of two classes one's gradient is minus the other's, up to rounding: a tie
            places = size.argsort(descending=True, stable=True)[:count]
            shape = torch.tensor(leaf.shape, dtype=torch.int32)
            out = {VALUES: flat.gather(0, places), PLACES: places.to(torch.int32), SHAPE: shape}
        if self.bits is not None:
            scale = out[VALUES].abs().max() / LEVELS
            steps = out[VALUES] / torch.where(scale > 0, scale, torch.ones_like(scale))
            out = {**out, VALUES: steps.round().to(torch.int8), SCALE: scale}
        return out


def inside(personal: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method's own personal tree."""
    return tree.drop(personal, (ERROR,))


def dense(parts: Mapping[str, Tensor], shape: Any) -> Tensor:
    """Encoded tensors of some clients, side by side, as tensors of ``shape``."""
    values = parts[VALUES]
    if SCALE in parts:
        values = values * parts[SCALE].view(-1, *[1] * (values.dim() - 1))
    if PLACES not in parts:
        return values
    zeros = values.new_zeros(len(values), math.prod(shape))
    return zeros.scatter(1, parts[PLACES].long(), values).view(-1, *shape)


@dataclass(frozen=True, eq=False)
class Decoded(Reduce):
    """Decodes uploads as they come in, adds what they were compared with, and reduces them as ``inner`` does."""

    inner: Reduce
    compared: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        return self.inner.streams

    def start(self) -> Any:
        return self.inner.start()

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        return self.inner.add(state, decode(uploads, self.compared), weights, places)

    def finish(self, state: Any) -> Any:
        return self.inner.finish(state)


def decode(uploads: Any, compared: Any) -> Any:
    """Uploads of some clients, side by side, as the method made them, up to what was left out."""
    if not isinstance(uploads, Mapping):
        return uploads
    if VALUES in uploads:
        shape = uploads[SHAPE][0].tolist() if SHAPE in uploads else uploads[VALUES].shape[1:]
        numbers = dense(uploads, shape)
        return numbers if compared is None else numbers + compared
    return {name: decode(part, (compared or {}).get(name)) for name, part in uploads.items()}


def idle(data: Any) -> Any:
    """Return a client's data with no steps to take, in any phase."""
    if isinstance(data, Guarded):
        return Guarded(idle(data.data), data.phase, data.guard, {})
    if isinstance(data, Batches):
        return data.idle()
    steps = {name: leaf[:0] if name in LEAVES else leaf for name, leaf in data.items()}
    return {
        name: idle(leaf) if isinstance(leaf, Mapping) and "mask" in leaf and name != "val" else leaf
        for name, leaf in steps.items()
    }


def compressed(algorithm: Algorithm, text: str) -> Algorithm:
    """Return the method with uploads compressed as a word says: ``top-k:0.1``, ``8bit``, or ``top-k:0.1,8bit``."""
    options: dict[str, Any] = {}
    for word in text.split(","):
        kind, _, share = word.strip().partition(":")
        if (kind, share) == ("8bit", ""):
            options["bits"] = 8
        elif kind == "top-k" and re.fullmatch(r"[0-9.]*[0-9]", share):
            options["keep"] = float(share)
        else:
            raise InvalidArgument(f"unknown compression {text!r}; use top-k:0.1, 8bit or top-k:0.1,8bit")
    return Compressed(method=algorithm, **options)
