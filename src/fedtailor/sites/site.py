"""Site: answers the server's messages from its own rows. What it keeps is on its disk; what it sends is in the reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedtailor import tree
from fedtailor.data.split import Split
from fedtailor.engine.base import Sent, lift, one_thread
from fedtailor.engine.loop import answer, visit
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.private import bound_to
from fedtailor.errors import FedtailorError, InvalidData
from fedtailor.metrics.client import measure
from fedtailor.runs.store import Store
from fedtailor.sites.memory import BORN, Memory
from fedtailor.sites.pact import weighs
from fedtailor.sites.questions import Questions
from fedtailor.sites.secure import MASK, REVEAL, SHARE, Seat
from fedtailor.sites.trial import SUMMARY, summarised
from fedtailor.sites.wire import Parcel, round_of

TRAIN, EVALUATE, FINISH, HELLO = "train", "evaluate", "finish", "hello"


@dataclass(frozen=True, eq=False)
class Site:
    """One client: ``ready`` is what ``Agreed.at_site`` made of its rows, ``memory`` where its state is kept."""

    ready: Prepared
    memory: Memory
    digest: str | None = None  # of what this site agreed to
    ends: Callable[[Site, Mapping[str, Any], Sent, Store], None] | None = (
        None  # what a site does with its model when the run is over
    )
    seat: Seat | None = None  # where the server may see sums of uploads only
    visits: int | None = None  # rounds that its privacy is charged for (None: all)
    trials: Callable[[Mapping[str, Any]], Site] | None = None  # the site with another method, for an advice; None: not allowed
    advises: bool = False  # whether it sums up its rows

    @property
    def name(self) -> str:
        return self.ready.plan.federation.names[0]

    @property
    def questions(self) -> Questions:
        """Return what it was asked to release so far, under privacy."""
        visits = self.ready.options.rounds if self.visits is None else self.visits
        return Questions(self.memory.folder, visits * self.ready.algorithm.exchanges)

    @one_thread()
    def answer(self, asked: Parcel) -> Parcel:
        """Return the reply to a message; where it cannot be answered, a reply that says why."""
        said = {"client": self.name, "action": asked.facts.get("action"), "run": asked.facts.get("run")}
        try:
            if asked.facts.get("client") != self.name:
                raise InvalidData(f"a message for {asked.facts.get('client')!r} came to {self.name}; check the sites' keys")
            if asked.facts.get("agreed") != self.digest:
                raise InvalidData(
                    "the server's config.toml or schema.toml is not the one this site agreed to; compare the two folders"
                )
            action = self._for(asked.facts)._actions().get(str(asked.facts.get("action")))
            if action is None:
                raise InvalidData(f"the server asks for {asked.facts.get('action')!r}, which this version does not know; upgrade")
            facts, upload = action(asked)
        except FedtailorError as error:
            return Parcel({**said, "error": str(error)}, {})
        return Parcel({**said, **facts}, upload)

    def _actions(self) -> dict[str, Callable[[Parcel], tuple[dict[str, Any], Any]]]:
        usual: dict[str, Callable[[Parcel], tuple[dict[str, Any], Any]]] = {
            HELLO: self._hello,
            TRAIN: self._train,
            EVALUATE: self._evaluate,
            FINISH: self._finish,
        }
        if self.seat is not None:
            usual |= {SHARE: self.seat.share, MASK: self.seat.mask, REVEAL: self.seat.reveal}
        if self.advises:
            usual[SUMMARY] = lambda asked: summarised(self.ready)
        return usual

    def _for(self, asked: Mapping[str, Any]) -> Site:
        """Return the site that a message is for: itself, or, for an advice that its owner allows, one with another method."""
        if "trial" not in asked:
            return self
        if self.trials is None:
            raise InvalidData(f"the owner of {self.name} does not take part in advice; it would take sites client --allow-advice")
        return self.trials(asked["trial"])

    def _hello(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        weighted = self.ready.options.weights == "size"
        rows = int(self.ready.plan.federation.train.sizes[0]) if weighted else None  # nobody else needs to know
        return {"versions": self.memory.versions(asked.facts["run"]), "rows": rows}, {}

    def _train(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        """Take part in a round; the new state is on disk before the upload leaves."""
        facts, rnd = asked.facts, round_of(asked.facts["round"])
        if rnd.number not in range(self.ready.options.rounds) or rnd.exchange not in range(self.ready.algorithm.exchanges):
            raise InvalidData(f"the server asks for round {rnd.number}, exchange {rnd.exchange}, which was not agreed on")
        base, personal = self.memory.recall(facts["run"], facts["version"])
        plan = self.ready.plan
        if plan.uses is not None:  # the same question has the same answer; any other is answered with other noise
            plan = bound_to(plan, facts["run"], self.questions.admit(facts["run"], asked, personal))
        upload, personal = visit(plan, (asked.tree["shared"], rnd), 0, asked.tree["own"], personal)
        self._check(upload, personal)
        self.memory.keep(facts["run"], facts["next"], personal)
        self.memory.forget(facts["run"], facts["keep"])
        said = {"base": base, "version": facts["next"]}
        if self.seat is None:
            return said, upload
        weighted = weighs(plan.reducer(asked.tree["shared"], rnd), self.ready)
        rows = float(plan.federation.train.sizes[0]) if weighted else None
        return {**said, **self.seat.enter(facts, upload, rows)}, {}

    def _check(self, upload: Any, personal: Any) -> None:
        for part, branch in (("upload", upload), ("personal state", personal)):
            for path, leaf in tree.items(branch):
                if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                    raise InvalidData(f"training diverged at {self.name}: {path} of its {part} is not finite; use a smaller lr")

    def _evaluate(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        base, personal = self.memory.recall(asked.facts["run"], asked.facts["version"])
        federation = self.ready.plan.federation
        splits = {"test": federation.test, **({"val": federation.val} if federation.val is not None else {})}
        scores = {part: self._scores(asked.tree, personal, split) for part, split in splits.items()}
        return {"base": base, "version": base, "scores": scores}, {}

    def _scores(self, sent: Mapping[str, Any], personal: Any, split: Split) -> dict[str, float | None]:
        """Return the measures of this client's models on its own rows of a split."""
        plan = self.ready.plan
        x, y = split.client(0)
        own, common, _ = answer(plan, (sent["shared"], sent["newcomer"]), 0, sent["own"], personal, x, True, False)
        mask = torch.ones(1, len(y), dtype=torch.bool)
        measured = measure(plan.task, own[None], None if common is None else common[None], y[None], mask)
        return {name: None if np.isnan(values[0]) else float(values[0]) for name, values in measured.items()}

    def _finish(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        """Keep what the client predicts with from now on."""
        base, personal = self.memory.recall(asked.facts["run"], asked.facts["version"])
        if self.ends is not None:
            store = Store(1)
            if base != BORN:
                store.put(np.array([0]), lift(personal))
            self.ends(self, asked.facts, sent_to(asked.tree), store)
        return {"base": base, "version": base}, {}


def sent_to(branch: Mapping[str, Any]) -> Sent:
    """Return what a site was sent, as an engine that has this client alone takes it."""
    own, newcomer = branch["own"], branch["newcomer"]
    return (
        Sent(branch["shared"], lambda ids: newcomer if ids is None else lift(own)) if own or newcomer else Sent(branch["shared"])
    )
