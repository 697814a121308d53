"""What is left at the server of a run across sites: its summary, and what a newcomer predicts with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor import tree
from fedtailor.algorithms.settings import notes_on
from fedtailor.engine.base import UNREAD, labelled
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.setup import visits_of
from fedtailor.engine.state import State
from fedtailor.engine.summary import asked_for, best
from fedtailor.runs import models
from fedtailor.runs.personal import STACKS
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.replies import sentences
from fedtailor.sites.terms import Ledger

OF_THE_ROUND = ("round", "cohort", "bytes_down", "bytes_up", "seconds", "left_out")


def summary_of(agreed: Agreed, ready: Prepared, records: Sequence[dict[str, Any]], ledger: Ledger, engine: str) -> dict[str, Any]:
    """Return the summary of a run whose rounds are ``records``."""
    name = ready.task.score.name
    return {
        **asked_for(ready),
        "clients": len(agreed.clients),
        "engine": engine,
        "engine_reason": "asked for",
        "workers": 1,
        **{key: value for key, value in records[-1].items() if key not in OF_THE_ROUND},
        f"{name}_global_test": None,  # nobody has everybody's rows
        "trained_parameters": ready.facts["trained_parameters"],
        "personal_parameters": None,  # known at the sites
        "bytes_down": sum(record["bytes_down"] for record in records),
        "bytes_up": sum(record["bytes_up"] for record in records),
        "epsilon_max": None,  # every site's own summary has it
        "epsilon": None,
        **({} if agreed.pact is None else agreed.pact.spent(_most_visits(ready), ready.algorithm.exchanges)),
        **best(records, ready.task.score),
        "events": ledger.events,
        "run": ledger.run,
        "notes": [
            *([] if agreed.pact is None else [agreed.pact.note()]),
            *ready.notes,
            *ready.facts["notes"],
            *notes_on(ready.algorithm),
            *sentences(ledger.events, ready.options.rounds),
        ],
    }


def keep_shared(agreed: Agreed, ready: Prepared, state: State, folder: Path) -> None:
    """Write what a newcomer predicts with; where that depends on its rows, only what is shared."""
    plan, rounds = ready.plan, ready.options.rounds
    sent = plan.sent_after(state.shared, state.server, rounds, rounds)
    new: Any = {}
    if tree.leaves(sent.newcomer):
        with suppress(Exception):  # raised by whatever looks at rows, of which there are none
            new = labelled(plan.algorithm.init_client(plan.task, sent.newcomer, UNREAD), sent.own(None))
    nobody = replace(ready.federation, names=())
    trained = ready.algorithm, ready.task, nobody
    models.write(folder, trained, agreed.model, ready.options.plain(), state.shared, {STACKS: {}, "new": new})


def _most_visits(ready: Prepared) -> int:
    """Return how many rounds the client takes part in that takes part in most."""
    return int(visits_of(ready.plan, ready.options.rounds, ready.size).max())
