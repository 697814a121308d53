"""The options in a network's name: ``resnet18:adapters,group`` or ``vit:adapters,dim=96``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedtailor.errors import InvalidArgument, nearest

_PARTS: dict[str, dict[str, Any]] = {"adapters": {"adapters": True}, "all": {"train": "all"}, "head": {"train": "head"}}
# by kind of network: words and the arguments they stand for; numbers and their type
WORDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "resnet": {
        **_PARTS,
        "group": {"norm": "group"},
        "small": {"stem": "small"},
        "imagenet": {"stem": "imagenet"},
    },
    "vit": _PARTS,
    "effnet-lite0": _PARTS,
}
NUMBERS: Mapping[str, Mapping[str, type]] = {
    "resnet": {"last": int, "width": int, "dropout": float},
    "vit": {"last": int, "patch": int, "dim": int, "depth": int, "heads": int, "hidden": int, "dropout": float},
    "effnet-lite0": {"last": int, "size": int, "dropout": float},
}


def parse(name: str, kind: str, option: str) -> dict[str, Any]:
    """Return the arguments that the options after the colon stand for."""
    out: dict[str, Any] = {}
    for word in option.split(",") if option else ():
        key, equals, text = word.strip().partition("=")
        known = NUMBERS[kind]
        if not equals and key in WORDS[kind]:
            out |= WORDS[kind][key]
        elif equals and key in known:
            out[key] = _number(name, key, text, known[key])
        else:
            words = [*WORDS[kind], *(f"{n}=" for n in known)]
            raise InvalidArgument(f"unknown option {word!r} in the model {name!r}; {nearest(word, words, 'its options are')}")
    return out


def _number(name: str, key: str, text: str, kind: type) -> float:
    try:
        value: float = kind(text)
    except ValueError:
        value = -1
    if value < 0 or (kind is int and value == 0) or value != value or value > 1e6:
        expected = "a whole number from 1" if kind is int else "a number from 0"
        raise InvalidArgument(f"{key} must be {expected} in the model {name!r}, not {text!r}")
    return value


def spelled(kind: str) -> str:
    """Return all options of a kind of network, for a listing."""
    return ", ".join([*WORDS[kind], *(f"{name}=N" for name in NUMBERS[kind])])
