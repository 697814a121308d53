"""Clients with different networks: each trains its own, on both engines; methods that send models are refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtailor as ft
from fedtailor import models, tree
from fedtailor.algorithms import origin
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.local import descend
from fedtailor.models.mixed import as_own
from fedtailor.runs.models import read
from tests.make import federation, pairs, seeded

NAMES = ("ann", "bob", "cid", "dee")
DATA = federation((7, 5, 9, 6), names=NAMES)
OF = {"ann": "small", "bob": "large", "cid": "small", "dee": "large"}
SETTINGS = {"rounds": 2, "workers": 1, "dtype": "float64", "batch_size": 4}
ENGINES = ["loop", "vectorized"]


def body(width):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4))


def network(head=True):
    return seeded(lambda: ft.Mixed({"small": body(2), "large": body(7)}, OF, nn.Linear(4, 2) if head else None))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_trains_its_own_network(engine):
    run = ft.run(ft.Local(lr=0.3, steps=3), DATA, network(), engine=engine, **{**SETTINGS, "rounds": 1, "batch_size": None})
    start = network().state_dict()
    for i, name in enumerate(NAMES):
        module = network().double()
        own = nn.Sequential(module.bodies[OF[name]], module.head)
        x, y = DATA.to(torch.float64).train.client(i)
        for _ in range(3):
            grads = torch.autograd.grad(F.cross_entropy(own(x), y), list(own.parameters()))
            with torch.no_grad():
                for p, g in zip(own.parameters(), grads, strict=True):
                    p -= 0.3 * g
        model = {k: v[0] for k, v in run.store.get(np.array([i]))["model"].items()}
        for key, value in module.state_dict().items():
            torch.testing.assert_close(model[key], value, rtol=1e-9, atol=1e-11)
            if key.startswith("bodies.") and OF[name] not in key:
                assert torch.equal(model[key], start[key].double())
        torch.testing.assert_close(run.predict(name, x), own(x).detach(), rtol=1e-9, atol=1e-11)


def test_networks_by_name_are_the_same_as_modules(tmp_path):
    """Each body is ``models.build`` with 32 outputs; a linear head follows."""
    bodies = {name: models.build(f"mlp:{width}", (3,), 32, seed=5) for name, width in (("small", 2), ("large", 7))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        by_hand = ft.Mixed(bodies, OF, nn.Linear(32, 2))
    method, given = ft.FedProto(lr=0.2, epochs=2), {**SETTINGS, "seed": 5}
    for engine in ENGINES:
        asked = ft.run(method, DATA, by_hand, engine=engine, **given)
        named = ft.run(method, DATA, "mixed:mlp:2=ann, cid+mlp:7", engine=engine, out=tmp_path / engine, **given)
        saved = read(tmp_path / engine)
        assert torch.equal(asked.shared["prototypes"], named.shared["prototypes"])
        for name in NAMES:
            x = DATA.test.client(DATA.index(name))[0]
            assert torch.equal(asked.predict(name, x), named.predict(name, x))
            assert torch.equal(saved.predict(name, x), named.predict(name, x))
    with pytest.raises(ModelMismatch, match="no shared model"):
        saved.predict(None, x)
    with pytest.raises(ModelMismatch, match="different networks"):
        saved.weights("ann")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixed:mlp:2", "two networks or more"),
        ("mixed:mlp:2+linear", "at most one of them"),
        ("mixed:mlp:2=ann+linear=bob", "gives cid no network"),
        ("mixed:mlp:2=ann,bob+linear=bob,cid,dee", "gives bob two"),
        ("mixed:mlp:2=zoe+linear", "no such client"),
        ("mixed:mlp:2=+linear", "cannot read"),
        ("mixed:mlp:2=ann+nothing", "unknown model"),
    ],
)
def test_networks_by_name_that_cannot_be_are_refused(name, said):
    with pytest.raises(InvalidArgument, match=said):
        ft.run(ft.Local(), DATA, name, **SETTINGS)


FACTORY = """
import fedtailor as ft
from torch import nn


