"""The server's half of a run across sites: whom to ask, what to take, how to go on when somebody is away.

It is the loop engine's round with messages in the middle: cohorts are drawn by our seed and the clients' names, uploads are
summed in the canonical order, so the numbers are those of a run in one process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.engine.base import Ids, Sent, lift, one_thread
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.setup import drawn
from fedtailor.engine.state import State
from fedtailor.errors import Diverged, InvalidArgument, InvalidData, TooFewSites
from fedtailor.metrics.spread import judged_by, on_validation, summarize
from fedtailor.runs import config
from fedtailor.runs.journal import Journal
from fedtailor.server import guard
from fedtailor.server.reduce import Mean, Reduce, named
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.memory import BORN
from fedtailor.sites.outcome import keep_shared, summary_of
from fedtailor.sites.pact import weighs
from fedtailor.sites.replies import Columns, Transport, answered, bytes_of, mismatch
from fedtailor.sites.site import EVALUATE, FINISH, HELLO, TRAIN
from fedtailor.sites.sums import Exchange
from fedtailor.sites.terms import Ledger, Terms, pseudonyms
from fedtailor.sites.wire import Parcel, round_facts
from fedtailor.task.layers import keyed

REMEMBERED = 50  # norms of accepted uploads that new ones are compared with


@dataclass(eq=False)
class Conductor:
    """Plays the rounds of what was ``agreed`` through ``transport``, and writes them down in ``out``."""

    agreed: Agreed
    transport: Transport
    out: Path
    terms: Terms = Terms()
    callback: Callable[[dict[str, Any]], None] | None = None
    digest: str | None = None  # of what was agreed on, which every site compares with its own
    pseudonyms: bool = False  # scores are written down under names that mean nothing, in an order of their own
    trial: Mapping[str, Any] | None = None  # a method that is tried in place of the one agreed on (``sites/trial.py``)

    @one_thread()
    def play(self, resume: bool = False) -> dict[str, Any]:
        """Return the summary when all rounds are played and every site that could be reached has its model."""
        began = time.perf_counter()
        self.ready: Prepared = self.agreed.at_server()
        self.traffic = np.zeros(2, np.int64)  # bytes down and up, where the server counts them
        state = self.ready.start()
        with closing(self._journal(state, resume)) as journal:
            earlier = journal.earlier
            if earlier is not None:
                state.restore(earlier.checkpoint.state, earlier.records)
                began -= earlier.seconds
            facts = {} if earlier is None else earlier.checkpoint.facts
            self.ledger = Ledger(
                facts.get("run") or secrets.token_hex(8),
                dict(facts.get("versions") or dict.fromkeys(self.agreed.clients, BORN)),
                list(facts.get("events") or ()),
                list(facts.get("norms") or ()),
                dict(facts.get("aliases") or (pseudonyms(self.agreed.clients) if self.pseudonyms else {})),
            )
            self.checked = dict(self.ledger.versions)  # as of the last checkpoint, from which a restart goes on
            self._greet(len(state.records))
            if earlier is None:
                journal.checkpoint(0, state.dump(), self.ledger.facts())
            self._train(state, journal, began)
            self._say_farewell(state)
            if earlier is not None and earlier.summary is not None:
                return earlier.summary
            summary = summary_of(self.agreed, self.ready, state.records, self.ledger, self.transport.name)
            keep_shared(self.agreed, self.ready, state, journal.folder)
            digests = journal.digests()
            summary["seconds"] = time.perf_counter() - began
            journal.finish(summary, digests)
        return summary

    def _journal(self, state: State, resume: bool) -> Journal:
        ready, asked = self.ready, self.ready.options.plain()
        pact = {} if self.agreed.pact is None else {"secure": self.agreed.pact.plain()}
        same = {"model": ready.model_name, **ready.options.identity(), **pact}
        identity = config.identity(ready.asked, ready.federation, state.shared, same, ready.task.frozen)
        described = config.describe(ready.asked, ready.federation, ready.model, asked)
        return Journal(self.out, described, identity, resume, 1)

    # -- talking -----------------------------------------------------------------------------------------------------
    def _head(self, action: str, name: str) -> dict[str, Any]:
        known = {"run": self.ledger.run, "version": self.ledger.versions[name], "agreed": self.digest}
        return {"action": action, "client": name, **known, **({} if self.trial is None else {"trial": dict(self.trial)})}

    def _parcel(self, action: str, client: int, sent: Sent, **facts: Any) -> Parcel:
        name = self.agreed.clients[client]
        head = self._head(action, name)
        own = sent.own_of(client) if self.ready.algorithm.has_downlink else {}
        return Parcel({**head, **facts}, {"shared": sent.shared, "own": own})

    def _ask(self, parcels: Mapping[str, Parcel], number: int) -> dict[str, Parcel]:
        """Return the replies that belong to what was asked; why others do not is noted."""
        replies = self.transport.ask(parcels, self.terms.deadline)
        if self.agreed.pact is not None:  # its messages have no form of their own that could be known beforehand
            self.traffic += [sum(parcel.size for parcel in parcels.values()), sum(map(bytes_of, replies.values()))]
        good: dict[str, Parcel] = {}
        for name, asked in parcels.items():
            reply = replies.get(name, "did not answer")
            wrong = reply if isinstance(reply, str) else mismatch(asked.facts, reply.facts)
            if wrong is not None:
                self.ledger.note(number, name, wrong)
            elif not isinstance(reply, str):
                good[name] = reply
        return good

    def _heard(self, number: int, name: str, reply: Parcel) -> None:
        """Note where a site's state is not the one that the server builds on."""
        base, expected = reply.facts["base"], self.ledger.versions[name]
        if base != expected:
            change = "lost its personal state and began anew" if base == BORN else "went back to an older personal state"
            self.ledger.note(number, name, f"{change} (version {base}, not {expected})")

    def _greet(self, number: int) -> None:
        """Learn who is there; where clients weigh as many rows as they have, how many that is."""
        parcels = {name: Parcel(self._head(HELLO, name), {}) for name in self.agreed.clients}
        heard = self._ask(parcels, number)
        if not heard:
            raise TooFewSites("no site answered; start the sites (fedtailor sites client) and look at their logs")
        if self.ready.options.weights == "size":
            absent = [name for name in self.agreed.clients if name not in heard]
            if absent:
                raise TooFewSites(f"weights='size' needs the number of rows of every site; {', '.join(absent)} did not answer")
            sizes = np.array([heard[name].facts["rows"] for name in self.agreed.clients], np.float64)
            self.ready = replace(self.ready, plan=_weighted(self.ready, sizes))

    # -- rounds ------------------------------------------------------------------------------------------------------
    def _train(self, state: State, journal: Journal, began: float) -> None:
        ready, plan, rounds = self.ready, self.ready.plan, self.ready.options.rounds
        every = ready.every
        likes = [self.agreed.example_upload(ready, exchange) for exchange in range(plan.algorithm.exchanges)]
        state.sent = plan.sent_after(state.shared, state.server, len(state.records), rounds)
        for number in range(len(state.records), rounds):
            started, before = time.perf_counter(), self.traffic.copy()
            invited = ids = drawn(plan, ready.size, number)
            for exchange, like in enumerate(likes):
                ids, rnd = self._exchange(state, plan.round(number, rounds, ids, exchange), ids, like)
            state.sent = plan.sent_after(state.shared, state.server, number + 1, rounds)
            talking = 0 if plan.algorithm.silent(rnd) else len(ids)
            missing = sorted({self.agreed.clients[i] for i in invited} - {self.agreed.clients[i] for i in ids})
            record: dict[str, Any] = {
                "round": number,
                "cohort": len(ids),
                "bytes_down": ready.facts["bytes_down"] * talking,
                "bytes_up": ready.facts["bytes_up"] * talking,
                **(self._traffic_since(before) if self.agreed.pact is not None else {}),
                **({"left_out": missing} if missing else {}),
                **plan.algorithm.measures(state.server, rnd),
            }
            columns: Columns | None = None
            done = number + 1
            if done == rounds or (every and done % every == 0):
                measured, columns = self._evaluate(state.sent, number)
                record |= measured
            record["seconds"] = time.perf_counter() - started
            state.records.append(record)
            journal.record(record, *self.ledger.shown(self.agreed.clients, columns), done == rounds)
            facts = {**self.ledger.facts(), "finished": done == rounds, "seconds": time.perf_counter() - began}
            journal.checkpoint(done, state.dump(), facts)
            self.checked = dict(self.ledger.versions)
            if self.callback is not None:
                self.callback(record)

    def _exchange(self, state: State, rnd: Round, ids: Ids, like: Any) -> tuple[Ids, Round]:
        """Let the clients ``ids`` work and the server learn from it; return who took part, and the round as it was."""
        plan = self.ready.plan
        for attempt in range(self.terms.attempts):
            if attempt:
                time.sleep(self.terms.pause)
            present, upload = self._learn(state, rnd, ids, like)
            if upload is not None:
                break
        else:
            came = f"{len(present)} of {len(ids)} sites sent something that can be used, and {self._least(ids)} are needed"
            raise TooFewSites(f"round {rnd.number}: {came}; look at events in {self.out}, then start again to go on")
        now = plan.round(rnd.number, rnd.rounds, present, rnd.exchange)
        with keyed(plan.key("server", now.number, exchange=now.exchange)):
            state.shared, state.server = plan.algorithm.server_update(plan.task, state.shared, state.server, upload, now)
        for path, leaf in tree.items(state.shared):
            if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                raise Diverged(rnd.number, ["the server"], f"the shared {path}")
        return present, now

    def _traffic_since(self, before: Any) -> dict[str, int]:
        down, up = (self.traffic - before).tolist()
        return {"bytes_down": down, "bytes_up": up}

    def _least(self, ids: Ids) -> int:
        least = min(self.terms.least, len(ids))
        return least if self.agreed.pact is None else max(least, self.agreed.pact.needed(len(ids)))

    def _learn(self, state: State, rnd: Round, ids: Ids, like: Any) -> tuple[Ids, Any]:
        """Return (whose uploads arrived, what the server makes of them; None where they are too few)."""
        plan = self.ready.plan
        sent = plan.sent(state.shared, state.server, rnd)
        if self.agreed.pact is not None:
            return self._learn_sum(sent, rnd, ids, like, plan.reducer(state.shared, rnd))
        good = self._trained(sent, rnd, ids, tree.shapes(like))
        present = self._places(good)
        if len(good) < self._least(ids):
            return present, None
        self._accept(rnd, good)
        now = plan.round(rnd.number, rnd.rounds, present, rnd.exchange)
        weights = torch.from_numpy(plan.weights[present])
        reduce = self._reducer(plan.reducer(state.shared, now))
        total = reduce.start()
        for place, client in enumerate(present.tolist()):
            upload = good[self.agreed.clients[client]].tree
            total = reduce.add(total, lift(upload), weights[place : place + 1], torch.tensor([place]))
        return present, reduce.finish(total)

    def _learn_sum(self, sent: Sent, rnd: Round, ids: Ids, like: Any, usual: Reduce) -> tuple[Ids, Any]:
        """Return the same where only the sum of the uploads may be seen."""
        pact, session = self.agreed.pact, secrets.token_hex(16)
        assert pact is not None
        trained = self._trained(sent, rnd, ids, {}, session=session)
        exchange = Exchange(
            pact,
            self.digest,
            self.ledger.run,
            [session, rnd.number, rnd.exchange, self._upcoming(rnd)],
            lambda parcels: self._ask(parcels, rnd.number),
            self._head,
            lambda name, text: self.ledger.note(rnd.number, name, text),
        )
        weighted = weighs(usual, self.ready)
        opened = exchange.total(trained, tree.size(like) + int(weighted))
        if opened is None:
            return self._places(trained), None
        names, total = opened
        present, mean = self._places(names), pact.mean(total, len(names), like, weighted)
        size = guard.norm(mean)
        if guard.absurd([size], self.ledger.norms, self.terms.factor)[0]:
            everyone = ", ".join(names)
            self.ledger.note(
                rnd.number, everyone, f"sum refused: its norm is {size:.3g}, far beyond the others'; whose it is nobody knows"
            )
            return present, None
        self._accept(rnd, {name: trained[name] for name in names})
        self.ledger.norms = [*self.ledger.norms, size][-REMEMBERED:]
        return present, mean

    def _places(self, names: Iterable[str]) -> Ids:
        """Return clients by number, in the order in which uploads are stacked."""
        return self.ready.plan.canonical(np.array(sorted(map(self.agreed.clients.index, names)), np.int64))

    def _upcoming(self, rnd: Round) -> int:
        """Return the version of a client's state after this exchange."""
        return rnd.number * self.ready.algorithm.exchanges + rnd.exchange + 1

    def _reducer(self, usual: Reduce) -> Reduce:
        """Return how uploads become one: as the method does, or, where that is the mean, as the terms say."""
        if self.terms.reduce == "mean":
            return usual
        if type(usual) is not Mean:
            name = type(self.ready.algorithm).__name__
            raise InvalidArgument(
                f"{name} does not take the mean of uploads, so reduce = {self.terms.reduce!r} cannot stand for it"
            )
        return named(self.terms.reduce)

    def _trained(self, sent: Sent, rnd: Round, ids: Ids, like: guard.Shapes, **more: Any) -> dict[str, Parcel]:
        """Return the replies of sites that have trained, with uploads that can be used."""
        clients, upcoming = self.agreed.clients, self._upcoming(rnd)
        parcels: dict[str, Parcel] = {}
        for client in ids.tolist():
            facts = {"round": round_facts(rnd), "next": upcoming, "keep": self.checked[clients[client]], **more}
            parcels[clients[client]] = self._parcel(TRAIN, client, sent, **facts)
        good = {}
        for name, reply in self._ask(parcels, rnd.number).items():
            wrong = "answered about another round" if reply.facts["version"] != upcoming else guard.fault(reply.tree, like)
            if wrong is not None:
                self.ledger.note(rnd.number, name, f"upload refused: {wrong}")
            else:
                good[name] = reply
        if not like:
            return good
        norms = {name: guard.norm(reply.tree) for name, reply in good.items()}
        verdicts = zip(norms, guard.absurd(list(norms.values()), self.ledger.norms, self.terms.factor), strict=True)
        for name, absurd in verdicts:
            if absurd:
                self.ledger.note(rnd.number, name, f"upload refused: its norm is {norms[name]:.3g}, far beyond everybody's")
                del good[name]
        return good

    def _accept(self, rnd: Round, good: Mapping[str, Parcel]) -> None:
        """Build on these sites' new states from now on."""
        for name, reply in good.items():
            self._heard(rnd.number, name, reply)
            self.ledger.versions[name] = self._upcoming(rnd)
            if self.agreed.pact is None:
                self.ledger.norms = [*self.ledger.norms, guard.norm(reply.tree)][-REMEMBERED:]

    # -- measuring ---------------------------------------------------------------------------------------------------
    def _to_all(self, action: str, sent: Sent, number: int) -> dict[str, Parcel]:
        newcomer = sent.own(None) if self.ready.algorithm.has_downlink else {}
        parcels = {}
        for client, name in enumerate(self.agreed.clients):
            alias = {"alias": self.ledger.aliases[name]} if action == FINISH and self.ledger.aliases else {}
            parcel = self._parcel(action, client, sent, **alias)
            parcels[name] = Parcel(parcel.facts, {**parcel.tree, "newcomer": newcomer})
        return self._ask(parcels, number)

    def _evaluate(self, sent: Sent, number: int) -> tuple[dict[str, Any], Columns]:
        """Return (measures over the sites that answered, every client's on its test rows: NaN where it did not)."""
        heard = self._to_all(EVALUATE, sent, number)
        if not heard:
            raise TooFewSites(f"round {number}: no site answered to be measured; start the sites, then start again to go on")
        for name, reply in heard.items():
            self._heard(number, name, reply)
        kind, score = self.ready.task.kind, self.ready.task.score
        final = number + 1 == self.ready.options.rounds
        late = [f"{metric.name}_{side}" for metric in self.ready.task.measured if metric.late for side in ("personal", "global")]
        test = {key: values for key, values in self._columns(heard, "test").items() if final or key not in late}
        out = summarize(kind, answered(test), score)
        if self.agreed.rows.validation:
            judged = self._columns(heard, "val")
            out |= on_validation(kind, answered(judged), score)
            test |= judged_by(judged, score)
        return out, test

    def _columns(self, heard: Mapping[str, Parcel], part: str) -> Columns:
        columns: Columns = {}
        for place, name in enumerate(self.agreed.clients):
            for measure, value in (heard[name].facts["scores"][part] if name in heard else {}).items():
                column = columns.setdefault(measure, np.full(len(self.agreed.clients), np.nan))
                column[place] = np.nan if value is None else value
        return columns

    def _say_farewell(self, state: State) -> None:
        """Give everybody what it predicts with from now on."""
        rounds = self.ready.options.rounds
        sent = self.ready.plan.sent_after(state.shared, state.server, rounds, rounds)
        reached = self._to_all(FINISH, sent, rounds)
        for name, reply in reached.items():
            self._heard(rounds, name, reply)


def _weighted(ready: Prepared, sizes: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    if not np.isfinite(sizes).all() or (sizes < 1).any():
        raise InvalidData("a site says that it has no rows; check its table")
    return replace(ready.plan, weights=sizes / sizes.sum())
