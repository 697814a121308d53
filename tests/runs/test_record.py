"""Measures of very many clients are written a column at a time, byte by byte as json writes them."""

from __future__ import annotations

import json

import numpy as np

from fedtailor.runs.record import lines_per_client, per_client


def test_lines_are_those_of_json():
    names = ["a", 'b"%s', "東京\n", "%d"]
    draw = np.random.default_rng(0)
    clients = {
        "acc": np.array([0.5, np.nan, 1.0, 1e-300]),
        "50%": draw.normal(size=4),
        "x": np.array([np.inf, -np.inf, -0.0, 3e22]),
    }
    expected = "".join(
        json.dumps({"round": 7, "client": name, **{k: None if np.isnan(v[i]) else float(v[i]) for k, v in clients.items()}})
        + "\n"
        for i, name in enumerate(names)
    )
    assert lines_per_client(7, names, clients) == expected
    assert [json.loads(line) for line in expected.splitlines()] == [
        {"round": 7, "client": name, **measures} for name, measures in per_client(names, clients)
    ]


def test_nobody_measured_is_nothing_written():
    assert lines_per_client(0, [], {"acc": np.array([])}) == ""
    assert lines_per_client(0, ["a"], {}) == '{"round": 0, "client": "a"}\n'
