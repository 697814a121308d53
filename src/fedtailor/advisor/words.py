"""Advice in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtailor.advisor.advice import Advice
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.metrics.verdict import HELPS, HURTS, Verdict

IF = {  # what to do where chance may explain the gain
    "local": "Training alone is as good as anything that was tried",
    "shared": "one model for all",
    "clusters": "a model for each group",
    "between": "a model of its own for each, tied to a shared one",
}
VERDICTS = {
    "local": "Do not learn together: training alone is best here.",
    "shared": "Learn together, one model for all.",
    "clusters": "Learn together, but inside the groups.",
    "between": "Learn together, and let each keep a model of its own.",
}


def headline(regime: str, verdict: Verdict | None) -> str:
    """Return what to do, in a sentence that goes no further than the verdict."""
    outcome = None if verdict is None else verdict.outcome
    if regime == "local":
        return VERDICTS["local"] if outcome == HURTS else f"{IF['local']}."
    if outcome == HELPS:
        return VERDICTS[regime]
    return f"Learning together is not clearly better here; if you do, {IF[regime]} does best."


def words(advice: Advice, federation: Federation) -> str:
    """Return the advice as text, a sentence or two per line."""
    lines = [f"{len(federation)} clients, {len(federation.train.y)} training rows."]
    if advice.heterogeneity is not None:
        low, high = advice.heterogeneity.interval
        size = f"spread {advice.heterogeneity.r2:.3g} (90 % interval {low:.3g} to {high:.3g})"
        noise = f"the noise of a client's own fit is {advice.heterogeneity.noise:.3g}"
        if advice.heterogeneity.zero:
            lines.append(f"How far apart they are is not distinguishable from zero: {size}; {noise}.")
        else:
            lines.append(f"They differ: {size}, squared distance of their true parameters to the mean; {noise}.")
    if advice.theory_lam is not None:
        amount = "one model for all" if np.isinf(advice.theory_lam) else f"lam about {advice.theory_lam:.3g}"
        lines.append(f"Theory alone, by these numbers, would ask for {amount}; the race on validation rows decides.")
    if advice.groups:
        sizes = ", ".join(str(advice.groups.count(g)) for g in range(advice.clusters))
        lines.append(f"They fall into {advice.clusters} groups far apart, of {sizes} clients.")
        lines += [_group(number, group) for number, group in enumerate(advice.inside, 1) if "spread" in group]
    elif advice.regime == "clusters":
        lines.append("Their fits are too noisy to show groups, but models for groups do better on validation rows.")
    lines.append(advice.headline)
    lines += [] if advice.verdict is None else [advice.verdict.sentence]
    lines.append(f"Use {written(advice.algorithm)}: {advice.rounds} rounds, about {advice.bytes_total / 1e6:.2f} MB in all.")
    if advice.lams:
        low, high = min(advice.lams.values()), max(advice.lams.values())
        lines.append(f"With a lam for every client by its rows: {low:.3g} (most rows) to {high:.3g} (fewest).")
    lines += _who(advice) if advice.collaborate and advice.gains else []
    lines += [] if advice.lead is None else [advice.lead.sentence]
    lines.append(f"{advice.steps_used:,} gradient steps were spent on this, over all clients; test rows were not looked at.")
    return "\n".join([*lines, *advice.notes])


def _group(number: int, group: Mapping[str, Any]) -> str:
    low, high = group["interval"]
    size = f"spread {group['spread']:.3g} ({low:.3g} to {high:.3g})"
    text = "not distinguishable from zero, one model for them all" if group["zero"] else f"pool with lam about {group['lam']:.3g}"
    return f"Inside group {number}: {size}, {text}."


def _who(advice: Advice) -> list[str]:
    """Return whom it helps and whom it hurts, on validation rows."""
    known = {client: gain for client, gain in advice.gains.items() if np.isfinite(gain)}
    better = sum(gain > 0 for gain in known.values())
    worse = [client for _, client in sorted((gain, client) for client, gain in known.items() if gain < 0)]
    losers = f" ({', '.join(worse[:5])}{', ...' if len(worse) > 5 else ''})" if worse else ""
    level, unknown = len(known) - better - len(worse), len(advice.gains) - len(known)
    gain, lose = "client gains" if better == 1 else "clients gain", "loses" if len(worse) == 1 else "lose"
    rest = f"{len(worse)} {lose}{losers} and {level} {'is' if level == 1 else 'are'} level"
    rest += f"; {unknown} cannot be scored on the validation rows they have" if unknown else ""
    return [f"On validation rows {better} {gain} over training alone, {rest}."]
