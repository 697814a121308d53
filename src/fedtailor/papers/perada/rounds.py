"""Do more rounds change what distillation costs? PerAda with and without it, few rounds and four times as many."""

from __future__ import annotations

from fedtailor.papers.adapters import CIFAR, above, closer, distilled, experiment, gap
from fedtailor.papers.base import Claim, Rows, Settings
from fedtailor.papers.frozen_images import Way

KD, PLAIN, PROBABILITIES = "PerAda", "without KD", "taught mean probabilities"


def ways(settings: Settings) -> dict[str, Way]:
    methods = {
        KD: distilled(settings, settings["lr"]),
        PLAIN: distilled(settings, settings["lr"], kd_steps=0),
        PROBABILITIES: distilled(settings, settings["lr"], teach="probabilities"),
    }
    lengths = {"few rounds": settings["rounds"], "four times as many": 4 * settings["rounds"]}
    return {
        f"{label}, {words}": Way(method, change={"rounds": count})
        for words, count in lengths.items()
        for label, method in methods.items()
    }


def cost(rows: Rows, words: str, key: str = "local") -> float:
    """Return how far distillation lifts a measure."""
    return gap(rows, key, f"{KD}, {words}", f"{PLAIN}, {words}")


FEW, MANY = "few rounds", "four times as many"
EXPERIMENT = experiment(
    "What distillation costs, over rounds",
    "Section 7.1",
    {**CIFAR, "images": 3000, "rounds": 10, "shift": False, "lrs": {}},
    ways,
    (
        Claim("After many rounds distillation costs at most one point of Local-test", lambda rows: cost(rows, MANY), above=-0.01,
              must=False, theirs="+0.55 points"),
        Claim("It costs less than after few (difference)", lambda rows: cost(rows, MANY) - cost(rows, FEW), above=0.0,
              must=False),
        Claim("After many rounds it helps Global-test", lambda rows: cost(rows, MANY, "global"), above=0.0, must=False,
              theirs="+5.24 points"),
        Claim("After many rounds it brings the shared model nearer to the ensemble (distance after less before)",
              lambda rows: closer(rows, f"{KD}, {MANY}"), below=0.0, must=False),
        Claim("So it does where mean probabilities are taught", lambda rows: closer(rows, f"{PROBABILITIES}, {MANY}"), below=0.0,
              must=False),
        above("But logits are better on Global-test", "global", f"{KD}, {MANY}", f"{PROBABILITIES}, {MANY}"),
    ),
)  # fmt: skip
