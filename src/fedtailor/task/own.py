"""What a module of the user's own may do that ours never do: be compiled or lazy, tie its weights, draw from torch's generator,
write to its buffers in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, jit, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from fedtailor.errors import InvalidArgument
from fedtailor.tree import BUFFER

OURS = ("torch.nn.modules.", "fedtailor.")  # packages whose layers that draw are all known here
# besides dropouts, which are replaced; attention and the transformer layers around it call ``F.dropout`` by themselves
DRAWING = (nn.RReLU, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def plain_module(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a module as it was written, and a note where it had been compiled; refuse what has no Python or no shapes."""
    for path, layer in module.named_modules():
        name = f"the layer {path}" if path else "the module"
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise InvalidArgument(f"{name} spreads batches over devices, which a run does by itself; give what it holds: .module")
        if isinstance(layer, jit.ScriptModule):
            raise InvalidArgument(
                f"{name} is TorchScript, whose layers cannot be given a client's weights; give the Python module"
            )
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise InvalidArgument(f"{name} is lazy and has no shape yet; pass one batch through the module first: module(x)")
    for path, parameter in module.named_parameters():
        if parameter.is_complex():
            raise InvalidArgument(f"the parameter {path} is complex; models are real: give its real and imaginary part apart")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InvalidArgument(
                f"the parameter {path} has a hook on its gradient, which clients' copies would not have; put it into forward"
            )
    if not any(_is_compiled(layer) for layer in module.modules()):
        return module, ()
    return _as_written(copied(module)), ("The module is trained as it was written, not compiled.",)


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module, or say why there is none."""
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever a module holds may refuse to be copied, each in its own way
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "; use torch.nn.utils.parametrizations" if "nn.utils" in str(error) else "; keep what is no tensor outside of it"
        raise InvalidArgument(f"the module cannot be copied ({text}){hint}") from error


def with_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module, changed in place, with its real numbers in ``dtype``; ``Module.to`` would cut complex buffers to their
    real parts."""
    return module._apply(lambda value: value.to(dtype) if value.is_floating_point() else value)


def _is_compiled(layer: nn.Module) -> bool:
    return "_orig_mod" in layer._modules or layer._compiled_call_impl is not None


def _as_written(module: nn.Module) -> nn.Module:
    """Replace compiled modules, in place, by what was compiled."""
    while "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    module._compiled_call_impl = None
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _as_written(child)
    return module


def tied(module: nn.Module) -> dict[str, str]:
    """Return the parameters and statistics that a module knows under a second name, with the first name of each."""
    out: dict[str, str] = {}
    for prefix, named in (("", module.named_parameters), (BUFFER, module.named_buffers)):
        first: dict[int, str] = {}
        for name, value in named(remove_duplicate=False):
            canonical = first.setdefault(id(value), name)
            if canonical != name:
                out[prefix + name] = prefix + canonical
    return out


def other_places(module: nn.Module) -> dict[str, str]:
    """Return the second names of ``tied`` that are places of their own, in torch's words, with the first name of each.

    A layer that stands in a module twice has one place under two names. Torch, which fills and empties the places of all names
    one after another, would leave in it what it was filled with.
    """
    layers = dict(module.named_modules(remove_duplicate=False))
    out: dict[str, str] = {}
    seen: set[tuple[int, str]] = set()
    for named in (module.named_parameters, module.named_buffers):
        first: dict[int, str] = {}
        for name, value in named(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            place = (id(layers[path]), last)
            canonical = first.setdefault(id(value), name)
            if canonical != name and place not in seen:
                out[name] = canonical
            seen.add(place)
    return out


def called(module: nn.Module, state: dict[str, Tensor], places: Mapping[str, str], *arguments: Any) -> Any:
    """Return what a module gives with these parameters and buffers; a buffer that it binds anew is written back to ``state``."""
    filled = {**state, **{name: state[first] for name, first in places.items() if first in state}} if places else state
    out = functional_call(module, filled, *arguments, tie_weights=False)
    if places:
        state.update({name: filled[name] for name in state})
    return out


def draws(module: nn.Module) -> bool:
    """Return whether a module may draw from torch's generator when it trains; a module that is not torch's or ours may."""
    return any(_may_draw(layer) for layer in module.modules())


def _may_draw(layer: nn.Module) -> bool:
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return bool(layer.dropout)
    return isinstance(layer, DRAWING) or not type(layer).__module__.startswith(OURS)


def in_place_buffers(module: nn.Module) -> frozenset[str]:
    """Return the statistics, by their names in a model, of layers that may write to them where they are (ours never do)."""
    return frozenset(
        BUFFER + (f"{path}.{name}" if path else name)
        for path, layer in module.named_modules()
        if not isinstance(layer, _BatchNorm)
        for name, value in layer.named_buffers(recurse=False)
        if value.is_floating_point()
    )
