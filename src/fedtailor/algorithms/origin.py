"""Where the class of a method comes from, so that a run directory can say it and it can be fetched again.

Our own methods are written as their names. A class of the user's is written ``mine.py:MyMethod@9f86d081884c7d65`` or
``package.module:MyMethod@...``: the digits after the @ are a fingerprint of its source, read off the syntax tree, so that it is
compared *before* anything is executed. It covers the class, the definitions of its module that it reaches by name, and those it
imports from files beside it; comments and docstrings do not matter, nor do fedtailor and installed packages.
A class without a file (typed into a notebook or a shell, or made inside a function) is written ``(no file):MyMethod``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any

from fedtailor.algorithms.fingerprint import INSTALLED, LENGTH, fingerprint, source
from fedtailor.errors import BadRun, FedtailorError, InvalidArgument

NO_FILE = "(no file)"
LOADED = "fedtailor_method_"  # prefix of the names under which files are imported


@dataclass(frozen=True)
class Origin:
    """The place where a class was defined; without a file, ``path`` and ``fingerprint`` are None."""

    name: str
    module: str
    path: Path | None = None
    fingerprint: str | None = None

    @property
    def place(self) -> str:
        """The file, seen from the working directory if it is below it, or the module, if that is part of a package."""
        if self.path is None:
            return NO_FILE
        if "." in self.module or set(INSTALLED) & set(self.path.parts):
            return self.module
        below = self.path.is_relative_to(Path.cwd())
        return str(self.path.relative_to(Path.cwd()) if below else self.path)

    @property
    def spec(self) -> str:
        return f"{self.place}:{self.name}" + (f"@{self.fingerprint}" if self.fingerprint else "")


_origins: dict[type[Any], Origin | None] = {}  # of every class of the interface that was defined, in that order; None: ours


def remember(kind: type[Any]) -> None:
    """Record where a class comes from, at the moment of its definition, when its file still holds its source."""
    _origins[kind] = None if kind.__module__.startswith("fedtailor.") else _origin(kind)


def defined() -> Iterator[type[Any]]:
    """Return every class of the interface that was defined so far, ours and others, abstract ones too; of those with the same
    module and name, the last."""
    return iter({(kind.__module__, kind.__qualname__): kind for kind in _origins}.values())


def of(kind: type[Any]) -> Origin | None:
    """Where a class comes from; None for our own."""
    if kind not in _origins:  # it has an __init_subclass__ that does not call ours
        remember(kind)
    return _origins[kind]


def _origin(kind: type[Any]) -> Origin:
    without_file = Origin(kind.__qualname__.rpartition(".")[2], kind.__module__)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or kind.__qualname__ != kind.__name__:
        return without_file
    path = Path(file).resolve()
    digest = fingerprint(path, kind.__name__)
    return without_file if digest is None else Origin(kind.__name__, kind.__module__, path, digest)


# -- fetching a class ---------------------------------------------------------------------------------------------------
def load(spec: str, folder: Path | None = None) -> type[Any]:
    """Return the class that a spec names: the one already defined here, or imported from its place.

    With a fingerprint, anything else than the class it was taken of is refused before it is executed. ``folder`` is the run
    directory that holds the spec: no file inside it is ever executed.
    """
    place, name, wanted = _parts(spec)
    if place == NO_FILE:
        return _defined_without_file(name)
    path = _file_of(place)
    same = [(kind, origin) for kind, origin in _defined_as(name) if wanted and origin.fingerprint == wanted]
    for kind, _ in sorted(same, key=lambda pair: pair[1].path != path):  # the one from that place, if it is among them
        return kind
    recorded = f"the run was made with {spec}"
    if path is None:
        if wanted:
            raise BadRun(f"{recorded} and there is no {place} in {Path.cwd()}; put it back, or work from where it is")
        raise InvalidArgument(f"cannot read {spec!r}; give a Python file and a class in it, as in mine.py:MyMethod")
    if folder is not None and path.is_relative_to(folder.resolve()):
        raise BadRun(f"{recorded}, which lies inside the run directory; code that comes with a run is never executed")
    digest = fingerprint(path, name)
    if wanted and digest is None:
        raise BadRun(f"{recorded} and {path} has no class {name!r} now; restore the source, or train anew")
    if wanted and digest != wanted:
        raise BadRun(
            f"{recorded} and {place} now holds {name}@{digest}, another class or a changed one; restore it, or train anew"
        )
    for kind, origin in _defined_as(name):
        if (origin.path, origin.fingerprint) == (path, digest):
            return kind
    loaded = getattr(_imported(place, path), name, None)
    if not isinstance(loaded, type):
        raise InvalidArgument(f"{path} has no class {name!r}")
    if wanted and (not (actual := of(loaded)) or actual.fingerprint != wanted):
        raise BadRun(f"{recorded} and this process holds another {name}, {actual.spec if actual else 'ours'}; start a new one")
    return loaded


# -- functions ----------------------------------------------------------------------------------------------------------
_functions: dict[str, Callable[..., Any]] = {}  # those given in this process, by their specs


def spec_of(function: Callable[..., Any]) -> str:
    """Return the spec of a function (or of an object that can be called) that a run is given, under which ``function_of`` finds
    it."""
    name = getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2].strip("<>")
    module = getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    top = getattr(sys.modules.get(module), name, None) is function
    digest = fingerprint(Path(file).resolve(), name) if file is not None and top else None
    if digest is not None and file is not None:
        spec = Origin(name, module, Path(file).resolve(), digest).spec
    else:
        digest, whole = _of_code(function)
        specs = (f"{NO_FILE}:{name}{'' if i == 1 else f'_{i}'}@{digest}" for i in count(1))
        spec = next(spec for spec in specs if whole or _functions.get(spec, function) is function)
    _functions[spec] = function
    return spec


def specs_of(value: Any, several: bool) -> Any:
    """Functions, given as they are or by name, as words that hold a fingerprint: a spec, or with ``several`` a tuple of specs or
    ``NAME=SPEC``; anything else stays as it is."""

    def spec(one: Any) -> Any:
        if isinstance(one, str) and "@" not in one:
            label, equals, where = one.rpartition("=")
            return label + equals + _spec_at(where)
        return spec_of(one) if callable(one) else one

    if not several:
        return spec(value)
    if isinstance(value, Mapping):
        return tuple(f"{name}={spec(function)}" for name, function in value.items())
    listed = [value] if callable(value) or isinstance(value, str) else value
    return tuple(map(spec, listed)) if isinstance(listed, (list, tuple)) else value


def _spec_at(where: str) -> str:
    """Return the spec, with a fingerprint, of what ``mine.py:name`` names, which may be an object that can be called."""
    function, (place, name, _) = function_of(where), _parts(where)
    path = _file_of(place)
    digest = None if path is None else fingerprint(path, name)
    if digest is None:
        return spec_of(function)
    spec = f"{place}:{name}@{digest}"
    _functions[spec] = function
    return spec


def name_of(spec: str) -> str:
    """Return the name of the function that a spec names."""
    return spec.rpartition(":")[2].partition("@")[0]


def is_spec(word: str) -> bool:
    """Return whether a word names something in a Python file or a module, as ``mine.py:net`` or ``package.module:net``."""
    place, colon, rest = word.rpartition(":")
    named = rest.partition("@")[0].isidentifier()
    return bool(colon) and named and (place.endswith(".py") or place == NO_FILE or ("." in place and "/" not in place))


def pieces_of(settings: Any, classes: bool = False) -> Iterator[str]:
    """Yield the functions that settings name, wherever they stand; with ``classes`` also methods and the kinds of their
    settings."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if classes or name not in ("method", "methods", "kind"):
                yield from pieces_of(value, classes)
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from pieces_of(value, classes)
    elif isinstance(settings, str) and is_spec(settings.rpartition("=")[2]):
        yield settings.rpartition("=")[2]


