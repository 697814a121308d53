"""What a federation looks like, before anything is trained: as numbers, as a picture for the terminal, as a page."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.checks import findings
from fedtailor.data.federation import Federation

if TYPE_CHECKING:
    from rich.text import Text

Description = dict[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
SHADES = ("cyan", "red", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_red")
MARKS = string.ascii_uppercase + string.ascii_lowercase + string.digits
SHOWN = 30  # clients in the terminal
DRAWN = 60  # clients on the page
LISTED = 20  # classes in a legend
ON_COLOUR = 'text-anchor="middle" fill="#fff" stroke="#222" stroke-width="2" paint-order="stroke"'
WIDTH, LEFT, RIGHT, BAR, TOP = 720, 130, 60, 16, 8
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "svg{width:100%;height:auto;font:12px system-ui,sans-serif}figure{margin:1.5rem 0}figcaption{color:#555}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td{padding:.2rem .8rem .2rem 0;border-bottom:1px solid #ddd}"
)


def describe(fed: Federation) -> Description:
    """Describe a federation in numbers, ready for JSON.

    ``skew`` says how much the clients differ in what they predict: for classes the mean over clients of the total variation
    distance between their label mix and the pooled one (0 alike, towards 1 apart), beside what clients of these sizes would
    show by chance; for regression the share of the targets' variance that lies between clients. ``findings`` are what is worth a
    look before training (``data.checks``).
    """
    splits = {part: split for part in ("train", "test", "val") if (split := getattr(fed, part)) is not None}
    targets = [np.concatenate([split.client(i)[1].cpu().numpy() for split in splits.values()]) for i in range(len(fed))]
    sizes = np.array([len(y) for y in targets])
    names = fed.classes or tuple(map(str, range(fed.labels)))
    about: Description = {
        "name": fed.name,
        "kind": fed.kind,
        "clients": len(fed),
        "names": list(fed.names),
        "rows": {part: len(split.y) for part, split in splits.items()},
        "shape": list(fed.train.x.shape[1:]),
        "client_rows": sizes.tolist(),
        "sizes": {
            "min": int(sizes.min()),
            "median": float(np.median(sizes)),
            "max": int(sizes.max()),
            "gini": gini(sizes),
        },
        "classes": list(names),
        "labels": None,
        "targets": None,
        "skew": None,
        "skew_by_chance": None,
        "notes": list(fed.notes),
        "findings": [finding._asdict() for finding in findings(fed)],
    }
    if fed.kind.softmax:
        counts = np.stack([np.bincount(y[y >= 0], minlength=fed.labels) for y in targets])  # -1 is padding
        chance = by_chance(counts.sum(0) / counts.sum(), counts.sum(1))
        return {**about, "labels": counts.tolist(), "skew": variation(counts), "skew_by_chance": chance}
    if not fed.kind.least_squares:
        return {**about, "labels": np.stack([y.sum(0).astype(np.int64) for y in targets]).tolist()}
    flat = [y.reshape(len(y), -1).astype(np.float64) for y in targets]
    spread = [{"mean": float(y.mean()), "std": float(y.std())} for y in flat]
    return {**about, "targets": spread, "skew": between(flat)}


def gini(sizes: NDArray[np.int64]) -> float:
    """Return the inequality of the clients' sizes: 0 where all are equal, towards 1 where one has nearly everything."""
    ranked, n = np.sort(sizes), len(sizes)
    return float(2 * (np.arange(1, n + 1) * ranked).sum() / (n * ranked.sum()) - (n + 1) / n)


def variation(counts: NDArray[np.int64]) -> float:
    """Return the mean over clients of the total variation distance between their label mix and the pooled mix."""
    mixes, pooled = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return float(np.abs(mixes - pooled).sum(1).mean() / 2)


