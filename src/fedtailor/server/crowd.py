"""Privacy of whole clients: a crowd hides each of its members (DP-FedAvg; McMahan, Ramage, Talwar and Zhang 2018, Algorithm 1).

Every client is drawn for a round by itself, its upload is clipped, noise is added to the sum of the uploads, and that is divided
by the number of clients that is expected: nothing that the server makes of it depends much on whether any one client took part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.data import rng
from fedtailor.data.secret import Secret
from fedtailor.server.reduce import Mean
from fedtailor.task.device import in_double


@dataclass(frozen=True)
class Crowd:
    """``clip`` bounds the norm of an upload, the noise on their sum has deviation ``noise * clip``; ``share`` of the ``clients``
    is expected in a round. The draws and the noise come from ``secret``."""

    clip: float
    noise: float
    share: float
    clients: int
    secret: Secret

    @property
    def expected(self) -> int:
        """The number of clients in a round, on average: what the server reckons with."""
        return round(self.share * self.clients)

    def drawn(self, keys: NDArray[np.uint64], number: int) -> NDArray[np.bool_]:
        """Return who takes part in a round: each client, by its key, with probability ``share``, whatever the others do."""
        if self.share >= 1:
            return np.ones(len(keys), bool)
        words = rng.mix(self.secret.word("cohort", number), keys)
        return (words >> np.uint64(11)).astype(np.float64) / 2**53 < self.share

    def mean(self, number: int, exchange: int, everyone: bool, empty: bool) -> NoisyMean:
        """Return how a round's uploads become one; ``empty`` where nobody was drawn, and what is uploaded counts for nothing."""
        return NoisyMean(self, self.clients if everyone else self.expected, (number, exchange), empty)


@dataclass(frozen=True)
class NoisyMean(Mean):
    """The sum of clipped uploads, with noise, over the number of uploads that is expected."""

    crowd: Crowd
    expected: int
    place: tuple[int, int]  # round and exchange
    empty: bool = False

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        if not tree.leaves(uploads):  # nothing is sent
            return super().add(state, uploads, weights, places)
        squares = [leaf.reshape(len(weights), -1).square().sum(1) for leaf in tree.leaves(uploads)]
        norms = torch.stack([in_double(square) for square in squares]).sum(0).sqrt()
        factor = (self.crowd.clip / norms.clamp(min=self.crowd.clip)) * float(not self.empty)
        return super().add(state, uploads, factor.cpu(), places)

    def finish(self, state: Any) -> Any:
        total, _ = state
        draw = self.crowd.secret.generator(*self.place)
        wide = self.crowd.noise * self.crowd.clip

        def noisy(leaf: Tensor) -> Tensor:
            noise = torch.from_numpy(np.asarray(draw.standard_normal(tuple(leaf.shape)))).to(leaf)
            return (leaf + wide * noise) / self.expected

        return tree.map(noisy, total)
