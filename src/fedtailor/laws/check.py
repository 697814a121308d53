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
from fedtailor.engine.base import NO_ROUND, one_thread
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import evaluate
from fedtailor.engine.pool import cores
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument, LawBroken
from fedtailor.laws.ground import Ground, everyone, federation, network
from fedtailor.runs.store import Store

CLOSE = 1e-9  # engines add in different orders; everything else must be equal to the last bit


@dataclass(frozen=True)
class Verdict:
    """A law that was kept, and on what."""

    number: int
    law: str
    model: str


def check_algorithm(
    algorithm: Algorithm,
    model: Any = None,
    data: Federation | None = None,
    laws: Sequence[int] | None = None,
) -> list[Verdict]:
    """Try the ten laws on ``algorithm``; returns what was kept, raises ``LawBroken`` naming every law that was not.

    Without ``model`` they are tried on a linear model and on a small network with batch norm and dropout. ``laws`` selects
    some by number.
    """
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(f"check_algorithm needs an Algorithm, for instance ft.FedAvg(), not {algorithm!r}")
    data = data or federation()
    grounds: dict[str, Any] = {"linear": "linear", "network": network()} if model is None else {"the given model": model}
    kept: list[Verdict] = []
    broken: list[str] = []
    for name, what in grounds.items():
        ground = Ground.make(name, algorithm, what, data)
        for number, (title, law) in LAWS.items():
            if laws is not None and number not in laws:
                continue
            try:
                with one_thread():
                    law(ground)
                kept.append(Verdict(number, title, name))
            except LawBroken as error:
                broken.append(f"law {number} ({title}) on {name}: {error}")
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else ""
                broken.append(f"law {number} ({title}) on {name}: {type(error).__name__}: {first}")
    if broken:
        laws_broken = len({text.split(" ")[1] for text in broken})
        raise LawBroken(f"{type(algorithm).__name__} breaks {laws_broken} of the ten laws:\n  " + "\n  ".join(broken))
    return kept


