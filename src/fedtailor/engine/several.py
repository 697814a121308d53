"""Several settings of one method on the same clients, rows and start: the clients of all of them work in one ``vmap``.

The settings' clients stand side by side, each with the numbers of its setting in the method's fields; the server's half is done
for each setting by itself. Where settings differ in more than plain numbers, or their numbers cannot be tensors (a method that
asks ``if self.lam``), ``play_together`` gives None, and they are to be played one by one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.engine.base import Ids, Sent, joined
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.rounds import exchanges, serve
from fedtailor.engine.setup import drawn
from fedtailor.engine.state import State
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged
from fedtailor.metrics.cost import Traffic
from fedtailor.runs.patience import stop_if_noted

TRIED, STEPS = 2, 2  # clients and steps on which the settings must come to the same together as one by one
CLOSE = 1e-3  # of the largest number of a leaf


class Apart(Exception):
    """These settings cannot be played together."""


@dataclass
class Player:
    """One setting: its engine, what it carries from round to round, and why it ended before the last one, if it did."""

    engine: VectorizedEngine
    state: State
    failure: Diverged | None = None

    def sent(self, rnd: Round) -> Sent:
        """Return what this setting's server sends in a round."""
        return self.engine.sent(self.engine.plan.sent(self.state.shared, self.state.server, rnd))

    def record(self, number: int) -> dict[str, Any]:
        """Return what is known of a round that has been played, and begin to count the next one's traffic."""
        traffic, self.engine.traffic = self.engine.traffic, Traffic()
        return {"round": number, "bytes_down": traffic.down, "bytes_up": traffic.up}


def _nobody(record: dict[str, Any]) -> None:
    """Hear of a round and do nothing."""


def play_together(prepared: Sequence[Prepared], callback: Callable[[dict[str, Any]], None] = _nobody) -> list[Player] | None:
    """Return the settings after all rounds, or None where they must be played one by one.

    ``told`` is given a record for every setting and round. A setting that diverges leaves the others alone.
    """
    names = varied(prepared)
    if names is None:
        return None
    states = [ready.start() for ready in prepared]
    first, _ = prepared[0].engine(states[0])
    if type(first) is not VectorizedEngine:
        first.close()
        return None
    players = [Player(VectorizedEngine(ready.plan), state) for ready, state in zip(prepared, states, strict=True)]
    rounds, size = prepared[0].options.rounds, prepared[0].size
    try:
        _rehearse(players, names, rounds)
        for number in range(rounds):
            stop_if_noted()
            playing = [player for player in players if player.failure is None]
            if playing:
                _play(playing, names, number, rounds, size)
            for player in playing:
                callback(player.record(number))
    except Apart:
        return None
    return players


def varied(prepared: Sequence[Prepared]) -> list[str] | None:
    """Return the fields in which the settings differ; None where they cannot be played together."""
    methods = [ready.algorithm for ready in prepared]
    lead, plan = methods[0], prepared[0].plan
    names = [f.name for f in dataclasses.fields(lead) if any(getattr(m, f.name) != getattr(lead, f.name) for m in methods)]
    alike = all(type(m) is type(lead) and m.work() == lead.work() for m in methods)
    numbers = all(type(getattr(method, name)) is float for method in methods for name in names)
    is_open = plan.uses is None and plan.crowd is None and lead.opt.many_rates
    return names if alike and numbers and is_open and len(methods) > 1 and "radius" not in names else None


def _play(players: Sequence[Player], names: Sequence[str], number: int, rounds: int, size: int) -> None:
    """Play a round of settings that have not failed."""
    plan = players[0].engine.plan
    ids = drawn(plan, size, number)
    for rnd, lost in exchanges(plan, ids, number, rounds) if len(ids) else ():
        playing = [player for player in players if player.failure is None]
        uploads = _visit(playing, names, plan.canonical(ids), rnd, lost) if playing else []
        for player, upload in zip(playing, uploads, strict=True):
            if player.failure is None:
                _noting(player, serve, player.engine.plan, player.state, upload, rnd)
    for player in players:
        state, own = player.state, player.engine.plan
        state.sent = own.sent_after(state.shared, state.server, number + 1, rounds)


def _visit(players: Sequence[Player], names: Sequence[str], ids: Ids, rnd: Round, lost: Ids) -> list[Any]:
    """Let the clients of all settings work; return each setting's uploads, reduced."""
    lead, sent = players[0].engine, [player.sent(rnd) for player in players]
    totals = [player.engine.begin(own, ids, rnd, lost) for player, own in zip(players, sent, strict=True)]
    for chunk in lead.chunks(ids, sent[0], lead.load(ids) * len(players)):
        data = lead.plan.feed_of(rnd).many(chunk, rnd.number)
        work = _work(players, names, sent, chunk, data, rnd)
        for player, total, (upload, personal) in zip(players, totals, work, strict=True):
            if player.failure is None:
                _noting(player, player.engine.take, total, chunk, upload, personal, rnd, player.state.store)
    return [None if player.failure else total.end() for player, total in zip(players, totals, strict=True)]