def by_chance(pooled: NDArray[np.float64], sizes: NDArray[np.int64]) -> float:
    """Return ``variation`` as expected of random samples: E|share - p| is sqrt(2 p (1 - p) / (pi n)) for a normal."""
    rest = 1 - sizes / sizes.sum()  # a client is itself part of the pool
    return float(np.mean(np.sqrt(2 * rest / (np.pi * sizes)) * np.sqrt(pooled * (1 - pooled)).sum() / 2))


def between(targets: Sequence[NDArray[np.float64]]) -> float:
    """Return the share of the targets' variance that the clients' means explain."""
    every = np.concatenate(targets)
    whole = float(((every - every.mean(0)) ** 2).sum())
    among = sum(len(y) * float(((y.mean(0) - every.mean(0)) ** 2).sum()) for y in targets)
    return among / whole if whole > 0 else 0.0


def sentences(about: Mapping[str, Any]) -> list[str]:
    """Return the description in sentences."""
    rows, sizes = about["rows"], about["sizes"]
    parts = ", ".join(f"{count:,} {part}" for part, count in rows.items())
    shape = "x".join(map(str, about["shape"]))
    lines = [
        f"{about['name']}: {about['clients']:,} clients, {sum(rows.values()):,} rows ({parts}) of shape {shape}.",
        f"Rows per client: {sizes['min']:,} to {sizes['max']:,}, median {sizes['median']:,.0f}, Gini {sizes['gini']:.2f}.",
    ]
    if about["skew_by_chance"] is not None:
        lines.append(
            f"Label mixes are {about['skew']:.2f} from the pooled mix (total variation, mean over clients); "
            f"chance alone would give {about['skew_by_chance']:.2f}."
        )
    elif about["targets"] is not None:
        lines.append(f"{100 * about['skew']:.0f} % of the targets' variance lies between clients.")
    return lines + list(about["notes"])


def warnings(about: Mapping[str, Any]) -> list[str]:
    """Return what is worth a look, in sentences."""
    return [finding["sentence"] for finding in about["findings"]]


def marks(classes: Sequence[str]) -> list[str]:
    """Return one character per class: its name where all names are single characters, else letters; past those, dots."""
    if all(len(name) == 1 and name.isprintable() and not name.isspace() for name in classes) and len(set(classes)) == len(
        classes
    ):
        return list(classes)
    return [MARKS[i] if i < len(MARKS) else "." for i in range(len(classes))]


def cells(counts: Sequence[int], length: int) -> list[int]:
    """Return how many cells each class gets in a bar of ``length``, by largest remainder."""
    total = sum(counts)
    exact = [count * length / total for count in counts] if total else [0.0 for _ in counts]
    whole = [int(value) for value in exact]
    unassigned = length - sum(whole) if total else 0
    for i in sorted(range(len(counts)), key=lambda i: (whole[i] - exact[i], i))[:unassigned]:
        whole[i] += 1
    return whole


def terminal(about: Mapping[str, Any], width: int = 80) -> Text:
    """Return sentences, then one bar per client: its length shows the rows, its letters (and colours) the classes."""
    from rich.text import Text

    text = Text("\n".join([*sentences(about), *(f"! {line}" for line in warnings(about))]) + "\n\n")
    labels = [_plain(name, 16) for name in about["names"][:SHOWN]]
    left = max(map(len, labels))
    digits = len(f"{about['sizes']['max']:,}")
    room = max(10, width - left - digits - 3)
    if about["labels"] is None:
        _spans(text, about, labels, left, room)
    else:
        _bars(text, about, labels, left, digits, room)
    rest = about["client_rows"][SHOWN:]
    if rest:
        text.append(f"... and {len(rest):,} more clients with {min(rest):,} to {max(rest):,} rows\n")
    return text


