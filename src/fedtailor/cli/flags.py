"""Settings as flags: a command whose parameters are those of ``fedtailor.config``, one by one."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedtailor.cli.base import Json
from fedtailor.config import DataSettings, RunSettings, assignments, join, read, value
from fedtailor.engine.checked import has_no_privacy, names, without_privacy
from fedtailor.errors import InvalidArgument, nearest

Config = Annotated[Path | None, typer.Option("--config", help="A TOML file with the names of the flags; flags win.")]
SaveConfig = Annotated[Path | None, typer.Option("--save-config", help="Write the settings to a TOML file as well.")]
Out = Annotated[Path | None, typer.Option("--out", help="The run directory (default: a new one under runs/).")]
LISTS = (
    "methods",
    "yardsticks",
    "features",
    "drop",
    "na",
    "shift",
    "lams",
    "targets",
    "metrics",
    "callbacks",
    "class_weights",
)  # written with commas
TABLES = ("set", "with", "grid")  # written as NAME=VALUE


def command_of(
    kind: type[DataSettings],
    action: Callable[..., None],
    metavar: str,
    about: str | None,
    to: Any = Out,
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> Callable[..., None]:
    """A function whose parameters are the settings, for typer to read; ``to`` is its flag --out, ``more`` are flags that the
    action takes by name."""

    def command(**flags: Any) -> None:
        arguments: list[str] = flags.pop("arguments") or []
        config, save, out, as_json = (flags.pop(name) for name in ("config", "save_config", "out", "as_json"))
        extra = {name: flags.pop(name) for name in more}
        layers: list[Mapping[str, Any]] = [read(config)] if config else []
        layers.append(
            {name.rstrip("_"): v for name, v in flags.items() if v is not None and v != [] and name.rstrip("_") not in TABLES}
        )
        for table in TABLES:
            pairs = flags.get(f"{table}_") or flags.get(table) or []
            if pairs:
                layers.append({table: assignments(pairs, f"--{table}")})
        layers.append(_words(kind, arguments))
        values = join(*layers)
        for name in LISTS:
            if isinstance(values.get(name), str):
                values[name] = [part.strip() for part in values[name].split(",") if part.strip()]
        if "grid" in values and isinstance(values["grid"], dict):
            values["grid"] = {k: v if isinstance(v, list) else [v] for k, v in values["grid"].items()}
        if "data" not in values:
            raise InvalidArgument("no data given; name a data set (see: fedtailor data list), a table or a folder")
        settings = kind.of(values)
        action(settings, out, as_json, save, **extra)

    parameters = [inspect.Parameter("arguments", inspect.Parameter.KEYWORD_ONLY, annotation=_argument(metavar), default=None)]
    for name, field in kind.model_fields.items():
        flag = "--" + (field.alias or name).replace("_", "-")
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=option_of(name, flag, field), default=None)
        )
    for name, annotation in (("config", Config), ("save_config", SaveConfig), ("out", to), *more.items(), ("as_json", Json)):
        default = False if name == "as_json" else None
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = about
    return command


def _argument(metavar: str) -> Any:
    return Annotated[list[str] | None, typer.Argument(metavar=metavar, help="What to train on.", autocompletion=_complete)]


def _complete(incomplete: str) -> list[str]:
    from fedtailor.data.sources import SOURCES

    return [name for name in SOURCES if name.startswith(incomplete)]


def _complete_method(incomplete: str) -> list[str]:
    from fedtailor.algorithms import METHODS
    from fedtailor.algorithms.settings import slug

    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{slug(m)}" for m in METHODS if slug(m).startswith(last)]


def option_of(name: str, flag: str, field: Any) -> Any:
    """The typer option for a setting: its type without None, with lists and tables as text."""
    plain = name.rstrip("_")
    help_ = field.description or ""
    default = field.default if field.default_factory is None else None
    if default is not None and plain not in TABLES and default.__class__.__name__ != "PydanticUndefinedType":
        shown = ",".join(default) if isinstance(default, list) else default
        help_ += f" [default: {shown}]"
    if plain in TABLES:
        return Annotated[list[str] | None, typer.Option(flag, help=help_, metavar="NAME=VALUE")]
    if plain in LISTS:
        more = {"autocompletion": _complete_method} if plain == "methods" else {}
        return Annotated[str | None, typer.Option(flag, help=help_, metavar="A,B", **more)]  # type: ignore[arg-type,call-overload,unused-ignore]
    kinds = [t for t in (typing.get_args(field.annotation) or (field.annotation,)) if t is not types.NoneType]
    if typing.get_origin(field.annotation) is Literal or typing.get_origin(kinds[0]) is Literal:
        words = typing.get_args(field.annotation if typing.get_origin(field.annotation) is Literal else kinds[0])
        return Annotated[str | None, typer.Option(flag, help=help_, metavar="|".join(words))]
    if kinds[0] is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help_)]
    more = {"autocompletion": _complete_method} if plain == "method" else {}
    return Annotated[kinds[0] | None, typer.Option(flag, help=help_, **more)]  # type: ignore[arg-type,call-overload,unused-ignore]


def _words(kind: type[DataSettings], arguments: Sequence[str]) -> dict[str, Any]:
    """The settings in the arguments: method and data, which have no flag, and the flags that are settings of the method."""
    settings: dict[str, Any] = {}
    words: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InvalidArgument(_unknown(kind, name) or f"--{name} needs a value")
            text = rest.pop(0)
        if hint := _unknown(kind, name):
            raise InvalidArgument(hint)
        settings.setdefault("set", {})[name.replace("-", "_")] = value(text)
    if kind is RunSettings and len(words) == 2:
        from fedtailor.algorithms.settings import find

        try:
            find(words[0])
        except InvalidArgument:
            if not _is_data(words[0]) or ".py:" in words[0]:
                raise
            find(words[1])  # "run digits fedavg" is as good as "run fedavg digits"
            words.reverse()
        settings["method"], settings["data"] = words
    elif len(words) == 1:
        settings["data"] = words[0]
    elif words:
        raise InvalidArgument(f"cannot make sense of {' '.join(words)!r}; give the data, and everything else as flags")
    return settings


def _is_data(word: str) -> bool:
    from fedtailor.data.sources import SOURCES, TABLES

    return word in SOURCES or word.endswith(TABLES) or any(mark in word for mark in "/:") or os.path.exists(word)


def _unknown(kind: type[DataSettings], name: str) -> str | None:
    """A hint, if no method has such a setting; otherwise None."""
    import dataclasses

    from fedtailor.algorithms import METHODS

    of_methods = {f.name.replace("_", "-") for method in METHODS for f in dataclasses.fields(method)}
    if name.replace("_", "-") in of_methods:
        return None
    if has_no_privacy(kind, name):
        return without_privacy(f"--{name}")
    of_command = [flag.replace("_", "-") for flag in names(kind)] + ["config", "save-config", "out", "json", "help"]
    return f"unknown flag --{name}; {nearest(name, [*of_command, *sorted(of_methods)], 'see fedtailor run --help for')}"
