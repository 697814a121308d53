"""Pact: what sites agree on where the server may see sums of uploads only, and never one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor import tree
from fedtailor.engine.base import Plan
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared
from fedtailor.errors import InvalidArgument
from fedtailor.privacy.accountant import Spend, delta_of, epsilon, noise_for
from fedtailor.server.guard import norm
from fedtailor.server.reduce import Even, Mean, Reduce
from fedtailor.sites import masks

LARGEST = {64: 2.0**20, 32: 16.0}  # numbers in an upload, times the client's weight, unless something else is agreed on
REPEATS = 3  # sums that a site helps to open for one exchange: the first, and where it was void, another two
CROWD = ("user_clip", "user_noise", "user_target_epsilon", "user_delta", "user_seed")  # settings that hide whole clients


@dataclass(frozen=True)
class Pact:
    """Sums of fewer than ``threshold`` uploads are never opened.

    Numbers are integers of ``bits`` bits, none larger than ``largest``. With a ``clip`` every site bounds the norm of its upload
    and adds its part of a noise of deviation ``noise`` times ``clip``; ``delta`` is that of the epsilon it amounts to.
    """

    clients: int
    threshold: int
    bits: int = 64
    largest: float = LARGEST[64]
    clip: float | None = None
    noise: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in masks.WORDS:
            raise InvalidArgument(f"bits must be 32 or 64, not {self.bits!r}")
        if not (math.isfinite(self.largest) and self.largest > 0):
            raise InvalidArgument(f"largest must be a number greater than 0, not {self.largest!r}")
        if not 2 <= self.threshold <= self.clients:
            raise InvalidArgument(
                f"threshold must be from 2 (a sum of one is an upload) to {self.clients}, all sites, not {self.threshold}"
            )
        masks.scale_of(self.bits, self.clients, self.largest)

    @property
    def scale(self) -> int:
        return masks.scale_of(self.bits, self.clients, self.largest)

    @property
    def error(self) -> float:
        """Return by how much a number in the mean of uploads may differ from the exact one, where they weigh the same."""
        return masks.error_of(self.scale)

    @property
    def repeats(self) -> int:
        """Return how many sums a site helps to open for one exchange; with noise one, since each costs privacy."""
        return REPEATS if self.clip is None else 1

    def needed(self, members: int) -> int:
        """Return how many of the members of a sum must be there to open it: always more than half, so that the server cannot
        get both halves of what hides a site by telling sites different stories."""
        return max(self.threshold, members // 2 + 1)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    # -- what a site sends -------------------------------------------------------------------------------------------
    def flat(self, upload: Any, weight: float | None) -> NDArray[np.float64]:
        """Return an upload as one vector, clipped, times the client's weight, which then comes last."""
        factor = 1.0
        if self.clip is not None:
            factor = self.clip / max(self.clip, norm(upload))
        leaves = [leaf.detach().reshape(-1).double().numpy() for leaf in in_order(upload)]
        values = np.concatenate([*leaves, np.zeros(0)]) * factor
        return values if weight is None else np.append(values * weight, weight)

    def hidden(self, values: NDArray[np.float64], needed: int) -> NDArray[np.float64]:
        """Return the vector with a site's part of the noise: that of any ``needed`` - 1 sites together is all that was agreed on,
        so neither the server nor one of the sites, which knows its own, sees less."""
        if self.clip is None:
            return values
        from fedtailor.data.secret import Secret

        draw = Secret.fresh().generator(0)
        return values + self.noise * self.clip / math.sqrt(needed - 1) * draw.standard_normal(len(values))

    def encode(self, values: NDArray[np.float64]) -> masks.Words:
        return masks.encode(values, self.bits, self.scale, self.largest)

    # -- what the server makes of it ---------------------------------------------------------------------------------
    def mean(self, total: masks.Words, count: int, like: Any, weighted: bool) -> Any:
        """Return the mean of ``count`` uploads, of the form of ``like``, from their sum."""
        values = masks.decode(total, self.bits, self.scale)
        values = values[:-1] / values[-1] if weighted else values / count
        leaves = tree.leaves(like)
        parts = torch.from_numpy(values).split([leaf.numel() for leaf in in_order(like)])
        placed = dict(zip(map(id, in_order(like)), parts, strict=True))
        return tree.refill(like, iter([placed[id(leaf)].view(leaf.shape).to(leaf.dtype) for leaf in leaves]))

    def note(self) -> str:
        """Return what a report says of it."""
        return (
            f"The server saw sums of {self.threshold} sites' uploads or more, and no single one, which nobody could check; "
            f"a number in their mean is exact to {self.error:.1e} where sites weigh the same."
        )

    def words(self, numbers: int) -> list[str]:
        """Return what a site's owner is told of an upload of so many numbers."""
        noise = ""
        if self.clip is not None:
            noise = f", clipped to norm {self.clip:g}, with this site's part of a noise of {self.noise:g} times that"
        return [
            f"    all of it under masks ({numbers:,} integers of {self.bits} bits){noise}: the server can open a sum of "
            f"{self.threshold} sites' or more and no single one; numbers are rounded to steps of {2 * self.error:.1e}",
        ]

    def spent(self, visits: int, exchanges: int) -> dict[str, Any]:
        """Return what the summary says of the privacy of whole sites."""
        if self.clip is None:
            return {}
        cost = epsilon([Spend(1.0, visits, exchanges)], self.noise, self.delta) if visits else 0.0
        return {
            "user_epsilon": cost,
            "user_delta": self.delta,
            "user_noise": self.noise,
            "user_clip": self.clip,
            "user_noise_secret": True,
        }


