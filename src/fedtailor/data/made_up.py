"""Made-up rows to try things with: patients of eight hospitals, the table that the examples and the demonstration use."""

from __future__ import annotations

import numpy as np
import pandas as pd

HOSPITALS = {"Aarhus": 180, "Bern": 160, "Cork": 140, "Delft": 120, "Evora": 100, "Ghent": 90, "Hamar": 60, "Izmir": 50}


def patients() -> pd.DataFrame:
    """Return 900 made-up patients of eight hospitals, whose risks follow a common law and each hospital's own."""
    draw = np.random.default_rng(20)
    common = np.array([1.1, 0.8, 0.5, 0.9])
    parts = []
    for i, (hospital, count) in enumerate(HOSPITALS.items()):
        age = draw.normal(58 + 3 * (i % 3), 11, count).round()
        pressure = draw.normal(132 + 4 * (i % 4), 15, count).round()
        cholesterol = draw.normal(5.4, 0.9, count).round(1)
        smoker = draw.random(count) < 0.2 + 0.05 * (i % 4)
        x = np.stack([(age - 60) / 11, (pressure - 138) / 15, (cholesterol - 5.4) / 0.9, smoker - 0.3], 1)
        logit = x @ (common + draw.normal(0, 0.5, 4)) + draw.normal(0, 0.6)
        outcome = draw.random(count) < 1 / (1 + np.exp(-logit))
        frame = pd.DataFrame({"hospital": hospital, "age": age.astype(int), "sex": draw.choice(["f", "m"], count)})
        frame["pressure"] = pressure.astype(int)
        frame["cholesterol"] = np.where(draw.random(count) < 0.06, np.nan, cholesterol)
        frame["smoker"] = np.where(smoker, "yes", "no")
        frame["outcome"] = np.where(outcome, "ill", "well")
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)
