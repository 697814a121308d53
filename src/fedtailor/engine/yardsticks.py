"""Yardsticks of a comparison: no methods, nothing federated; what the methods' scores are held against.

``majority`` says of every row what is most frequent (or, of numbers, the mean) among the client's training rows. ``pooled`` is
one model trained on all clients' rows in one place, which nobody here has. ``boosting`` is scikit-learn's gradient boosting, for
every client alone and on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.data.redeal import pooled
from fedtailor.data.split import Split
from fedtailor.engine import tune as tuning
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import newcomers_of, prepare
from fedtailor.engine.run import run
from fedtailor.errors import FedtailorError, InvalidArgument, nearest
from fedtailor.metrics.client import measure
from fedtailor.metrics.spread import summarize
from fedtailor.runs.record import Record
from fedtailor.task import Task

ALONE = next(kind for kind in METHODS if kind.yardstick == "alone")  # local training
ALWAYS, OPTIONAL = ("majority", "pooled"), ("boosting",)
BLOCK = 64  # clients measured together
FAINT = 1e-6  # least probability, so that its logarithm is a number


@dataclass(frozen=True)
class Setting:
    """Everything that yardsticks are made from: the rows, the model, the options of the runs, and the method of local training
    there."""

    federation: Federation
    model: Any
    options: Options
    local: Algorithm
    grid: Mapping[str, Sequence[float]] | None
    tune: bool = False


def names_of(asked: Sequence[str]) -> tuple[str, ...]:
    """Return which yardsticks are meant: those that always stand there and those asked for; ``none`` is none at all."""
    for word in asked:
        if word not in (*ALWAYS, *OPTIONAL, "none"):
            raise InvalidArgument(
                f"unknown yardstick {word!r}; {nearest(word, (*ALWAYS, *OPTIONAL, 'none'), 'the yardsticks are')}"
            )
    return () if "none" in asked else tuple(dict.fromkeys([*ALWAYS, *asked]))


def make(names: Sequence[str], where: Setting) -> dict[str, Record]:
    """Return the yardsticks by label; one that cannot be made here (boosting of pictures) is left out."""
    federation = learners(where.federation, where.options)
    where = replace(where, federation=federation.as_task(where.options.task or federation.kind))
    makers: dict[str, Callable[[Setting], dict[str, Record]]] = {"majority": _majority, "pooled": _pooled, "boosting": _boosting}
    out: dict[str, Record] = {}
    for name in names:
        out |= makers[name](where)
    return out


def learners(federation: Federation, options: Options) -> Federation:
    """Return the clients that are trained, without those that are held out."""
    outside = newcomers_of(federation, options.new_clients, options.seed)
    return federation if outside is None else federation.take(np.setdiff1d(np.arange(len(federation)), outside))


def _majority(where: Setting) -> dict[str, Record]:
    """Return what is most frequent among a client's training rows; probabilities are the shares there, so that AUC is a half."""
    federation, task = where.federation, _task(where)
    y, test = federation.train.y, federation.test
    answers = [
        _frequent(federation, y[a:b]) for a, b in zip(federation.train.offsets, federation.train.offsets[1:], strict=False)
    ]
    constant = torch.stack(answers)[np.repeat(np.arange(len(federation)), test.sizes)]
    if federation.per_position:
        constant = constant.unsqueeze(1).expand(-1, test.y.shape[1], -1)
    label = "majority class" if federation.kind.softmax else "mean" if federation.kind.least_squares else "majority labels"
    text = "always what is most frequent among the client's training rows" if label != "mean" else "the client's training mean"
    return {label: _record(label, text, where, task, constant)}


def _frequent(federation: Federation, y: Tensor) -> Tensor:
    if federation.kind.least_squares:
        return y.double().reshape(len(y), -1).mean(0)
    if federation.kind.softmax:
        counts = torch.bincount(y[y >= 0].flatten(), minlength=federation.outputs).double()
        return torch.log((counts / counts.sum()).clamp(min=FAINT))
    share = y.double().reshape(len(y), -1).mean(0).clamp(FAINT, 1 - FAINT)
    return torch.log(share / (1 - share))


