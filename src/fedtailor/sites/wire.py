"""Parcel: what travels between the server and a site: plain facts, and a tree of tensors, each with its exact type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.errors import InvalidData

TYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
OF_A_ROUND = ("number", "rounds", "clients", "cohort", "mass", "seed", "exchange")  # and its tensors of every client


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message: ``facts`` are numbers, words, lists and tables, ``tree`` holds tensors."""

    facts: Mapping[str, Any]
    tree: Any

    def split(self) -> tuple[str, dict[str, NDArray[Any]]]:
        """Return the facts, and the tensors' places and shapes, as one text, and the numbers of each type as one array.

        Flower asks for every array on its own, each time with its keys and signatures: one array in place of twenty is what keeps
        a message little longer than the model.
        """
        leaves, places = tree.leaves(self.tree), iter(range(len(tree.leaves(self.tree))))
        parts: dict[str, list[NDArray[Any]]] = {}
        for path, leaf in tree.items(self.tree):
            kind = _type(leaf)
            if kind not in TYPES:
                raise InvalidData(f"{path!r} is of type {leaf.dtype} and cannot travel; use one of {', '.join(TYPES)}")
            parts.setdefault(kind, []).append(leaf.detach().cpu().contiguous().numpy().reshape(-1))
        tensors = [[_type(leaf), list(leaf.shape)] for leaf in leaves]
        keys = tree.map(lambda _: next(places), self.tree)
        text = json.dumps({"facts": dict(self.facts), "keys": keys, "tensors": tensors})
        return text, {kind: np.concatenate(several) for kind, several in parts.items()}

    @property
    def size(self) -> int:
        """The bytes of it, as taken apart."""
        text, arrays = self.split()
        return len(text.encode()) + sum(array.nbytes for array in arrays.values())

    @staticmethod
    def joined(text: str, arrays: Mapping[str, NDArray[Any]]) -> Parcel:
        """Return the parcel that ``split`` took apart; one that does not fit together is refused."""
        try:
            content = json.loads(text)
            facts, keys, tensors = dict(content["facts"]), content["keys"], content["tensors"]
            if sorted(tree.leaves(keys)) != list(range(len(tensors))):
                raise ValueError("its tensors are not those it names")
            leaves = _cut(tensors, arrays)
            return Parcel(facts, tree.map(lambda place: leaves[place], keys))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidData(f"a message cannot be read ({error}); let both sides use the same version of fedtailor") from error


def _type(leaf: torch.Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _cut(tensors: Sequence[Any], arrays: Mapping[str, NDArray[Any]]) -> list[torch.Tensor]:
    """Return the tensors of these types and shapes, in order, from the numbers of each type; none may be left over."""
    used, leaves = dict.fromkeys(arrays, 0), []
    for kind, shape in tensors:
        numbers, begin = arrays[kind], used[kind]
        if kind not in TYPES or numbers.dtype.name != kind or numbers.ndim != 1:
            raise ValueError(f"it holds numbers of type {numbers.dtype} as {kind!r}")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"a tensor cannot be of shape {shape}")
        used[kind] = begin + math.prod(shape)
        leaves.append(torch.from_numpy(np.array(numbers[begin : used[kind]], order="C").reshape(shape)))
    if any(used[kind] != len(numbers) for kind, numbers in arrays.items()):
        raise ValueError("its tensors are not as long as it says")
    return leaves


def round_facts(rnd: Round) -> dict[str, Any]:
    """Return a round as plain numbers and lists."""
    known = {name: getattr(rnd, name) for name in OF_A_ROUND}
    return {**known, "weights": rnd.weights.tolist(), "ranks": rnd.ranks.tolist()}


def round_of(facts: Mapping[str, Any]) -> Round:
    """Return the round that a message is about."""
    try:
        weights = torch.tensor(facts["weights"], dtype=torch.float64)
        ranks = torch.tensor(facts["ranks"], dtype=torch.int64)
        return Round(**{name: facts[name] for name in OF_A_ROUND}, weights=weights, ranks=ranks)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidData(f"a round cannot be read ({error}); let both sides use the same version of fedtailor") from error
