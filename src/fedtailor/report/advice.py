"""The advice as one self-contained page: what to do in a sentence, the facts, then the pictures that it rests on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.errors import BadRun, FedtailorError
from fedtailor.report import advice_figures, figures
from fedtailor.report.advice_words import (
    MEANINGS,
    VERDICTS,
    bound_words,
    facts,
    gain_words,
    lam_of,
    lam_text,
    map_words,
    race_words,
    score_in,
    sentence,
    sweep_words,
    traffic,
)
from fedtailor.report.draw import rounded
from fedtailor.report.evidence import number
from fedtailor.report.pieces import document, figure, listed, section, table
from fedtailor.runs import files
from fedtailor.task.scores import score_named
from fedtailor.version import __version__

ADVICE, SWEEP = "advice.json", "sweep.json"
WIDTH = 3.0  # of the map's middle band, as a factor; that of `regime` in papers/minimax_theory.py

STYLE = """
.verdict{font-size:1.75rem;line-height:1.25;border-left:6px solid #0072B2;padding:.2rem 0 .2rem 1rem;margin:1rem 0 1.2rem}
.verdict.no{border-color:#D55E00}.verdict b{overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:.8rem;margin:1.2rem 0;padding:0}
.tiles div{border:1px solid #ccc;border-radius:.5rem;padding:.6rem .8rem}.tiles dt{font-weight:400;font-size:.85rem;color:#555}
.tiles dd{margin:0;font-size:1.25rem;font-weight:600}.tiles dd small{display:block;font-size:.82rem;font-weight:400}
.facts td:first-child{min-width:8rem;font-weight:600}.facts td{text-align:left;white-space:normal}.said{white-space:pre-line}
@media print{.verdict{font-size:15pt}.tiles{grid-template-columns:repeat(3,1fr);gap:.3rem}.tiles div{padding:.25rem .4rem}
.tiles dd{font-size:11pt}.tiles dt,.tiles dd small{font-size:8pt}section{break-inside:auto}}
@media screen and (prefers-color-scheme:dark){.verdict{border-color:#4aa8e0}.verdict.no{border-color:#f08a45}
.tiles div{border-color:#3a3f45}.tiles dt{color:#a5abb3}}
"""


def page(
    advice: Mapping[str, Any],
    *,
    curves: Mapping[str, Any] | None = None,
    map: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    command: str | None = None,
) -> str:
    """Return the page of an advice as ``Advice.json`` gives it.

    ``curves`` and ``map`` are those of ``advisor.curves.facts`` (by default the advice's own, where it was saved with them),
    ``sweep`` is that of a sweep over lam, ``command`` what made the advice.
    """
    _check(advice)
    curves = advice.get("curves") if curves is None else curves
    where = (advice.get("map") if map is None else map) or {}
    about = advice.get("about") or {}
    command = command or about.get("command")
    sections = [
        section("", _headline(advice), _facts(advice)),
        section("Error over lam", *_over_lam(advice, curves)),
        section("Where this federation stands", *_map(advice, where)),
        section("The race on validation rows", *_race(advice)),
        section("The trade-off with communication", *trade_off(sweep)) if sweep else "",
        section("Who gains over training alone", *_gains(advice)),
        section("The advice as the command line says it", f'<p class="said">{escape(str(advice.get("text") or "-"))}</p>'),
        section("How to reproduce it", _reproduce(about, command)),
        section("What the words mean", "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in MEANINGS.items()) + "</dl>"),
    ]
    return document(f"fedtailor: advice for {about.get('data') or 'these clients'}", "".join(sections), STYLE)


def write(advice_json: Mapping[str, Any], path: str | os.PathLike[str], **options: Any) -> Path:
    """Write the page (``options`` are those of ``page``); the file is replaced whole or not at all."""
    target = Path(path)
    with readable(target.parent / ADVICE):
        content = page(advice_json, **options)
    files.write(target, content)
    return target


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read the advice of a directory, and the sweep that lies beside it, if any."""
    advice = _json(folder / ADVICE)
    sweep = _json(folder / SWEEP) if (folder / SWEEP).exists() else None
    with readable(folder / ADVICE):
        _check(advice)
    return advice, sweep


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what breaks on a file that was tampered with into a refusal of one line."""
    try:
        yield
    except FedtailorError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadRun(f"{path} was changed or cut short ({why}); ask again: fedtailor advise DATA --out {path.parent}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise BadRun(f"{path} cannot be read ({why}); make it again with --out {path.parent}") from error
    if not isinstance(content, dict):
        raise BadRun(f"{path} holds no object but {type(content).__name__}; make it again with --out {path.parent}")
    return content


def _check(advice: Mapping[str, Any]) -> None:
    if not isinstance(advice, Mapping):
        raise BadRun(f"an advice is a table of values, not {type(advice).__name__}; give what Advice.json() returns")
    for key, kind in (("algorithm", str), ("regime", str), ("gains", Mapping), ("race", Sequence), ("notes", Sequence)):
        if not isinstance(advice.get(key), kind):
            raise BadRun(f"the advice has no {key!r} that makes sense; it was changed or cut short: ask for it again")
    if advice["regime"] not in VERDICTS:
        raise BadRun(f"the advice has the regime {str(advice['regime'])[:40]!r}; it is one of {', '.join(VERDICTS)}")
    if not all(isinstance(row, Mapping) for row in advice["race"]):
        raise BadRun("the advice's race is not a list of methods; it was changed or cut short: ask for it again")


# -- the sections, in the order of the page -------------------------------------------------------------------------------
def _headline(advice: Mapping[str, Any]) -> str:
    kind = "verdict" if advice.get("collaborate") else "verdict no"
    verdict = advice.get("verdict")
    said = str(verdict.get("sentence") or "") if isinstance(verdict, Mapping) else ""
    return f'<h1 class="{kind}">{sentence(advice)}</h1>' + (f"<p><strong>{escape(said)}</strong></p>" if said else "")


def _facts(advice: Mapping[str, Any]) -> str:
    entries = facts(advice)
    tiles = "".join(
        f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}<small>{escape(fact.more)}</small></dd></div>"
        for fact in entries
        if fact.tile
    )
    rows = [
        f"<tr><td>{escape(fact.name)}</td><td>{escape(fact.value)}{escape(f': {fact.more}' if fact.more else '')}</td></tr>"
        for fact in entries
        if not fact.tile
    ]
    return (
        f'<dl class="tiles">{tiles}</dl>' + table(["fact", "here"], rows, "facts words") + listed(str(n) for n in advice["notes"])
    )


def _over_lam(advice: Mapping[str, Any], curves: Mapping[str, Any] | None) -> list[str]:
    if not curves or "refused" in curves:
        why = "the model is not linear" if not curves else str(curves["refused"])
        return [f"<p>Not drawn: the exact solution at every lam is not known here ({escape(why)}).</p>"]
    guides = {}
    if (lam := lam_of(advice)) is not None:
        guides["advised"] = lam
    if (theory := number(advice.get("theory_lam"))) is not None:
        guides["pooling asks"] = theory
    picture = advice_figures.over_lam(curves, guides, score_named(curves.get("score")).words)
    first, *captions = bound_words(advice, curves)
    return [f"<p>{escape(first)}</p>", figure(picture, *captions)]


def _map(advice: Mapping[str, Any], where: Mapping[str, Any]) -> list[str]:
    estimate = advice.get("heterogeneity") or {}
    m, N, noise = (number(value) for value in (where.get("m"), where.get("N"), estimate.get("noise")))
    if not estimate:
        return ["<p>The spread was not estimated, so there is no place on the map; the race decides alone.</p>"]
    if not m or not N or not noise or noise <= 0 or m < 2:
        return ["<p>Not drawn: the noise of the clients' own fits is not known, or zero, so the map has no scale.</p>"]
    edge = noise * (1 - 1 / m)
    r2, (low, high) = number(estimate.get("r2")), [number(end) for end in estimate.get("interval") or (None, None)]
    if estimate.get("zero"):
        low = 0.0
    picture = advice_figures.regimes(N / m, edge, r2, low, high, WIDTH)
    first, caption = map_words(advice, N / m, edge, WIDTH)
    return [f"<p>{escape(first)}</p>", figure(picture, caption)]


def _race(advice: Mapping[str, Any]) -> list[str]:
    rows = advice["race"]
    score = score_in(rows)
    picture = advice_figures.race(rows, score.name, score.words)
    if not picture:
        return ["<p>No method was scored on validation rows.</p>"]
    first, caption = race_words(advice)
    return [f"<p>{escape(first)}</p>", figure(picture, caption)]


def trade_off(sweep: Mapping[str, Any]) -> list[str]:
    """Draw a sweep, and list the lam with the fewest rounds for every target."""
    measure = score_named(sweep.get("score")).words
    picture = advice_figures.trade_off(sweep, f"{measure}, validation")
    if not picture:
        return ["<p>The sweep holds no scores.</p>"]
    first, caption = sweep_words(sweep)
    rows = []
    for entry in sweep.get("fewest") or ():
        target, rounds, sent = (number(entry.get(key)) for key in ("target", "rounds", "bytes"))
        reached = rounds is not None
        lam = lam_text(entry.get("lam")) if reached else "-"
        cells = ("-" if target is None else rounded(target), lam, f"{rounds:g}" if reached else "not reached", traffic(sent))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    titles = [f"{measure} to reach and keep", "lam with the fewest rounds", "rounds", "traffic"]
    return [f"<p>{escape(first)}</p>", figure(picture, caption), table(titles, rows) if rows else ""]


def _gains(advice: Mapping[str, Any]) -> list[str]:
    names = [str(name) for name in advice["gains"]]
    values = [value if (value := number(v)) is not None else math.nan for v in advice["gains"].values()]
    known = np.array([v for v in values if math.isfinite(v)])
    if not len(known):
        return ["<p>No client was measured both alone and with the advised method.</p>"]
    first, caption = gain_words(advice, names, np.array(values))
    rise = score_in(advice["race"]).improvement
    picture = figures.gains(names, {"gain over training alone": values}, rise, ends=True) if known.any() else ""
    return [f"<p>{escape(first)}</p>", figure(picture, caption)]


def _reproduce(about: Mapping[str, Any], command: str | None) -> str:
    source = f"<pre>{escape(command)}</pre>" if command else "<p>Made from Python.</p>"
    return source + listed(
        [f"fedtailor {about.get('version') or __version__}", "Test rows were not looked at for anything on this page."]
    )
