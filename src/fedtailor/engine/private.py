"""Privacy of a run: what is refused, how often each client's rows are released, and what that comes to.

Covered are the clients' training rows, by everything a client sends or predicts with. Not covered: validation and test rows (they
are measured on), how features were scaled or a table was read, tuning (its trials are runs of their own), and the number of
rows of a client, which is taken as known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.batches import Work
from fedtailor.data.feed import Feed
from fedtailor.data.guard import Guard
from fedtailor.engine.base import NO_ROUND, Plan
from fedtailor.errors import InvalidArgument
from fedtailor.local import Private
from fedtailor.privacy.accountant import Spend, delta_of, epsilons, noise_for
from fedtailor.task import Task

TRIED, FAR = 3, 1000  # rounds in which a client is watched, of the first so many


@dataclass(frozen=True)
class Uses:
    """How often a batch of each phase is used: in a round, and when a client personalises."""

    round: Mapping[str, int]
    end: Mapping[str, int]

    @property
    def budget(self) -> dict[str, int]:
        return {phase: max(self.round.get(phase, 0), self.end.get(phase, 0)) for phase in {*self.round, *self.end}}


def check(algorithm: Algorithm, task: Task) -> None:
    """Refuse what cannot be private."""
    name = type(algorithm).__name__
    if algorithm.leak is not None:
        raise InvalidArgument(f"{name} cannot be private: {algorithm.leak}; use another method, or leave privacy out")
    if task.trainer is not None and any(isinstance(m, _BatchNorm) and m.training for m in task.trainer.modules()):
        raise InvalidArgument(
            "batch norm cannot be private: it mixes the rows of a batch, so that no row can be clipped by itself; "
            "use group norm (nn.GroupNorm, or a model by name such as resnet8:group)"
        )


def uses_of(plan: Plan) -> Uses:
    """Let a client go through a few rounds of one step, and through personalising, and count.

    What a method does only later (but for rounds of ``warmup``, after which it is watched again) is not seen here; it is refused
    when it happens (``Guarded.unlock``). All rounds are charged alike.
    """
    algorithm = replace(plan.algorithm, opt=replace(plan.algorithm.opt, noise=0.0, target_epsilon=None))  # type: ignore[call-arg]
    task, name = plan.task, type(algorithm).__name__
    short = {phase: work if 0 in (work.steps, work.epochs) else work.taking(1) for phase, work in plan.feed.phases.items()}
    watch, last = Guard(name), Guard(name)
    feed = plan.feed.like(short, guard=watch)
    shared, _ = algorithm.init_server(task)
    personal = algorithm.init_client(task, shared, feed.one(0, 0))
    for start in {0, getattr(algorithm, "warmup", 0)}:
        rounds = (Round(number=n, clients=len(plan.federation), seed=feed.seed) for n in range(start, start + FAR))
        for rnd in islice(filter(algorithm.looks, rounds), TRIED):
            _, personal = algorithm.client_update(task, shared, personal, feed.one(0, rnd.number), rnd)
    algorithm.personalize(task, shared, personal, plan.feed.like(short, guard=last).one(0, NO_ROUND, "personalize"))
    return Uses(watch.seen, last.seen)


def guarded(plan: Plan) -> Plan:
    """The plan, its data guarded and drawn as the private optimiser asks; as it is where the method is not private."""
    opt = plan.algorithm.opt
    if not isinstance(opt, Private):
        return plan
    check(plan.algorithm, plan.task)
    feed = plan.feed
    feed = Feed(feed.federation, feed.phases, feed.batch_size, feed.seed, opt.sampling, Guard(type(plan.algorithm).__name__))
    plan = replace(plan, feed=feed)
    uses = uses_of(plan)
    guard = Guard(type(plan.algorithm).__name__, uses.budget)
    return replace(plan, feed=feed.like(guard=guard), uses=uses)


def parts(plan: Plan) -> list[tuple[int, frozenset[str]]]:
    """(client, phases) for all rows of a client that the same phases use: one entry per client, or one for each part of its rows.

    Which row is in which part depends on the number of rows alone. A phase that draws its part anew in every round may use any.
    """
    sizes = plan.federation.train.sizes
    ends = {}
    for phase in sorted({*plan.uses.round, *plan.uses.end}):
        work = plan.feed.phases[phase]
        ends[phase] = np.stack(replace(work, part=None).bounds(sizes) if work.redraw else work.bounds(sizes), 1).tolist()
    out: list[tuple[int, frozenset[str]]] = []
    for client in range(len(sizes)):
        cuts = sorted({end for own in ends.values() for end in own[client]})
        groups = (frozenset(p for p, own in ends.items() if own[client][0] <= cut < own[client][1]) for cut in cuts[:-1])
        out += [(client, group) for group in dict.fromkeys(groups)] or [(client, frozenset())]
    return out


def spends(plan: Plan, visits: NDArray[np.int64]) -> list[list[Spend]]:
    """What each client releases of a row in ``visits`` rounds (one number per client) and in personalising once at the end; where
    its rows are in parts, an entry for each (``parts``)."""
    feed, uses, sizes = plan.feed, plan.uses, plan.federation.train.sizes
    of: dict[tuple[int, str], list[Spend]] = {}
    for moment, often in ((uses.round, visits), (uses.end, np.ones_like(visits))):
        for phase, releases in moment.items():
            work, counts = feed.phases[phase], feed.steps(np.arange(len(sizes)), phase)
            many = zip(work.rows(sizes).tolist(), counts.tolist(), often.tolist(), strict=True)
            for client, (rows, steps, times) in enumerate(many):
                q, batches, each = _batches(rows, feed.batch_size, work, steps, feed.sampling)
                of.setdefault((client, phase), []).append(Spend(q, batches * times, each * releases))
    return [[spend for phase in sorted(phases) for spend in of[client, phase]] for client, phases in parts(plan)]


def _batches(rows: int, batch_size: int | None, work: Work, steps: int, sampling: str) -> tuple[float, int, int]:
    """(probability that a row is in a batch, batches, steps on each); without Poisson sampling, how often a row is used."""
    if batch_size is None or rows <= batch_size:
        return 1.0, steps, 1
    if sampling == "poisson":
        return (batch_size / rows, 1, steps) if work.same_batch else (batch_size / rows, steps, 1)
    return (1.0, steps, 1) if work.same_batch else (1.0, -(-steps // -(-rows // batch_size)), 1)


def settled(algorithm: Algorithm, plan: Plan, visits: NDArray[np.int64]) -> Algorithm:
    """The method with the noise that its target asks for."""
    opt = algorithm.opt
    if not isinstance(opt, Private) or opt.target_epsilon is None:
        return algorithm
    delta = deltas(plan)
    noise = noise_for(opt.target_epsilon, spends(plan, visits), [delta[client] for client, _ in parts(plan)], opt.accountant)
    return replace(algorithm, opt=replace(opt, noise=noise, target_epsilon=None))


def deltas(plan: Plan) -> list[float]:
    given = plan.algorithm.opt.delta  # type: ignore[attr-defined]
    return [delta_of(rows) if given is None else given for rows in plan.federation.train.sizes.tolist()]


def spent(plan: Plan, visits: NDArray[np.int64]) -> dict[str, Any]:
    """For the summary: epsilon (mean over clients), its maximum, the largest delta, noise, clip, sampling and accountant.

    Epsilon is null where there is no noise.
    """
    opt = plan.algorithm.opt
    assert isinstance(opt, Private)
    owners, delta = [client for client, _ in parts(plan)], deltas(plan)
    found = [0.0] * len(delta)
    each = epsilons(spends(plan, visits), opt.multiplier, [delta[client] for client in owners], opt.accountant)
    for client, value in zip(owners, each, strict=True):  # a row is in one part
        found[client] = max(found[client], value)
    bounded = all(map(math.isfinite, found))
    return {
        "epsilon": float(np.mean(found)) if bounded else None,
        "epsilon_max": max(found) if bounded else None,
        "delta": max(delta),
        "noise": opt.multiplier,
        "clip": opt.clip if math.isfinite(opt.clip) else None,
        "sampling": opt.sampling,
        "accountant": opt.accountant,
    }
