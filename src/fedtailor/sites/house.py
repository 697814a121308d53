"""A site's house: its table, its memory, its secret, and what it has after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.federation import Federation
from fedtailor.data.secret import Secret
from fedtailor.engine.base import Sent
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import evaluate
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.private import spent
from fedtailor.engine.setup import drawn
from fedtailor.engine.state import State
from fedtailor.engine.summary import summarise
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import config, files, models
from fedtailor.runs.journal import Journal
from fedtailor.runs.layout import SUMMARY, refuse_links_between
from fedtailor.runs.personal import stacked
from fedtailor.runs.signature import read_key
from fedtailor.runs.store import Store
from fedtailor.sites.memory import Memory, seal, unseal
from fedtailor.sites.project import PEERS, SIGNER, Place
from fedtailor.sites.secure import SUMS, Seat
from fedtailor.sites.site import Site
from fedtailor.sites.trial import METHODS, Trial, check, judged_on_validation

STATE, RUNS, SECRET = "state", "runs", "noise.key"


@dataclass(frozen=True, eq=False)
class House:
    """The folder of a site and the table of its rows; ``key`` is the file of the key that its state is encrypted with."""

    place: Place
    data: Path
    key: Path | None = None
    allows_advice: bool = False

    @cached_property
    def rows(self) -> Federation:
        """The table, checked against the schema."""
        return replace(self.place.table.federation(self.data, self.place.client), public=self.place.public)

    @cached_property
    def ready(self) -> Prepared:
        return self.place.agreed.at_site(self.rows, self._secret())

    def site(self) -> Site:
        """Return what answers the server."""
        for name in (STATE, RUNS):
            refuse_links_between(self.place.folder, self.place.folder / name)
        memory = Memory(self.place.folder / STATE, self._lock)
        visits = None if self.ready.plan.uses is None else self._visits()
        usual = Site(self.ready, memory, self.place.digest, self._end, self._seat(self._lock), visits)
        return replace(usual, trials=partial(self._trial, memory)) if self.allows_advice else usual

    @cached_property
    def _lock(self) -> bytes | None:
        """The key that the site's state is encrypted with."""
        if self.key is None:
            return None
        try:
            return files.read(self.key).strip()
        except FileNotFoundError:
            raise InvalidArgument(f"there is no key {self.key}; make one with fedtailor sites client --new-key") from None

    def _trial(self, memory: Memory, facts: Mapping[str, Any]) -> Site:
        """Return the site as it answers a question of an advice: ``facts`` names the method that is tried, if any."""
        check(self.place.agreed)
        rows = judged_on_validation(self.rows)
        agreed = Trial.of(facts).agreed(self.place.agreed) if facts else self.place.agreed
        return Site(agreed.at_site(rows), memory, advises=True)

    def _seat(self, key: bytes | None) -> Seat | None:
        """Return the site's place in secure sums, where these were agreed on."""
        place, pact = self.place, self.place.agreed.pact
        if pact is None:
            return None
        signer = read_key(place.folder / SIGNER, "private").private_bytes_raw()
        peers = {name: read_key(place.folder / PEERS / f"{name}.pem", "public").public_bytes_raw() for name in place.clients}
        return Seat(place.client, pact, Memory(place.folder / STATE / SUMS, key), signer, peers, place.digest)

    def _secret(self) -> Secret | None:
        """Return where the noise of a private method comes from: the same as long as the site is there."""
        if self.place.agreed.algorithm.opt.privacy is None:
            return None
        path = self.place.folder / STATE / SECRET
        try:
            return Secret.from_hex(unseal(files.read(path), self._lock, path).decode("ascii"))
        except FileNotFoundError:
            secret = Secret.fresh()
            files.write(path, seal(secret.hex().encode() + b"\n", self._lock), files.PRIVATE)
            return secret
        except ValueError as error:
            raise BadRun(
                f"{path} cannot be read ({error}); restore it: other noise on the same rounds would cost twice"
            ) from None

    def _visits(self) -> int:
        """Return in how many rounds of a run this site takes part, as was agreed."""
        everyone = self.place.agreed.at_server()
        place = everyone.plan.federation.positions[self.place.client]
        return sum(place in drawn(everyone.plan, everyone.size, number) for number in range(self.ready.options.rounds))

    def epsilon(self, runs: int = 1) -> float | None:
        """Return what so many whole runs may cost a row of this site; None where the method is not private."""
        if self.ready.plan.uses is None:
            return None
        return spent(self.ready.plan, np.array([runs * self._visits()]))["epsilon_max"]

    def paper(self) -> list[str]:
        """Return, line by line, what would leave the house."""
        agreed, ready, rounds = self.place.agreed, self.ready, self.ready.options.rounds
        host, port = self.place.address
        lines = [
            f"What {self.place.client} would send to {host}:{port} in a run of {type(agreed.algorithm).__name__} "
            f"with {rounds} rounds (rows of {self.data.name}: {_sizes(self.rows)}):"
        ]
        for exchange in range(agreed.algorithm.exchanges):
            often = f"exchange {exchange + 1} of every round" if agreed.algorithm.exchanges > 1 else "every round"
            like = agreed.upload_like(ready, exchange)
            for path, (shape, dtype) in like.items():
                size = int(np.prod(shape)) * dtype.itemsize
                kind = str(dtype).removeprefix("torch.")
                lines.append(f"  {often} it takes part in: {path}, {kind} of shape {shape}, {size:,} bytes")
            if agreed.pact is not None:
                lines += agreed.pact.words(sum(int(np.prod(shape)) for shape, _ in like.values()))
        if agreed.options.weights == "size":
            lines.append("  once: the number of its training rows")
        evaluations = "the end" if not ready.every else f"every {ready.every} rounds"
        lines.append(f"  at {evaluations}: its scores on its test and validation rows, and how many these are")
        lines.append("  with every answer: its name, and the version of its state")
        if self.allows_advice:
            lines.append(
                "  if the server asks for advice: a linear model fitted to its training rows, its covariance and how many rows"
            )
            lines.append(
                f"    these are; uploads as above of short trials ({', '.join(METHODS)}), and scores on validation rows only"
            )
        lines.append("What stays: every row, its personal model, its predictions.")
        epsilon = self.epsilon()
        private = f"epsilon = {epsilon:.3g} for any one training row, scores not counted" if epsilon is not None else "no bound"
        lines.append(f"Privacy of what is sent: {private}.")
        if agreed.pact is not None and agreed.pact.clip is not None:
            cost, delta = (agreed.pact.spent(rounds, agreed.algorithm.exchanges)[f"user_{fact}"] for fact in ("epsilon", "delta"))
            often = "if it takes part in every round; scores not counted"
            lines.append(f"Privacy of the whole site in the sums: epsilon = {cost:.3g} at delta = {delta:g}, {often}.")
        return lines

    def _end(self, site: Site, facts: Mapping[str, Any], sent: Sent, store: Store) -> None:
        """Write the site's own run directory: its model, its scores."""
        run = str(facts["run"])
        ready, folder = self.ready, self.place.folder / RUNS / run
        if (folder / SUMMARY).exists():
            return
        options = ready.options.plain()
        engine = LoopEngine(ready.plan, workers=1)
        state = State(sent.shared, {}, store, sent=sent)
        measured, judged = evaluate(engine, sent, store)
        rounds = ready.options.rounds
        record = {"round": rounds - 1, "cohort": 1, "bytes_down": 0, "bytes_up": 0, "seconds": 0.0, **measured}
        state.records.append(record)
        described = config.describe(ready.asked, ready.federation, ready.model, options)
        identity = config.identity(ready.asked, ready.federation, sent.shared, ready.options.identity(), ready.task.frozen)
        journal = Journal(folder, described, identity, True, 1)
        try:
            journal.record(record, ready.plan.federation.names, judged, True)
            journal.checkpoint(rounds, state.dump(), {"finished": True, "seconds": 0.0})
            personal = stacked(engine.personal_chunks(sent, store), models.LARGEST)
            personal["new"] = engine.newborn(sent)
            trained = ready.algorithm, ready.task, replace(ready.federation, notes=())
            models.write(folder, trained, ready.model, options, sent.shared, personal)
            summary = {**summarise(ready, engine, "asked for", state, judged), "engine": "sites", "run": run, "seconds": 0.0}
            if "alias" in facts:
                summary["pseudonym"] = str(facts["alias"])
            if ready.plan.uses is not None:
                summary["epsilon"] = summary["epsilon_max"] = self.epsilon()
                summary["epsilon_composed"] = self.epsilon(len(site.questions.counts()))
            digests = journal.digests()
            journal.finish(summary, digests)
        finally:
            journal.close()


def _sizes(rows: Federation) -> str:
    parts = {"to train": rows.train, "to test": rows.test, **({"to choose": rows.val} if rows.val is not None else {})}
    return ", ".join(f"{len(split.y)} {word}" for word, split in parts.items())


def newest_run(folder: Path) -> Path | None:
    """Return the newest finished run in the folder of a site or a server."""
    finished: Sequence[Any] = sorted((folder / RUNS).glob(f"*/{SUMMARY}"), key=lambda path: path.stat().st_mtime)
    return finished[-1].parent if finished else None
