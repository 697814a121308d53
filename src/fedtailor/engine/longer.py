"""A run that was begun for fewer rounds goes on for more: it ends as one of that many rounds would, or is refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fedtailor.algorithms import origin
from fedtailor.algorithms.settings import settings
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.layout import IDENTITY

FIELD = "rounds"  # of a ``Round``: how many there are to be


def spaced(options: Options, out: Path) -> Options:
    """Return the options of a run that goes on in ``out``; unless they say how far apart evaluations are, it is as it was."""
    try:
        known = dict(json.loads(files.read(out / IDENTITY)))
        before, every = int(known["rounds"]), known.get("evaluate_every")
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return options  # nothing was begun there, or it is refused later
    if options.evaluate_every is not None or (every is None and options.rounds <= before):
        return options
    return options.but(evaluate_every=max(1, before // 20) if every is None else every)


def check_longer(longer: Prepared, shorter: Prepared) -> None:
    """Refuse to go on where the rounds that were played would have been others, had more been asked for."""
    name, now, then = type(longer.asked).__name__, settings(longer.algorithm), settings(shorter.algorithm)
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            raise BadRun(f"{name}'s {key} depends on the number of rounds, so that it cannot be given more; train anew")
    if longer.plan.crowd is not None and shorter.plan.crowd is not None and longer.plan.crowd.noise != shorter.plan.crowd.noise:
        raise BadRun("the noise for user_target_epsilon depends on the number of rounds; give user_noise, or train anew")
    uses = longer.plan.uses
    if uses is not None and (uses.end or longer.newcomers is not None):
        raise BadRun(
            f"{name} trains on clients' rows at the end, which is charged once, so that it cannot be given more; train anew"
        )
    if origin.of(type(longer.asked)) is not None and _reads_total(type(longer.asked)):
        raise BadRun(f"{name} looks at the number of rounds (Round.rounds), so that it cannot be given more; train anew")


def _reads_total(kind: type[Any]) -> bool:
    """Return whether a method of one's own, or a function of its module that it calls, mentions the number of rounds."""
    ours = [base for base in kind.__mro__ if not base.__module__.startswith(("fedtailor.", "builtins", "abc"))]
    queue = [value for base in ours for value in vars(base).values()]
    seen: set[int] = set()
    while queue:
        function = inspect.unwrap(getattr(queue[0], "__func__", None) or getattr(queue[0], "fget", None) or queue[0])
        queue.pop(0)
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        names = _names(function.__code__)
        if FIELD in names:
            return True
        queue += [function.__globals__[name] for name in names if name in function.__globals__]
    return False


def _names(code: CodeType) -> set[str]:
    """Return the attributes, globals and words that a function mentions, those inside it included."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names, *(part for part in code.co_consts if isinstance(part, str))}.union(*inner)
