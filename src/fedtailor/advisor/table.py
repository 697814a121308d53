"""``python -m fedtailor.advisor.table [PATH]``: writes docs/methods.md, what is known about every method and how."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fedtailor.advisor.card import Card, card, cards
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm, Limit
from fedtailor.algorithms.settings import settings
from fedtailor.errors import InvalidArgument, LawBroken
from fedtailor.laws.check import CLOSE, LAWS, check_algorithm
from fedtailor.laws.ground import network
from fedtailor.runs import files

NONE = "none"
TOP = """# The methods, and what is known about each

This file is written by `make docs` (`python -m fedtailor.advisor.table`); do not edit it. Every figure in it was found by running
the method with its defaults ({settings}), or in the tests.

## What was checked

- **reference**: from the method's docstring.
- **laws**: how many of the ten laws (`ft.check_algorithm`) were kept, tried one by one for this file on a linear model and on a
  network with batch norm and dropout. The law of limits is tried, and counted, only where a limit is declared. "does not fit":
  the method refuses this model.
- **limits**: the reductions that the method declares; they are tried by the law of limits.
- **oracle**: the file in `tests/oracles/` with a transcription of the paper that the method is compared with round by round, and
  in how many settings (batches, clients of a round, weights, options), each on both engines.
- **fixed point**: the minimiser, known in closed form, that the method reaches, and how closely
  (`tests/algorithms/fixed_points.py`).

Oracles and fixed points are read from the tables that `make check-all` runs.
"""
MIDDLE = """
## What it takes

Found by running the method on the laws' network ({parameters} parameters, {bytes} bytes as serialised in float32).

- **down**, **up**, **kept**: one message to a client, one back, and what a client stores between rounds, as multiples of the
  model (tensors without the header of the message; batch-norm statistics are part of the model, control variates have none).
- **bytes down**, **bytes up**, **bytes kept**: the same as serialised, with the header.
- **trained**: parameters in all descents of a round, or of the end if that is more; "not seen": the method steps by bare
  gradients, which are not metered, or trains nothing.
- **at the end**: what `personalize` does before predicting: trains, prepares (stores or chooses something), or nothing.
- **newcomers**: a client that never took part predicts without a local step.
- **mean only**: the server sees nothing but the mean of the uploads, as secure aggregation requires.
- **private**: runs with `opt=ft.Private()`, clipped and noisy gradients (tried with group norm in the place of batch norm).
- **at sites**: can run across real sites (prepared as a server and as a site would, each without the rest); where not,
  `fedtailor list algorithms --json` says why.

"""


def main(path: str = "docs/methods.md") -> None:
    files.write(Path(path), page())


def page() -> str:
    facts, evidence_rows = cards(), [evidence(method) for method in METHODS]
    examples = {method.__name__: settings(method.example()) for method in METHODS}
    needed = "; ".join(f"{name}: {words(values)}" for name, values in examples.items() if values)
    middle = MIDDLE.format(parameters=facts[0].model_parameters, bytes=facts[0].model_bytes)
    return f"{TOP.format(settings=needed)}\n{markdown(evidence_rows)}{middle}{markdown([costs(fact) for fact in facts])}"


def evidence(method: type[Algorithm]) -> dict[str, str]:
    """Return a method's row of the first table."""
    algorithm = method.example()
    return {
        "method": method.__name__,
        "reference": reference(method),
        "laws, linear": laws_kept(algorithm, "linear"),
        "laws, network": laws_kept(algorithm, network()),
        "limits": "; ".join(in_words(limit) for limit in algorithm.limits) or "none declared",
        "oracle": oracle(method),
        "fixed point": fixed_point(method),
    }


def costs(fact: Card) -> dict[str, str]:
    """Return a method's row of the second table."""
    sizes = {"bytes down": fact.sent_down, "bytes up": fact.sent_up, "bytes kept": fact.kept}
    cells = fact.cells()
    needs = cells.pop("needs")
    return {**cells, **{title: str(parcel.bytes) for title, parcel in sizes.items()}, "needs": needs}


def reference(method: type[Algorithm]) -> str:
    """Return the first line under the heading Reference of the method's file."""
    lines = (sys.modules[method.__module__].__doc__ or "").splitlines()
    return lines[lines.index("Reference") + 1].strip() if "Reference" in lines else "none given"


def laws_kept(algorithm: Algorithm, model: Any) -> str:
    """``kept of tried``, or that the model does not fit."""
    try:
        card(algorithm, model)
    except InvalidArgument:
        return "does not fit"
    tried = [number for number, (title, _) in LAWS.items() if title != "limits" or algorithm.limits]
    return f"{sum(keeps(algorithm, model, number) for number in tried)} of {len(tried)}"


def keeps(algorithm: Algorithm, model: Any, number: int) -> bool:
    try:
        check_algorithm(algorithm, model, laws=[number])
    except LawBroken:
        return False
    return True


def in_words(limit: Limit) -> str:
    """Return a declared reduction as a sentence."""
    when, also = words(limit.change), words(limit.also)
    other = f"{limit.equals} ({also})" if also else limit.equals
    claim = f"it predicts as {other}" if limit.compares == "personal" else f"its shared state is that of {other}"
    return f"{f'with {when} ' if when else ''}{claim}{', bit for bit' if limit.exact else f', to {CLOSE:g}'}"


def words(values: Mapping[str, Any]) -> str:
    """Fields and their values; one set to None is left out."""
    return ", ".join(f"{k} = {v:g}" if isinstance(v, float) else f"{k} = {v!r}" for k, v in values.items() if v is not None)


def oracle(method: type[Algorithm]) -> str:
    """Return what the method's file in tests/oracles compares it with."""
    stem = method.__module__.rpartition(".")[2]
    module = tests_module(f"oracles.{stem}")
    if module is None:
        return NONE
    count = sum(len(case.settings) for case in getattr(module, "CASES", ()))
    return f"{stem}, in {count} setting{'s' * (count > 1)}" if count else stem


def fixed_point(method: type[Algorithm]) -> str:
    """Return the minimisers that the tests let the method reach, and how closely."""
    module = tests_module("algorithms.fixed_points")
    points = [point for point in module.TABLE if type(point.method) is method] if module else []
    return "; ".join(dict.fromkeys(f"{point.words}, to {point.tolerance:g}" for point in points)) or NONE


def tests_module(name: str) -> ModuleType | None:
    """Return a module of the tests in the working directory; None where there is none of this name."""
    try:
        return import_module(f"tests.{name}")
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"tests.{name}".startswith(missing.name):
            return None
        raise


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as a table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:2])