def refuse_inside(settings: Any, folder: Path) -> None:
    """Refuse settings, read from a run directory, that name code in a file inside it; nothing is executed."""
    for piece in pieces_of(settings, classes=True):
        path = _file_of(_parts(piece)[0])
        if path is not None and path.is_relative_to(folder.resolve()):
            raise BadRun(f"{piece} lies inside the run directory; code that comes with a run is never executed")


def _of_code(function: Callable[..., Any]) -> tuple[str, bool]:
    """Return (a hash of what a function without a file does, whether it is all of it): its byte code and the values that it
    holds."""
    code = getattr(function, "__code__", None)
    if code is None and not isinstance(function, type):
        return _of_object(function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    defaults, by_name = (getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__"))
    values = [*cells, *(defaults or ()), *(by_name or {}).values()]
    plain = [value for value in values if isinstance(value, (bool, int, float, str, bytes))]
    parts = [] if code is None else [code.co_code, code.co_names, *(c for c in code.co_consts if not hasattr(c, "co_code"))]
    digest = hashlib.sha256("\n".join(map(repr, [*plain, *parts])).encode()).hexdigest()[:LENGTH]
    return digest, code is not None and len(plain) == len(values)


def _of_object(thing: Any) -> tuple[str, bool]:
    """Return the same of an object that can be called: the source of its class and what it holds."""
    kind, values = type(thing), dict(getattr(thing, "__dict__", {}))
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    source = None if file is None else fingerprint(Path(file).resolve(), kind.__name__)
    plain = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, bytes, type(None)))}
    digest = hashlib.sha256(repr((kind.__qualname__, source, sorted(plain.items()))).encode()).hexdigest()[:LENGTH]
    return digest, source is not None and len(plain) == len(values)


