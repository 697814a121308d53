"""A method as words and numbers: its name on the command line, its settings as plain values, and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from inspect import isabstract
from pathlib import Path
from typing import Any

from fedtailor import algorithms
from fedtailor.algorithms import origin
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.fedopt import ServerOptimizer
from fedtailor.errors import BadRun, InvalidArgument, nearest
from fedtailor.local import SGD, Adam, Optimizer, Private, TorchOptimizer
from fedtailor.local.schedule import Cosine, Exponential, Harmonic, Lambda, Milestones, Schedule

OTHERS: tuple[type[Any], ...] = (SGD, Adam, Private, TorchOptimizer, Cosine, Exponential, Harmonic, Lambda, Milestones)


@cache
def _kinds() -> dict[str, type[Any]]:
    """Return the classes that a table with ``kind`` may stand for, by name; the methods that step on the server are among
    them."""
    servers = [kind for kind in algorithms.METHODS if issubclass(kind, ServerOptimizer)]
    return {kind.__name__.lower(): kind for kind in (*OTHERS, *servers)}


def slug(method: type[Algorithm] | Algorithm) -> str:
    """Return the name on the command line: ``FedProxPersonal`` is ``fedprox-personal``."""
    kind = method if isinstance(method, type) else type(method)
    return re.sub(r"(?<=.)(?=[A-Z][a-z]{5})", "-", kind.__name__).lower()


def spec(method: type[Algorithm] | Algorithm) -> str:
    """Return the method as a run directory writes it: the name of ours, the place and the fingerprint of any other
    (``origin``)."""
    kind = method if isinstance(method, type) else type(method)
    source = origin.of(kind)
    return slug(kind) if source is None else source.spec


def notes_on(method: Algorithm) -> list[str]:
    """Return what the user of a run directory must know about the method: that it is in no file."""
    source, name = origin.of(type(method)), type(method).__name__
    if source is None or source.path is not None:
        return []
    return [f"{name} is in no file, so this run can be resumed and predicted with only where a class {name} is defined again"]


def label_of(kind: type[Algorithm]) -> str:
    """Return the name of a class, followed by where it comes from if one of our methods has the same name."""
    source = origin.of(kind)
    return kind.__name__ if source is None or kind.__name__ not in algorithms.registry else f"{kind.__name__} ({source.place})"


def find(name: str) -> type[Algorithm]:
    """Return the class of a method: ours by name, in any case, with or without dashes; any other as ``mine.py:MyMethod`` or
    ``package.module:MyMethod``, or by the name alone once it is defined."""
    if ":" in name:
        return _usable(origin.load(name), name)
    by_name = {_bare(kind.__name__): kind for kind in origin.defined() if origin.of(kind) is not None and not isabstract(kind)}
    by_name |= {_bare(key): kind for key, kind in algorithms.registry.items()}
    if _bare(name) in by_name:
        return by_name[_bare(name)]
    hint = nearest(name, map(slug, algorithms.METHODS), "the methods are")
    raise InvalidArgument(f"unknown method {name!r}; {hint}; one of your own is given as mine.py:MyMethod")


def recall(written: str, folder: Path) -> type[Algorithm]:
    """Return the class that a run directory names, refused unless it is the one that the run was made with."""
    if ":" not in written:
        for kind in algorithms.METHODS:
            if slug(kind) == written or _bare(kind.__name__) == _bare(written):
                return kind
        raise BadRun(f"{folder} was made with {written!r}, which is no method of ours; upgrade fedtailor, or train anew")
    if "@" not in written and not written.startswith(origin.NO_FILE):
        raise BadRun(f"{folder} does not say which source {written} had; the directory was changed by hand: restore it")
    return _usable(origin.load(written, folder), written)


def _usable(kind: type[Any], name: str) -> type[Algorithm]:
    if not issubclass(kind, Algorithm) or isabstract(kind):
        missing = ", ".join(sorted(getattr(kind, "__abstractmethods__", ()))) if issubclass(kind, Algorithm) else ""
        why = f"it lacks {missing}" if missing else "a method needs an Algorithm as its base, as in class MyMethod(ft.Algorithm)"
        raise InvalidArgument(f"{name} cannot be used: {why}")
    return kind


def settings(algorithm: Algorithm | Optimizer | Schedule) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as numbers, words, lists and tables."""
    return {name: _plain(value) for name, value in changed(algorithm).items()}


