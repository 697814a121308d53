"""Where training starts, if not at the model's own start: a finished run, a file of weights, or a state dict."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.errors import BadRun, InvalidArgument, ModelMismatch
from fedtailor.models import backbone
from fedtailor.runs.contents import open_contents
from fedtailor.runs.layout import MODELS
from fedtailor.task import Task
from fedtailor.task.own import tied

STATE = "(state dict):"  # before a checksum, in place of a path
FILES = (".safetensors", ".pt", ".pth", ".bin")
_states: dict[str, dict[str, Tensor]] = {}  # those given in this process, by their words


def in_words(state: Mapping[Any, Any]) -> str:
    """Return the word that stands for a state dict, under which ``started`` finds it in this process."""
    if not state or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()):
        raise ValueError("must be a run directory, a file of weights, or a state dict (names and tensors)")
    copies = {name: value.detach().cpu().clone() for name, value in state.items()}
    word = f"{STATE}{hashlib.sha256(tree.pack(copies)).hexdigest()[:16]}"
    _states[word] = copies
    return word


def started(task: Task, where: str) -> Task:
    """Return the task with another start: the shared model of a finished run, a file of weights, or a state dict."""
    model = _weights(where) if where.startswith(STATE) or where.endswith(FILES) else _shared_model(Path(where))
    source = "the state dict" if where.startswith(STATE) else where
    want = task.init()
    frozen = {name.removeprefix(tree.BUFFER): value for name, value in task.frozen.items()}
    by_torch_name = {name.removeprefix(tree.BUFFER): name for name in want}
    ours = _untied(task, {by_torch_name.get(name, name): value for name, value in model.items()}, source)
    for name, value in ours.items():
        if name in frozen and not torch.equal(value.to(frozen[name]), frozen[name]):
            raise ModelMismatch(f"{source} holds {name}, which is frozen here with other values; load it into the module instead")
    ours = {name: value for name, value in ours.items() if name in want or (name not in frozen and value.is_floating_point())}
    for name in {**want, **ours}:
        shapes = [tuple(one[name].shape) if name in one else "missing" for one in (want, ours)]
        if shapes[0] != shapes[1]:
            words = f"{name} is {shapes[0]} in the model and {shapes[1]} in the start"
            raise ModelMismatch(f"{source} differs in {name}: {words}; start from weights of the same model")
        if not bool(torch.isfinite(ours[name]).all()):
            raise ModelMismatch(f"{source} holds numbers in {name} that are not finite; start from other weights")
    return replace(task, init=lambda: {name: ours[name].to(value.dtype, copy=True) for name, value in want.items()})


def _untied(task: Task, model: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return the weights with each parameter of the task under its first name only; a state dict has tied ones under all."""
    second = {} if task.trainer is None else tied(task.trainer)
    out = {name: value for name, value in model.items() if name not in second}
    for name, first in second.items():
        if name in model and not torch.equal(out.setdefault(first, model[name]), model[name]):
            raise ModelMismatch(f"{source} holds other values in {name} than in {first}, which are one parameter of the model")
    return out


def _shared_model(folder: Path) -> Mapping[str, Tensor]:
    """Return the shared model of a finished run."""
    contents = open_contents(folder)
    contents.require_finished()
    data = contents.read(f"{MODELS}/shared.safetensors")
    model = None if data is None else tree.unpack(data).get("model")
    if not isinstance(model, Mapping):
        raise InvalidArgument(f"the run in {folder} has no shared model to start from; use a run of another method")
    return model


def _weights(where: str) -> Mapping[str, Tensor]:
    """Return the tensors of a file of weights, or of a state dict that was given in this process."""
    if not where.startswith(STATE):
        return backbone.read(Path(where))
    if where not in _states:
        raise BadRun(
            "the run was started from a state dict, which is in no file; give the same one again in Python, with "
            "ft.run(..., start=..., out=..., resume=True)"
        )
    return _states[where]
