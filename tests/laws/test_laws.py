"""Every registered method keeps the ten laws, and a method that breaks one is told which, where and by how much."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor import algorithms, tree
from fedtailor.algorithms import METHODS, Algorithm
from fedtailor.algorithms.base import amount
from fedtailor.errors import InvalidArgument, LawBroken
from fedtailor.laws import check
from fedtailor.laws.check import LAWS
from fedtailor.laws.ground import network
from fedtailor.local import descend

# a linear model has a head and nothing else
NEED_PARTS = (ft.FedPer, ft.LGFedAvg, ft.FedBN, ft.FedAlt, ft.FedRep, ft.FedBABU, ft.FedPAC)
OWN_PACE = (ft.L2GD, ft.AL2SGD, ft.GIANT)  # how long a round is is not said by epochs
# an epoch of the largest clients is three steps; where one epoch ends is the feed's business, which no method sees
VARIANTS = [
    *(method(epochs=1) for method in METHODS if method not in (*NEED_PARTS, *OWN_PACE)),
    ft.GIANT(lr=0.5, cg_steps=3, ridge=0.1),
    ft.GIANT(cg_steps=2, ridge=0.1, damping=0.2, line_search=True),
    ft.FedROD(balanced=False, head_rate=0.5, server_lr=0.7, steps=3),
    ft.FedFomo(downloads=1, explore=0.5, steps=2),
    ft.PFedHN(hidden=4, layers=1, embedding=2, hyper_lr=0.3, embedding_lr=0.1, steps=2),
    ft.Compressed(method=ft.Scaffold(steps=3), keep=0.3, bits=8),
    ft.L2GD(lr=0.1, lam=0.5, p=0.3),
    ft.AL2SGD(lam=0.5, mu=0.1, smoothness=2.0),
    ft.APFL(adaptive=True, alpha_lr=0.5, steps=2),
    ft.PerFedAvg(hessian="free", finetune_epochs=1),
    ft.ScaffoldP(first="zeros", personal="head", personal_lr=0.05, personal_server_lr=0.5),
    ft.KNNPer(weight=0.4, k=3),
    ft.FedDF(kd_steps=5, kd_batch=3, temperature=2.0),
    ft.PerAda(
        kd_steps=5, kd_batch=3, temperature=2.0, gate=0.3, kd_rounds=2, teach="probabilities", personal_steps=2, server_lr=0.8
    ),
    ft.FedAvg(steps=3, lr=ft.Exponential(0.2, 0.5), opt=ft.SGD(momentum=0.9, weight_decay=0.01), server_lr=0.7),
    ft.FedAvgFT(finetune_steps=3, opt=ft.Adam(), lr=0.01),
    ft.FedProxPersonal(lam=0.3, lr=ft.Harmonic(0.3, per="step"), server_lr=1.5, radius=0.8, final_epochs=2),
    ft.FedCLUP(lam=2.0, steps=4, same_batch=True, server_lr=0.3),
    ft.FedCLUP(lam="client", steps=3),
    ft.PartialFed(steps=2, logit_steps=3, logit_lr=2.0, cooling=0.5, opt=ft.SGD(momentum=0.5)),
    ft.PFedMe(lam=2.0, inner_steps=2, beta=0.5, warm_start=False),
    ft.Ditto(lam=0.5, personal_steps=4, personal_lr=0.3, opt=ft.SGD(momentum=0.5)),
]


OUTCOMES: dict[tuple[str, str], dict] = {}  # several methods have the same limit: what it ends with is played once


@pytest.fixture
def remembered(monkeypatch):
    """Limits that are compared with what the same method ended with for another one, on the same model and data."""
    play = check.outcome

    def outcome(case):
        key = (case.name, repr(case.plan.algorithm))
        if key not in OUTCOMES:
            OUTCOMES[key] = play(case)
        return OUTCOMES[key]

    monkeypatch.setattr(check, "outcome", outcome)


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("algorithm", VARIANTS, ids=lambda a: type(a).__name__)
def test_every_method_keeps_the_ten_laws_on_a_linear_model_and_on_a_network(algorithm):
    kept = ft.check_algorithm(algorithm)
    assert {(v.number, v.model) for v in kept} == {(n, m) for n in LAWS for m in ("linear", "network")}


@pytest.mark.parametrize("method", NEED_PARTS, ids=lambda m: m.__name__)
def test_methods_that_split_a_model_keep_the_ten_laws_on_a_network(method):
    more = {"personal_steps": 2} if method in (ft.FedRep, ft.FedAlt, ft.FedPAC) else {}
    assert {v.number for v in ft.check_algorithm(method(epochs=1, **more), network())} == set(LAWS)


def test_every_file_of_a_method_is_registered():
    no_method = {"__init__", "base", "fingerprint", "origin", "partial", "fedopt", "prototypes", "routing", "settings"}
    files = {p.stem for p in Path(algorithms.__file__).parent.glob("*.py")} - no_method
    assert files == {method.__module__.rsplit(".", 1)[1] for method in METHODS}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_every_method_says_what_it_is_under_fixed_headings(method):
    text = sys.modules[method.__module__].__doc__
    headings = ["What it does", "Reference", "Differs from the paper", "Limits", "When to use"]
    assert [line for line in text.splitlines() if line and not line.startswith(" ")][1:] == headings


@dataclass(frozen=True, kw_only=True)
class Plain(Algorithm):
    """FedAvg as a user would write it: the one below each change breaks a law."""

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.add(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


class WritesIntoShared(Plain):
    def client_update(self, task, shared, personal, data, rnd):
        next(iter(shared["model"].values())).add_(1.0)
        return super().client_update(task, shared, personal, data, rnd)


class DrawsGlobalNumbers(Plain):
    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.map(lambda t: t + 1e-3 * torch.randn_like(t), upload), personal


class GrowsATree(Plain):
    def server_update(self, task, shared, server, upload, rnd):
        shared, _ = super().server_update(task, shared, server, upload, rnd)
        return shared, {"seen": torch.zeros(rnd.number + 1)}


class CountsPaddedSteps(Plain):
    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, 1.0 / data["mask"].shape[0]), personal


class LooksAtThePadding(Plain):
    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, 1.0 + data["x"].mean().tanh()), personal


class CallsItem(Plain):
    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, float(data["mask"].sum().item() > 0)), personal


class DependsOnOrder(Plain):
    seen: list = []

    def client_update(self, task, shared, personal, data, rnd):
        self.seen.append(1)
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, 1.0 + 0.01 * len(self.seen)), personal


@dataclass(frozen=True, kw_only=True)
class KeepsAPersonalModel(Plain):
    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        upload, _ = super().client_update(task, shared, personal, data, rnd)
        return upload, {"model": tree.add(personal["model"], upload["delta"])}


class TunesWhenAsked(KeepsAPersonalModel):
    def personalize(self, task, shared, personal, data):
        for leaf in personal["model"].values():
            leaf.mul_(0.9)
        return personal


class ClaimsTooMuch(Plain):
    limits = (ft.Limit({"lr": 0.3}, "FedProx", also={"mu": 5.0}),)


class CountsItsCalls(Plain):
    def client_update(self, task, shared, personal, data, rnd):
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        return super().client_update(task, shared, personal, data, rnd)


class TakesPaddedRowsForReal(Plain):
    """The largest feature, over padded places too: the engines fill those with the client's own rows, but need not."""

    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, 1.0 / data["x"].abs().amax()), personal


