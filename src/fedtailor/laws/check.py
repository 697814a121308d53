"""``check_algorithm``: the ten laws, each a function that returns nothing or raises ``LawBroken``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms import registry
from fedtailor.algorithms.base import Algorithm, Limit, Round
from fedtailor.data.federation import Federation
from fedtailor.data.guard import Guarded
from fedtailor.engine.base import NO_ROUND, Sent, joined, lift, one_thread, row
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import evaluate
from fedtailor.engine.pool import cores
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument, LawBroken
from fedtailor.laws.ground import ROUNDS, Case, everyone, federation, network
from fedtailor.runs.store import Store

CLOSE = 1e-9  # engines add in different orders; everything else must be equal to the last bit


@dataclass(frozen=True)
class Verdict:
    """A law that the algorithm keeps, and the model on which it was tried."""

    number: int
    law: str
    model: str


def check_algorithm(
    algorithm: Algorithm,
    model: Any = None,
    data: Federation | None = None,
    laws: Sequence[int] | None = None,
) -> list[Verdict]:
    """Try the ten laws on ``algorithm``; return the laws that hold, or raise ``LawBroken`` naming every law that does not.

    Without ``model`` they are tried on a linear model and on a small network with batch norm and dropout. ``laws`` selects
    some by number.
    """
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(f"check_algorithm needs an Algorithm, for instance ft.FedAvg(), not {algorithm!r}")
    data = data or federation()
    models: dict[str, Any] = {"linear": "linear", "network": network()} if model is None else {"the given model": model}
    verdicts: list[Verdict] = []
    broken: list[str] = []
    for name, tried in models.items():
        case = Case.make(name, algorithm, tried, data)
        for number, (title, law) in LAWS.items():
            if laws is not None and number not in laws:
                continue
            try:
                with one_thread():
                    law(case)
                verdicts.append(Verdict(number, title, name))
            except LawBroken as error:
                broken.append(f"law {number} ({title}) on {name}: {error}")
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else ""
                broken.append(f"law {number} ({title}) on {name}: {type(error).__name__}: {first}")
    if broken:
        laws_broken = len({text.split(" ")[1] for text in broken})
        raise LawBroken(f"{type(algorithm).__name__} breaks {laws_broken} of the ten laws:\n  " + "\n  ".join(broken))
    return verdicts


def same(a: Any, b: Any, description: str, tolerance: float = 0.0, path: str = "") -> None:
    """Raise unless two trees have the same keys in the same order and their leaves agree: to the last bit, or to ``tolerance``
    relative to the size of the leaf."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        for key in a:
            same(a[key], b[key], description, tolerance, f"{path}/{key}" if path else str(key))
        return
    if isinstance(a, dict) or isinstance(b, dict):
        raise LawBroken(f"{description}: the trees differ{f' in {path}' if path else ''}, {_keys(a)} against {_keys(b)}")
    if a.shape != b.shape or a.dtype != b.dtype:
        raise LawBroken(f"{description}: {path} is {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}")
    if torch.equal(a, b) or not a.numel():
        return
    difference = float((a.double() - b.double()).abs().max())
    size = max(1.0, float(b.double().abs().max()))
    if not difference <= tolerance * size:
        raise LawBroken(f"{description}: {path} differs by {difference:.3g} (allowed {tolerance * size:.1g})")


def _keys(value: Any) -> Any:
    return list(value) if isinstance(value, dict) else type(value).__name__


