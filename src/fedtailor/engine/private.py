"""Privacy of a run: what is refused, how often each client's rows are released, and what that comes to.

Covered are the clients' training rows, by everything a client sends or predicts with. Not covered: validation and test rows (they
are measured on), how features were scaled or a table was read, tuning (its trials are runs of their own), and the number of
rows of a client, which is taken as known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import spec, written
from fedtailor.data.batches import Work
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed
from fedtailor.data.guard import Guard
from fedtailor.data.secret import Secret
from fedtailor.engine.base import NO_ROUND, Plan
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument
from fedtailor.privacy.accountant import Spend, delta_of, epsilons, noise_for
from fedtailor.task import Task

HERE = ("auto", "loop", "vectorized", "ray")  # engines of one process, its workers, or a cluster that is one's own
TRIED, FAR = 3, 1000  # rounds in which a client is watched, of the first so many


@dataclass(frozen=True)
class Uses:
    """The number of times that a batch of each phase is used: in each exchange of a round, and when a client personalises."""

    exchanges: tuple[Mapping[str, int], ...]
    end: Mapping[str, int]

    @property
    def round(self) -> dict[str, int]:
        """In all exchanges of a round."""
        return self.until(len(self.exchanges))

    def until(self, exchange: int) -> dict[str, int]:
        """In a round's exchanges before this one."""
        before = self.exchanges[:exchange]
        return {phase: sum(uses.get(phase, 0) for uses in before) for phase in dict.fromkeys(p for uses in before for p in uses)}

    def guard(self, who: str, secret: Secret, exchange: int) -> Guard:
        """Return the guard over an exchange's data: its uses go on from those of the exchanges before it, so that noise is never
        used twice; the first exchange's is also over the data a client personalises on."""
        phases, before, uses = {*self.round, *self.end}, self.until(exchange), self.exchanges[exchange]
        if not exchange:
            return Guard(who, secret, {phase: max(uses.get(phase, 0), self.end.get(phase, 0)) for phase in phases})
        first = {phase: max(before.get(phase, 0), self.end.get(phase, 0)) for phase in phases}
        return Guard(who, secret, {phase: first[phase] + uses.get(phase, 0) for phase in phases}, first=first)


def check(algorithm: Algorithm, task: Task, federation: Federation) -> None:
    """Refuse what cannot be private."""
    name = type(algorithm).__name__
    if algorithm.leak is not None:
        raise InvalidArgument(f"{name} cannot be private: {algorithm.leak}; use another method, or leave privacy out")
    if task.trainer is not None and any(isinstance(m, _BatchNorm) and m.training for m in task.trainer.modules()):
        raise InvalidArgument(
            "batch norm cannot be private: it mixes the rows of a batch, so that no row can be clipped by itself; "
            "use group norm (nn.GroupNorm, or a model by name such as resnet8:group)"
        )
    if federation.train.weights is not None:
        raise InvalidArgument(
            "rows with weights cannot be private: every row's gradient is clipped alike, whatever its weight; leave the weights "
            "out, or privacy"
        )
    opt, largest = algorithm.opt.privacy, int(federation.train.sizes.argmax())
    rows = int(federation.train.sizes[largest])
    if opt is not None and opt.delta is not None and opt.delta * rows >= 1 and not opt.force:
        raise InvalidArgument(
            f"delta={opt.delta:g} allows one of the {rows} rows of client {federation.names[largest]} to be published as it is; "
            f"give a delta well below 1/{rows}, or leave it out (force=True, --dp-force, to try it all the same)"
        )


def check_options(algorithm: Algorithm, options: Options) -> None:
    """Refuse, where rows or clients are private, settings that are read off the rows, which no clipping bounds, and engines whose
    processes would have to be sent the secret."""
    if algorithm.opt.privacy is None and options.user_clip is None:
        return
    if options.engine not in HERE:
        raise InvalidArgument(
            f"engine={options.engine!r} sends a client's work to other processes, and the secret behind the noise never travels; "
            "use engine='loop' or 'vectorized', or real sites (fedtailor sites), each of which has a secret of its own"
        )
    if options.class_weights == "balanced":
        raise InvalidArgument(
            "balanced class weights count the labels of all rows, which is not private; give numbers that are known without the "
            "rows, or leave class_weights out"
        )
    if "theory" in (algorithm.lr, algorithm.steps):
        raise InvalidArgument("the theory's step sizes are read off the clients' rows, which is not private; give lr and steps")


