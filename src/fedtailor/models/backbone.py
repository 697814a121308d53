"""Weights from a file as the start of a network; weights that do not fit are refused by name.

Adapters may be missing in the file (it was trained without them) and keep their start; a head for other classes is left out,
with a note. Everything else must be there, under the same name and in the same shape.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedtailor.errors import InvalidData, ModelMismatch
from fedtailor.models.adapters import Bottleneck, SeriesAdapter
from fedtailor.models.chain import Chain

Net = TypeVar("Net", bound=Chain)
SHOWN = 4  # at most so many tensors are named in a message
WRAPPERS = ("state_dict", "model_state_dict", "model")  # where checkpoints keep the weights


def load(net: Net, path: str | os.PathLike[str] | None) -> Net:
    """Return the network, started from the weights in a file (None: as it is)."""
    if path is not None:
        return fit(net, read(Path(path)), str(path))
    if not all(p.requires_grad for p in net.parameters()):
        net.notes = ("The frozen part of the network is at its random start; give weights to start from with backbone=.",)
    return net


def read(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a .safetensors file, or from a torch file that holds nothing but tensors."""
    if not path.is_file():
        raise InvalidData(f"there is no file of weights {path}; give a .safetensors or .pt file, or make one: fedtailor pretrain")
    try:
        content: Any
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidData(f"{path} holds more than tensors and was not opened; save module.state_dict() alone") from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise InvalidData(f"{path} cannot be read as weights ({reason}); give a .safetensors or .pt file of tensors") from error
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise InvalidData(f"{path} holds no tensors by name; save module.state_dict() alone")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


def fit(net: Net, weights: Mapping[str, Tensor], source: str) -> Net:
    """Load ``weights`` into the network, or say which of them do not fit."""
    state = {name: value for name, value in net.state_dict().items() if value.is_floating_point()}
    loaded = {name: value for name, value in weights.items() if value.is_floating_point()}
    head = {name for name in state if any(name.startswith(f"{path}.") for path in net.groups["head"])}
    adapters = tuple(f"{path}." for path in net.paths(SeriesAdapter, Bottleneck))
    other_head = [name for name in sorted(head) if name in loaded and loaded[name].shape != state[name].shape]
    if other_head:
        loaded = {name: value for name, value in loaded.items() if name not in head}
    may_be_missing = {name for name in state if name in head or name.startswith(adapters)} if adapters else head
    problems = [f"{name} is missing" for name in state if name not in loaded and name not in may_be_missing]
    problems += [
        f"{name} is {tuple(loaded[name].shape)}, not {tuple(state[name].shape)}"
        for name in state
        if name in loaded and loaded[name].shape != state[name].shape
    ]
    problems += [f"{name} is unknown" for name in loaded if name not in state]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ModelMismatch(
            f"the weights in {source} do not fit the network: {'; '.join(problems[:SHOWN])}{more}; use its own model"
        )
    net.load_state_dict({name: value.to(state[name]) for name, value in loaded.items()}, strict=False)
    notes = [f"The network starts from {source}."]
    if other_head:
        first = other_head[-1] if other_head[-1].endswith("weight") else other_head[0]
        theirs, ours = weights[first].shape[0], state[first].shape[0]
        notes.append(f"Its head is for {theirs} classes, not {ours}, and was left out: the head starts anew.")
    elif not head & loaded.keys():
        notes.append("It has no head: the head starts anew.")
    net.notes = (*net.notes, *notes)
    return net