def net(shape, outputs, clients):
    bodies = {"small": nn.Linear(*shape, 4), "large": nn.Sequential(nn.Linear(*shape, 6), nn.Tanh(), nn.Linear(6, 4))}
    return ft.Mixed(bodies, {name: "large" if name > "bob" else "small" for name in clients}, nn.Linear(4, outputs))
"""


def test_a_function_gives_clients_different_networks_and_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY)
    run = ft.run(ft.FedProto(lr=0.2), DATA, "mine.py:net", out=tmp_path / "run", engine="loop", **SETTINGS)
    origin._functions.clear()  # as in a new process
    saved, x = read(tmp_path / "run"), DATA.test.client(0)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        by_hand = ft.Mixed(
            {"small": nn.Linear(3, 4), "large": nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))},
            {"ann": "small", "bob": "small", "cid": "large", "dee": "large"},
            nn.Linear(4, 2),
        )
    asked = ft.run(ft.FedProto(lr=0.2), DATA, by_hand, engine="loop", **SETTINGS)
    for name in NAMES:
        assert torch.equal(run.predict(name, x), asked.predict(name, x))
        assert torch.equal(saved.predict(name, x), run.predict(name, x))
    with pytest.raises(InvalidArgument, match="sends models"):
        ft.run(ft.FedAvg(), DATA, "mine.py:net", **SETTINGS)


def test_a_function_that_gives_different_networks_takes_rows_of_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = "\n\nclass Of(nn.Sequential):\n    def forward(self, table):\n        return super().forward(table)\n"
    source = FACTORY.replace("nn.Linear(*shape, 4)", "Of(nn.Linear(*shape, 4))").replace("nn.Sequential(", "Of(")
    source = source.replace("*shape", "*shape['table']")
    (tmp_path / "mine.py").write_text(source.replace("from torch import nn\n", "from torch import nn\n" + named))
    rows = [[({"table": x}, y) for x, y in pairs(sizes, seed=seed)] for seed, sizes in enumerate(((7, 5, 9, 6), (4,) * 4))]
    data = ft.Federation.from_arrays(*rows, names=NAMES)
    run = ft.run(ft.FedProto(lr=0.2), data, "mine.py:net", out=tmp_path / "run", **SETTINGS)
    plain = ft.run(ft.FedProto(lr=0.2), DATA, _written(tmp_path, FACTORY), **SETTINGS)
    saved, x = read(tmp_path / "run"), pairs((5,))[0][0]
    for name in NAMES:
        torch.testing.assert_close(run.predict(name, {"table": x}), plain.predict(name, x))
        assert torch.equal(saved.predict(name, {"table": x}), run.predict(name, {"table": x}))


def test_a_dict_with_the_one_part_x_has_the_same_shape_when_the_run_is_read_back(tmp_path, monkeypatch):
    """Before: the function got {'x': (3,)} when it trained and (3,) when it was read back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY.replace("*shape", "*shape['x']"))
    rows = [[({"x": x}, y) for x, y in pairs(sizes, seed=seed)] for seed, sizes in enumerate(((7, 5, 9, 6), (4,) * 4))]
    data = ft.Federation.from_arrays(*rows, names=NAMES)
    run = ft.run(ft.FedProto(lr=0.2), data, "mine.py:net", out=tmp_path / "run", **SETTINGS)
    origin._functions.clear()  # as in a new process
    saved, x = read(tmp_path / "run"), {"x": pairs((5,))[0][0]}
    for name in NAMES:
        assert torch.equal(saved.predict(name, x), run.predict(name, x))


def _written(folder, source):
    (folder / "plain.py").write_text(source)
    return "plain.py:net"


@pytest.mark.parametrize("model", ["mixed:linear=ann+mlp:4", "mlp:4", network(), lambda: nn.Linear(3, 2)])
def test_the_constant_term_is_left_out_of_linear_models_only(model):
    with pytest.raises(InvalidArgument, match="bias=False is for the model 'linear'"):
        ft.run(ft.Local(), DATA, model, bias=False, **SETTINGS)