def pact_of(terms: Mapping[str, Any], options: Options, clients: int, exchanges: int = 1) -> Pact:
    """Return what is agreed on, from settings: two thirds of a round's sites must be there, unless something else is said."""
    size, bits = options.size(clients), int(terms.get("bits") or 64)
    threshold = int(terms.get("threshold") or math.ceil(2 * size / 3))
    if threshold > size:
        raise InvalidArgument(
            f"threshold is {threshold}, and only {size} sites take part in a round; use less, or a larger cohort"
        )
    largest = float(terms.get("largest") or LARGEST.get(bits, 0.0))
    clip, noise, target = options.user_clip, options.user_noise, options.user_target_epsilon
    if clip is None:
        if noise is not None or target is not None:
            raise InvalidArgument("privacy of whole sites clips their uploads; give user_clip as well")
        return Pact(clients, threshold, bits, largest)
    if (noise is None) == (target is None):
        raise InvalidArgument("give user_noise or user_target_epsilon, one of them, beside user_clip")
    if options.user_seed is not None:
        raise InvalidArgument("every site draws its own part of the noise, and nobody else knows it; leave user_seed out")
    if options.weights != "uniform":
        raise InvalidArgument("weights by rows give a large site away; use weights='uniform' with user_clip")
    delta = delta_of(clients) if options.user_delta is None else options.user_delta
    if noise is None:
        noise = noise_for(float(target or 0), [[Spend(1.0, options.rounds, exchanges)]], [delta])
    return Pact(clients, threshold, bits, largest, clip, noise, delta)


def without_crowd(options: Options) -> Options:
    """Return the settings without those that the pact has taken over."""
    return options.but(**dict.fromkeys(CROWD))


def in_order(upload: Any) -> list[torch.Tensor]:
    """Return the leaves of an upload by their paths, an order that does not depend on how a dict was filled."""
    return [leaf for _, leaf in sorted(tree.items(upload), key=lambda item: item[0])]


def check_pact(ready: Prepared, likes: Sequence[Any]) -> None:
    """Refuse methods whose server needs more of the uploads than their mean."""
    plan: Plan = ready.plan
    shared, _ = plan.algorithm.init_server(plan.task)
    rounds, everyone = ready.options.rounds, np.arange(len(plan.federation))
    for number in {0, rounds - 1}:  # a method may begin or end in a way of its own
        weighs(plan.reducer(shared, plan.round(number, rounds, everyone)), ready)
    for like in likes:
        for path, leaf in tree.items(like):
            if not leaf.is_floating_point():
                raise InvalidArgument(f"the upload {path!r} is of type {leaf.dtype} and cannot be averaged; upload floats")


def weighs(reducer: Reduce, ready: Prepared) -> bool:
    """Return whether a client's upload counts by its rows; a method whose server wants no mean is refused."""
    if type(reducer) not in (Mean, Even):
        name = type(ready.algorithm).__name__
        raise InvalidArgument(
            f"{name} cannot run with secure sums: its server needs single uploads, not their mean; use a method that averages "
            "(fedtailor list algorithms), or leave secure out"
        )
    return type(reducer) is Mean and ready.options.weights == "size"