def _pooled(where: Setting) -> dict[str, Record]:
    """Return one model of all training rows: as many steps as a client makes alone, on all clients' batches together."""
    label, clients = "all rows pooled", len(where.federation)
    plain_training = {"cohort": 1.0, "new_clients": 0.0, "shift": (), "callbacks": (), "patience": None, "evaluate_every": 0}
    batch = None if where.options.batch_size is None else where.options.batch_size * clients
    options = where.options.but(**plain_training, batch_size=batch, weights="uniform", workers=1)
    whole, local = replace(pooled(where.federation, "all rows"), recipe=None, schema=None), where.local
    try:
        if where.tune and whole.val is not None:
            local, _ = tuning.tune(local, tuning.Trials(whole, where.model, options, where.grid))
        trained = run(local, whole, where.model, options)
    except FedtailorError:
        return {}
    x = where.federation.test.x.to(trained.federation.train.x.dtype) if not where.federation.tokens else where.federation.test.x
    logits = trained.predict(0, x)
    text = f"one model on all rows in one place, which nobody here has: {trained.summary['settings']}"
    record = _record(label, text, where, trained.task, logits.reshape(len(logits), *logits.shape[1:] or (1,)))
    return {label: replace(record, summary={**record.summary, "seconds": trained.summary["seconds"]})}


def _boosting(where: Setting) -> dict[str, Record]:
    """Scikit-learn's histogram gradient boosting with its default settings, of tables with one label per row."""
    federation = where.federation
    train, test = federation.train, federation.test
    if federation.tokens or train.y.dim() > 1 or not (federation.kind.softmax or federation.kind.least_squares):
        raise InvalidArgument("boosting is a yardstick for tables with one label per row; leave it out")
    task = _task(where)
    seed = where.options.seed
    everyone = _boosted(federation, train, test.x, seed)
    parts = [_boosted(federation, train.take(np.array([i])), test.client(i)[0], seed) for i in range(len(federation))]
    texts = {"boosting, each alone": (torch.cat(parts), "every client by itself"), "boosting, pooled": (everyone, "all rows")}
    return {
        label: _record(label, f"scikit-learn's gradient boosting of {who}, default settings", where, task, logits)
        for label, (logits, who) in texts.items()
    }


def _boosted(federation: Federation, known: Split, new: Tensor, seed: int) -> Tensor:
    """Return what boosting on known rows, with their weights, says of new ones: logarithms of probabilities, or numbers."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    rows, targets, others = known.x.flatten(1).numpy(), known.y.numpy(), new.flatten(1).numpy()
    weights = None if known.weights is None else known.weights.numpy()
    if federation.kind.least_squares:
        model = HistGradientBoostingRegressor(random_state=seed).fit(rows, targets, weights)
        return torch.from_numpy(model.predict(others)).reshape(-1, 1)
    shares = np.full((len(others), federation.outputs), FAINT)
    if len(classes := np.unique(targets)) == 1:
        shares[:, classes[0]] = 1.0
    else:
        fitted = HistGradientBoostingClassifier(random_state=seed).fit(rows, targets, weights)
        shares[:, fitted.classes_] = np.maximum(fitted.predict_proba(others), FAINT)
    return torch.log(torch.from_numpy(shares))


def _task(where: Setting) -> Task:
    """Return the task of the comparison, which knows what is measured."""
    return prepare(ALONE(), where.federation, where.model, where.options.but(cohort=1.0, new_clients=0.0)).task


def _record(label: str, text: str, where: Setting, task: Task, logits: Tensor) -> Record:
    """Return the measures of predictions for all test rows, [rows, outputs], client by client."""
    federation = where.federation
    test, columns = federation.test, dict[str, Any]()
    order = np.argsort(test.sizes, kind="stable")
    for block in (order[i : i + BLOCK] for i in range(0, len(order), BLOCK)):
        longest = int(test.sizes[block].max())
        rows = torch.from_numpy(np.minimum(test.offsets[block][:, None] + np.arange(longest), len(test.y) - 1))
        mask = torch.from_numpy(np.arange(longest) < test.sizes[block][:, None])
        for name, values in measure(task, logits[rows], None, test.y[rows], mask).items():
            columns.setdefault(name, np.full(len(federation), np.nan))[block] = values
    facts = {"algorithm": label, "kind": str(task.kind), "score": task.score.name}
    means = summarize(task.kind, columns, task.score)
    summary = {**facts, "dataset": federation.name, "settings": text, **means}
    return Record(label, task.kind, summary, [], federation.names, columns, text)