def check_end(plan: Plan, options: Options) -> None:
    """Refuse to look at models between the rounds where that trains on a client's rows: it is charged once, at the end."""
    if plan.uses is None or not plan.uses.end or not (options.callbacks or options.patience):
        return
    name = "patience" if options.patience else "callbacks"
    raise InvalidArgument(
        f"{type(plan.algorithm).__name__} trains on a client's rows whenever its model is looked at; under privacy that is once, "
        f"at the end: leave {name} out"
    )


def uses_of(plan: Plan) -> Uses:
    """Let a client go through a few rounds of one step, and through personalising, and count.

    It is watched from every round on from which the method says that it works in another way (``Algorithm.stages``). What it
    does only later is refused when it happens (``Guarded.unlock``). All rounds are charged alike.
    """
    algorithm = replace(plan.algorithm, opt=replace(plan.algorithm.opt, noise=0.0, target_epsilon=None, force=True))  # type: ignore[call-arg]
    task, name = plan.task, type(algorithm).__name__
    short = {phase: work if 0 in (work.steps, work.epochs) else work.taking(1) for phase, work in plan.feed.phases.items()}
    secret = Secret.fresh()
    watches, last = [Guard(name, secret) for _ in range(algorithm.exchanges)], Guard(name, secret)
    feeds = [plan.feed.like(short, guard=watch) for watch in watches]
    shared, server = algorithm.init_server(task)
    client = np.array([0])
    received = plan.sent(shared, server, plan.round(0, FAR, client)).to(0)
    personal = algorithm.init_client(task, received, feeds[0].one(0, 0))
    for start in algorithm.stages():
        rounds = (plan.round(number, start + FAR, client) for number in range(start, start + FAR))
        for rnd in islice(filter(algorithm.looks, rounds), TRIED):
            for exchange, feed in enumerate(feeds):
                now = replace(rnd, exchange=exchange)
                received = plan.sent(shared, server, now).to(0)
                _, personal = algorithm.client_update(task, received, personal, feed.one(0, rnd.number), now)
    algorithm.personalize(task, received, personal, plan.feed.like(short, guard=last).one(0, NO_ROUND, "personalize"))
    return Uses(tuple(watch.seen for watch in watches), last.seen)


def guarded(plan: Plan, secret: Secret | None = None) -> Plan:
    """Return the plan, its data guarded and drawn as the private optimiser asks; as it is where the method is not private.

    What is drawn comes from the run's ``secret`` (None: a fresh one, or what the optimiser's seed stands for), bound to the
    method and its settings.
    """
    opt = plan.algorithm.opt.privacy
    if opt is None:
        return plan
    check(plan.algorithm, plan.task, plan.federation)
    who = type(plan.algorithm).__name__
    secret = (opt.secret() if secret is None or opt.seed is not None else secret).bound(
        spec(plan.algorithm), written(plan.algorithm)
    )
    feed = plan.feed
    feed = Feed(
        feed.federation, feed.phases, feed.batch_size, feed.seed, opt.sampling, Guard(who, secret), feed.augment, feed.paces
    )
    plan = replace(plan, feed=feed)
    uses = uses_of(plan)
    first, *later = (feed.like(guard=uses.guard(who, secret, exchange)) for exchange in range(plan.algorithm.exchanges))
    return replace(plan, feed=first, later=tuple(later), uses=uses)


