"""What a site does for an advice: one summary of its fit, and short trials of other methods, judged on validation rows.

Its owner allows it (``sites client --allow-advice``); no row leaves the house, and test rows are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedtailor.algorithms.settings import make
from fedtailor.data.federation import Federation
from fedtailor.engine.prepare import Prepared
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.wire import Parcel
from fedtailor.theory.fits import Summary, summary
from fedtailor.theory.heterogeneity import residual_variance

SUMMARY = "summary"  # the action
METHODS = ("local", "fedavg", "fedavgft", "fedclup", "hypcluster")  # what a server may try
LARGEST = 150  # parameters of the fit: the covariance of more would be a large message
PLAIN = ("n", "load", "inputs", "rank", "variance", "square", "ridge", "name")
ARRAYS = ("parameters", "covariance", "span")


@dataclass(frozen=True)
class Trial:
    """A method that is tried for some rounds in place of the one agreed on."""

    method: str
    settings: Mapping[str, Any]
    rounds: int

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Trial:
        """Return the trial that a message names; one that no site agrees to is refused."""
        method, settings, rounds = facts.get("method"), facts.get("set"), facts.get("rounds")
        if method not in METHODS or not isinstance(settings, Mapping) or not isinstance(rounds, int):
            raise InvalidData(f"the server asks for a trial of {method!r}; sites try {', '.join(METHODS)} only")
        return Trial(str(method), dict(settings), rounds)

    def plain(self) -> dict[str, Any]:
        return {"method": self.method, "set": dict(self.settings), "rounds": self.rounds}

    def agreed(self, usual: Agreed) -> Agreed:
        """Return the run of the trial: everything but the method and the rounds is as agreed on."""
        check(usual)
        if not 1 <= self.rounds <= usual.options.rounds:
            raise InvalidData(f"a trial of {self.rounds} rounds is longer than the run of {usual.options.rounds} agreed on")
        options = usual.options.but(rounds=self.rounds, evaluate_every=0)
        return replace(usual, algorithm=make(self.method, self.settings), options=options)


def check(agreed: Agreed) -> None:
    """Refuse networks for which there is no advice."""
    if agreed.algorithm.opt.privacy is not None:
        raise InvalidArgument("the method agreed on is private, and trials would spend more than was agreed; no advice is given")
    if agreed.pact is not None:
        raise InvalidArgument(
            "the sites agreed on secure sums, and trials would show the server single uploads; no advice is given"
        )
    if not agreed.rows.validation:
        raise InvalidArgument("an advice is judged on validation rows and the schema sets none apart; agree on a val_share")


def judged_on_validation(rows: Federation) -> Federation:
    """Return a site's rows without those to test on, which an advice must not see."""
    if rows.val is None:
        raise InvalidData("there are no validation rows to judge a trial on; agree on a val_share")
    return replace(rows, test=rows.val)


def summarised(ready: Prepared) -> tuple[dict[str, Any], Any]:
    """Return (plain facts, arrays) of a site's own fit of the linear model and how uncertain it is."""
    plan, rows = ready.plan, ready.plan.federation
    outputs = max(1, rows.outputs - rows.kind.softmax)
    features = int(np.prod(rows.train.x.shape[1:]))
    if plan.task.gradient is None or features * outputs > LARGEST:
        raise InvalidData(f"the spread is that of a linear model with at most {LARGEST} parameters; the race decides alone")
    fit = summary(plan.task, *rows.train.client(0), name=rows.names[0], seed=ready.options.seed)
    facts = {name: getattr(fit, name) for name in PLAIN} | {"flags": list(fit.flags)}
    facts["dispersion"] = residual_variance(rows) if rows.kind.least_squares else 1.0
    arrays = {name: torch.from_numpy(np.array(value)) for name in ARRAYS if (value := getattr(fit, name)) is not None}
    return {"fit": facts}, arrays


def summary_of(facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[Summary, float]:
    """Return a site's summary, and the variance of a row about its fit, as it sent them; what is no fit is refused."""
    try:
        content: dict[str, Any] = {name: np.asarray(arrays[name], np.float64) for name in ARRAYS if name in arrays}
        size = content["parameters"].size
        if not all(np.isfinite(array).all() for array in content.values()) or content["covariance"].shape != (size, size):
            raise ValueError("its numbers are not those of a fit")
        plain: dict[str, Any] = {name: facts[name] for name in PLAIN}
        return Summary(**content, **plain, flags=tuple(map(str, facts["flags"]))), float(facts["dispersion"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(f"the summary of a site cannot be read ({error})") from None


def look(agreed: Agreed, ask: Callable[[Mapping[str, Parcel]], Mapping[str, Parcel | str]], digest: str | None) -> dict[str, Any]:
    """Return by site what it says of its fit (``fit`` and ``arrays``), or why it says nothing (``error``)."""
    head = {"action": SUMMARY, "run": SUMMARY, "version": 0, "agreed": digest, "trial": {}}
    replies = ask({name: Parcel({**head, "client": name}, {}) for name in agreed.clients})
    out: dict[str, Any] = {}
    for name in agreed.clients:
        reply = replies.get(name, "did not answer")
        wrong = reply if isinstance(reply, str) else reply.facts.get("error")
        if wrong is not None or isinstance(reply, str):
            out[name] = {"error": wrong}
            continue
        arrays = {key: leaf.tolist() for key, leaf in reply.tree.items()}
        facts = {**reply.facts["fit"], "name": name}
        summary_of(facts, arrays)
        out[name] = {"fit": facts, "arrays": arrays}
    return out