def _bars(text: Text, about: Mapping[str, Any], labels: Sequence[str], left: int, digits: int, room: int) -> None:
    letters = marks(about["classes"])
    longest = max(about["client_rows"])
    for label, counts, rows in zip(labels, about["labels"], about["client_rows"], strict=False):
        text.append(f"{label:>{left}} {rows:>{digits},} ")
        for i, count in enumerate(cells(counts, max(1, round(rows / longest * room)))):
            text.append(letters[i] * count, style=SHADES[i % len(SHADES)])
        text.append("\n")
    if letters != about["classes"]:
        shown = [f"{letter} {_plain(name, 24)}" for letter, name in zip(letters, about["classes"], strict=True)][:LISTED]
        more = len(letters) - len(shown)
        text.append("\n" + ", ".join(shown) + (f" and {more} more classes" if more else "") + "\n")


def _spans(text: Text, about: Mapping[str, Any], labels: Sequence[str], left: int, room: int) -> None:
    """Draw the mean of each client's numeric targets, and one standard deviation to either side, on one scale."""
    spread = about["targets"]
    low = min(t["mean"] - t["std"] for t in spread)
    high = max(t["mean"] + t["std"] for t in spread)

    def place(value: float) -> int:
        return round((value - low) / (high - low) * (room - 1)) if high > low else 0

    for label, t in zip(labels, spread, strict=False):
        line = [" "] * room
        start, stop = place(t["mean"] - t["std"]), place(t["mean"] + t["std"]) + 1
        line[start:stop] = "-" * (stop - start)
        line[place(t["mean"])] = "o"
        text.append(f"{label:>{left}} {''.join(line).rstrip()}\n")
    text.append(f"{'':>{left}} from {low:.3g} to {high:.3g}: o is a client's mean target, - one standard deviation around it\n")


def _plain(name: str, longest: int) -> str:
    clean = "".join(c if c.isprintable() else "?" for c in name)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def html(about: Mapping[str, Any]) -> str:
    """Return the description as one self-contained HTML page."""
    first, *more = sentences(about)
    words = "".join(f"<p>{escape(line)}</p>" for line in more)
    if odd := warnings(about):
        words += f"<h2>Worth a look</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in odd)}</ul>"
    picture, caption = (
        _mean_figure(about),
        "Mean target of every client, the smallest first, and one standard deviation to either side.",
    )
    if about["labels"] is not None:
        content = "rows of each class" if about["skew_by_chance"] is not None else "positive labels"
        picture, caption = (_stack_figure(about), f"{content.capitalize()}, client by client, the largest first.")
    rest = about["clients"] - DRAWN
    if rest > 0:
        caption += f" {rest:,} more clients are not drawn."
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(about["name"])}</title><style>{STYLE}</style>'
        f"<h1>{escape(about['name'])}</h1><p>{escape(first)}</p>{words}"
        f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure></html>\n"
    )


