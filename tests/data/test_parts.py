"""Rows of several parts: right on both engines, under privacy, in predictions and after a run is read back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.errors import BadRun, InvalidArgument, InvalidData, ModelMismatch
from fedtailor.runs import models
from fedtailor.task.packing import Packing
from tests.make import seeded

SIZES = (7, 5, 9)
SETTINGS = {"rounds": 2, "workers": 1, "dtype": "float64", "batch_size": 4}


def texts(sizes, seed=0):
    """Token ids and a mask of which are real."""
    draw = np.random.default_rng(seed)
    out = []
    for n in sizes:
        x = {"ids": draw.integers(0, 11, (n, 5)), "mask": np.arange(5) < draw.integers(1, 6, n)[:, None]}
        out.append((x, draw.integers(0, 2, n)))
    return out


class Reader(nn.Module):
    """Means of embeddings, over the real positions."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(11, 4), nn.Linear(4, 2)

    def forward(self, ids, mask):
        assert ids.dtype is torch.int64
        assert mask.dtype is torch.bool
        real = mask.unsqueeze(-1)
        return self.out((self.words(ids) * real).sum(1) / real.sum(1))


class Whole(Reader):
    """The same, of one dict."""

    def forward(self, batch):
        return super().forward(batch["ids"], batch["mask"])


class Pair(nn.Module):
    """An image and a table, in order."""

    def __init__(self):
        super().__init__()
        self.image, self.table, self.out = nn.Conv2d(1, 2, 3), nn.Linear(3, 4), nn.Linear(12, 2)

    def forward(self, image, table):
        return self.out(torch.cat([self.image(image).flatten(1).tanh(), self.table(table)], 1))


def pictures(sizes, seed=0):
    draw = np.random.default_rng(seed)
    return [((draw.normal(size=(n, 1, 4, 4)), draw.normal(size=(n, 3))), draw.integers(0, 2, n)) for n in sizes]


TEXT = ft.Federation.from_arrays(texts(SIZES), texts((4, 4, 4), 1))
BOTH = ft.Federation.from_arrays(pictures(SIZES), pictures((4, 4, 4), 1))


