"""Trees: nested dicts of tensors, and the few operations that everything else is built on.

A *model* is the flat case, name -> tensor. Names that start with ``buffer:`` are statistics that travel and are
averaged with the model but are not trained (batch norm's running mean and variance).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load as _load
from safetensors.torch import save as _save
from torch import Tensor

Tree = Mapping[str, Any]
BUFFER = "buffer:"


def map(fn: Callable[..., Any], *trees: Any) -> Any:
    """Apply ``fn`` leaf by leaf. All trees must have the same keys."""
    first = trees[0]
    if isinstance(first, Tensor) or not isinstance(first, Mapping):  # the first question is the quick one
        return fn(*trees)
    for other in trees[1:]:
        if not isinstance(other, Mapping) or other.keys() != first.keys():
            theirs = sorted(other) if isinstance(other, Mapping) else type(other).__name__
            raise ValueError(f"trees differ: {sorted(first)} against {theirs}")
    return {key: map(fn, *(tree[key] for tree in trees)) for key in first}


def items(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf, with paths such as ``a/b/c``, in insertion order."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, value in tree.items():
        yield from items(value, f"{path}/{key}" if path else key)


def leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, Mapping):
        return [tree]
    return [leaf for value in tree.values() for leaf in leaves(value)]


def refill(tree: Any, values: Iterator[Any]) -> Any:
    """Return a tree with the same keys, and its leaves taken from ``values`` in order."""
    return map(lambda _: next(values), tree)


def is_buffer(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith(BUFFER)


def trainable(model: Tree) -> dict[str, Tensor]:
    """Return a flat model without its buffers."""
    return {name: value for name, value in model.items() if not name.startswith(BUFFER)}


def add(a: Any, b: Any, scale: float | Tensor = 1.0) -> Any:
    """Return a + scale * b."""
    if isinstance(scale, (int, float)) and scale == 1.0:
        return map(torch.add, a, b)
    return map(lambda x, y: x + scale * y, a, b)


def sub(a: Any, b: Any) -> Any:
    return map(torch.sub, a, b)


def scale(a: Any, factor: float | Tensor) -> Any:
    return map(lambda x: x * factor, a)


def scale_trainable(tree: Any, factor: float | Tensor) -> Any:
    """Multiply the parameters by ``factor``; buffers stay as they are."""
    return {
        key: value if key.startswith(BUFFER) else scale_trainable(value, factor) if isinstance(value, Mapping) else value * factor
        for key, value in tree.items()
    }


def move(model: Any, delta: Any, lr: float | Tensor) -> Any:
    """Return model + lr * delta; buffers move all the way (a variance must not be extrapolated)."""
    return add(model, delta if isinstance(lr, (int, float)) and lr == 1.0 else scale_trainable(delta, lr))


def mix(a: Any, b: Any, t: float | Tensor) -> Any:
    """Return (1 - t) a + t b."""
    return map(lambda x, y: (1 - t) * x + t * y, a, b)


def zeros(a: Any) -> Any:
    return map(torch.zeros_like, a)


def clone(a: Any) -> Any:
    return map(lambda x: x.detach().clone(), a)


def where(condition: Tensor, a: Any, b: Any) -> Any:
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def dot(a: Any, b: Any) -> Tensor:
    """Return the inner product over all leaves."""
    return sum(leaves(map(lambda x, y: (x * y).sum(), a, b)), torch.zeros(()))


def dist2(a: Any, b: Any) -> Tensor:
    """Return the squared Euclidean distance over all leaves."""
    return sum(leaves(map(lambda x, y: ((x - y) ** 2).sum(), a, b)), torch.zeros(()))


def pick(model: Tree, names: Collection[str]) -> dict[str, Any]:
    return {name: model[name] for name in model if name in names}


def drop(model: Tree, names: Collection[str]) -> dict[str, Any]:
    return {name: model[name] for name in model if name not in names}


def size(tree: Any) -> int:
    """Return how many numbers a tree holds."""
    return sum(leaf.numel() for leaf in leaves(tree))


def shapes(tree: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and type of every leaf, which must stay the same from round to round."""
    return {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in items(tree)}


def pack(tree: Any) -> bytes:
    """Return a tree as bytes: safetensors, never pickle. This is what is sent and stored."""
    # numbered, because two paths may be equal as text; cloned, because two leaves may be one tensor
    owned = (leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for leaf in leaves(tree))
    flat = {str(i): leaf for i, leaf in enumerate(owned)}
    numbers = iter(range(len(flat)))
    return _save(flat, metadata={"keys": json.dumps(map(lambda _: next(numbers), tree))})


def unpack(data: bytes) -> Any:
    """Return the tree that ``pack`` wrote, with its key order and empty branches."""
    flat = _load(data)
    head = int.from_bytes(data[:8], "little")
    keys = json.loads(json.loads(data[8 : 8 + head])["__metadata__"]["keys"])
    return map(lambda number: flat[str(number)], keys)
