"""Figure 1 with its hundred repetitions: at four R on a laptop, at all of the paper's with its scale."""

from __future__ import annotations

from dataclasses import replace

from fedtailor.papers.minimax import dichotomy

FULL = dichotomy.EXPERIMENT.settings["paper"]
LAPTOP = {**FULL, "R": dichotomy.LAPTOP["R"]}
EXPERIMENT = replace(
    dichotomy.EXPERIMENT,
    title="Accuracy over heterogeneity, 100 repetitions",
    settings={"laptop": LAPTOP, "paper": FULL},
    convex=False,  # convex, but too long for `papers check`: five minutes of one core a seed
)
