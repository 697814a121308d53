"""Files of weights: readable by the library, and the same bytes whenever they are written."""

from __future__ import annotations

import torch
from safetensors import safe_open
from safetensors.torch import load

from fedtailor.runs.weights import pack


def test_the_library_reads_weights_and_facts_back(tmp_path):
    weights = {"b": torch.arange(6.0).view(2, 3).T, "a": torch.zeros(0), "n": torch.tensor([True, False])}
    facts = {"model": "resnet8 \u00e4", "data": "digits", "c": "1"}
    data = pack(weights, facts)
    assert all(torch.equal(value, weights[name]) for name, value in load(data).items())
    (tmp_path / "w.safetensors").write_bytes(data)
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == facts
        assert set(file.keys()) == set(weights)


def test_the_bytes_are_the_same_every_time():
    facts = {name: name for name in "abcdefgh"}
    assert len({pack({"w": torch.ones(3)}, facts) for _ in range(20)}) == 1
