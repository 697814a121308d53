"""The page of PerAda: tables, and every claim held or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import perada_speed
from benchmarks.kept import Results

Found = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by label and seed
Claim = tuple[str, bool, str]  # whether it is held in the mean over seeds, and the figures
SAME_STEP = "PerAda without KD, PerAda's step size"
ABOUT = """# PerAda's claims at our scale

Written by `make bench-perada` (benchmarks/perada.py) at scale `{name}`. The network is EfficientNet-Lite0 with its ImageNet
weights, on images of 64 x 64 (those of CIFAR enlarged). **For every method alike, all before its last block is frozen** and was
computed once: "full" below is that block and all that follows, "adapters" an adapter in it, the norm after it and the head. The
paper has adapters in every block of a ResNet-18 and trains all of it for the full methods; two cores do not allow that.

CIFAR-10: {rows:,} images, PACS: {half:,}; 60 % to train on, 15 % for validation, 25 % to test. {rounds} rounds of {epochs}
epochs, batches of {batch}; {public:,} images of CIFAR-100 are public, without labels; {kd_steps} steps of distillation in
batches of {kd_batch}. (The paper: 60,000 images, 200 rounds of 10 epochs, 50,000 public images, 500 steps of 2,048.) Mean ±
deviation over seeds, each of which sets the images, the split and the training. Step sizes are chosen from {lrs} (PACS: all but
the first) on validation rows after a third of the rounds of the first seed; lam and the distillation are not tuned: lam is 1 as
in the paper, and distillation's step size is its authors' for CIFAR-10, 0.001, and for PACS that for Office-Home, 0.0001, which
is by domain as well. (PACS was first run with 0.001; those rows are kept.) The pull of a step towards the shared model is lr lam,
so PerAda without KD is there twice: at its own step size and at that of PerAda.