def _noting(player: Player, action: Callable[..., None], *arguments: Any) -> None:
    """Do something for a setting, and note its divergence."""
    try:
        action(*arguments)
    except Diverged as error:
        player.failure = error


def _work(
    players: Sequence[Player], names: Sequence[str], sent: Sequence[Sent], chunk: Ids, data: Any, rnd: Round
) -> list[tuple[Any, Any]]:
    """Return every setting's (uploads, personal trees) of a chunk: settings are next to each other within a client, so that
    clients stay sorted by their work."""
    engine, count, clients = players[0].engine, len(players), len(chunk)
    plan, feed = engine.plan, engine.plan.feed_of(rnd)
    own = [one.own(chunk) for one in sent]
    states = [
        player.engine.state(one.shared, received, chunk, player.state.store, data)
        for player, one, received in zip(players, sent, own, strict=True)
    ]
    methods, dtype = [player.engine.plan.algorithm for player in players], plan.federation.precision
    numbers = {name: torch.tensor([getattr(m, name) for m in methods], dtype=dtype, device=plan.device) for name in names}
    values = {name: number.repeat(clients) for name, number in numbers.items()}

    def update(own_numbers: Any, shared: Any, received: Any, old: Any, mine: Any) -> Any:
        method = _holding(plan.algorithm, own_numbers)
        return method.client_update(plan.task, joined(shared, received), old, feed.guarded(mine), rnd)

    shared = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape).flatten(0, 1), _stacked([s.shared for s in sent], 0))
    received, old = [tree.map(lambda leaf: leaf.flatten(0, 1), _stacked(branches, 1)) for branches in (own, states)]
    wide = tree.map(lambda leaf: _repeated(leaf, count), data)
    try:
        result = vmap(update, in_dims=(0, 0, 0, 0, 1), randomness="error")(values, shared, received, old, wide)
    except Exception as error:  # tensors refuse to be plain numbers in many ways; one by one, whatever else is wrong says so
        raise Apart from error
    return [(_every(count, place, result[0]), _every(count, place, result[1])) for place in range(count)]


def _stacked(branches: Sequence[Any], axis: int) -> Any:
    """Return trees of one form as one, with an axis for them."""
    columns = zip(*(tree.leaves(branch) for branch in branches), strict=True)
    return tree.refill(branches[0], (torch.stack(column, axis) for column in columns))


def _every(count: int, place: int, branch: Any) -> Any:
    """Return the rows of the setting at ``place``, out of those of ``count`` settings."""
    return tree.map(lambda leaf: leaf[place::count], branch)


def _holding(method: Algorithm, numbers: Mapping[str, Tensor]) -> Algorithm:
    """Return the method with tensors in the place of numbers that were checked before."""
    method = copy.copy(method)
    for name, number in numbers.items():
        object.__setattr__(method, name, number)
    return method


def _repeated(leaf: Tensor, times: int) -> Tensor:
    """Return [steps, clients, ...] with every client as many times; steps that share their rows go on sharing them."""
    if len(leaf) > 1 and leaf.stride(0) == 0:
        return _repeated(leaf[:1], times).expand(len(leaf), -1, *leaf.shape[2:])
    return leaf.repeat_interleave(times, 1)


def _rehearse(players: Sequence[Player], names: Sequence[str], rounds: int) -> None:
    """Let two clients take two steps with all settings, together and one by one; what comes out must be the same."""
    plan = players[0].engine.plan
    feed = plan.feed.like({name: work.taking(STEPS) for name, work in plan.feed.phases.items()})
    short = [
        Player(VectorizedEngine(replace(player.engine.plan, feed=feed)), replace(player.state, store=player.state.store.like()))
        for player in players
    ]
    ids = plan.canonical(plan.federation.order[:TRIED])
    rnd = plan.round(0, rounds, ids)
    sent, data = [player.sent(rnd) for player in short], feed.many(ids, 0)
    together = _work(short, names, sent, ids, data, rnd)
    for player, one, ours in zip(short, sent, together, strict=True):
        own, engine = one.own(ids), player.engine
        by_itself = engine.work(one.shared, own, engine.state(one.shared, own, ids, player.state.store, data), data, rnd)
        for a, b in zip(ours, by_itself, strict=True):
            if not all(map(_close, tree.leaves(a), tree.leaves(b))):
                raise Apart


def _close(ours: Tensor, by_itself: Tensor) -> bool:
    """Return whether two leaves are the same but for rounding, or where both are not finite."""
    if not by_itself.is_floating_point():
        return torch.equal(ours, by_itself)
    finite = by_itself.isfinite()
    scale = float(by_itself[finite].abs().max()) if bool(finite.any()) else 0.0
    return torch.equal(ours.isfinite(), finite) and bool(((ours - by_itself)[finite].abs() <= CLOSE * scale).all())
