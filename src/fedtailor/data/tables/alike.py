"""Names that differ only in how they are spelled: capitals, spaces, accents as one letter or two, leading zeros."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from fedtailor.data.columns import Raw
from fedtailor.data.tables.codes import tally
from fedtailor.data.words import shown

MOST = 5  # groups that a note lists


def folded(name: str) -> str:
    """Return a name without what people write in different ways; look-alikes become equal."""
    plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    whole = re.fullmatch(r"([+-]?)0*(\d+?)(?:\.0*)?", plain)
    return f"{whole[1].removeprefix('+')}{whole[2]}" if whole else plain


def settled(raw: Raw, role: str, merge: bool) -> tuple[Raw, list[str]]:
    """Return the column, with look-alikes merged into the most frequent if asked, and a note that lists them with counts."""
    counts = tally(raw.values, len(raw.texts)).tolist()
    groups = _groups(raw.texts, counts)
    if not groups:
        return raw, []
    listing = "; ".join(", ".join(f"{shown(raw.texts[i])} ({counts[i]:,})" for i in group) for group in groups[:MOST])
    listing += f"; and {len(groups) - MOST:,} more" if len(groups) > MOST else ""
    if not merge:
        return raw, [f"{role.capitalize()}s that look alike are kept apart: {listing}; --merge-{role}s makes one of each."]
    return _merged(raw, groups), [f"{role.capitalize()}s that look alike were merged into the first of each: {listing}."]


def _groups(texts: Sequence[str], counts: Sequence[int]) -> list[list[int]]:
    """Return the codes of look-alikes, the most frequent of each group first."""
    alike: dict[str, list[int]] = {}
    for i, name in enumerate(texts):
        if counts[i]:
            alike.setdefault(folded(name), []).append(i)
    return [sorted(group, key=lambda i: (-counts[i], texts[i])) for group in alike.values() if len(group) > 1]


def _merged(raw: Raw, groups: Sequence[Sequence[int]]) -> Raw:
    target = np.arange(len(raw.texts) + 1)
    target[-1] = -1
    for first, *others in groups:
        target[others] = first
    return Raw(raw.kind, target[raw.values], raw.texts)