def _stack_figure(about: Mapping[str, Any]) -> str:
    letters = marks(about["classes"])
    order = sorted(range(len(about["labels"])), key=lambda i: -sum(about["labels"][i]))[:DRAWN]
    shown = [about["labels"][i] for i in order]
    longest = max(map(sum, shown)) or 1
    out = [_hatches(len(letters))]
    for line, (name, counts) in enumerate(zip((about["names"][i] for i in order), shown, strict=True)):
        y, x = TOP + line * (BAR + 4), float(LEFT)
        out.append(_words(LEFT - 6, y + 12, _plain(name, 18), "end"))
        for i, count in enumerate(counts):
            if not count:
                continue
            width = count / longest * (WIDTH - LEFT - RIGHT)
            hint = escape(f"{name}: {count} of {about['classes'][i]}")
            out.append(f"<g><title>{hint}</title>{_box(x, y, width, i)}")
            if width >= 12:
                out.append(f'<text x="{x + width / 2:.1f}" y="{y + 12}" {ON_COLOUR}>{escape(letters[i])}</text>')
            out.append("</g>")
            x += width
        out.append(_words(x + 6, y + 12, f"{sum(counts):,}", "start"))
    foot = TOP + len(shown) * (BAR + 4) + 12
    out += _axis([(LEFT + n / longest * (WIDTH - LEFT - RIGHT), f"{n:,}") for n in round_numbers(longest)], foot, "rows")
    foot += 40
    legend = list(zip(letters, about["classes"], strict=True))[:LISTED]
    for i, (letter, name) in enumerate(legend):
        x, y = 20 + i % 4 * 175, foot + i // 4 * 22
        out += [_box(x, y, 14, i), _words(x + 20, y + 12, name if letter == name else f"{letter} {_plain(name, 20)}", "start")]
    if len(letters) > LISTED:
        out.append(_words(20, foot + LISTED // 4 * 22 + 12, f"and {len(letters) - LISTED} more classes", "start"))
    return _svg(out, foot + (-(-len(legend) // 4) + 1) * 22, "Labels by client")


def round_numbers(most: int) -> list[int]:
    """Return 0 and the multiples of 1, 2 or 5 times a power of ten that do not exceed ``most``: one to five of them after 0."""
    power = 10 ** max(0, len(str(most)) - 2)
    step = next(
        size for scale in (1, 10, 100) for size in (power * scale, 2 * power * scale, 5 * power * scale) if 5 * size >= most
    )
    return list(range(0, most + 1, step))


def _box(x: float, y: float, width: float, i: int) -> str:
    """Draw the block of a class: eight colours, then the same ones hatched."""
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
    block = f'<rect {place} fill="{COLOURS[i % len(COLOURS)]}"/>'
    turn = i // len(COLOURS)
    return block if turn == 0 else f'{block}<rect {place} fill="url(#hatch{(turn - 1) % 3})"/>'


def _hatches(classes: int) -> str:
    """Define white hatching in three directions, for the classes past the eighth."""
    if classes <= len(COLOURS):
        return ""
    line = '<path d="M0 0V6" stroke="#fff" stroke-width="2"/>'
    shape = 'width="6" height="6" patternUnits="userSpaceOnUse"'
    patterns = [
        f'<pattern id="hatch{k}" {shape} patternTransform="rotate({turn})">{line}</pattern>'
        for k, turn in enumerate((45, 135, 0))
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def _mean_figure(about: Mapping[str, Any]) -> str:
    order = sorted(range(len(about["targets"] or ())), key=lambda i: about["targets"][i]["mean"])[:DRAWN]
    spread = [about["targets"][i] for i in order]
    if not spread:
        return ""
    low = min(t["mean"] - t["std"] for t in spread)
    high = max(t["mean"] + t["std"] for t in spread)

    def place(value: float) -> float:
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    out = []
    for line, (name, t) in enumerate(zip((about["names"][i] for i in order), spread, strict=True)):
        y = TOP + line * (BAR + 4) + 8
        ends = place(t["mean"] - t["std"]), place(t["mean"] + t["std"])
        out.append(_words(LEFT - 6, y + 4, _plain(name, 18), "end"))
        out.append(f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y}" y2="{y}" stroke="{COLOURS[5]}" stroke-width="4"/>')
        hint = f"<title>{escape(name)}: mean {t['mean']:.4g}, standard deviation {t['std']:.4g}</title>"
        out.append(f'<circle cx="{place(t["mean"]):.1f}" cy="{y}" r="5" fill="{COLOURS[0]}">{hint}</circle>')
    foot = TOP + len(spread) * (BAR + 4) + 12
    values = [low + i / 4 * (high - low) for i in range(5)]
    out += _axis([(place(value), f"{value:.3g}") for value in values], foot, "target")
    return _svg(out, foot + 40, "Targets by client")


def _axis(ticks: Sequence[tuple[float, str]], y: float, title: str) -> list[str]:
    """Draw a line with ticks, their values and what they count."""
    line = f'<line x1="{ticks[0][0]:.1f}" x2="{ticks[-1][0]:.1f}" y1="{y}" y2="{y}" stroke="#555"/>'
    marks = [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#555"/>' for x, _ in ticks]
    middle = (ticks[0][0] + ticks[-1][0]) / 2
    return [line, *marks, *(_words(x, y + 16, value, "middle") for x, value in ticks), _words(middle, y + 30, title, "middle")]


def _words(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"
