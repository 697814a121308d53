"""The named parts of a model: groups (head, norm, ...) and blocks (the layers in order), found by module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from fedtailor.errors import InvalidArgument
from fedtailor.task.own import called, other_places
from fedtailor.tree import BUFFER

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Block:
    """One layer that can be routed: its parameters, and the layer as a function of (model, x).

    A block ends with the layer that holds the parameters and begins with whatever stands before it (activation, pooling),
    so that what leaves a block is a pre-activation. The blocks in order are the model.
    """

    name: str
    parameters: tuple[str, ...]
    path: tuple[str, ...] = ()
    modules: tuple[nn.Module, nn.Module] | None = None

    def bind(self, evaluator: nn.Module, trainer: nn.Module, moving: Collection[str]) -> Block:
        """Return the block as a function of the model; frozen parameters are in the modules."""
        return Block(self.name, tuple(n for n in self.parameters if n in moving), self.path, (evaluator, trainer))

    def is_tied_outside(self, aliases: Mapping[str, str]) -> bool:
        """Return whether a module of the block uses a parameter that is known under a name outside the module."""
        starts = tuple(f"{path}." if path else "" for path in self.path)
        here = [name for name in self.parameters if name in aliases]
        return any(name.startswith(start) and not aliases[name].startswith(start) for name in here for start in starts)

    def __call__(self, model: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        return self.layer(model, self.before(x, training), training)[0]

    def before(self, x: Tensor, training: bool = False) -> Tensor:
        """Apply the modules before the layer; they have no parameters, so they are the same in every version of the block."""
        return self._through({}, x, training, self.path[: self.bare])[0]

    def layer(self, model: Mapping[str, Tensor], x: Tensor, training: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Apply the rest of the block; return the output, and its buffers as they are after the pass."""
        return self._through(model, x, training, self.path[self.bare :])

    def lead(self, model: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        """Apply everything before the block's last module."""
        return self._through(model, x, training, self.path[:-1])[0]

    @property
    def last(self) -> nn.Module:
        assert self.modules is not None
        return self.modules[0].get_submodule(self.path[-1])

    def weights(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of the block's last module, by its own names; frozen ones are the module's."""
        own = dict(self.last.named_parameters())
        return {**own, **{inner: model[name] for name, inner in self._below[self.path[-1]].items()}}

    @cached_property
    def bare(self) -> int:
        """The number of modules without parameters at the beginning of the block."""
        owned = [bool(self._below[path]) for path in self.path]
        return owned.index(True) if True in owned else 0

    @cached_property
    def _below(self) -> dict[str, dict[str, str]]:
        """For each module, the block's parameters below it and their names there."""
        names = {name: name.removeprefix(BUFFER) for name in self.parameters}
        starts = {path: f"{path}." if path else "" for path in self.path}
        return {
            path: {name: inner.removeprefix(start) for name, inner in names.items() if inner.startswith(start)}
            for path, start in starts.items()
        }

    @cached_property
    def _places(self) -> dict[str, dict[str, str]]:
        """For each module, the second places of its parameters."""
        assert self.modules is not None
        return {path: other_places(self.modules[0].get_submodule(path)) for path in self.path}

    def _through(
        self, model: Mapping[str, Tensor], x: Tensor, training: bool, paths: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.modules is not None
        moved: dict[str, Tensor] = {}
        for path in paths:
            names = self._below[path]
            own = {inner: model[name] for name, inner in names.items()}
            module = self.modules[int(training)].get_submodule(path)
            x = called(module, own, self._places[path], (x,)) if own else module(x)
            moved.update({name: own[inner] for name, inner in names.items() if name.startswith(BUFFER)})
        return x, moved if training else {}


def joined(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks in which something moves, each with the frozen ones before it, the last also with those after it."""
    out: list[Block] = []
    waiting: tuple[str, ...] = ()
    for block in blocks:
        if not block.parameters:
            waiting += block.path
            continue
        out.append(replace(block, path=waiting + block.path) if waiting else block)
        waiting = ()
    if waiting and out:
        out[-1] = replace(out[-1], path=out[-1].path + waiting)
    return tuple(out)


def _names_below(root: nn.Module, path: str) -> list[str]:
    prefix = f"{path}." if path else ""
    module = root.get_submodule(path)
    parameters = [prefix + name for name, _ in module.named_parameters()]
    return parameters + [BUFFER + prefix + name for name, value in module.named_buffers() if value.is_floating_point()]


def default_groups(root: nn.Module, aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the groups head (the last layer with weights that is not a norm), norm (all norms) and body (all but the head)."""
    owners = [(path, m) for path, m in root.named_modules() if _owns_weights(m)]
    layers = [path for path, m in owners if not isinstance(m, NORMS)]
    head = tuple(_names_below(root, layers[-1])) if layers else ()
    norm = tuple(n for path, m in root.named_modules() if isinstance(m, NORMS) for n in _names_below(root, path))
    in_head = {aliases.get(n, n) for n in head}
    body = tuple(n for n in _names_below(root, "") if n not in in_head)
    return {"head": head, "body": body, "norm": norm}


def _owns_weights(layer: nn.Module) -> bool:
    """Return whether a layer has weights of its own; those of a parametrization (weight norm) are the layer's that it is in."""
    if isinstance(layer, ParametrizationList):
        return False
    return is_parametrized(layer) or any(True for _ in layer.parameters(recurse=False))


def named_groups(root: nn.Module, groups: Mapping[str, Sequence[str | nn.Module]]) -> dict[str, tuple[str, ...]]:
    return {group: tuple(n for part in parts for n in _names_below(root, _path(root, part))) for group, parts in groups.items()}


def _path(root: nn.Module, part: str | nn.Module) -> str:
    paths = dict(root.named_modules())
    if isinstance(part, str) and part in paths:
        return part
    for path, module in paths.items():
        if module is part:
            return path
    known = ", ".join(p for p in list(paths)[1:9])
    raise InvalidArgument(f"no module {part!r} in the model; its modules are {known}{', ...' if len(paths) > 9 else ''}")


Part = str | nn.Module  # a module's name, or the module itself


def split_blocks(root: nn.Module, declared: Sequence[Part | Sequence[Part]] | None) -> list[Block]:
    """Return one block per declared module (or tuple of modules, one after another) or, for an ``nn.Sequential``, per child
    with weights (norms join the layer before)."""
    if declared is not None and any(isinstance(part, (tuple, list)) for part in declared):
        return [
            _joined(root, [_path(root, p) for p in (part if isinstance(part, (tuple, list)) else (part,))]) for part in declared
        ]
    if declared is not None:
        paths = [_path(root, part) for part in declared]  # type: ignore[arg-type]
    elif isinstance(root, nn.Sequential):
        paths = list(root._modules)
    elif isinstance(root, nn.Linear):
        paths = [""]
    else:
        return []
    blocks: list[Block] = []
    waiting: list[str] = []
    for path in paths:
        module = root.get_submodule(path)
        names = _names_below(root, path)
        waiting.append(path)
        if isinstance(module, NORMS) and blocks and len(waiting) == 1:
            last = blocks.pop()
            blocks.append(Block(last.name, last.parameters + tuple(names), (*last.path, path)))
            waiting = []
        elif names:
            blocks.append(Block(path or "layer", tuple(names), tuple(waiting)))
            waiting = []
    if waiting and blocks:
        last = blocks.pop()
        blocks.append(Block(last.name, last.parameters, (*last.path, *waiting)))
    return blocks


def _joined(root: nn.Module, paths: Sequence[str]) -> Block:
    """Join modules into one block, named after the last that has weights."""
    names = [(path, _names_below(root, path)) for path in paths]
    owner = [path for path, own in names if own]
    if not owner:
        raise InvalidArgument(f"the block {', '.join(paths)} has no weights; join it with the layer after it")
    return Block(owner[-1], tuple(name for _, own in names for name in own), tuple(paths))
