"""The named parts of a model: groups (head, norm, ...) and blocks (the layers in order), found by module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fedtailor.errors import InvalidArgument
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
        """The block as a function of the model; what is frozen is in the modules."""
        return Block(self.name, tuple(n for n in self.parameters if n in moving), self.path, (evaluator, trainer))

    def __call__(self, model: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        assert self.modules is not None
        root = self.modules[int(training)]
        for path in self.path:
            prefix = f"{path}." if path else ""
            layer = root.get_submodule(path)
            names = {k: k.removeprefix(BUFFER) for k in self.parameters}
            own = {v.removeprefix(prefix): model[k] for k, v in names.items() if v.startswith(prefix)}
            x = functional_call(layer, own, (x,))
        return x


def _names_below(root: nn.Module, path: str) -> list[str]:
    prefix = f"{path}." if path else ""
    module = root.get_submodule(path)
    parameters = [prefix + name for name, _ in module.named_parameters()]
    return parameters + [BUFFER + prefix + name for name, value in module.named_buffers() if value.is_floating_point()]


def default_groups(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """head: the last layer with weights that is not a norm; norm: every norm, buffers included; body: all but the head."""
    owners = [(path, m) for path, m in root.named_modules() if any(True for _ in m.parameters(recurse=False))]
    layers = [path for path, m in owners if not isinstance(m, NORMS)]
    head = tuple(_names_below(root, layers[-1])) if layers else ()
    norm = tuple(n for path, m in root.named_modules() if isinstance(m, NORMS) for n in _names_below(root, path))
    body = tuple(n for n in _names_below(root, "") if n not in head)
    return {"head": head, "body": body, "norm": norm}


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


def split_blocks(root: nn.Module, declared: Sequence[str | nn.Module] | None) -> list[Block]:
    """One block per declared module or, for an ``nn.Sequential``, per child with weights (norms join the layer before)."""
    if declared is not None:
        paths = [_path(root, part) for part in declared]
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
