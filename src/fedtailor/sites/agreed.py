"""Agreed: what all sites and the server know before anybody looks at a row, and what each makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.data.schema import Schema
from fedtailor.data.secret import Secret
from fedtailor.data.split import Split
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.sites.pact import Pact, check_pact, without_crowd
from fedtailor.task.kinds import Kind, kind_of
from fedtailor.theory.resolve import Problem

PRETEND_ROWS = 8  # of the rows that the server tries a method on, to know the shape of an upload


@dataclass(frozen=True, eq=False)
class Rows:
    """The look of a row: the shape of one, the kind of target, the number of classes (or of outputs)."""

    shape: tuple[int, ...]
    kind: Kind
    labels: int = 0
    outputs: int = 0  # of a matrix of targets; 0: one number per row
    classes: tuple[str, ...] = ()
    validation: bool = True
    public: Tensor | None = None
    schema: Schema | None = None  # how a table's columns become features

    @staticmethod
    def of(federation: Federation) -> Rows:
        """Return what the rows of a federation look like."""
        if federation.tokens:
            raise InvalidArgument("sites cannot learn from tokens yet; use tables or images, or another engine")
        if federation.facts:
            raise InvalidArgument("sites do not know facts about clients; give the method numbers, or use another engine")
        y = federation.train.y
        return Rows(
            shape=tuple(federation.train.x.shape[1:]),
            kind=federation.kind,
            labels=federation.labels,
            outputs=int(np.prod(y.shape[1:])) if y.dim() > 1 else 0,
            classes=federation.classes,
            validation=federation.val is not None,
            public=federation.public,
        )

    def pretend(self, names: Sequence[str]) -> Federation:
        """Return clients of these names with rows that are nobody's: only their shapes mean anything."""
        count = PRETEND_ROWS * len(names)
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(count, *self.shape, generator=draw)
        if self.kind.softmax:
            y = torch.arange(count) % max(1, self.labels)
        else:
            y = (
                torch.arange(count * max(1, self.outputs))
                .remainder(2)
                .to(x)
                .view(count, *([self.outputs] if self.outputs else []))
            )
        split = Split(x, y, np.arange(len(names) + 1) * PRETEND_ROWS)
        return Federation(
            train=split,
            test=split,
            val=split if self.validation else None,
            public=self.public,
            names=tuple(names),
            kind=kind_of(self.kind),
            labels=self.labels,
            name="sites",
            classes=self.classes,
            schema=self.schema,
        )


@dataclass(frozen=True, eq=False)
class Agreed:
    """The method, the model, the options, the names of the clients, and what rows look like.

    ``prepare`` runs at every site, on its rows alone, and at the server, on none.
    """

    algorithm: Algorithm
    model: Any  # a name; within one process a module will do
    options: Options
    clients: tuple[str, ...]
    rows: Rows
    pact: Pact | None = None  # where the server may see sums of uploads only

    def __post_init__(self) -> None:
        refuse(self)

    @cached_property
    def settled(self) -> Algorithm:
        """The method with the numbers that it leaves to the clients' number and the rounds; what needs their rows is refused."""
        size = self.options.size(len(self.clients))
        problem = Problem(
            None,  # type: ignore[arg-type] # whatever looks at the task, the rows or the facts is refused
            None,  # type: ignore[arg-type]
            self.options.rounds,
            size,
            self.options.batch_size,
            self.options.weights,
        )
        try:
            return self.algorithm.resolve(problem)[0]
        except (AttributeError, TypeError):
            name = type(self.algorithm).__name__
            raise InvalidArgument(
                f"{name} with these settings reads its step sizes off all clients' rows, which no site has; give numbers"
            ) from None

    @cached_property
    def asked(self) -> Options:
        """The options, with the score settled: which one leads must not depend on anybody's rows."""
        return self.options.but(score=self.options.score or self.rows.kind.score.name)

    def at_server(self) -> Prepared:
        """Return what the server needs: everything but rows."""
        ready = prepare(self.settled, self.rows.pretend(self.clients), self.model, without_crowd(self.asked))
        if self.pact is not None:
            check_pact(ready, [self.example_upload(ready, exchange) for exchange in range(ready.algorithm.exchanges)])
        return ready

    def at_site(self, own: Federation, secret: Secret | None = None) -> Prepared:
        """Return what a site needs, from its own rows alone."""
        if len(own) != 1 or own.names[0] not in self.clients:
            raise InvalidData(f"a site holds the rows of one of the clients agreed on, {', '.join(self.clients)}")
        self.check_rows(own)
        options = without_crowd(self.asked).but(cohort=1.0, new_clients=0.0)
        ready = prepare(self.settled, own, self.model, options, secret)
        task = replace(ready.plan.task, clients=len(self.clients))
        return replace(ready, plan=replace(ready.plan, task=task))

    def check_rows(self, own: Federation) -> None:
        """Refuse rows that are not of the form agreed on."""
        have = Rows.of(own)
        for fact in ("shape", "kind", "labels", "outputs", "validation"):
            mine, theirs = getattr(have, fact), getattr(self.rows, fact)
            if mine != theirs:
                raise InvalidData(f"the rows of {own.names[0]} have {fact} {mine}, but {theirs} was agreed on; check the schema")

    def upload_like(self, ready: Prepared, exchange: int = 0) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the name, shape and type of everything in an upload."""
        return tree.shapes(self.example_upload(ready, exchange))

    def example_upload(self, ready: Prepared, exchange: int = 0) -> Any:
        """Return an upload, made by trying the method on the rows at hand: at the server nobody's."""
        plan, ids = ready.plan, np.array([0])
        algorithm, task = plan.algorithm, plan.task
        shared, server = algorithm.init_server(task)
        personal: Any = None
        upload: Any = {}
        for now in range(exchange + 1):
            rnd = plan.round(1, 2, ids, now)
            received = plan.sent(shared, server, rnd).to(0)
            data = plan.feed_of(rnd).one(0, 1)
            if personal is None:
                personal = algorithm.init_client(task, received, data)
            upload, personal = algorithm.client_update(task, received, personal, data, rnd)
        return upload


def refuse(agreed: Agreed) -> None:
    """Refuse what cannot run at sites, and say why."""
    options, name = agreed.options, type(agreed.algorithm).__name__
    if len(set(agreed.clients)) < max(2, len(agreed.clients)):
        raise InvalidArgument("a network has two sites or more, each with a name of its own; check the list of sites")
    if agreed.algorithm.needs_everyone:
        raise InvalidArgument(
            f"{name} cannot run at sites: it needs all clients in every round, and a site may be away; use another method"
        )
    privacy = agreed.algorithm.opt.privacy
    if privacy is not None and privacy.target_epsilon is not None:
        raise InvalidArgument("the noise for an epsilon depends on how many rows each site has; give the noise itself (dp_noise)")
    crowd: Mapping[str, Any] = {
        key: value for key, value in options.plain().items() if key.startswith("user_") and value is not None
    }
    if crowd and agreed.pact is None:
        raise InvalidArgument(
            f"{next(iter(crowd))} hides whole sites, but the server would see their uploads; give secure = true in [terms]"
        )
    if options.new_clients or options.shift or options.attendance is not None:
        raise InvalidArgument("new_clients, shift and a cohort by name are for simulations; leave them out")
    if options.patience is not None or options.callbacks:
        raise InvalidArgument("patience and callbacks do not work across sites yet; leave them out and look at best_round")
    if options.class_weights == "balanced":
        raise InvalidArgument("balanced class_weights count all sites' rows, which nobody has; give one number per class")
