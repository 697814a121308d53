"""Text: windows of characters, in order, no part seeing another's."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.data.readers.text import windows


def test_windows_and_the_character_that_follows():
    x, y = windows(np.arange(10), 4, 3)
    assert x.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert y.tolist() == [4, 7]
    assert len(windows(np.arange(4), 4, 3)[1]) == 0


@pytest.fixture
def plays(tmp_path):
    roles = {"long": "abcdefghij" * 20, "short": "ab", "other": "jihgfedcba" * 15}
    content = {"roles": [{"user": user, "play": "p", "role": user, "speeches": [text]} for user, text in roles.items()]}
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "shakespeare_by_role.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    return tmp_path


def test_the_roles_that_speak_most_are_the_clients_and_the_rest_is_said(plays):
    fed = ft.Federation.load("shakespeare", data_dir=str(plays), length=5, stride=1)
    assert fed.names == ("long", "other")
    assert fed.classes == tuple("abcdefghij")
    assert fed.train.x.dtype == torch.int64
    assert any("1 client is left out" in note for note in fed.notes)
    x, y = fed.train.client(fed.names[1] == "long")
    follows = dict(zip("abcdefghij", "bcdefghija", strict=True))
    for row, target in zip(x.tolist(), y.tolist(), strict=True):
        text = "".join(fed.classes[i] for i in row)
        assert follows[text[-1]] == fed.classes[target]
    # 140 characters to train on give 135 windows of five, 20 give 15 for validation, 40 give 35 for testing
    assert [len(split.client(0)[1]) for split in (fed.train, fed.val, fed.test)] == [135, 15, 35]


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(20, 10)

    def forward(self, x):
        return self.head(self.embed(x).flatten(1))


def test_a_network_on_tokens_learns_alike_on_both_engines(plays):
    fed = ft.Federation.load("shakespeare", data_dir=str(plays), length=5, stride=1)
    torch.manual_seed(0)
    net = Next()
    options = {"rounds": 10, "batch_size": 16, "dtype": "float64"}
    loop, vectorized = (ft.run(ft.Ditto(lr=1.0, epochs=5), fed, net, engine=e, **options) for e in ("loop", "vectorized"))
    assert loop.summary["acc_personal"] > 0.95  # what follows what is a table of ten entries
    x = fed.test.client(0)[0]
    assert torch.allclose(loop.predict(0, x), vectorized.predict(0, x), atol=1e-9)


def test_labels_beyond_the_named_classes_are_refused():
    x, y = np.zeros((4, 2)), np.array([0, 1, 2, 3])
    with pytest.raises(ft.errors.InvalidData, match="there are 3 classes"):
        ft.Federation.from_arrays([(x, y)], [(x, y)], classes=("a", "b", "c"))
