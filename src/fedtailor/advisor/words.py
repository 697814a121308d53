"""Advice in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtailor.advisor.advice import Advice
from fedtailor.advisor.pilot import Race
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.task.scores import Metric

VERDICTS = {
    "local": "Do not learn together: training alone is best here.",
    "shared": "Learn together, one model for all.",
    "clusters": "Learn together, but inside the groups.",
    "between": "Learn together, and let each keep a model of its own.",
}


def words(advice: Advice, race: Race, federation: Federation) -> str:
    """The advice as text, a sentence or two per line."""
    lines = [f"{len(federation)} clients, {len(federation.train.y)} training rows."]
    if advice.heterogeneity is not None:
        low, high = advice.heterogeneity.interval
        size = f"R² = {advice.heterogeneity.r2:.3g} (90 % interval {low:.3g} to {high:.3g})"
        noise = f"the noise of a client's own fit is {advice.heterogeneity.noise:.3g}"
        if advice.heterogeneity.zero:
            lines.append(f"How far apart they are is not distinguishable from zero: {size}; {noise}.")
        else:
            lines.append(f"They differ: {size}, squared distance of their true parameters to the mean; {noise}.")
    if advice.theory_lam is not None:
        amount = "one model for all" if np.isinf(advice.theory_lam) else f"lam about {advice.theory_lam:.3g}"
        lines.append(f"Partial pooling by these numbers asks for {amount}.")
    if advice.groups:
        sizes = ", ".join(str(advice.groups.count(g)) for g in range(advice.clusters))
        lines.append(f"They fall into {advice.clusters} groups far apart, of {sizes} clients.")
        lines += [_group(number, group) for number, group in enumerate(advice.inside, 1) if "r2" in group]
    elif advice.regime == "clusters":
        lines.append("Their fits are too noisy to show groups, but models for groups do better on validation rows.")
    lines.append(VERDICTS[advice.regime])
    lines.append(f"Use {written(advice.algorithm)}: {advice.rounds} rounds, about {advice.bytes_total / 1e6:.2f} MB in all.")
    if advice.lams:
        low, high = min(advice.lams.values()), max(advice.lams.values())
        lines.append(f"With a lam for every client by its rows: {low:.3g} (most rows) to {high:.3g} (fewest).")
    lines += _who(advice, race.task.score) if advice.collaborate and advice.gains else []
    lines += _how_sure(advice, race) if len(advice.race) > 1 else []
    lines.append(f"{advice.steps_used:,} gradient steps were spent on this, over all clients; test rows were not looked at.")
    return "\n".join([*lines, *advice.notes])


def _group(number: int, group: Mapping[str, Any]) -> str:
    low, high = group["interval"]
    size = f"R² = {group['r2']:.3g} ({low:.3g} to {high:.3g})"
    text = "not distinguishable from zero, one model for them all" if group["zero"] else f"pool with lam about {group['lam']:.3g}"
    return f"Inside group {number}: {size}, {text}."


def _who(advice: Advice, score: Metric) -> list[str]:
    """Whom it helps and whom it hurts, on validation rows."""
    better = sum(gain > 0 for gain in advice.gains.values())
    worse = [client for _, client in sorted((gain, client) for client, gain in advice.gains.items() if gain < 0)]
    losers = f" ({', '.join(worse[:5])}{', ...' if len(worse) > 5 else ''})" if worse else ""
    mean = float(np.mean(list(advice.gains.values())))
    change = f"{score.words} {'rises' if score.higher else 'falls'} by {mean:.3g} on average"
    return [f"On validation rows {better} clients gain over training alone and {len(worse)} lose{losers}; {change}."]


def _how_sure(advice: Advice, race: Race) -> list[str]:
    second = advice.race[1]["method"]
    errors_ahead = race.behind(second, advice.race[0]["method"])
    if errors_ahead > 2:
        return [f"It is clearly ahead of {second} ({errors_ahead:.1f} standard errors)."]
    times = int(np.ceil((2 / max(errors_ahead, 0.2)) ** 2))
    more = f"about {times} times the validation rows, or a full comparison (fedtailor compare --tune)"
    return [f"It is not clearly ahead of {second} ({errors_ahead:.1f} standard errors); to know better would take {more}."]
