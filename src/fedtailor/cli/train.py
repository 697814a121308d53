"""``run``, ``compare`` and ``resume``. Their flags are the settings of ``fedtailor.config``, one by one."""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedtailor.cli.base import Json, progress, say, show
from fedtailor.config import CompareSettings, RunSettings, Settings, assignments, flags, join, read, value
from fedtailor.errors import InvalidArgument, nearest

Config = Annotated[Path | None, typer.Option("--config", help="A TOML file with the names of the flags; flags win.")]
SaveConfig = Annotated[Path | None, typer.Option("--save-config", help="Write the settings to a TOML file as well.")]
Out = Annotated[Path | None, typer.Option("--out", help="The run directory (default: a new one under runs/).")]
LISTS = ("methods", "features", "drop")  # given with commas
TABLES = ("set", "with", "grid")  # given as NAME=VALUE


def register(app: typer.Typer) -> None:
    """Add ``run`` and ``compare``, their signatures made from the settings."""
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}  # a method's settings are flags too: --lam 0.5
    app.command("run", context_settings=loose)(_command(RunSettings, run, "[METHOD] DATA", run.__doc__))
    app.command("compare", context_settings=loose)(_command(CompareSettings, compare, "DATA", compare.__doc__))


def run(settings: RunSettings, out: Path | None, as_json: bool, save: Path | None = None, resuming: bool = False) -> None:
    """Train one method and measure it.

    DATA is a name (digits), a table (patients.csv, with --client and --label) or a folder. The method's settings are flags as
    well: --lam 0.5 --lr 0.1 --epochs 2.
    """
    algorithm, federation = settings.algorithm(), settings.federation()
    tell_about(federation)
    keep(settings, save)
    from fedtailor.engine.run import run as train
    from fedtailor.report.page import write

    folder = out or fresh(settings.data, settings.method)
    with resumable(folder), progress(settings.rounds) as tell:
        done = train(algorithm, federation, settings.model, out=folder, resume=resuming, callback=tell, **settings.options())
    page = write({done.summary["algorithm"]: [done.record()]}, folder / "report.html", command=_command_line())
    if as_json:
        typer.echo(json.dumps({**done.summary, "out": str(folder)}, indent=2))
        return
    show([], [_cells(done.summary["settings"], done.summary)], False)
    typer.echo(f"The run is in {folder}, the report in {page}.")


def compare(settings: CompareSettings, out: Path | None, as_json: bool, save: Path | None = None, resuming: bool = False) -> None:
    """Compare methods on the same splits and seeds, and write a report: who gains by learning together?

    DATA is a name (digits), a table (patients.csv, with --client and --label) or a folder.
    """
    algorithms, federation = settings.algorithms(), settings.federation()
    tell_about(federation)
    if settings.grid and not settings.tune:
        say("the grid is not used; add --tune to choose from it")
    keep(settings, save)
    from fedtailor.engine.compare import compare as train
    from fedtailor.engine.compare import total
    from fedtailor.report.page import headline, write

    folder = out or fresh(settings.data, "compare")
    grid = settings.grid if settings.tune and settings.grid else settings.tune
    with resumable(folder), progress(total(algorithms, settings.rounds, settings.seeds, grid)) as tell:
        found = train(
            algorithms,
            federation,
            settings.model,
            seeds=settings.seeds,
            tune=grid,
            out=folder,
            resume=resuming,
            callback=tell,
            **settings.options(),
        )
    records = found.records()
    page = write(records, folder / "report.html", command=_command_line())
    best = headline(records)
    rows = found.table()
    if as_json:
        typer.echo(json.dumps({"best": best["best"], "methods": rows, "tuning": found.tuning, "out": str(folder)}, indent=2))
        return
    show([], [_cells(row["method"], row) for row in rows], False)
    chosen = f"Best on validation: {best['best']}" if best["best"] else "There are no validation rows to choose a method on"
    typer.echo(f"{chosen}. The report is in {page}.")