class WantsMoreWheneverAsked(Plain):
    """The clients listed anew are another plan, for which a method is asked once more how much work it wants."""

    asked = 0

    def work(self):
        type(self).asked += 1
        return {"train": amount(type(self).asked, None)}


class KnowsItsOwnObject(Plain):
    """Halves the steps on the object that was made here, which is no longer there on a client's machine."""

    made: list = []

    def __post_init__(self):
        super().__post_init__()
        self.made.append(self)

    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, 0.5 if any(one is self for one in self.made) else 1.0), personal


class KnowsItsStateByIdentity(Plain):
    """Takes two branches that are one object for untouched since birth; a state that was put away and fetched is two."""

    roll_call = True

    def init_client(self, task, shared, data):
        return {"start": shared["model"], "model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        upload, _ = super().client_update(task, shared, personal, data, rnd)
        untouched = rnd.number > 0 and personal["start"] is personal["model"]
        return tree.scale(upload, 0.5 if untouched else 1.0), personal


class LearnsFromBeingAsked(Plain):
    asked = 0

    def predict(self, task, shared, personal, x):
        type(self).asked += 1
        return super().predict(task, shared, personal, x)

    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = super().client_update(task, shared, personal, data, rnd)
        return tree.scale(upload, 1.0 / (1 + type(self).asked)), personal


class NumbersItsBranches(Plain):
    """Whole numbers as keys, which come back from a file as words."""

    def init_server(self, task):
        shared, _ = super().init_server(task)
        return shared, {"memory": {0: tree.zeros(shared["model"]), 1: shared["model"]}}


class NamesNobody(Plain):
    limits = (ft.Limit({}, "FedNothing"),)


@pytest.mark.parametrize(
    ("kind", "law", "words"),
    [
        (WritesIntoShared, 1, "changed an argument"),
        (DrawsGlobalNumbers, 1, "another answer the second time"),
        (GrowsATree, 2, "server"),
        (CallsItem, 3, ""),
        (CountsPaddedSteps, 4, "delta/weight differs by"),
        (LooksAtThePadding, 4, "delta/weight differs by"),
        (DependsOnOrder, 1, "another answer"),
        (TunesWhenAsked, 8, "evaluation in round 0"),
        (ClaimsTooMuch, 10, "lr=0.3: personal against FedProx"),
        (NamesNobody, 10, "not registered"),
    ],
)
def test_a_broken_law_is_named_with_the_place(kind, law, words):
    with pytest.raises(LawBroken) as caught:
        ft.check_algorithm(kind(epochs=2), laws=[law])
    text = str(caught.value)
    assert f"law {law} ({LAWS[law][0]}) on linear" in text
    assert words in text


@pytest.mark.parametrize(
    ("kind", "law", "words"),
    [
        (CountsItsCalls, 1, "keeps state on itself"),
        (GrowsATree, 2, "server of client"),
        (CallsItem, 3, "vmap"),
        (TakesPaddedRowsForReal, 4, "client 0 with 0 more steps and 3 more rows"),
        (WantsMoreWheneverAsked, 5, "clients reversed"),
        (KnowsItsOwnObject, 6, "with only bytes between server and clients"),
        (KnowsItsStateByIdentity, 7, "against the protocol by the book"),
        (LearnsFromBeingAsked, 8, "with evaluation in every round"),
        (NumbersItsBranches, 9, "server through bytes"),
        (ClaimsTooMuch, 10, "lr=0.3"),
    ],
)
def test_each_law_has_a_method_that_breaks_it_and_no_other(kind, law, words):
    with pytest.raises(LawBroken) as caught:
        ft.check_algorithm(kind(epochs=2), "linear")
    assert [int(number) for number in re.findall(r"law (\d+) \(", str(caught.value))] == [law]
    assert words in str(caught.value)


def test_a_users_method_in_the_plainest_form_keeps_all_laws():
    assert len(ft.check_algorithm(Plain(epochs=2))) == 20
    assert len(ft.check_algorithm(KeepsAPersonalModel(steps=3))) == 20


def test_state_smuggled_through_the_object_breaks_ownership():
    class Smuggler(Plain):
        def client_update(self, task, shared, personal, data, rnd):
            upload, personal = super().client_update(task, shared, personal, data, rnd)
            object.__setattr__(self, "memory", upload)
            return tree.zeros(upload), personal

        def server_update(self, task, shared, server, upload, rnd):
            return {"model": tree.add(shared["model"], self.memory["delta"])}, server

    with pytest.raises(LawBroken, match=r"law 6 \(owners\)"):
        ft.check_algorithm(Smuggler(epochs=1), laws=[6])


def test_laws_want_an_instance():
    with pytest.raises(InvalidArgument, match=r"ft\.FedAvg\(\)"):
        ft.check_algorithm(ft.FedAvg)
