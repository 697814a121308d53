"""``onboard``: a model for a client that was not there, from a few labelled rows, and whether it is better than the shared one.

The newcomer works by the run's own method on what the server had at the end, round after round, and sends nothing back. To judge
it without its own training rows the same is done on folds: every row is predicted by a model that has not seen it, and by the
shared model, and the rows are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedtailor.algorithms.base import RECEIVED, opened
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.data.tokens import as_tokens
from fedtailor.engine.base import Plan, Sent, one_thread
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.options import Options
from fedtailor.engine.pieces import augmented_by, batch_length, metric_name, with_pieces
from fedtailor.engine.setup import make_plan
from fedtailor.errors import InvalidArgument, InvalidData, ModelMismatch
from fedtailor.metrics.paired import Paired, over_rows
from fedtailor.metrics.verdict import FEW, UNKNOWN, judge_newcomer, unknown
from fedtailor.runs.models import Saved
from fedtailor.runs.store import Store
from fedtailor.server.reduce import nothing
from fedtailor.task.kinds import Kind, kind_of
from fedtailor.task.scores import Metric, named

FOLDS = 10
FEWEST = 10  # rows below which nothing is said about which model is better
NO_SPREAD = 1e-6  # of a feature that was standardised by everyone's rows: it is the same in all of the client's

DRAWS = 500  # of rows with replacement, for scores that are no mean over rows

Rows = NDArray[np.int64]
Moments = tuple[tuple[float, float], ...]


@dataclass(frozen=True, eq=False)
class Onboarded:
    """A newcomer's model: the tree it predicts with, its own (mean, scale) of every column where the run scales clients by their
    own rows, and the ``record`` of how it was made and judged (plain values)."""

    client: str
    personal: Any
    moments: Moments
    record: dict[str, Any]


@one_thread()
def onboard(saved: Saved, x: ArrayLike | Tensor, y: ArrayLike | Tensor, client: str, rounds: int | None = None) -> Onboarded:
    """Return the model of a client that the run has not seen, trained on its rows of features and targets, and judged.

    ``x`` is scaled as everyone's rows are (``Schema.encode`` without a client), ``y`` holds class numbers or targets as trained
    on. ``rounds`` is how long it works (default: as long as the run's clients did).
    """
    options = _options(saved)
    _check(saved, client, rounds)
    rows, targets = _tensors(saved, x, y)
    rounds = options.rounds if rounds is None else rounds
    folds = _folds(targets, kind_of(saved.facts["kind"]), rng.generator(options.seed, f"onboard {client}"))
    parts = [(np.arange(len(targets)),) * 2, *folds]
    scaled = [_own_scale(saved, rows, train) for train, _ in parts]
    plan = _plan(saved, [(pair[0], targets) for pair in scaled], parts, client, options)
    trees = _trained(plan, _sent(saved), rounds)
    record = {
        "client": client,
        "method": saved.facts["algorithm"],
        "rows": len(targets),
        "rounds": rounds,
        **_judged(saved, plan.federation, trees),
    }
    return Onboarded(client, trees[0], scaled[0][1], record)


def _options(saved: Saved) -> Options:
    """Return how the run trained its clients."""
    known = {name: value for name, value in saved.config.items() if name in Options.model_fields}
    # what concerns other clients, the engine or the measures of a whole run
    for name in (
        "start",
        "cohort",
        "new_clients",
        "shift",
        "metrics",
        "score",
        "engine",
        "workers",
        "device",
        "autocast",
        *_of_members(),
    ):
        known.pop(name, None)
    if saved.config.get("batch_size") == 0:
        known.pop("batch_size")
    return Options.of(known)


def _of_members() -> list[str]:
    return [name for name in Options.model_fields if name.startswith("user_")]


def _check(saved: Saved, client: str, rounds: int | None) -> None:
    if not client or client in saved.facts["clients"]:  # one that was onboarded may come again, with more rows
        have = f"the run has a model of {client!r} already" if client else "a newcomer needs a name"
        raise InvalidArgument(f"{have}; give another name")
    if rounds is not None and rounds < 1:
        raise InvalidArgument(f"rounds={rounds} must be at least 1")
    if saved.algorithm.opt.privacy is not None:
        raise InvalidArgument(
            f"the run of {saved.facts['algorithm']} is private, and what onboarding would spend of a newcomer's privacy is not "
            "counted; predict its rows with the shared model, or train again with it among the clients"
        )


def _tensors(saved: Saved, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    shape, dtype = tuple(saved.facts["shape"]), getattr(torch, saved.facts["dtype"])
    if saved.tokens:
        rows = as_tokens(x, saved.tokens, shape[0])
    elif saved.packing is not None:
        rows = saved.packing.pack(x).to(dtype)
    else:
        rows = (x if isinstance(x, Tensor) else torch.tensor(np.asarray(x))).to(dtype)
    if not saved.tokens and tuple(rows.shape[1:]) != shape:
        raise ModelMismatch(f"rows have shape {tuple(rows.shape[1:])} but the model was trained on {shape}")
    softmax = kind_of(saved.facts["kind"]).softmax
    targets = (y if isinstance(y, Tensor) else torch.tensor(np.asarray(y))).to(torch.int64 if softmax else dtype)
    if not len(targets) or len(targets) != len(rows):
        raise InvalidData(f"there are {len(rows)} rows and {len(targets)} labels; give at least one of each, and as many")
    if softmax and targets.dim() == 1 and not bool(((targets >= 0) & (targets < saved.facts["labels"])).all()):
        raise InvalidData(f"labels must be class numbers from 0 to {saved.facts['labels'] - 1}")
    return rows, targets


def _folds(y: Tensor, kind: Kind, draw: np.random.Generator) -> list[tuple[Rows, Rows]]:
    """Return (rows to train on, rows to judge on), each row judged once, classes spread over the folds; none for few rows."""
    count = len(y)
    if count < FEWEST:
        return []
    shuffled = draw.permutation(count)
    if kind.softmax and y.dim() == 1:
        shuffled = shuffled[np.argsort(y.numpy()[shuffled], kind="stable")]
    fold = np.empty(count, np.int64)
    fold[shuffled] = np.arange(count) % FOLDS
    return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(FOLDS)]


def _own_scale(saved: Saved, x: Tensor, train: Rows) -> tuple[Tensor, Moments]:
    """Return the rows and no moments; where the run scales clients by their own rows, rescaled by the newcomer's training rows,
    and the moments that do it."""
    schema = saved.schema
    if schema is None or schema.standardize != "client":
        return x, ()
    x, moments, at = x.clone(), [], 0
    for column in schema.columns:
        mean, scale = 0.0, 1.0
        if column.kind in ("numeric", "date"):
            values = x[train, at].double()
            center, spread = float(values.mean()), float(values.std(correction=0))
            spread = spread if spread > NO_SPREAD else 1.0
            x[:, at] = (x[:, at] - center) / spread
            mean, scale = column.mean + column.scale * center, column.scale * spread
        moments.append((mean, scale))
        at += len(column.names())
    return x, tuple(moments)


def _plan(
    saved: Saved, rows: Sequence[tuple[Tensor, Tensor]], parts: Sequence[tuple[Rows, Rows]], client: str, options: Options
) -> Plan:
    """Return the method on a federation in which the newcomer is the first client, and on each fold one more."""

    def split(which: int) -> Split:
        chosen = [part[which] for part in parts]
        x = torch.cat([x[torch.from_numpy(part)] for (x, _), part in zip(rows, chosen, strict=True)])
        y = torch.cat([y[torch.from_numpy(part)] for (_, y), part in zip(rows, chosen, strict=True)])
        return Split(x, y, np.cumsum([0, *map(len, chosen)]))

    facts = saved.facts
    federation = Federation(
        train=split(0),
        test=split(1),
        names=(client, *(f"{client}, without fold {i}" for i in range(1, len(parts)))),
        kind=kind_of(facts["kind"]),
        labels=facts["labels"],
        tokens=saved.tokens,
        vocabulary=saved.vocabulary,
        packing=saved.packing,
        precision=getattr(torch, facts["dtype"]),
    )
    task = replace(saved.task, inputs=federation.train.x[:0].clone(), seed=options.seed, clients=len(facts["clients"]))
    if saved.vocabulary is not None and saved.vocabulary.unknown is not None:
        task = replace(task, unscored=saved.vocabulary.unknown)
    task = with_pieces(task, federation.take([0]), options)
    augment = augmented_by(options.augment, federation, batch_length(federation, options))
    return make_plan(saved.algorithm, task, federation, options.batch_size, options.seed, "uniform", augment=augment)


def _sent(saved: Saved) -> Sent:
    """Return what the server sends a newcomer at the end."""
    received = saved.newcomer.get(RECEIVED, {}) if saved.newcomer else {}
    return Sent(saved.shared, lambda ids: received).to_newcomers()


def _trained(plan: Plan, sent: Sent, rounds: int) -> list[Any]:
    """Return the tree with which each client of the plan predicts, after so many rounds with what was sent to it."""
    store, ids = Store(len(plan.federation)), np.arange(len(plan.federation))
    engine = LoopEngine(plan, workers=1)
    if not plan.algorithm.stateless:
        for number in range(rounds):
            for exchange in range(plan.algorithm.exchanges):
                engine.round(sent, ids, plan.round(number, rounds, ids, exchange), store, nothing)
    return [engine.personal(sent, client, store) for client in ids.tolist()]


def _judged(saved: Saved, federation: Federation, trees: Sequence[Any]) -> dict[str, Any]:
    """Return the score of the newcomer's models on rows they have not seen, that of the shared model, and the verdict."""
    score, rows = _score_of(saved), federation.train.sizes[0]
    facts: dict[str, Any] = dict.fromkeys(("shared", "personal", "gain", "low", "high"))
    facts |= {"score": score.name, "folds": len(trees) - 1}
    client, method = federation.names[0], saved.facts["algorithm"]
    why = ""
    if not saved.has_shared:
        why = f"{method} has no shared model, so there is nothing to compare {client}'s own with."
    elif saved.algorithm.stateless:
        why = f"{method} gives every client the shared model, and {client} too."
    elif len(trees) == 1:
        why = f"{rows} rows are too few to tell whether {client}'s own model is better than the shared one; {FEWEST} are needed."
    if why:
        verdict = replace(unknown(client, score, why), outcome=FEW if saved.has_shared and len(trees) == 1 else UNKNOWN)
        return {**facts, "verdict": verdict.json(), "text": why}
    means, gains = _compared(saved, federation, trees, score)
    verdict = judge_newcomer(client, gains, score, means)
    facts |= {"personal": means[0], "shared": means[1], "gain": gains.mean, "low": gains.low, "high": gains.high}
    return {**facts, "verdict": verdict.json(), "text": verdict.sentence}


def _score_of(saved: Saved) -> Metric:
    """Return what the run is judged by, or the kind's score where that is a measure of the user's own; an earlier version did not
    write it down."""
    kind = kind_of(saved.facts["kind"])
    name = saved.facts.get("score")
    own = [metric_name(entry) for entry in saved.config.get("metrics", ())]
    known = kind.score if name is None or name in own else named(str(name), kind.metrics)
    return known or kind.score


def _compared(saved: Saved, federation: Federation, trees: Sequence[Any], score: Metric) -> tuple[tuple[float, float], Paired]:
    """Return the scores of the models that have not seen a row and of the shared one, and their comparison over the rows."""
    sides: dict[str, list[Tensor]] = {"own": [], "shared": []}
    targets = []
    for fold in range(1, len(trees)):
        x, y = federation.test.client(fold)
        with torch.no_grad():
            sides["own"].append(saved.algorithm.predict(saved.task, *opened(saved.shared, trees[fold]), x))
        sides["shared"].append(saved.predict(None, x))
        targets.append(y)
    y = torch.cat(targets)
    own, shared = (torch.cat(parts) for parts in sides.values())
    each = [_per_row(federation.kind, logits, y) for logits in (own, shared)]
    if score.clients is None or federation.kind.per_position(y):
        return (float(each[0].mean()), float(each[1].mean())), over_rows(federation.kind.score, each[0], each[1])
    drawn = [_over_draws(score, logits, y) for logits in (own, shared)]
    gains = score.gain(*drawn)
    means = (float(drawn[0][0]), float(drawn[1][0]))
    error = float(np.nanstd(gains[1:], ddof=1))
    return means, over_rows(federation.kind.score, each[0], each[1], gain=float(gains[0]), error=error)


def _over_draws(score: Metric, logits: Tensor, y: Tensor) -> NDArray[np.float64]:
    """Return a score that is no mean over rows: on the rows, and on rows drawn from them with replacement, again and again."""
    draw = np.random.default_rng(0)
    index = torch.from_numpy(np.concatenate([np.arange(len(y))[None], draw.integers(len(y), size=(DRAWS, len(y)))]))
    assert score.clients is not None
    values = score.clients(logits[index], y[index], torch.ones(index.shape, dtype=torch.bool))
    return np.full(len(index), np.nan) if values is None else values


def _per_row(kind: Kind, logits: Tensor, y: Tensor) -> NDArray[np.float64]:
    hits = kind.hits(logits, y)
    if not kind.per_position(y):
        return hits.double().numpy()
    real = (y != -1).double()
    return ((hits * real).sum(1) / real.sum(1).clamp(min=1)).double().numpy()