# -- the laws ---------------------------------------------------------------------------------------------------------
def pure(case: Case) -> None:
    """No method changes its arguments or itself, and the same call gives the same answer."""
    plan, task = case.plan, case.plan.task
    algorithm = plan.algorithm
    before = dict(vars(algorithm)) if hasattr(algorithm, "__dict__") else {}

    def call(name: str, *arguments: Any) -> Any:
        trees = [a for a in arguments if isinstance(a, dict)]
        copies = [tree.clone(t) for t in trees]
        method: Callable[..., Any] = getattr(algorithm, name)
        first, again = (method(task, *(a.anew() if isinstance(a, Guarded) else a for a in arguments)) for _ in range(2))
        for was, now in zip(copies, trees, strict=True):
            same(now, was, f"{name} changed an argument")
        for one, other in zip(_parts(first), _parts(again), strict=True):
            same(one, other, f"{name} gave another answer the second time")
        return first

    client = np.array([0])
    for _ in range(2):  # global random state must not matter either
        shared, server = call("init_server")
        personal = None
        for exchange in range(algorithm.exchanges):
            rnd = plan.round(0, 2, client, exchange)
            data = plan.feed_of(rnd).one(0, 0)
            received = joined(shared, row(call("downlink", shared, server, rnd.ranks, rnd), 0))
            if personal is None:
                personal = call("init_client", received, data)
            upload, personal = call("client_update", received, personal, data, rnd)
            reduce = plan.reducer(shared, rnd)
            reduced = reduce.finish(reduce.add(reduce.start(), lift(upload), torch.ones(1), torch.zeros(1, dtype=torch.int64)))
            shared, server = call("server_update", shared, server, reduced, rnd)
        received = joined(shared, row(call("downlink", shared, server, rnd.ranks, rnd), 0))
        ready = call("personalize", received, personal, plan.feed.one(0, NO_ROUND, "personalize"))
        call("predict", received, ready, plan.federation.test.client(0)[0])
        call("downlink", shared, server, None, rnd)
    if hasattr(algorithm, "__dict__") and dict(vars(algorithm)) != before:
        raise LawBroken("the algorithm keeps state on itself; state belongs in shared, personal or server")


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def stable(case: Case) -> None:
    """Shapes and types of every tree stay what they were."""
    _, seen = case.book
    start = seen[0]["server"]
    grown = next((step for step in seen if step["server"] is not start), seen[0])  # by rank, once it knows how many there are
    for step in seen:
        like = next(other for other in seen if other["exchange"] == step["exchange"])  # uploads of exchanges may differ
        for branch in ("shared", "server", "received", "upload", "personal", "born"):
            first = like if branch == "upload" else grown if branch == "server" and step["server"] is not start else seen[0]
            if tree.shapes(step[branch]) != tree.shapes(first["personal" if branch == "born" else branch]):
                raise LawBroken(
                    f"{branch} of client {step['client']} in round {step['round']} is {tree.shapes(step[branch])}, "
                    f"it was {tree.shapes(first[branch])}"
                )


def engines(case: Case) -> None:
    """The loop, any number of workers, and the vectorized engine give the same numbers."""
    if cores() > 1:
        same(case.played(LoopEngine(case.plan, workers=2)), case.reference, "two workers against one")
    same(case.played(VectorizedEngine(case.plan)), case.reference, "vectorized against loop", CLOSE)


def padding(case: Case) -> None:
    """Rows and steps that are masked out change nothing, whatever they hold."""
    plan = case.plan
    start = plan.algorithm.init_server(plan.task)
    for client in (0, 1):
        rnd = plan.round(0, 1, np.array([client]))
        shared = plan.sent(*start, rnd).to(client)
        batches = plan.feed.one(client, 0)
        real = _plain(batches.data if isinstance(batches, Guarded) else batches)
        for more_steps, more_rows in ((0, 3), (2, 0), (1, 2)):
            padded = _pad(real, more_steps, more_rows)
            answers = []
            for data in (plan.feed.guarded(real), plan.feed.guarded(padded)):
                personal = plan.algorithm.init_client(plan.task, shared, data)
                answers.append(plan.algorithm.client_update(plan.task, shared, personal, data, rnd))
            description = f"client {client} with {more_steps} more steps and {more_rows} more rows"
            same(dict(zip("ab", answers[1], strict=True)), dict(zip("ab", answers[0], strict=True)), description, CLOSE)


def _plain(data: Any) -> dict[str, Any]:
    return {name: _plain(data[name]) if not isinstance(data[name], Tensor) else data[name] for name in data}


def _pad(data: dict[str, Any], steps: int, rows: int) -> dict[str, Any]:
    without_steps = ("val", "facts")  # not cut into steps
    branches = {name: value for name, value in data.items() if isinstance(value, dict)}
    out: dict[str, Any] = {name: value if name in without_steps else _pad(value, steps, rows) for name, value in branches.items()}
    if "rows" in data:
        out["rows"] = data["rows"]
    for name in ("x", "y", "mask", "key", "expected"):
        if name not in data:
            continue
        value = data[name]
        shape = (value.shape[0] + steps, *([] if name in ("key", "expected") else [value.shape[1] + rows]), *value.shape[2:])
        fill = 1e3 if name == "x" and value.is_floating_point() else 0  # a token must be one
        padded = torch.full(shape, fill, dtype=value.dtype)
        padded[tuple(slice(0, n) for n in value.shape)] = value
        out[name] = padded
    return out


