"""Run: what training leaves behind, to look at and to predict with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, opened
from fedtailor.data.columns import is_frame
from fedtailor.data.federation import Federation
from fedtailor.data.tokens import as_tokens
from fedtailor.errors import ModelMismatch
from fedtailor.runs.record import Record, per_client
from fedtailor.runs.store import Store
from fedtailor.task import Task

if TYPE_CHECKING:
    import pandas as pd


class _Plan(Protocol):
    @property
    def federation(self) -> Federation: ...

    @property
    def on_host(self) -> _Plan: ...

    def sent_after(self, shared: Any, server: Any, done: int, rounds: int) -> Any: ...


class _Engine(Protocol):
    @property
    def plan(self) -> _Plan: ...

    def personal(self, shared: Any, client: int, store: Store) -> Any: ...

    def personal_chunks(self, shared: Any, store: Store) -> Iterator[tuple[NDArray[np.int64], Any]]: ...

    def newborn(self, shared: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Personal(Sequence[Any]):
    """The tree each client predicts with, by position or by name; made when asked for.

    What the server sends to one client only is in it as well (``algorithms.base.RECEIVED``).
    """

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

    @cached_property
    def sent(self) -> Any:
        """Return what the server would send now, to everyone and to each client (``engine.base.Sent``)."""
        done = self.summary.get("kept_round", len(self.history) - 1) + 1
        return self.engine.plan.on_host.sent_after(self.shared, self.server, done, len(self.history))

    def __repr__(self) -> str:
        score, name = self.task.score, self.task.score.name
        own, common = self.summary[f"{name}_personal"], self.summary[f"{name}_global"]
        shared = "no shared model" if common is None else f"{name}_global={score.cell(common)}"
        own = float("nan") if own is None else own
        return f"Run({self.summary['algorithm']}, {self.summary['rounds']} rounds, {name}_personal={score.cell(own)}, {shared})"

    def predict(self, client: int | str, x: ArrayLike | Tensor | pd.DataFrame, as_frame: bool = False) -> Any:
        """Return a client's logits (one number per row in regression on one target).

        x holds features; where the federation came from a table, it may be a DataFrame with the table's columns. With
        ``as_frame`` the answer is a DataFrame: the prediction of every row (in the label's units) and, of classes, their
        probabilities.
        """
        i = self.federation.index(client)
        rows = self._of_client(self._features(x, self.federation.names[i]), i)
        return (
            self._frame(self._answer(self.personal[i], rows, raw=True), x) if as_frame else self._answer(self.personal[i], rows)
        )

    def _features(self, x: Any, client: str | None = None) -> Any:
        if not is_frame(x):
            return x
        if self.federation.schema is None:
            raise ModelMismatch("the federation came from no table, so a DataFrame's columns mean nothing to it; give an array")
        return self.federation.schema.encode(x, client)

    def _of_client(self, x: Any, i: int) -> Any:
        """Return rows with the number of the client's network among their parts, where clients have different ones."""
        packing = self.federation.packing
        if packing is None or not packing.mixed:
            return x
        return packing.with_architecture(x, int(self.federation.train.client(i)[0][0, -1]))

    def _frame(self, logits: Tensor, x: Any) -> pd.DataFrame:
        import pandas as pd

        schema, classes = self.federation.schema, self.federation.classes
        names = classes or [str(i) for i in range(logits.shape[-1])]
        columns = self.task.kind.written(logits, names, (lambda values: values) if schema is None else schema.restore)
        return pd.DataFrame(columns, index=x.index if is_frame(x) else None)

    def predict_global(self, x: ArrayLike | Tensor | pd.DataFrame) -> Tensor:
        """Return the shared model's logits, with no local step: what a newcomer predicts with."""
        x = self._features(x)
        differ = self.federation.packing is not None and self.federation.packing.mixed
        if differ or not tree.leaves(self.sent.newcomer):
            raise ModelMismatch(f"{self.summary['algorithm']} has no shared model; use predict(client, x)")
        return self._answer(self.engine.newborn(self.sent), x)

    def tree_of(self, i: int) -> Any:
        """Return the tree with which the i-th client predicts."""
        name = self.federation.names[i]
        for engine, store, sent in self._parties():
            positions = engine.plan.federation.positions
            if name in positions:
                return engine.personal(sent, positions[name], store)
        raise KeyError(name)

    def personal_chunks(self) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Yield everybody's personal trees, some clients at a time: (their numbers, leaves [clients, ...])."""
        for engine, store, sent in self._parties():
            numbers = np.array([self.federation.positions[name] for name in engine.plan.federation.names], np.int64)
            for ids, stack in engine.personal_chunks(sent, store):
                yield numbers[ids], stack

    def _parties(self) -> list[tuple[_Engine, Store, Any]]:
        """Return the clients that were trained, and those that were held out: (engine, store, what they are sent)."""
        trained = [(self.engine, self.store, self.sent)]
        return trained if self.outside is None else [*trained, (*self.outside, self.sent.to_newcomers())]

    def model(self, client: int | str | None = None) -> dict[str, Tensor]:
        """Return a client's model (or the shared one) as name -> tensor, copied, with what is frozen in it.

        It is refused where no single model gives the predictions.
        """
        state = {} if client is None else self.personal[self.federation.index(client)]
        received, own = (self.sent.newcomer, {}) if client is None else opened(self.shared, state)
        parts = {**received.get("model", {}), **own.get("model", {})}
        model = {name: parts[name].clone() for name in self.task.names if name in parts}
        fits = tuple(model) == self.task.names
        if fits and client is not None:
            x = self.federation.few(4)[0]
            with torch.no_grad():
                fits = torch.allclose(self.task.apply(model, x), self._answer(state, x, raw=True))
        if not fits:
            raise ModelMismatch(f"no single model gives {self.summary['algorithm']}'s predictions there; use predict or personal")
        return {**model, **{name: value.clone() for name, value in self.task.frozen.items()}}

    def state_dict(self, client: int | str | None = None) -> dict[str, Tensor]:
        """Return ``model`` with torch's names, for ``module.load_state_dict(..., strict=False)``: integer buffers stay behind."""
        return {name.removeprefix(tree.BUFFER): value for name, value in self.model(client).items()}

    def per_client(self) -> Iterator[tuple[str, dict[str, float | None]]]:
        """Yield (name, measures on the client's own test rows) of every client that took part."""
        yield from per_client(self.engine.plan.federation.names, self.clients)

    def record(self, label: str | None = None) -> Record:
        """Return the measures and settings without the parameters: what a report is made of."""
        return Record(
            label=label or self.summary["algorithm"],
            kind=self.task.kind,
            summary=self.summary,
            rounds=self.history,
            names=self.engine.plan.federation.names,
            clients=self.clients,
            settings=self.summary["settings"],
            notes=self.summary.get("notes", self.federation.notes),
        )

    def _answer(self, personal: Any, x: ArrayLike | Tensor, raw: bool = False) -> Tensor:
        like = self.federation.train.x
        if self.federation.tokens:
            rows = as_tokens(x, self.federation.tokens, like.shape[1])
        elif self.federation.packing is not None:
            rows = self.federation.packing.pack(x).to(like)
        else:
            rows = (x if isinstance(x, Tensor) else torch.tensor(np.asarray(x))).to(like)
        if not self.federation.tokens and rows.shape[1:] != like.shape[1:]:
            want, have = tuple(like.shape[1:]), tuple(rows.shape[1:])
            shape = ", ".join(["rows", *map(str, want)])
            raise ModelMismatch(f"rows have shape {have} but the model was trained on {want}; give x of shape ({shape})")
        with torch.no_grad():
            logits = self.algorithm.predict(self.task, *opened(self.shared, personal), rows)
        single = not raw and self.task.kind.least_squares and self.federation.train.y.dim() == 1
        return logits.reshape(len(rows)) if single else logits
