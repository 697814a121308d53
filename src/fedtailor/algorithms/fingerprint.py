"""A fingerprint of a definition: what its source says, read off the syntax tree without executing anything.

It covers the definition, those of its module that it reaches by name, and those it imports from files beside it; comments and
docstrings do not matter, nor do fedtailor and installed packages.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeGuard

LENGTH = 16  # hex digits of a fingerprint
INSTALLED = ("site-packages", "dist-packages")


def fingerprint(path: Path, name: str) -> str | None:
    """Return a hash of the source of ``name`` in a file; None where it cannot be read or has no such definition."""
    pieces: list[str] = []
    try:
        if not _reach(path, name, pieces, set()):
            return None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:LENGTH]


def _reach(path: Path, name: str, pieces: list[str], seen: set[tuple[Path, str]]) -> bool:
    """Add the definition of ``name`` and all it reaches to ``pieces``; False where there is none."""
    bindings = _bindings(path, path.stat().st_mtime_ns)
    if name not in bindings:
        return False
    if (path, name) in seen:
        return True
    seen.add((path, name))
    for node in bindings[name]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _follow(path, node, pieces, seen)
            continue
        pieces.append(_text(node))
        for other in _free(node, frozenset()):
            _reach(path, other, pieces, seen)
    return True


def _follow(path: Path, node: ast.Import | ast.ImportFrom, pieces: list[str], seen: set[tuple[Path, str]]) -> None:
    """Add an import of one name to ``pieces``, and what it imports where that is in a file of the user's."""
    (alias,) = node.names
    pieces.append(ast.unparse(node))
    level = node.level if isinstance(node, ast.ImportFrom) else 0
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
    if not level and module.partition(".")[0] in (*sys.stdlib_module_names, "fedtailor"):
        return
    folders = [str(path.parents[level - 1])] if level else [*sys.path, str(path.parent), os.getcwd()]
    file = source(module, folders) if module else path.parents[level - 1] / "__init__.py"
    if isinstance(node, ast.ImportFrom):
        if _is_users(file) and _reach(file, alias.name, pieces, seen):
            return
        file = source(f"{module}.{alias.name}".lstrip("."), folders)
    if _is_users(file) and (file, "") not in seen:
        seen.add((file, ""))
        pieces.append(_text(ast.parse(file.read_text("utf-8"))))


def _is_users(file: Path | None) -> TypeGuard[Path]:
    """Return whether this is a file of the user's, not of an installed package."""
    return file is not None and file.is_file() and not set(INSTALLED) & set(file.parts)


@lru_cache(maxsize=64)
def _bindings(path: Path, modified: int) -> dict[str, list[ast.AST]]:
    """Return the top-level statements of a file that bind each name; ``modified`` is when the file was written."""
    bindings: dict[str, list[ast.AST]] = {}
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                single = ast.copy_location(type(statement)(**{**dict(ast.iter_fields(statement)), "names": [alias]}), statement)
                bindings.setdefault(alias.asname or alias.name.partition(".")[0], []).append(single)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bindings.setdefault(statement.name, []).append(statement)
        elif not (isinstance(statement, ast.If) and "__name__" in _names(statement.test)):
            for name in _bound(statement):
                bindings.setdefault(name, []).append(statement)
    return bindings


def _bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement binds, those inside its blocks too."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _names(node: ast.AST) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def _free(node: ast.AST, local: frozenset[str]) -> Iterator[str]:
    """Yield the names that a node reads and no function around them binds, in the order of the text."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in local:
            yield node.id
        return
    inside = local
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        inside = local | _bound(node)
    for child in ast.iter_child_nodes(node):
        outside = child in (getattr(node, "decorator_list", None) or ())
        yield from _free(child, local if outside else inside)


def _text(node: ast.AST) -> str:
    """Return the source without comments and docstrings, in one layout."""
    copy = ast.parse(ast.unparse(node))
    for part in ast.walk(copy):
        body = getattr(part, "body", None)
        if isinstance(part, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                part.body = body[1:] or [ast.Pass()]
    return ast.unparse(copy)


def source(module: str, folders: Iterable[str]) -> Path | None:
    """Return the file of a module that would be imported from one of the folders; None where there is none in Python."""
    search: list[str] | None = [folder or os.getcwd() for folder in folders]
    module_spec = None
    for end in range(1, module.count(".") + 2):
        module_spec = PathFinder.find_spec(".".join(module.split(".")[:end]), search)
        if module_spec is None:
            return None
        search = None if module_spec.submodule_search_locations is None else list(module_spec.submodule_search_locations)
    path = None if module_spec is None or module_spec.origin is None else Path(module_spec.origin)
    return path.resolve() if path is not None and path.suffix == ".py" else None
