"""The rounds of a run: cohort, clients' work, server's work, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.engine.base import NOBODY, Engine, Ids, Plan, all_finite, step_size
from fedtailor.engine.setup import drawn
from fedtailor.engine.state import State
from fedtailor.errors import Diverged
from fedtailor.metrics.cost import Traffic
from fedtailor.runs.patience import stop_if_noted
from fedtailor.runs.store import Store
from fedtailor.task.layers import keyed


def play_on(engine: Engine, state: State, rounds: int, size: int) -> Iterator[Round]:
    """Play the rounds that are left and yield each; ``state`` is then that after the round."""
    plan, done = engine.plan, len(state.records)
    state.sent = plan.sent_after(state.shared, state.server, done, rounds)
    for number in range(done, rounds):
        stop_if_noted()
        ids, engine.traffic = drawn(plan, size, number), Traffic()
        for rnd, lost in exchanges(plan, ids, number, rounds):
            if len(ids):
                sent = plan.sent(state.shared, state.server, rnd)
                serve(plan, state, engine.round(sent, ids, rnd, state.store, lost=lost), rnd)
        state.sent = plan.sent_after(state.shared, state.server, number + 1, rounds)
        yield rnd


def exchanges(plan: Plan, ids: Ids, number: int, rounds: int) -> Iterator[tuple[Round, Ids]]:
    """Yield (what everyone knows about it, whose uploads are lost) for every exchange of a round with the clients ``ids``."""
    for exchange in range(plan.algorithm.exchanges):
        lost = plan.lost(number) if exchange == plan.algorithm.exchanges - 1 else NOBODY  # after training
        yield plan.round(number, rounds, ids[~np.isin(ids, lost)] if len(lost) else ids, exchange, lost), lost


def serve(plan: Plan, state: State, upload: Any, rnd: Round) -> None:
    """Let the server take its step; where no upload arrives (None, and clients were lost) it has nothing to go by."""
    if upload is None and len(rnd.lost):
        return
    with keyed(plan.key("server", rnd.number, exchange=rnd.exchange), plan.device):
        state.shared, state.server = plan.algorithm.server_update(plan.task, state.shared, state.server, upload, rnd)
    _check_server(plan.algorithm, state.shared, rnd)


def play(
    engine: Engine, shared: Any, server: Any, store: Store, rounds: int, size: int
) -> Iterator[tuple[Round, tuple[Any, Any]]]:
    """Play rounds and yield (round, (shared, server) after it); personal state goes to ``store``."""
    state = State(shared, server, store)
    for rnd in play_on(engine, state, rounds, size):
        yield rnd, (state.shared, state.server)


def _check_server(algorithm: Algorithm, shared: Any, rnd: Round) -> None:
    if all_finite([shared]):
        return
    for path, leaf in tree.items(shared):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise Diverged(rnd.number, ["the server"], f"the shared {path}", step_size(algorithm, rnd))
