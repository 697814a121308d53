"""What all settings have in common: they are right or refused, and a function that takes them shows them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from fedtailor.errors import InvalidArgument, UnknownSetting, nearest

SHOWN = 60  # letters of a wrong value that a message repeats
TYPES = (
    "int",
    "float",
    "str",
    "bool",
    "tuple",
    "list",
    "dict",
    "function-before",
    "literal",
)  # as pydantic marks branches of a union
F = TypeVar("F", bound=Callable[..., Any])


class Checked(BaseModel):
    """Settings that are right or refused, in one line that names the setting and says what it may be."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    PRIVATE: ClassVar[bool] = False  # whether what is asked for can be had with privacy
    SWITCHES: ClassVar[tuple[str, ...]] = (  # the settings that are true or false
        *("bias", "tune", "dynamic", "dp_force"),
        *("keep_na", "merge_clients", "merge_labels"),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """NumPy's numbers and paths as Python's own; ``rounds = true`` is a slip, not one round."""
        if isinstance(value, bool) and info.field_name not in cls.SWITCHES:
            raise ValueError("must have a value of another kind")
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, bool) or not isinstance(value, Real):
            return value
        return int(value) if isinstance(value, Integral) else float(value)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Return the settings with these plain values; ``where`` stands before a refusal."""
        try:
            return cls(**values)
        except ValidationError as error:
            refusal = UnknownSetting if error.errors()[0]["type"] == "extra_forbidden" else InvalidArgument
            raise refusal(where + _said(error, cls)) from None

    def but(self, **changes: Any) -> Self:
        """Return a copy with some settings changed, checked again."""
        return type(self).of({**self.plain(), **changes})

    def plain(self) -> dict[str, Any]:
        """Return every setting by name."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def taking(kind: type[Checked]) -> Callable[[F], F]:
    """Show the settings of ``kind`` in the signature and the help of a function that takes them as ``**settings``."""

    def dressed(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in kind.model_fields.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        lines = [f"    {name}: {field.description}" for name, field in kind.model_fields.items()]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Settings:", *lines])
        return function

    return dressed


def _said(error: ValidationError, kind: type[Checked]) -> str:
    """Return the first thing that is wrong, in one line."""
    first = error.errors()[0]
    places = [str(part) for part in first["loc"] if str(part).partition("[")[0] not in TYPES]
    name = ".".join(places) or "the settings"
    if first["type"] == "extra_forbidden":
        if has_no_privacy(kind, name):
            return without_privacy(name)
        return f"unknown setting {shown(name)}; {nearest(name, names(kind), 'the settings are')}"
    if not name.isprintable():
        name = shown(name)
    if first["type"] == "missing":
        return f"{name} is missing; give it"
    message = first["msg"].replace("Input should be", "must be").replace("Value error, ", "")
    return f"{name} {message}, not {shown(first.get('input'))}"


def has_no_privacy(kind: type[Checked], name: str) -> bool:
    """Return whether a setting, of a file or a flag, asks for privacy where there is none: of advice, sweeps and pretraining."""
    return not kind.PRIVATE and name.replace("-", "_").startswith(("dp_", "user_", "target_epsilon"))


def without_privacy(name: str) -> str:
    """Return why a command that has no privacy refuses a setting that asks for it."""
    return (
        f"{name} is for run and compare: what this command learns from the rows has no noise on it, and no epsilon would count "
        "it; ask on public rows, or leave it out"
    )


def names(kind: type[Checked]) -> list[str]:
    """Return the names of the settings, as they stand in a file."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def shown(value: Any) -> str:
    """Return a value for a message: in one line, not too long."""
    quoted = repr(value)
    return quoted if len(quoted) <= SHOWN else f"{quoted[:SHOWN]}..."