def changed(algorithm: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults; a wrapper's local work is written with the method inside it."""
    wraps = isinstance(getattr(algorithm, "method", None), Algorithm)
    inside = {f.name for f in dataclasses.fields(Algorithm)} if wraps else set()
    values = {f.name: (getattr(algorithm, f.name), default(f)) for f in dataclasses.fields(algorithm) if f.name not in inside}
    return {name: value for name, (value, usual) in values.items() if value != usual}


def written(algorithm: Algorithm) -> str:
    """Return the method as a Python expression with only those settings that differ from its defaults."""
    arguments = (f"{k}={written(v) if isinstance(v, Algorithm) else repr(v)}" for k, v in changed(algorithm).items())
    return f"{type(algorithm).__name__}({', '.join(arguments)})"


def make(name: str, values: Mapping[str, Any]) -> Algorithm:
    """Return the method of this name with these settings."""
    return build(find(name), values)


def build(kind: type[Algorithm], values: Mapping[str, Any]) -> Algorithm:
    """Return the method of this class with these settings; a setting that it does not have is refused."""
    fields = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in fields:
            raise InvalidArgument(f"{slug(kind)} has no setting {key!r}; {nearest(key, fields, 'its settings are')}")
    try:
        return kind(**{key: _object(_spelled(key, value), key) for key, value in values.items()})
    except TypeError as error:  # a word where a number belongs, compared with a bound
        raise InvalidArgument(f"{slug(kind)}: these settings do not fit: {dict(values)}") from error


def default(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _bare(name: str) -> str:
    return re.sub(r"[-_ +]", "", name).lower()


def _plain(value: Any) -> Any:
    if isinstance(value, (Optimizer, Schedule, ServerOptimizer)):
        kind = type(value)
        name = kind.__name__.lower()
        return {"kind": name if _kinds().get(name) is kind else origin.spec_of(kind), **settings(value)}
    if isinstance(value, Algorithm):
        return {"kind": spec(value), **settings(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, type) and value.__module__.startswith("torch.optim"):
        return value.__name__
    if callable(value):
        return origin.spec_of(value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _spelled(key: str, value: Any) -> Any:
    """Return a step size or an optimiser that is given as one word (``mine.py:decay``, ``adam``, ``torch.optim.RMSprop``) as a
    table."""
    if key == "lr" and isinstance(value, str) and origin.is_spec(value):
        return {"kind": "lambda", "function": value}
    if key != "opt" or not isinstance(value, str):
        return value
    if value.startswith("torch.optim."):
        return {"kind": "torchoptimizer", "optimizer": value.removeprefix("torch.optim.")}
    if origin.is_spec(value) and not issubclass(_own(value), Optimizer):
        return {"kind": "torchoptimizer", "optimizer": value}
    return {"kind": value}


def _own(name: str) -> type[Any]:
    """Return an optimiser or a schedule of the user's own, named by where it is to be found."""
    kind = origin.function_of(origin.specs_of(name, False))
    if not isinstance(kind, type):
        raise InvalidArgument(f"{name} is no class; give an optimiser, as in mine.py:MyOptimizer")
    return kind


def _object(value: Any, key: str = "") -> Any:
    """Return the optimizer or schedule that a table with ``kind`` stands for; other values as they are."""
    if isinstance(value, str) and key in ("function", "optimizer") and origin.is_spec(value):
        return origin.function_of(origin.specs_of(value, False))
    if isinstance(value, Mapping) and "kind" in value:
        name = str(value["kind"])
        kind = _kinds().get(name.lower())
        if kind is None and key != "method" and origin.is_spec(name):
            kind = _own(name)
            if not issubclass(kind, (Optimizer, Schedule)):
                raise InvalidArgument(
                    f"{name} cannot be used: an optimiser needs ft.Optimizer as its base, a schedule ft.Schedule"
                )
        if kind is None and (":" in name or _bare(name) in map(_bare, algorithms.registry)):
            return make(name, {k: v for k, v in value.items() if k != "kind"})
        if kind is None:
            raise InvalidArgument(f"unknown kind {value['kind']!r}; {nearest(str(value['kind']), _kinds(), 'the kinds are')}")
        fields = [f.name for f in dataclasses.fields(kind)]
        rest = {k: _object(v, k) for k, v in value.items() if k != "kind"}
        for key in rest:
            if key not in fields:
                raise InvalidArgument(f"{kind.__name__} has no setting {key!r}; {nearest(key, fields, 'its settings are')}")
        try:
            return kind(**rest)
        except TypeError as error:
            raise InvalidArgument(f"{kind.__name__} cannot be made of {rest}; its settings are {', '.join(fields)}") from error
    return tuple(_object(v) for v in value) if isinstance(value, list) else value
