"""A method as words and numbers: its name on the command line, its settings as plain values, and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fedtailor.algorithms import registry
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.fedopt import ServerOptimizer
from fedtailor.errors import InvalidArgument, nearest
from fedtailor.local import SGD, Adam, Optimizer, Private
from fedtailor.local.schedule import Cosine, Exponential, Harmonic, Milestones, Schedule

SERVERS: list[type[Any]] = [kind for kind in registry.values() if issubclass(kind, ServerOptimizer)]
OTHERS: tuple[type[Any], ...] = (SGD, Adam, Private, Cosine, Exponential, Harmonic, Milestones)
KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (*OTHERS, *SERVERS)}


def slug(method: type[Algorithm] | Algorithm) -> str:
    """The name on the command line: ``FedProxPersonal`` is ``fedprox-personal``."""
    kind = method if isinstance(method, type) else type(method)
    return re.sub(r"(?<=.)(?=[A-Z][a-z]{5})", "-", kind.__name__).lower()


def find(name: str) -> type[Algorithm]:
    """A method by name, in any case, with or without dashes."""
    known = {_bare(key): kind for key, kind in registry.items()}
    if _bare(name) in known:
        return known[_bare(name)]
    raise InvalidArgument(f"unknown method {name!r}; {nearest(name, map(slug, registry.values()), 'the methods are')}")


def settings(algorithm: Algorithm | Optimizer | Schedule) -> dict[str, Any]:
    """What differs from the defaults, as numbers, words, lists and tables."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, f.name)
        if value != default(f):
            out[f.name] = _plain(value)
    return out


def written(algorithm: Algorithm) -> str:
    """The method as it would be written in Python: only what differs from its defaults."""
    given = [
        f"{f.name}={getattr(algorithm, f.name)!r}"
        for f in dataclasses.fields(algorithm)
        if getattr(algorithm, f.name) != default(f)
    ]
    return f"{type(algorithm).__name__}({', '.join(given)})"


def make(name: str, values: Mapping[str, Any]) -> Algorithm:
    """The method with these settings."""
    return build(find(name), values)


def build(kind: type[Algorithm], values: Mapping[str, Any]) -> Algorithm:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise InvalidArgument(f"{slug(kind)} has no setting {key!r}; {nearest(key, known, 'its settings are')}")
    try:
        return kind(**{key: _object(value) for key, value in values.items()})
    except TypeError as error:  # a word where a number belongs, compared with a bound
        raise InvalidArgument(f"{slug(kind)}: these settings do not fit: {dict(values)}") from error


def default(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _bare(name: str) -> str:
    return re.sub(r"[-_ +]", "", name).lower()


def _plain(value: Any) -> Any:
    if isinstance(value, (Optimizer, Schedule, ServerOptimizer)):
        return {"kind": type(value).__name__.lower(), **settings(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _object(value: Any) -> Any:
    """The optimizer or schedule that a table with ``kind`` stands for; other values as they are."""
    if isinstance(value, Mapping) and "kind" in value:
        kind = KINDS.get(str(value["kind"]).lower())
        if kind is None:
            raise InvalidArgument(f"unknown kind {value['kind']!r}; {nearest(str(value['kind']), KINDS, 'the kinds are')}")
        known = [f.name for f in dataclasses.fields(kind)]
        rest = {k: _object(v) for k, v in value.items() if k != "kind"}
        for key in rest:
            if key not in known:
                raise InvalidArgument(f"{kind.__name__} has no setting {key!r}; {nearest(key, known, 'its settings are')}")
        try:
            return kind(**rest)
        except TypeError as error:
            raise InvalidArgument(f"{kind.__name__} cannot be made of {rest}; its settings are {', '.join(known)}") from error
    return tuple(_object(v) for v in value) if isinstance(value, list) else value