Local-test: the personal model on the client's own test rows. Global-test: on the union of all clients' test rows. Corrupted
test: on that union, mean over {shifts} (our own corruptions, not the files of CIFAR-10-C; CIFAR-10.1 was not to be had).
Shared: the shared model on the clients' own rows (FedAlt and FedSim: with adapters as at the start). Parameters are those of
one client in one round, and of one message. Personal distance: of personal from shared predictions on public rows. Φ: the L1
distance of the shared model's probabilities from the mean of the clients' on the last round's public rows (Theorem 1), of the
mean of their models and of the model after distillation. Seconds a round depend on what else the machine did, and some
rows were measured beside another benchmark; the last section has times that compare.
"""
TITLES = {
    "cifar": "CIFAR-10, Dirichlet 0.1, 20 clients, 40 % of them in a round",
    "pacs": "PACS, a domain a client, all in every round",
}


def page(
    results: Results,
    name: str,
    scale: Any,
    cases: Sequence[str],
    backbones: Mapping[str, Mapping[str, float]],
    shifts: Sequence[str],
    batch: int,
    lrs: Sequence[float],
) -> str:
    text = ABOUT.format(
        name=name,
        half=scale.rows // 2,
        shifts=", ".join(shifts),
        batch=batch,
        lrs=", ".join(f"{lr:g}" for lr in lrs),
        **vars(scale),
    )
    lines = [text]
    for case in cases:
        if found := results.of(case):
            lines += [f"## {TITLES[case]}", "", *table(found), "", *spelled(claims(found)), "", *settings(found), ""]
    trained = "; ".join(f"{stem} {about['accuracy']:.3f}" for stem, about in sorted(backbones.items()))
    others = [
        f"A ResNet-8 was trained whole on {scale.backbone_rows:,} images of CIFAR-100 in {scale.backbone_epochs} epochs, or by "
        f"FedAvg on the training rows of the first seed's clients in {scale.rounds} rounds (some of which are test rows "
        f"of other seeds); then frozen but for its last block. Right of the rows held out: {trained}. Public images may be among "
        f"those it was trained on."
    ]
    if found := results.of("ablations"):
        lines += [
            "## Ablations, CIFAR-10",
            "",
            "One thing changed of PerAda; nothing was tuned again.",
            "",
            *table(found),
            "",
            *spelled(changed(found)),
            "",
            *others,
            "",
        ]
    if found := results.of("private"):
        words = (
            "The last block of a ResNet-8 with group norm in the place of batch norm, the rest frozen as above; Poisson samples, "
            "clipping norm 1, delta as by default. Step sizes are chosen from 0.03, 0.1 and 0.3 on validation rows of the first "
            "seed after a third of the rounds, without noise and at noise 1 (whose is also taken for the other noises); a real "
            "user pays for such a choice with more epsilon."
        )
        lines += [
            "## Differential privacy, CIFAR-10",
            "",
            words,
            "",
            *table(found, private=True),
            "",
            *spelled(noised(found)),
            "",
        ]
        lines += [*settings(found), ""]
    if found := results.of("speed"):
        words = (
            "A round of four clients with 96 training images of CIFAR-10 each, one epoch, two workers; median of three rounds, "
            "and over times. The frozen layers before the first adapter are computed once, before the rounds; with KD the server "
            f"also takes {scale.kd_steps} steps in batches of {scale.kd_batch} and asks every client's model about the public "
            "images, which has no counterpart in Ditto and does not shrink with the clients' rows."
        )
        lines += ["## Time of a round", "", words, "", *perada_speed.table(found), "", *spelled(perada_speed.claims(found)), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(found: Found, private: bool = False) -> list[str]:
    """A row for each label, mean and deviation over seeds."""
    keys = {"local": "Local-test", "global": "Global-test", "shifted": "corrupted test", "shared": "shared"}
    keys = {key: title for key, title in keys.items() if not private or key != "shifted"}
    head = [
        "method",
        "seeds",
        *keys.values(),
        "trained",
        "sent",
        "personal distance",
        "Φ of the mean",
        "Φ after KD",
        "seconds a round",
    ]
    head += ["epsilon, mean over clients"] if private else []
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for label, by_seed in found.items():
        mine = list(by_seed.values())
        cells = [cell([f[key] for f in mine]) for key in keys]
        cells += [f"{mine[0]['trained']:,}", f"{mine[0]['sent']:,}", cell([f["apart"] for f in mine])]
        cells += [cell([f[key] for f in mine]) for key in ("phi_mean", "phi")]
        cells += [f"{np.mean([f['seconds'] for f in mine]):.1f}"]
        cells += [cell([f["epsilon"] for f in mine], 2)] if private else []
        lines.append(f"| {label} | {len(mine)} | {' | '.join(cells)} |")
    return lines


def cell(values: Sequence[Any], digits: int = 4) -> str:
    if any(v is None for v in values):
        return "-"
    spread = f" ± {np.std(values):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def settings(found: Found) -> list[str]:
    return ["Settings:", "", *(f"- {label}: `{next(iter(mine.values()))['settings']}`" for label, mine in found.items())]


def spelled(said: Sequence[Claim]) -> list[str]:
    return [f"- {claim}: {'held' if held else '**not held**'} ({how})" for claim, held, how in said]


def mean_of(found: Found, label: str, key: str) -> float:
    return float(np.mean([f[key] for f in found[label].values()]))


def above(found: Found, claim: str, key: str, *labels: str) -> list[Claim]:
    """The claim that ``key`` falls from label to label, of those that have been run; nothing if fewer than two have."""
    means = {label: mean_of(found, label, key) for label in labels if label in found}
    if len(means) < 2:
        return []
    shared = set.intersection(*(set(found[label]) for label in means))
    times = sum(falls([found[label][seed][key] for label in means]) for seed in shared)
    figures = "; ".join(f"{label} {m:.4f}" for label, m in means.items())
    return [(claim, falls(means.values()), f"{figures}; in {times} of {len(shared)} seeds")]


def falls(values: Iterable[float]) -> bool:
    return all(a > b for a, b in pairwise(values))


def noised(found: Found) -> list[Claim]:
    """Table 4's: PerAda keeps more than Ditto under noise."""
    noises = [label.removeprefix("PerAda, ") for label in found if label.startswith("PerAda, ")]
    return [
        claim
        for noise in noises
        for key, name in (("local", "Local-test"), ("global", "Global-test"))
        for claim in above(found, f"{name}, {noise}: PerAda above Ditto", key, f"PerAda, {noise}", f"Ditto, full, {noise}")
    ]