def function_of(spec: str, folder: Path | None = None) -> Callable[..., Any]:
    """Return the function that a spec names, as ``load`` finds classes: one that has changed since is refused before it is
    executed."""
    if spec in _functions:
        return _functions[spec]
    place, name, wanted = _parts(spec)
    if place == NO_FILE:
        raise BadRun(
            f"the run was made with {name}, a function that was in no file (a notebook or a shell) or inside another one; give "
            "the same function in Python, with ft.run(..., out=..., resume=True)"
        )
    path = _file_of(place)
    if path is None or fingerprint(path, name) is None:
        refusal = BadRun if wanted else InvalidArgument
        raise refusal(f"there is no function {name!r} in {place} (looked in {Path.cwd()}); give it as in mine.py:{name}")
    if folder is not None and path.is_relative_to(folder.resolve()):
        raise BadRun(f"{spec} lies inside the run directory; code that comes with a run is never executed")
    if wanted and fingerprint(path, name) != wanted:
        raise BadRun(f"the run was made with {spec} and {place} now holds another {name}; restore it, or train anew")
    function = getattr(_imported(place, path), name, None)
    if not callable(function):
        raise InvalidArgument(f"{name!r} in {place} is no function; give one, as in mine.py:my_loss")
    if wanted:
        _functions[spec] = function
    return function


def _parts(spec: str) -> tuple[str, str, str | None]:
    place, _, rest = spec.rpartition(":")
    name, at, digest = rest.partition("@")
    if not place or not name.isidentifier() or (at and not digest):
        raise InvalidArgument(f"cannot read {spec!r}; give a Python file and a class in it, as in mine.py:MyMethod")
    return place, name, digest or None


def _defined_as(name: str) -> list[tuple[type[Any], Origin]]:
    return [(kind, origin) for kind in defined() if (origin := of(kind)) is not None and origin.name == name]


def _defined_without_file(name: str) -> type[Any]:
    """Return a class of this name that was defined in this process, without a file."""
    candidates = _defined_as(name)
    for kind, origin in reversed(candidates):
        if origin.path is None:
            return kind
    elsewhere = f"only {candidates[-1][1].spec}" if candidates else "no class of that name"
    raise BadRun(
        f"the run was made with {name}, a class that was in no file (a notebook or a shell), and this process has {elsewhere}; "
        "define the same class in Python first, and go on there"
    )


def _imported(place: str, path: Path) -> Any:
    """Return the module of the user's, executed."""
    folder = str(path.parent) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # for the files beside it; last, so that they hide nothing
    try:
        if not place.endswith(".py"):
            return import_module(place)
        name = f"{LOADED}{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
        module_spec = spec_from_file_location(name, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = sys.modules[name] = module_from_spec(module_spec)  # a dataclass looks its module up by name
        module_spec.loader.exec_module(module)
        return module
    except FedtailorError:
        raise
    except (Exception, SystemExit) as error:  # the file is the user's: anything can happen in it
        raise InvalidArgument(f"{path} cannot be imported ({type(error).__name__}: {error}); run it with python first") from error


def files_loaded() -> list[Path]:
    """Return the user's files that were imported here, for another process to import first (``import_files``)."""
    modules = [module for name, module in sys.modules.items() if name.startswith(LOADED)]
    return [Path(module.__file__) for module in modules if module.__file__]


def import_files(paths: Iterable[Path]) -> None:
    """Import files under the names that they have in the process they were listed in."""
    for path in paths:
        _imported(str(path), path)


def _file_of(place: str) -> Path | None:
    """Return the source of a file or a module, found without executing anything."""
    if place.endswith(".py"):
        path = Path(place).resolve()
        return path if path.is_file() else None
    return source(place, [*sys.path, os.getcwd()])
