"""Compressed uploads: what is sent and what is remembered, true bytes, what is refused, and settings that can be written."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import registry
from fedtailor.algorithms.compressed import compressed, decode
from fedtailor.algorithms.settings import make, settings, written
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from fedtailor.laws.ground import network
from fedtailor.metrics.cost import wire_bytes
from fedtailor.runs import models
from tests.make import batches, pairs

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "batch_size": None, "workers": 1}


def sent(method, leaf):
    return decode(tree.map(lambda part: part.unsqueeze(0), method.encode(leaf)), None)[0]


def test_the_largest_numbers_travel_with_their_places():
    leaf = torch.tensor([[0.1, -5.0, 2.0], [3.0, -0.2, -2.0]])
    parts = ft.Compressed(keep=0.5).encode(leaf)
    values, places, shape = parts.values()
    assert (values.tolist(), places.tolist(), shape.tolist()) == ([-5, 3, 2], [1, 3, 2], [2, 3])  # of equals the first
    assert places.dtype == torch.int32
    assert sent(ft.Compressed(keep=0.5), leaf).tolist() == [[0, -5, 2], [3, 0, 0]]


def test_eight_bits_are_rounded_to_the_nearest_of_127_steps():
    leaf = torch.tensor([254.0, 126.9, -1.0, 0.9, -0.0])  # a step is 2
    parts = ft.Compressed(bits=8).encode(leaf)
    assert parts["encoded:values"].dtype == torch.int8
    assert sent(ft.Compressed(bits=8), leaf).tolist() == [254, 126, 0, 0, 0]
    assert sent(ft.Compressed(bits=8, keep=0.4), leaf).tolist() == [254, 126, 0, 0, 0]
    assert not sent(ft.Compressed(bits=8), torch.zeros(3)).any()


def test_a_message_has_the_bytes_of_what_is_kept():
    leaf = torch.randn(100, 100)
    top, eight = (wire_bytes(ft.Compressed(**how).encode(leaf)) for how in ({"keep": 0.01}, {"bits": 8}))
    assert 100 * (4 + 4) < top < 100 * (4 + 4) + 400
    assert 10_000 < eight < 10_400
    fed = ft.Federation.from_arrays(pairs((8, 8), d=1000), pairs((8, 8), d=1000, seed=1))
    runs = [ft.run(m, fed, "linear", rounds=1) for m in (ft.FedAvg(), ft.Compressed(keep=0.1))]
    up = [run.summary["bytes_up"] for run in runs]
    assert up[1] < 0.3 * up[0]


@pytest.mark.parametrize("how", [{"keep": 0.2}, {"bits": 8}, {"keep": 0.5, "bits": 8}], ids=str)
def test_what_is_left_out_is_remembered(how):
    """What is sent and what is remembered make up what the method meant to send and what was remembered before."""
    x, y = pairs((6,), d=5)[0]
    fed = ft.Federation.from_arrays([(x, y)], [(x, y)])
    task = build_task("linear", fed, 0, torch.float64, bias=True)
    data = batches(torch.tensor(x), torch.tensor(y), [range(6)] * 2)
    inner = ft.FedAvg()
    method, rnd = ft.Compressed(method=inner, **how), None
    shared, _ = method.init_server(task)
    personal = method.init_client(task, shared, data)
    assert not any(leaf.any() for leaf in tree.leaves(personal["left out"]))
    for _ in range(3):
        meant, _ = inner.client_update(task, shared, {}, data, rnd)
        upload, after = method.client_update(task, shared, personal, data, rnd)
        arrived = decode(tree.map(lambda leaf: leaf.unsqueeze(0), upload), {})["delta"]["weight"][0]
        before, left = personal["left out"]["delta/weight"], after["left out"]["delta/weight"]
        torch.testing.assert_close(arrived + left, meant["delta"]["weight"] + before)
        assert left.any()
        shared, personal = {"model": {**shared["model"], "weight": shared["model"]["weight"] + arrived}}, after


@pytest.mark.parametrize("how", [{"keep": 0.2}, {"bits": 8}], ids=str)
def test_error_feedback_reaches_the_minimiser_of_least_squares(how):
    x, y = pairs((40,), d=5, kind="regression")[0]
    fed = ft.Federation.from_arrays([(x, y)] * 2, [(x, y)] * 2, task="regression")
    run = ft.run(ft.Compressed(lr=0.2, steps=1, **how), fed, "linear", rounds=400, bias=False, **OPTIONS)
    want = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(run.shared["model"]["weight"][0], want, atol=1e-6)


@pytest.mark.parametrize("name", ["PFedMe", "MTL", "FedCLUPDynamic", "HypCluster", "FedPer", "PerFedAvg", "FedDyn", "FedROD"])
def test_any_averaged_method_goes_on_both_engines(name):
    """Uploads of models, of several branches, with single numbers, of parts of a model."""
    settings = {"spread": 0.1} if name == "HypCluster" else {}  # else it sees the first round's uploads one by one
    ft.check_algorithm(ft.Compressed(method=registry[name](**settings), keep=0.3), network(), laws=(2, 3, 10))


def test_methods_that_are_not_averaged_are_refused_by_name():
    clients = pairs((8, 8), d=3)
    fed = ft.Federation.from_arrays(clients, clients, public=clients[0][0])
    with pytest.raises(InvalidArgument, match="does not average FedDF's uploads"):
        ft.run(ft.Compressed(method=ft.FedDF()), fed, "linear", rounds=1)
    with pytest.raises(InvalidArgument, match="does not average FedProto's uploads"):
        ft.run(ft.Compressed(method=ft.FedProto()), fed, "linear", rounds=1)
    with pytest.raises(InvalidArgument, match="some rounds of L2GD"):
        ft.Compressed(method=ft.L2GD())
    with pytest.raises(InvalidArgument, match="method must be a method"):
        ft.Compressed(method=ft.Compressed())
    with pytest.raises(InvalidArgument, match="cannot be private"):
        ft.run(ft.Compressed(method=ft.APFL(opt=ft.Private())), fed, "linear", rounds=1)


def test_local_work_may_be_set_outside_or_inside():
    method = ft.Compressed(method=ft.FedAvg(lr=0.2, epochs=5), keep=0.3)
    assert (method.lr, method.epochs, method.steps) == (0.2, 5, None)
    changed = replace(method, steps=3, lr=0.5)
    assert changed.method == ft.FedAvg(lr=0.5, steps=3)
    assert ft.Compressed(lr=0.5, steps=3, keep=0.3) == changed
    with pytest.raises(InvalidArgument, match="lr must be greater than 0"):
        replace(method, lr=-1.0)


@pytest.mark.parametrize(
    "method",
    [
        ft.Compressed(method=ft.FedProxPersonal(lam=0.3, opt=ft.SGD(momentum=0.9)), keep=0.25),
        ft.Compressed(method=ft.FedAdam(lr=0.3), bits=8),
    ],
    ids=["top-k", "8bit"],
)
def test_settings_are_written_and_read_back(method):
    text = written(method)
    assert eval(text, vars(ft) | {name: getattr(ft, name) for name in ft.__all__}) == method
    plain = settings(method)
    assert plain["method"]["kind"] in ("fedprox-personal", "fedadam")
    assert make("compressed", plain) == method


def test_a_run_is_saved_resumed_and_predicts(tmp_path):
    clients = pairs((8, 8), d=3)
    fed = ft.Federation.from_arrays(clients, clients)
    method = ft.Compressed(method=ft.FedPer(personal="head"), keep=0.25)
    run = ft.run(method, fed, "mlp:4", rounds=2, out=tmp_path / "run")
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["set"]["method"]["kind"] == "fedper"
    again = models.read(tmp_path / "run")
    assert again.algorithm == method
    x = fed.test.client(0)[0]
    torch.testing.assert_close(again.predict(fed.names[0], x), run.predict(0, x))


def test_words_of_the_command_line():
    method = ft.FedAvg(lr=0.3)
    assert compressed(method, "top-k:0.1") == ft.Compressed(method=method, keep=0.1)
    assert compressed(method, "8bit") == ft.Compressed(method=method, bits=8)
    assert compressed(method, "top-k:0.1,8bit") == ft.Compressed(method=method, keep=0.1, bits=8)
    for wrong in ("zip", "top-k", "top-k:x", "8bit:2", "top-7:0.1"):
        with pytest.raises(InvalidArgument, match="unknown compression"):
            compressed(method, wrong)