def bound_to(plan: Plan, *purpose: str) -> Plan:
    """Return the plan with noise and samples for one purpose, where it is private: those for two have nothing in common."""

    def bound(feed: Feed) -> Feed:
        return feed.like(guard=replace(feed.guard, secret=feed.guard.secret.bound(*purpose))) if feed.guard is not None else feed

    return plan if plan.uses is None else replace(plan, feed=bound(plan.feed), later=tuple(map(bound, plan.later)))


def parts(plan: Plan) -> list[tuple[int, frozenset[str]]]:
    """Return (client, phases) for all rows of a client that the same phases use: one entry per client, or one for each part of
    its rows.

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
    """Return what each client releases of a row in ``visits`` rounds (one number per client) and in personalising once at the
    end; where its rows are in parts, an entry for each (``parts``)."""
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
    """Return (probability that a row is in a batch, batches, steps on each); without Poisson sampling, how often a row is
    used."""
    if batch_size is None or rows <= batch_size:
        return 1.0, steps, 1
    if sampling == "poisson":
        return (batch_size / rows, 1, steps) if work.same_batch else (batch_size / rows, steps, 1)
    return (1.0, steps, 1) if work.same_batch else (1.0, -(-steps // -(-rows // batch_size)), 1)


def with_noise(algorithm: Algorithm, plan: Plan, visits: NDArray[np.int64]) -> Algorithm:
    """Return the method with the noise that its target asks for."""
    opt = algorithm.opt.privacy
    if opt is None or opt.target_epsilon is None:
        return algorithm
    delta = deltas(plan)
    noise = noise_for(opt.target_epsilon, spends(plan, visits), [delta[client] for client, _ in parts(plan)], opt.accountant)
    return replace(algorithm, opt=replace(opt, noise=noise, target_epsilon=None))


def deltas(plan: Plan) -> list[float]:
    asked = plan.algorithm.opt.delta  # type: ignore[attr-defined]
    return [delta_of(rows) if asked is None else asked for rows in plan.federation.train.sizes.tolist()]


def not_counted(federation: Federation, more: Sequence[str] = ()) -> list[str]:
    """Return what is learnt from the clients' rows beside what epsilon counts; ``more`` is what this run learns."""
    learnt = (
        "how the table was read: the scaling of its columns, what fills missing values, its categories and its labels come from "
        "the rows (give them with --columns)"
    )
    notes = "the notes on how the table was read: they count rows, and name values that were not expected"
    if federation.schema is not None:
        first = notes if federation.schema.public else learnt
    elif federation.vocabulary is not None:
        first = "the vocabulary: which words there are, and which are common, comes from the rows"
    else:
        first = "how the data were made: which labels there are, and any scaling of the features"
    return [
        first,
        *more,
        "validation and test rows: scores, and with them the choice of the best round, are measured on them without noise",
        "how many rows each client has",
        "whatever else looked at the rows: advice, sweeps, and runs outside this directory",
    ]


def spent(plan: Plan, visits: NDArray[np.int64]) -> dict[str, Any]:
    """For the summary: epsilon (mean over clients), its maximum, the largest delta, noise, clip, sampling and accountant, and
    whether that protects anybody.

    Epsilon is null where there is no noise.
    """
    opt = plan.algorithm.opt.privacy
    assert opt is not None
    owners, delta = [client for client, _ in parts(plan)], deltas(plan)
    largest = [0.0] * len(delta)
    each = epsilons(spends(plan, visits), opt.multiplier, [delta[client] for client in owners], opt.accountant)
    for client, value in zip(owners, each, strict=True):  # a row is in one part
        largest[client] = max(largest[client], value)
    bounded, sizes = all(map(math.isfinite, largest)), plan.federation.train.sizes.tolist()
    return {
        "epsilon_max": max(largest) if bounded else None,
        "epsilon": float(np.mean(largest)) if bounded else None,
        "delta": max(delta),
        "noise": opt.multiplier,
        "clip": opt.clip if math.isfinite(opt.clip) else None,
        "sampling": opt.sampling,
        "accountant": opt.accountant,
        "noise_secret": opt.seed is None,
        "private": opt.seed is None and bounded and all(d * n < 1 for d, n in zip(delta, sizes, strict=True)),
    }