def order(case: Case) -> None:
    """Listing the clients in another order changes no client's numbers."""
    reversed_ = case.listed(list(reversed(range(len(case.plan.federation)))))
    same(reversed_.reference, case.reference, "clients reversed")


def owners(case: Case) -> None:
    """Server and clients share nothing but what is sent down and the upload up, as bytes."""
    apart, _ = case.by_the_book(apart=True)
    same(apart, case.book[0], "with only bytes between server and clients")


def birth(case: Case) -> None:
    """A client is initialised when it is first sampled, from the shared tree it then receives, and keeps its state after."""
    same(case.reference, case.book[0], "against the protocol by the book")


def read_only(case: Case) -> None:
    """Evaluating, as often as one likes, changes nothing."""
    reference = case.reference
    engine = LoopEngine(case.plan, workers=1)

    def watch(rnd: Round, sent: Sent, store: Store) -> None:
        before = {"shared": tree.clone(sent.shared), "personal": tree.clone(everyone(engine.plan, store))}
        first, again = evaluate(engine, sent, store)[0], evaluate(engine, sent, store)[0]
        same({"shared": sent.shared, "personal": everyone(engine.plan, store)}, before, f"evaluation in round {rnd.number}")
        if first != again:
            raise LawBroken(f"two evaluations in round {rnd.number} differ")

    same(case.played(engine, watch), reference, "with evaluation in every round")


def round_trip(case: Case) -> None:
    """Every tree survives the wire, the checkpoint and the store bit for bit."""
    _, seen = case.book
    store = Store(len(case.plan.federation))
    for step in seen:
        for branch in ("received", "server", "upload", "personal"):
            same(tree.unpack(tree.pack(step[branch])), step[branch], f"{branch} through bytes")
        ids = np.array([step["client"]])
        store.put(ids, lift(step["personal"]))
        same(store.get(ids), lift(step["personal"]), "personal through the store")


def limits(case: Case) -> None:
    """Every declared reduction holds, with everyone taking part (else newcomers start elsewhere)."""
    algorithm = case.plan.algorithm
    ends: dict[str, dict[str, Any]] = {}  # several limits name the same method
    for limit in algorithm.limits:
        pair = limit_pair(algorithm, limit)
        for method in pair:
            if repr(method) not in ends:
                ends[repr(method)] = outcome(case.using(method))
        change = ", ".join(f"{k}={v}" for k, v in limit.change.items()) or "as it is"
        description = f"{change}: {limit.compares} against {limit.equals}"
        actual, expected = (ends[repr(method)][limit.compares] for method in pair)
        same(actual, expected, description, 0.0 if limit.exact else CLOSE)


def outcome(case: Case) -> dict[str, Any]:
    """Return what the rounds at full turnout end with: the shared tree, and every client's logits on its test rows."""
    engine, federation = LoopEngine(case.plan, workers=1), case.plan.federation
    ids = np.arange(len(federation))
    out: dict[str, Any] = {}

    def watch(rnd: Round, sent: Sent, store: Store) -> None:
        if rnd.number + 1 == ROUNDS:
            predictions = engine.predictions(sent, ids, store, federation.test)
            out["personal"] = {federation.names[p.ids[0]]: p.personal for p in predictions}
            out["shared"] = sent.shared

    case.played(engine, watch, len(federation))
    return out


def limit_pair(algorithm: Algorithm, limit: Limit) -> tuple[Algorithm, Algorithm]:
    """Return the method with the limit's change, and the method it must then be."""
    one = dataclasses.replace(algorithm, **limit.change)
    kind = registry.get(limit.equals)
    if kind is None:
        raise LawBroken(f"the limit names {limit.equals!r}, which is not registered")
    fields = {f.name for f in dataclasses.fields(kind)}
    common = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name in fields}
    return one, kind(**{**common, **limit.also})


LAWS: dict[int, tuple[str, Callable[[Case], None]]] = {
    1: ("pure", pure),
    2: ("stable trees", stable),
    3: ("engines agree", engines),
    4: ("padding is nothing", padding),
    5: ("order of clients is nothing", order),
    6: ("owners", owners),
    7: ("birth", birth),
    8: ("evaluation is read-only", read_only),
    9: ("round trip", round_trip),
    10: ("limits", limits),
}