def resume(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run or a comparison that was stopped.")],
    workers: Annotated[int | None, typer.Option(help="Processes of the loop engine.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run or a comparison that was stopped; it ends as if it never had been."""
    from fedtailor.runs.folder import readable
    from fedtailor.runs.layout import SUMMARY, check_version

    asked = check_version(where)
    if "data" not in asked or "model" not in asked:
        raise InvalidArgument(f"{where} was begun in Python, with objects; go on there, with ft.run(..., out=..., resume=True)")
    if workers is not None:
        asked["workers"] = workers
    # what is finished is read back, so that whatever fails is a file that does not fit the others
    with readable(where) if any(where.rglob(SUMMARY)) else nullcontext():
        if asked.get("command") == "compare":
            compare(CompareSettings.of(asked, f"{where}: "), where, as_json, resuming=True)
        else:
            run(RunSettings.of(asked, f"{where}: "), where, as_json, resuming=True)


def fresh(data: str, what: str) -> Path:
    """A run directory that is not there yet, named after the data and the method."""
    stem = Path(data).name.split(".")[0] or "run"
    base = Path("runs") / f"{stem}-{what}"
    return next(p for p in (base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 10_000))) if not p.exists())


def keep(settings: Settings, path: Path | None) -> None:
    """Write the settings to a file, if one is given."""
    from fedtailor.runs import files

    if path is not None:
        files.write(path, settings.toml())


def tell_about(federation: Any) -> None:
    """What was assumed about the data, on stderr."""
    for note in federation.notes:
        say(note)


class resumable:  # noqa: N801 (used like a function)
    """Ctrl-C says how to go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is KeyboardInterrupt:
            from fedtailor.runs.layout import CONFIG

            begun = (self.folder / CONFIG).exists()
            say(f"stopped; go on with: fedtailor resume {self.folder}" if begun else "stopped before the first round")
            raise typer.Exit(130) from None


def _command(kind: type[Settings], action: Callable[..., None], metavar: str, about: str | None) -> Callable[..., None]:
    """A function whose parameters are the settings, for typer to read."""

    def command(**given: Any) -> None:
        what: list[str] = given.pop("what") or []
        config, save, out, as_json = (given.pop(name) for name in ("config", "save_config", "out", "as_json"))
        layers: list[Mapping[str, Any]] = [read(config)] if config else []
        layers.append(
            {name.rstrip("_"): v for name, v in given.items() if v is not None and v != [] and name.rstrip("_") not in TABLES}
        )
        for table in TABLES:
            pairs = given.get(f"{table}_") or given.get(table) or []
            if pairs:
                layers.append({table: assignments(pairs, f"--{table}")})
        layers.append(_words(kind, what))
        values = join(*layers)
        for name in LISTS:
            if isinstance(values.get(name), str):
                values[name] = [part.strip() for part in values[name].split(",") if part.strip()]
        if "grid" in values and isinstance(values["grid"], dict):
            values["grid"] = {k: v if isinstance(v, list) else [v] for k, v in values["grid"].items()}
        if "data" not in values:
            raise InvalidArgument("no data given; name a data set (see: fedtailor data list), a table or a folder")
        settings = kind.of(values)
        action(settings, out, as_json, save)

    parameters = [inspect.Parameter("what", inspect.Parameter.KEYWORD_ONLY, annotation=_argument(metavar), default=None)]
    for name, field in kind.model_fields.items():
        flag = "--" + (field.alias or name).replace("_", "-")
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=_option(name, flag, field), default=None)
        )
    for name, annotation in (("config", Config), ("save_config", SaveConfig), ("out", Out), ("as_json", Json)):
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


def _option(name: str, flag: str, field: Any) -> Any:
    """The flag for a setting: its type without None, lists and tables as text."""
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
        return Annotated[str | None, typer.Option(flag, help=help_, metavar="A,B", **more)]  # type: ignore[arg-type]
    kinds = [t for t in (typing.get_args(field.annotation) or (field.annotation,)) if t is not types.NoneType]
    if typing.get_origin(field.annotation) is Literal or typing.get_origin(kinds[0]) is Literal:
        words = typing.get_args(field.annotation if typing.get_origin(field.annotation) is Literal else kinds[0])
        return Annotated[str | None, typer.Option(flag, help=help_, metavar="|".join(words))]
    if kinds[0] is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help_)]
    more = {"autocompletion": _complete_method} if plain == "method" else {}
    return Annotated[kinds[0] | None, typer.Option(flag, help=help_, **more)]  # type: ignore[arg-type]


def _words(kind: type[Settings], what: Sequence[str]) -> dict[str, Any]:
    """The words without a flag (method, data) and the flags that are settings of the method."""
    out: dict[str, Any] = {}
    words: list[str] = []
    given = list(what)
    while given:
        word = given.pop(0)
        if not word.startswith("--") or len(word) < 3:
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not given or given[0].startswith("--"):
                raise InvalidArgument(_unknown(kind, name) or f"--{name} needs a value")
            text = given.pop(0)
        if hint := _unknown(kind, name):
            raise InvalidArgument(hint)
        out.setdefault("set", {})[name.replace("-", "_")] = value(text)
    if kind is RunSettings and len(words) == 2:
        from fedtailor.algorithms.settings import find

        try:
            find(words[0])
        except InvalidArgument:
            if not _is_data(words[0]):
                raise
            find(words[1])  # "run digits fedavg" is as good as "run fedavg digits"
            words.reverse()
        out["method"], out["data"] = words
    elif len(words) == 1:
        out["data"] = words[0]
    elif words:
        raise InvalidArgument(f"cannot make sense of {' '.join(words)!r}; give the data, and everything else as flags")
    return out


def _is_data(word: str) -> bool:
    from fedtailor.data.sources import SOURCES, TABLES

    return word in SOURCES or word.endswith(TABLES) or any(mark in word for mark in "/:") or os.path.exists(word)


def _unknown(kind: type[Settings], name: str) -> str | None:
    """A hint if no method has such a setting."""
    import dataclasses

    from fedtailor.algorithms import METHODS

    own = {f.name.replace("_", "-") for method in METHODS for f in dataclasses.fields(method)}
    if name.replace("_", "-") in own:
        return None
    others = [flag.replace("_", "-") for flag in flags(kind)] + ["config", "save-config", "out", "json", "help"]
    return f"unknown flag --{name}; {nearest(name, [*others, *sorted(own)], 'see fedtailor run --help for')}"


def _cells(label: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    from fedtailor.metrics.client import score_name
    from fedtailor.report.page import cell, columns

    shown = columns(score_name(summary["kind"]))
    return {"method": label, **{title: cell(key, summary.get(key)) for key, title in shown.items()}}


def _command_line() -> str:
    import shlex

    return shlex.join(["fedtailor", *sys.argv[1:]])