def test_prototypes_of_different_networks_are_averaged_alike_on_both_engines():
    loop, stacked = (ft.run(ft.FedProto(lr=0.2, epochs=2), DATA, network(), engine=e, **SETTINGS) for e in ENGINES)
    assert loop.shared["prototypes"].shape == (2, 4)
    for a, b in ((loop.shared, stacked.shared), (loop.store.get(np.arange(4)), stacked.store.get(np.arange(4)))):
        for p, q in zip(tree.leaves(a), tree.leaves(b), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-11)
    numbers = loop.summary["bytes_up"] / loop.summary["rounds"] / 4
    assert numbers < 1000  # prototypes and counts, whatever the networks are


def test_everybodys_rows_go_through_ones_own_network():
    run = ft.run(ft.Local(lr=0.3, epochs=3), DATA, network(), engine="loop", **SETTINGS)
    x, y = DATA.to(torch.float64).test.x, DATA.test.y
    by_hand = np.mean([float((run.predict(name, x).argmax(1) == y).double().mean()) for name in NAMES])
    assert run.summary["acc_global_test"] == pytest.approx(by_hand)
    with pytest.raises(ModelMismatch, match="no shared model"):
        run.predict_global(x)


@pytest.mark.parametrize(
    "method", [ft.FedAvg(), ft.Ditto(), ft.FedPer(), ft.APFL(), ft.PFedHN(), ft.FedFomo(), ft.Scaffold()], ids=repr
)
def test_methods_that_send_models_are_refused(method):
    data = federation((7, 5, 9, 6), names=NAMES, val=True)
    with pytest.raises(InvalidArgument, match=r"sends models, and these clients have different ones"):
        ft.run(method, data, network(), **SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Consensus(ft.Algorithm):
    """Clients send what they say of public rows, and learn what all of them say (Li and Wang 2019, FedMD)."""

    def init_server(self, task):
        return {"consensus": torch.zeros(len(task.public), 2, dtype=task.public.dtype), "known": torch.zeros(())}, {}

    def init_client(self, task, shared, data):
        return {"model": task.init()}

    def client_update(self, task, shared, personal, data, rnd):
        public = as_own(task.public, data)

        def risk(model, batch):
            gap = task.kind.gap(task.apply(model, public), torch.softmax(shared["consensus"], -1)).mean()
            return task.risk(model, batch) + shared["known"] * gap

        model = descend(risk, personal["model"], data, self.optimizer(rnd))
        return {"consensus": task.apply(model, public)}, {"model": model}

    def server_update(self, task, shared, server, upload, rnd):
        return {"consensus": upload["consensus"], "known": torch.ones(())}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)


def test_networks_of_different_widths_learn_from_each_others_logits():
    public = np.random.default_rng(0).normal(size=(6, 3))
    data = ft.Federation.from_arrays(pairs((7, 5, 9, 6)), pairs((4,) * 4, seed=1), public=public, names=NAMES)
    bodies = {"small": body(2), "large": body(7)}
    net = ft.Mixed({name: nn.Sequential(part, nn.Tanh(), nn.Linear(4, 2)) for name, part in bodies.items()}, OF)
    loop, stacked = (ft.run(Consensus(lr=0.2), data, net, engine=e, **SETTINGS) for e in ENGINES)
    torch.testing.assert_close(stacked.shared["consensus"], loop.shared["consensus"], rtol=1e-9, atol=1e-11)
    said = torch.stack([loop.predict(name, public) for name in NAMES]).mean(0)
    torch.testing.assert_close(loop.shared["consensus"], said, rtol=1e-9, atol=1e-11)


def test_what_does_not_fit_says_so():
    with pytest.raises(InvalidArgument, match="client ann is to have 'tiny'"):
        ft.Mixed({"small": body(2)}, {"ann": "tiny"})
    with pytest.raises(InvalidArgument, match="which body client dee has"):
        ft.run(ft.Local(), DATA, ft.Mixed({"small": body(2)}, dict.fromkeys(NAMES[:3], "small"), nn.Linear(4, 2)), **SETTINGS)
    uneven = ft.Mixed({"small": nn.Linear(3, 4), "large": nn.Linear(3, 5)}, OF, nn.Linear(4, 2))
    with pytest.raises(ModelMismatch, match="does not take inputs"):
        ft.run(ft.Local(), DATA, uneven, **SETTINGS)
