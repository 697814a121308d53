"""Run: what training leaves behind, to look at and to predict with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.data.tokens import as_tokens
from fedtailor.errors import ModelMismatch
from fedtailor.runs.record import Record, per_client
from fedtailor.runs.store import Store
from fedtailor.task import Task


class _Plan(Protocol):
    @property
    def federation(self) -> Federation: ...


class _Engine(Protocol):
    @property
    def plan(self) -> _Plan: ...

    def personal(self, shared: Any, client: int, store: Store) -> Any: ...

    def newborn(self, shared: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Personal(Sequence[Any]):
    """The tree each client predicts with, by position or by name; made when asked for."""

    run: Run
    _made: dict[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.run.federation)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        if isinstance(client, int) and not -len(self) <= client < len(self):
            raise IndexError(f"no client {client}; there are {len(self)}")
        i = self.run.federation.index(client)
        if i not in self._made:
            self._made[i] = self.run.tree_of(i)
        return self._made[i]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run. ``history`` has a record per round, ``summary`` the measures over clients.

    Clients are numbered (and named) as in the federation given to ``run``, held-out ones included; ``clients`` holds the measures
    of those that took part.
    """

    algorithm: Algorithm
    task: Task
    federation: Federation
    shared: Any
    server: Any
    store: Store
    engine: _Engine
    outside: tuple[_Engine, Store] | None  # the clients that were held out
    history: list[dict[str, Any]]
    clients: dict[str, NDArray[np.float64]]
    summary: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "personal", Personal(self))

    personal: Personal = field(init=False)

    def __repr__(self) -> str:
        name = "mse" if self.task.kind == "regression" else "acc"
        own, common = self.summary[f"{name}_personal"], self.summary[f"{name}_global"]
        shared = "no shared model" if common is None else f"{name}_global={common:.4f}"
        return f"Run({self.summary['algorithm']}, {self.summary['rounds']} rounds, {name}_personal={own:.4f}, {shared})"

    def predict(self, client: int | str, x: ArrayLike | Tensor) -> Tensor:
        """A client's logits (one number per row in regression on one target)."""
        i = self.federation.index(client)
        return self._answer(self.personal[i], x)

    def predict_global(self, x: ArrayLike | Tensor) -> Tensor:
        """The shared model's logits, with no local step: what a newcomer predicts with."""
        if not tree.leaves(self.shared):
            raise ModelMismatch(f"{self.summary['algorithm']} has no shared model; use predict(client, x)")
        return self._answer(self.engine.newborn(self.shared), x)

    def tree_of(self, i: int) -> Any:
        """The tree with which the i-th client predicts."""
        name = self.federation.names[i]
        places = [(self.engine, self.store), *([] if self.outside is None else [self.outside])]
        for engine, store in places:
            names = engine.plan.federation.names
            if name in names:
                return engine.personal(self.shared, names.index(name), store)
        raise KeyError(name)

    def model(self, client: int | str | None = None) -> dict[str, Tensor]:
        """A client's model (or the shared one) as name -> tensor, copied, with what is frozen in it; refused where no single
        model gives its predictions."""
        state = {} if client is None else self.personal[self.federation.index(client)]
        parts = {**self.shared.get("model", {}), **state.get("model", {})}
        found = {name: parts[name].clone() for name in self.task.names if name in parts}
        x = self.federation.train.x[:4]
        wanted = None if tuple(found) != self.task.names else self._answer(state, x, raw=True) if client is not None else None
        with torch.no_grad():
            fits = tuple(found) == self.task.names and (wanted is None or torch.allclose(self.task.apply(found, x), wanted))
        if not fits:
            raise ModelMismatch(f"no single model gives {self.summary['algorithm']}'s predictions there; use predict or personal")
        return {**found, **{name: value.clone() for name, value in self.task.held.items()}}

    def state_dict(self, client: int | str | None = None) -> dict[str, Tensor]:
        """``model`` with torch's names, for ``module.load_state_dict(..., strict=False)`` (integer buffers never travel)."""
        return {name.removeprefix(tree.BUFFER): value for name, value in self.model(client).items()}

    def per_client(self) -> Iterator[tuple[str, dict[str, float | None]]]:
        """(name, measures on the client's own test rows) of every client that took part."""
        yield from per_client(self.engine.plan.federation.names, self.clients)

    def record(self, label: str | None = None) -> Record:
        """The measures and settings without the parameters: what a report is made of."""
        return Record(
            label=label or self.summary["algorithm"],
            kind=self.task.kind,
            summary=self.summary,
            rounds=self.history,
            names=self.engine.plan.federation.names,
            clients=self.clients,
            settings=self.summary["settings"],
            notes=self.federation.notes,
        )

    def _answer(self, personal: Any, x: ArrayLike | Tensor, raw: bool = False) -> Tensor:
        like = self.federation.train.x
        if self.federation.tokens:
            rows = as_tokens(x, self.federation.tokens, like.shape[1])
        else:
            rows = (x if isinstance(x, Tensor) else torch.tensor(np.asarray(x))).to(like)
        if not self.federation.tokens and rows.shape[1:] != like.shape[1:]:
            want, have = tuple(like.shape[1:]), tuple(rows.shape[1:])
            shape = ", ".join(["rows", *map(str, want)])
            raise ModelMismatch(f"rows have shape {have} but the model was trained on {want}; give x of shape ({shape})")
        with torch.no_grad():
            logits = self.algorithm.predict(self.task, self.shared, personal, rows)
        single = not raw and self.task.kind == "regression" and self.federation.train.y.dim() == 1
        return logits.reshape(len(rows)) if single else logits
