"""Sums of row-wise clipped gradients, without a copy of the model per row where the layers allow it.

A layer that is linear in its parameters has a row's gradient as a product of the layer's input and the gradient at its output, so
its norm, and the weighted sum over the rows, come from one forward and one backward pass through the activations (Goodfellow
2015; Bu et al. 2022, "book-keeping"). That needs layers that are known, used once, in a network that does not mix rows;
every other network is differentiated row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.task.layers import BatchNorm, Dropout, GroupNorm

Sums = dict[str, Tensor]
AT_ONCE = 2**22
# layers without trained parameters of their own that treat every row by itself; a module of another type declares with
# `rows_apart = True` that it does so too, and changes nothing in place
APART = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Flatten,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Sequential, Dropout,
)  # fmt: skip


def shrink(norms: Tensor, clip: float) -> Tensor:
    """Return the factor that scales a vector of each norm down to norm ``clip`` (1 where it is shorter)."""
    return (clip / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def layers_of(module: nn.Module) -> dict[str, nn.Module] | None:
    """Return the layers with parameters, by path; None if a row's gradient cannot be computed from them."""
    layers: dict[str, nn.Module] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        known = KNOWN.get(type(layer))
        if known is not None and known[0](layer):
            layers[path] = layer
            continue
        frozen = not any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        apart = type(layer) in APART or getattr(layer, "rows_apart", False) or known is not None or _is_frozen_norm(layer)
        if not apart or not frozen or getattr(layer, "inplace", False):
            return None
    owned = [parameter for layer in layers.values() for parameter in layer.parameters()]
    return layers if len({id(parameter) for parameter in owned}) == len(owned) else None  # none is shared by layers


def _is_frozen_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm that keeps its statistics in training."""
    return isinstance(layer, BatchNorm) and not layer.training and layer.track_running_stats


class UsedTwice(Exception):
    """A layer was used twice in one pass."""


@contextmanager
def recorded(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record (input, output) of each layer during a forward pass; outputs are made part of the graph."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(path: str) -> Callable[..., Any]:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if path in seen:
                raise UsedTwice
            if not output.requires_grad:
                output.requires_grad_()
            seen[path] = inputs[0].detach(), output
            return output

        return note

    handles = [layer.register_forward_hook(hook(path)) for path, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def clipped_by_layer(
    layers: Mapping[str, nn.Module], losses: Callable[[], Tensor], names: Collection[str], clip: float
) -> Sums | None:
    """Return sums over the rows of the clipped gradients of the parameters ``names``; ``losses()`` gives a loss per row.

    The norm is over all of ``names``. None if the network turns out to use a layer twice.
    """
    wanted = {path: layer for path, layer in layers.items() if any(_under(path, n) in names for n, _ in layer.named_parameters())}
    with torch.enable_grad(), recorded(wanted) as seen:
        try:
            row_losses = losses()
        except UsedTwice:
            return None
        slopes = torch.autograd.grad(row_losses.sum(), [output for _, output in seen.values()], allow_unused=True)
    squares = row_losses.new_zeros(len(row_losses))
    parts: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    with torch.no_grad():
        for (path, (inputs, _)), slope in zip(seen.items(), slopes, strict=True):
            if slope is None:
                continue
            for name, square, total in KNOWN[type(wanted[path])][1](wanted[path], inputs, slope):
                if _under(path, name) in names:
                    squares += square()
                    parts.append((_under(path, name), total))
        factor = shrink(squares.sqrt(), clip)
        return {name: total(factor) for name, total in parts}


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- each layer: (name, squared norms of the rows' gradients, their weighted sum) ---------------------------------------
Parts = list[tuple[str, Callable[[], Tensor], Callable[[Tensor], Tensor]]]


def _explicit(name: str, gradients: Tensor) -> Any:
    """Return the entry of a parameter whose rows' gradients [rows, ...] are small enough to be stored."""
    flat = gradients.flatten(1)
    shape = gradients.shape[1:]
    return name, lambda: flat.square().sum(1), lambda factor: (factor @ flat).view(shape)


def _linear(layer: nn.Linear, inputs: Tensor, slope: Tensor) -> Parts:
    if inputs.dim() > 2:
        a, g = inputs.flatten(1, -2), slope.flatten(1, -2)  # [rows, places, features]
        parts = [_explicit("weight", g.transpose(1, 2) @ a)]
        return parts + ([_explicit("bias", g.sum(1))] if layer.bias is not None else [])
    size, reach = slope.square().sum(1), inputs.square().sum(1)
    parts = [("weight", lambda: size * reach, lambda factor: (slope * factor.unsqueeze(1)).T @ inputs)]
    return parts + ([("bias", lambda: size, lambda factor: factor @ slope)] if layer.bias is not None else [])


def _conv(layer: nn.Conv2d, inputs: Tensor, slope: Tensor) -> Parts:
    g = slope.flatten(2)
    fan = layer.weight[0].numel()
    some = max(1, AT_ONCE // (fan * g.shape[2]))  # rows whose patches are stored at a time
    parts = []
    for x, out in zip(inputs.split(some), g.split(some), strict=True):
        patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
        parts.append(out @ patches.transpose(1, 2))
    weight = torch.cat(parts).view(len(g), *layer.weight.shape)
    return [_explicit("weight", weight)] + ([_explicit("bias", g.sum(2))] if layer.bias is not None else [])


def _group_norm(layer: nn.GroupNorm, inputs: Tensor, slope: Tensor) -> Parts:
    normal = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    g = slope.flatten(2) if slope.dim() > 2 else slope.unsqueeze(2)
    return [_explicit("weight", (g * normal.view_as(g)).sum(2)), _explicit("bias", g.sum(2))]


def _layer_norm(layer: nn.LayerNorm, inputs: Tensor, slope: Tensor) -> Parts:
    normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    keep = (len(inputs), -1, *layer.normalized_shape)
    parts = [_explicit("weight", (slope * normal).reshape(keep).sum(1))]
    return parts + ([_explicit("bias", slope.reshape(keep).sum(1))] if layer.bias is not None else [])


KNOWN: dict[type[nn.Module], tuple[Callable[[Any], bool], Callable[[Any, Tensor, Tensor], Parts]]] = {
    nn.Linear: (lambda layer: True, _linear),
    nn.Conv2d: (
        lambda layer: layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str),
        _conv,
    ),
    GroupNorm: (lambda layer: layer.affine, _group_norm),
    nn.LayerNorm: (lambda layer: layer.elementwise_affine, _layer_norm),
}