def changed(found: Found) -> list[Claim]:
    """The paper's ablations, by Global-test unless said."""
    labels = list(found)
    steps = [label for label in labels if label.startswith("distillation,")]
    base = next((label for label in steps if "as above" in label), "")
    rows = [label for label in labels if label.startswith("public,")]
    own, other = "public images of CIFAR-10 that nobody has", "public images of PACS"
    inits = [f"ResNet-8, {how}" for how in ("pretrained on CIFAR-100", "by FedAvg of the clients", "at random")]
    return [
        *above(found, "More steps of distillation help", "global", *steps[::-1]),
        *above(found, "More public images help", "global", base, *rows[::-1]),
        *above(found, "Public images like the clients' help more than others", "global", own, base, other),
        *above(found, "lam = 1 helps Global-test over lam = 0.1", "global", base, "lam 0.1"),
        *above(found, "lam = 10 costs Local-test", "local", base, "lam 10"),
        *above(found, "A pretrained start is best, one by FedAvg better than one at random", "global", *inits),
    ]


def claims(found: Found) -> list[Claim]:
    """(claim, held in the mean over seeds, the figures and in how many seeds); only of what has been run."""

    mean = partial(mean_of, found)

    def seeds(key: str, other: str) -> str:
        both = [seed for seed in found["PerAda"] if seed in found[other]]
        return f"{sum(found['PerAda'][seed][key] > found[other][seed][key] for seed in both)} of {len(both)} seeds"

    if not {"PerAda", "PerAda without KD"} <= set(found):
        return []
    out = []
    words = {"global": "Global-test", "shifted": "corrupted test"}
    for key, name in words.items():
        for other in (label for label in ("PerAda without KD", SAME_STEP) if label in found):
            a, b = mean("PerAda", key), mean(other, key)
            out.append((f"{name}: PerAda above {other}", a > b, f"{a:.4f} against {b:.4f}, {seeds(key, other)}"))
    split = [label for label in ("FedAlt, adapters", "FedSim, adapters") if label in found]
    for key, name in words.items() if split else ():
        for label in ("PerAda", "PerAda without KD"):
            a, b = mean(label, key), max(mean(other, key) for other in split)
            out.append((f"{name}: {label} above FedAlt and FedSim with adapters", a > b, f"{a:.4f} against {b:.4f}"))
    rivals = [label for label in found if not label.startswith("PerAda")]
    if rivals:
        a, (b, rival) = mean("PerAda", "local"), max((mean(label, "local"), label) for label in rivals)
        out.append(
            ("Local-test: PerAda within one point of the best rival", a >= b - 0.01, f"{a:.4f} against {b:.4f} of {rival}")
        )
    a, b = mean("PerAda", "local"), max(mean(label, "local") for label in ("PerAda without KD", SAME_STEP) if label in found)
    out.append(("Local-test: KD costs at most one point", a >= b - 0.01, f"{a:.4f} against {b:.4f} without"))
    for key in ("trained", "sent") if rivals else ():
        mine, least = mean("PerAda", key), min(mean(label, key) for label in rivals)
        out.append((f"PerAda's parameters {key} are the fewest", mine < least, f"{mine:,.0f} against {least:,.0f} at least"))
    a, b = mean("PerAda", "phi"), mean("PerAda", "phi_mean")
    out.append(("Distillation lowers the distance to the ensemble in the last round", a < b, f"{a:.4f} against {b:.4f}"))
    return out
