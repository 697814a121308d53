"""``python -m fedtailor.advisor.table [PATH]``: writes docs/methods.md, what is known about every method and how."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fedtailor.advisor.card import SETTINGS, Card, card, cards, example
from fedtailor.algorithms import METHODS, registry
from fedtailor.algorithms.base import Algorithm, Limit
from fedtailor.errors import InvalidArgument, LawBroken
from fedtailor.laws.check import CLOSE, LAWS, check_algorithm
from fedtailor.laws.ground import network

HELPERS = {"__init__", "risks"}  # in tests/oracles, but no method's transcription
TOP = """# The methods, and what is known about each

This file is written by `make docs` (`python -m fedtailor.advisor.table`); do not edit it. Every figure in it was found by running
the method with its defaults ({settings}), or in the tests.

## What was checked

- **reference**: from the method's docstring.
- **laws**: how many of the ten laws (`ft.check_algorithm`) were kept, tried one by one for this file on a linear model and on a
  network with batch norm and dropout. The law of limits is tried, and counted, only where a limit is declared. "does not fit":
  the method refuses this model.
- **limits**: the reductions that the method declares; they are tried by the law of limits.
- **oracle**: the NumPy transcription of the paper (`tests/oracles/`) that a test compares the method with.
- **fixed point**: yes where the name of a test that runs the method says "reach": to a minimiser known in closed form.

Oracles and fixed points were found by reading the tests; `make check` runs them.
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

"""


@dataclass
class Found:
    """What the tests say: oracles by method, and the methods with a fixed point."""

    oracles: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    reaching: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Test:
    """A test function: the methods and the oracles named in it."""

    name: str
    methods: frozenset[str]
    oracles: frozenset[str]


def main(path: str = "docs/methods.md") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page(), encoding="utf-8")


def page() -> str:
    found, facts = search(Path("tests")), cards()
    checked = [evidence(method, found) for method in METHODS]
    settings = "; ".join(f"{name}: {words(values)}" for name, values in SETTINGS.items())
    middle = MIDDLE.format(parameters=facts[0].model_parameters, bytes=facts[0].model_bytes)
    return f"{TOP.format(settings=settings)}\n{markdown(checked)}{middle}{markdown([costs(fact) for fact in facts])}"


def evidence(method: type[Algorithm], found: Found | None) -> dict[str, str]:
    """A method's row of the first table."""
    algorithm, name = example(method), method.__name__
    return {
        "method": name,
        "reference": reference(method),
        "laws, linear": laws_kept(algorithm, "linear"),
        "laws, network": laws_kept(algorithm, network()),
        "limits": "; ".join(in_words(limit) for limit in algorithm.limits) or "none declared",
        "oracle": "not looked for" if found is None else ", ".join(sorted(found.oracles[name])) or "none found",
        "fixed point": "not looked for" if found is None else "yes" if name in found.reaching else "none found",
    }


def costs(fact: Card) -> dict[str, str]:
    """A method's row of the second table."""
    sizes = {"bytes down": fact.sent_down, "bytes up": fact.sent_up, "bytes kept": fact.kept}
    cells = fact.cells()
    needs = cells.pop("needs")
    return {**cells, **{title: str(parcel.bytes) for title, parcel in sizes.items()}, "needs": needs}


def reference(method: type[Algorithm]) -> str:
    """The first line under the heading Reference of the method's file."""
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
    """A declared reduction as a sentence."""
    when, also = words(limit.change), words(limit.also)
    other = f"{limit.equals} ({also})" if also else limit.equals
    what = f"it predicts as {other}" if limit.compares == "personal" else f"its shared state is that of {other}"
    return f"{f'with {when} ' if when else ''}{what}{', bit for bit' if limit.exact else f', to {CLOSE:g}'}"


def words(settings: Mapping[str, Any]) -> str:
    """Fields and their values; one set to None is left out."""
    return ", ".join(f"{k} = {v:g}" if isinstance(v, float) else f"{k} = {v!r}" for k, v in settings.items() if v is not None)


# -- the tests --------------------------------------------------------------------------------------------------------
def search(folder: Path) -> Found | None:
    """Read the tests in ``folder`` of the working directory; None where there are none."""
    if not (folder / "test_oracles.py").exists():
        return None
    found = Found()
    files = {path.stem for path in (folder / "oracles").glob("*.py")} - HELPERS
    for path in sorted(folder.glob("test_oracles*.py")):
        for name, oracle in cases(import_module(f"{folder.name}.{path.stem}"), files):
            found.oracles[name].add(oracle)
        for test in tests(path, files):
            if len(test.methods) == 1:  # a test of its own: no doubt whose oracle it is
                found.oracles[next(iter(test.methods))] |= test.oracles
    for path in (folder / "test_limits.py", *sorted(folder.glob("test_oracles*.py"))):
        for test in tests(path, files):
            if "reach" in test.name:
                found.reaching |= {method for method in test.methods if not beaten(method, test.name)}
    return found


def beaten(method: str, test: str) -> bool:
    """Whether the test's name has the method in it only for comparison: ``fedavg_does_not``, ``than_l2gd``."""
    return f"{method.lower()}_does_not" in test or f"than_{method.lower()}" in test


def cases(module: Any, files: set[str]) -> Iterator[tuple[str, str]]:
    """(method, oracle) from a test module's tables: dicts of tuples that hold the name of an oracle's file."""
    for table in vars(module).values():
        if not isinstance(table, dict):
            continue
        for key, case in table.items():
            if isinstance(case, tuple) and key.split()[0] in registry:
                yield from ((key.split()[0], part) for part in case if isinstance(part, str) and part in files)


def tests(path: Path, files: set[str]) -> list[Test]:
    """The test functions of a file, with the methods (``ft.Name``) and oracles (modules or their names) that they mention."""
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return [_read(function, files) for function in functions if function.name.startswith("test_")]


def _read(function: ast.FunctionDef, files: set[str]) -> Test:
    inside = [node for statement in function.body for node in ast.walk(statement)]
    methods = {n.attr for n in inside if isinstance(n, ast.Attribute) and n.attr in registry}
    named = {n.id for n in inside if isinstance(n, ast.Name)} | {n.value for n in inside if isinstance(n, ast.Constant)}
    return Test(function.name, frozenset(methods), frozenset(files & named))


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as a table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:2])