def test_a_row_is_its_parts_one_after_another_and_comes_apart_again():
    x = texts((3,))[0][0]
    packing = Packing.of(x, "x")
    assert [tuple(part) for part in packing.parts] == [("ids", (5,), "int"), ("mask", (5,), "bool")]
    back = packing.unpack(packing.pack(x))
    assert torch.equal(back["ids"], torch.from_numpy(x["ids"]))
    assert torch.equal(back["mask"], torch.from_numpy(x["mask"]))
    assert Packing.from_json(packing.to_json()) == packing


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize(("kind", "data"), [(Reader, TEXT), (Whole, TEXT), (Pair, BOTH)], ids=["names", "dict", "order"])
def test_a_step_on_parts_is_the_step_that_torch_takes_on_them(engine, kind, data):
    module = seeded(kind)
    run = ft.run(ft.Local(lr=0.3, steps=1), data, module, rounds=1, engine=engine, workers=1, dtype="float64")
    x, y = (texts if data is TEXT else pictures)(SIZES)[1]
    parts = {name: torch.from_numpy(part) for name, part in x.items()} if isinstance(x, dict) else tuple(map(torch.from_numpy, x))
    out = module(parts) if kind is Whole else module(**parts) if isinstance(parts, dict) else module.double()(*parts)
    F.cross_entropy(out, torch.from_numpy(y)).backward()
    for name, parameter in module.named_parameters():
        after = run.store.get(np.array([1]))["model"][name][0]
        torch.testing.assert_close(after, (parameter - 0.3 * parameter.grad).detach().double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(run.predict(1, x), run.predict(1, data.packing.pack(x)))


def test_both_engines_agree_also_under_privacy_and_for_methods_that_look_at_features():
    plain = ft.Ditto(lr=0.2, epochs=1), ft.FedProto(lr=0.2, epochs=1), ft.FedRep(lr=0.2)
    private = ft.FedAvg(lr=0.2, epochs=1, opt=ft.Private(clip=0.5, noise=1.0, seed=0))
    for method in (*plain, private):
        loop, stacked = (ft.run(method, TEXT, seeded(Reader), engine=engine, **SETTINGS) for engine in ("loop", "vectorized"))
        for p, q in zip(tree.leaves(loop.store.get(np.arange(3))), tree.leaves(stacked.store.get(np.arange(3))), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-10)
        for p, q in zip(tree.leaves(loop.shared), tree.leaves(stacked.shared), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-10)


def reader():
    return Reader()


def test_a_run_that_is_read_back_takes_parts(tmp_path):
    run = ft.run(ft.Ditto(), TEXT, reader, out=tmp_path / "run", **SETTINGS)
    saved = models.read(tmp_path / "run")
    x = texts((4,), 5)[0][0]
    torch.testing.assert_close(saved.predict("1", x), run.predict(1, x))
    assert set(saved.weights("1")) == set(Reader().state_dict())
    with pytest.raises(InvalidData, match="a dict of the parts ids, mask"):
        saved.predict("1", {"ids": x["ids"]})


def test_check_model_takes_parts():
    x = texts((6,))[0][0]
    assert ft.check_model(seeded(Reader), x) == []


def test_what_cannot_be_packed_is_refused_by_name():
    pairs = texts(SIZES)
    with pytest.raises(InvalidData, match=r"test x of client 0 must be a dict of the parts ids, mask"):
        ft.Federation.from_arrays(pairs, [({"ids": x["ids"]}, y) for x, y in pairs])
    uneven = [({**x, "mask": x["mask"][:-1]}, y) for x, y in pairs]
    with pytest.raises(InvalidData, match=r"parts of train x of client 0 have 7, 6 rows"):
        ft.Federation.from_arrays(uneven, pairs)
    with pytest.raises(InvalidData, match="above 16777216"):
        Packing.of(pairs[0][0], "x").pack({**pairs[0][0], "ids": pairs[0][0]["ids"] + 2**30})
    with pytest.raises(InvalidArgument, match="'ids' of whole numbers, which the model 'linear' would take for quantities"):
        ft.run(ft.FedAvg(), TEXT, rounds=1)
    assert ft.run(ft.FedAvg(), BOTH, "mlp:4", rounds=1).summary["rounds"] == 1
    with pytest.raises(ModelMismatch, match="does not take inputs"):
        ft.run(ft.FedAvg(), TEXT, nn.Linear(10, 2), rounds=1)


def test_a_newcomer_brings_parts_too(tmp_path):
    ft.run(ft.Ditto(), TEXT, reader, out=tmp_path / "run", **SETTINGS)
    x, y = texts((12,), 7)[0]
    came = ft.onboard(models.read(tmp_path / "run"), x, y, "new")
    assert came.record["rows"] == 12


def test_code_inside_a_run_directory_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ft.run(ft.Ditto(), TEXT, reader, out=tmp_path / "run", **SETTINGS)
    (tmp_path / "run/evil.py").write_text("raise SystemExit\ndef loss(out, y): ...\n")
    (tmp_path / "run/manifest.json").unlink()
    config = tmp_path / "run/config.toml"
    config.write_text('loss = "run/evil.py:loss"\n' + config.read_text())
    with pytest.raises(BadRun):
        models.read(tmp_path / "run")
    from fedtailor.algorithms import origin

    with pytest.raises(BadRun, match="never executed"):
        origin.refuse_inside({"set": {"opt": {"kind": "run/evil.py:Opt"}}}, tmp_path / "run")
    assert list(origin.pieces_of({"method": "a.py:M", "metrics": ["f1=a.py:f"], "set": {"lr": {"function": "a.py:g"}}})) == [
        "a.py:f",
        "a.py:g",
    ]
