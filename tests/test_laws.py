"""Every registered method keeps the ten laws, and a method that breaks one is told which, where and by how much."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor import algorithms, tree
from fedtailor.algorithms import METHODS, Algorithm
from fedtailor.errors import InvalidArgument, LawBroken
from fedtailor.laws.check import LAWS
from fedtailor.laws.ground import network
from fedtailor.local import descend

NEED_PARTS = (ft.FedPer, ft.LGFedAvg, ft.FedBN, ft.FedAlt, ft.FedRep, ft.FedBABU)  # a linear model has a head and nothing else
VARIANTS = [
    *(method(epochs=2) for method in METHODS if method not in (*NEED_PARTS, ft.L2GD, ft.AL2SGD)),
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


@pytest.mark.parametrize("algorithm", VARIANTS, ids=lambda a: type(a).__name__)
def test_every_method_keeps_the_ten_laws_on_a_linear_model_and_on_a_network(algorithm):
    kept = ft.check_algorithm(algorithm)
    assert {(v.number, v.model) for v in kept} == {(n, m) for n in LAWS for m in ("linear", "network")}


@pytest.mark.parametrize("method", NEED_PARTS, ids=lambda m: m.__name__)
def test_methods_that_split_a_model_keep_the_ten_laws_on_a_network(method):
    more = {"personal_steps": 2} if method in (ft.FedRep, ft.FedAlt) else {}
    assert {v.number for v in ft.check_algorithm(method(epochs=1, **more), network())} == set(LAWS)


def test_every_file_of_a_method_is_registered():
    no_method = {"__init__", "base", "partial", "fedopt", "routing", "settings"}
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
