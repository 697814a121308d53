"""Readers that take a checked options object's fields as keywords, so that each option is listed in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

Reader = TypeVar("Reader", bound=Callable[..., Any])


def keywords_of(options: type) -> Callable[[Reader], Reader]:
    """Spell out a reader's ``**options`` in its signature: a keyword with its default for every field of the class ``options``.

    ``help`` shows them, and ``sources.load`` checks what it passes on against them.
    """

    def spell_out(read: Reader) -> Reader:
        signature = inspect.signature(read)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(options)]
        read.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return read

    return spell_out
