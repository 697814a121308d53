"""Parcel: what travels between the server and a site: plain facts, and a tree of tensors, each with its exact type."""

from __future__ import annotations

import json
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
OF_A_ROUND = ("number", "rounds", "clients", "cohort", "mass", "seed", "exchange")  # the rest of a ``Round`` are tensors


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message: ``facts`` are numbers, words, lists and tables, ``tree`` holds tensors."""

    facts: Mapping[str, Any]
    tree: Any

    def split(self) -> tuple[str, list[NDArray[Any]]]:
        """Return the facts and the keys of the tree as one text, and the tensors as arrays of the same types."""
        for path, leaf in tree.items(self.tree):
            if str(leaf.dtype).removeprefix("torch.") not in TYPES:
                raise InvalidData(f"{path!r} is of type {leaf.dtype} and cannot travel; use one of {', '.join(TYPES)}")
        places = iter(range(len(tree.leaves(self.tree))))
        text = json.dumps({"facts": dict(self.facts), "keys": tree.map(lambda _: next(places), self.tree)})
        return text, [leaf.detach().cpu().contiguous().numpy() for leaf in tree.leaves(self.tree)]

    @property
    def size(self) -> int:
        """The bytes of it, as taken apart."""
        text, arrays = self.split()
        return len(text.encode()) + sum(array.nbytes for array in arrays)

    @staticmethod
    def joined(text: str, arrays: Sequence[NDArray[Any]]) -> Parcel:
        """Return the parcel that ``split`` took apart; one that does not fit together is refused."""
        try:
            content = json.loads(text)
            facts, keys = dict(content["facts"]), content["keys"]
            if sorted(tree.leaves(keys)) != list(range(len(arrays))):
                raise ValueError("its tensors are not those it names")
            for array in arrays:
                if array.dtype.name not in TYPES:
                    raise ValueError(f"it holds a tensor of type {array.dtype}")
            return Parcel(facts, tree.map(lambda place: torch.from_numpy(np.array(arrays[place], order="C")), keys))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidData(f"a message cannot be read ({error}); let both sides use the same version of fedtailor") from error


def round_facts(rnd: Round) -> dict[str, Any]:
    """Return what is plain in a round; ``round_tree`` has the rest."""
    return {name: getattr(rnd, name) for name in OF_A_ROUND}


def round_tree(rnd: Round) -> dict[str, Any]:
    return {"weights": rnd.weights, "ranks": rnd.ranks}


def round_of(facts: Mapping[str, Any], branch: Mapping[str, Any]) -> Round:
    """Return the round that a parcel is about."""
    return Round(**{name: facts[name] for name in OF_A_ROUND}, weights=branch["weights"], ranks=branch["ranks"])