def same(a: Any, b: Any, where: str, tolerance: float = 0.0) -> None:
    """Raise unless two trees agree: to the last bit, or to ``tolerance`` relative to the size of the leaf."""
    if isinstance(a, dict) != isinstance(b, dict) or (isinstance(a, dict) and list(a) != list(b)):
        raise LawBroken(f"{where}: the trees differ, {_keys(a)} against {_keys(b)}")
    for (path, x), (_, y) in zip(tree.items(a), tree.items(b), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise LawBroken(f"{where}: {path} is {tuple(x.shape)} {x.dtype} against {tuple(y.shape)} {y.dtype}")
        if torch.equal(x, y) or not x.numel():
            continue
        apart = float((x.double() - y.double()).abs().max())
        size = max(1.0, float(y.double().abs().max()))
        if not apart <= tolerance * size:
            raise LawBroken(f"{where}: {path} differs by {apart:.3g} (allowed {tolerance * size:.1g})")


def _keys(value: Any) -> Any:
    return list(value) if isinstance(value, dict) else type(value).__name__


# -- the laws ---------------------------------------------------------------------------------------------------------
def pure(ground: Ground) -> None:
    """No method changes its arguments or itself, and the same call gives the same answer."""
    plan, task = ground.plan, ground.plan.task
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

    data, rnd = plan.feed.one(0, 0), Round(0, 2, len(plan.federation), 1)
    for _ in range(2):  # global random state must not matter either
        shared, server = call("init_server")
        personal = call("init_client", shared, data)
        upload, personal = call("client_update", shared, personal, data, rnd)
        reduce = plan.reducer(shared, rnd)
        reduced = reduce.finish(reduce.add(reduce.start(), _lift(upload), torch.ones(1), torch.zeros(1, dtype=torch.int64)))
        shared, server = call("server_update", shared, server, reduced, rnd)
        ready = call("personalize", shared, personal, plan.feed.one(0, NO_ROUND, "personalize"))
        call("predict", shared, ready, plan.federation.test.client(0)[0])
    if hasattr(algorithm, "__dict__") and dict(vars(algorithm)) != before:
        raise LawBroken("the algorithm keeps state on itself; state belongs in shared, personal or server")


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _lift(branch: Any) -> Any:
    return tree.map(lambda leaf: leaf.unsqueeze(0), branch)


def stable(ground: Ground) -> None:
    """Shapes and types of every tree stay what they were."""
    _, seen = ground.by_the_book()
    first = seen[0]
    for step in seen:
        for what in ("shared", "server", "upload", "personal", "born"):
            if tree.shapes(step[what]) != tree.shapes(first["personal" if what == "born" else what]):
                raise LawBroken(
                    f"{what} of client {step['client']} in round {step['round']} is {tree.shapes(step[what])}, "
                    f"it was {tree.shapes(first[what])}"
                )


def engines(ground: Ground) -> None:
    """The loop, any number of workers, and the vectorized engine give the same numbers."""
    alone = ground.played(LoopEngine(ground.plan, workers=1))
    if cores() > 1:
        same(ground.played(LoopEngine(ground.plan, workers=2)), alone, "two workers against one")
    same(ground.played(VectorizedEngine(ground.plan)), alone, "vectorized against loop", CLOSE)


def padding(ground: Ground) -> None:
    """Rows and steps that are masked out change nothing, whatever they hold."""
    plan = ground.plan
    shared, _ = plan.algorithm.init_server(plan.task)
    rnd = Round(0, 1, len(plan.federation), 1)
    for client in (0, 1):
        given = plan.feed.one(client, 0)
        real = _plain(given.data if isinstance(given, Guarded) else given)
        for more_steps, more_rows in ((0, 3), (2, 0), (1, 2)):
            padded = _pad(real, more_steps, more_rows)
            answers = []
            for data in (plan.feed.guarded(real), plan.feed.guarded(padded)):
                personal = plan.algorithm.init_client(plan.task, shared, data)
                answers.append(plan.algorithm.client_update(plan.task, shared, personal, data, rnd))
            where = f"client {client} with {more_steps} more steps and {more_rows} more rows"
            same(dict(zip("ab", answers[1], strict=True)), dict(zip("ab", answers[0], strict=True)), where, CLOSE)


def _plain(data: Any) -> dict[str, Any]:
    return {name: _plain(data[name]) if not isinstance(data[name], Tensor) else data[name] for name in data}


def _pad(data: dict[str, Any], steps: int, rows: int) -> dict[str, Any]:
    whole = ("val", "facts")  # not cut into steps
    branches = {name: value for name, value in data.items() if isinstance(value, dict)}
    out: dict[str, Any] = {name: value if name in whole else _pad(value, steps, rows) for name, value in branches.items()}
    if "rows" in data:
        out["rows"] = data["rows"]
    for name in ("x", "y", "mask", "key", "expected"):
        if name not in data:
            continue
        value = data[name]
        shape = (value.shape[0] + steps, *([] if name in ("key", "expected") else [value.shape[1] + rows]), *value.shape[2:])
        fill = 1e3 if name == "x" and value.is_floating_point() else 0  # a token must be one
        wide = torch.full(shape, fill, dtype=value.dtype)
        wide[tuple(slice(0, n) for n in value.shape)] = value
        out[name] = wide
    return out


def order(ground: Ground) -> None:
    """Listing the clients in another order changes no client's numbers."""
    count = len(ground.plan.federation)
    turned = ground.listed(list(reversed(range(count))))
    same(turned.played(LoopEngine(turned.plan, workers=1)), ground.played(LoopEngine(ground.plan, workers=1)), "clients reversed")


def owners(ground: Ground) -> None:
    """Server and clients share nothing but the shared tree down and the upload up, as bytes."""
    together, _ = ground.by_the_book()
    apart, _ = ground.by_the_book(apart=True)
    same(apart, together, "with only bytes between server and clients")


def birth(ground: Ground) -> None:
    """A client is initialised when it is first sampled, from the shared tree it then receives, and keeps its state after."""
    book, _ = ground.by_the_book()
    same(ground.played(LoopEngine(ground.plan, workers=1)), book, "against the protocol by the book")


def read_only(ground: Ground) -> None:
    """Evaluating, as often as one likes, changes nothing."""
    quiet = ground.played(LoopEngine(ground.plan, workers=1))
    engine = LoopEngine(ground.plan, workers=1)

    def watch(rnd: Round, shared: Any, store: Store) -> None:
        kept = {"shared": tree.clone(shared), "personal": tree.clone(everyone(engine.plan, store))}
        first, again = evaluate(engine, shared, store)[0], evaluate(engine, shared, store)[0]
        same({"shared": shared, "personal": everyone(engine.plan, store)}, kept, f"evaluation in round {rnd.number}")
        if first != again:
            raise LawBroken(f"two evaluations in round {rnd.number} differ")

    same(ground.played(engine, watch), quiet, "with evaluation in every round")


def round_trip(ground: Ground) -> None:
    """Every tree survives the wire, the checkpoint and the store bit for bit."""
    _, seen = ground.by_the_book()
    store = Store(len(ground.plan.federation))
    for step in seen:
        for what in ("shared", "server", "upload", "personal"):
            same(tree.unpack(tree.pack(step[what])), step[what], f"{what} through bytes")
        ids = np.array([step["client"]])
        store.put(ids, _lift(step["personal"]))
        same(store.get(ids), _lift(step["personal"]), "personal through the store")


def limits(ground: Ground) -> None:
    """Every declared reduction holds, with everyone taking part (else newcomers start elsewhere)."""
    algorithm = ground.plan.algorithm
    for limit in algorithm.limits:
        one, other = limit_pair(algorithm, limit)
        what = ", ".join(f"{k}={v}" for k, v in limit.change.items()) or "as it is"
        where = f"{what}: {limit.compares} against {limit.equals}"
        found, wanted = (outcome(ground.using(method), limit.compares) for method in (one, other))
        same(found, wanted, where, 0.0 if limit.exact else CLOSE)


def outcome(ground: Ground, compares: str) -> dict[str, Any]:
    """After the rounds at full turnout: the shared tree, or every client's logits on its test rows."""
    engine = LoopEngine(ground.plan, workers=1)
    out: dict[str, Any] = {}

    def watch(rnd: Round, shared: Any, store: Store) -> None:
        if compares == "shared":
            out.update(shared)
            return
        ids = np.arange(len(ground.plan.federation))
        found = engine.predictions(shared, ids, store, ground.plan.federation.test)
        out.update({ground.plan.federation.names[p.ids[0]]: p.personal for p in found})

    ground.played(engine, watch, len(ground.plan.federation))
    return out


def limit_pair(algorithm: Algorithm, limit: Limit) -> tuple[Algorithm, Algorithm]:
    """The method with the limit's change, and the method it must then be."""
    one = dataclasses.replace(algorithm, **limit.change)
    kind = registry.get(limit.equals)
    if kind is None:
        raise LawBroken(f"the limit names {limit.equals!r}, which is not registered")
    fields = {f.name for f in dataclasses.fields(kind)}
    common = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name in fields}
    return one, kind(**{**common, **limit.also})


LAWS: dict[int, tuple[str, Callable[[Ground], None]]] = {
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
