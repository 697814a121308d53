"""Every method, step by step, against an independent NumPy transcription of its paper (tests/oracles).

Float64. The oracles are given the row numbers that the package drew, nothing else.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.algorithms import METHODS
from fedtailor.engine.base import NO_ROUND
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, cohort_of, make_plan, play
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs.store import Store
from tests.oracles import fedclup, risks

ROUNDS, SEED, TOLERANCE = 5, 4, 1e-9
COMMON = {"lr": 0.15}
# method -> (module of the oracle, settings of the method, settings the oracle is told by other names)
CASES = {
    "Local": ("local", {}, {}),
    "FedAvg": ("fedavg", {"server_lr": 0.8}, {}),
    "FedAvgFT": ("fedavgft", {"server_lr": 0.8, "finetune_steps": 3}, {}),
    "FedProx": ("fedprox", {"server_lr": 0.8, "mu": 0.7}, {}),
    "FedProxPersonal": ("fedprox_personal", {"server_lr": 0.9, "lam": 0.6, "radius": 1.3, "final_steps": 4}, {}),
    "FedCLUP": ("fedclup", {"server_lr": 1.1, "lam": 0.6}, {}),
    "PFedMe": ("pfedme", {"inner_lr": 0.08, "inner_steps": 3, "lam": 1.5, "beta": 0.9}, {}),
    "Ditto": ("ditto", {"server_lr": 0.8, "lam": 0.4, "personal_lr": 0.2, "personal_steps": 5}, {}),
}
NOT_THE_ORACLES = {"finetune_steps", "final_steps", "personal_steps", "steps", "epochs"}


def data(kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(7)
    out = []
    for i, n in enumerate((9, 14, 5, 11)):
        x = draw.normal(size=(n, 3)) + 0.4 * i
        if kind == "regression":
            out.append((x, x @ draw.normal(size=3) + 0.1 * draw.normal(size=n)))
        else:
            out.append((x, np.r_[0, 1, 2, draw.integers(0, 3, n - 3)]))
    return out


def trajectory(engine, plan, rounds, size):
    """(shared, every client's personal model) after each round, as flat vectors."""
    shared, server = plan.algorithm.init_server(plan.task)
    store = Store(len(plan.federation))
    for _, now in play(engine, shared, server, store, rounds, size, SEED):
        shared, server = now
        personal = [engine.personal(shared, i, store) for i in range(len(plan.federation))]
        yield (
            shared["model"]["weight"].numpy().ravel() if shared else None,
            [p.get("model", shared.get("model"))["weight"].numpy().ravel() for p in personal],
        )


def test_every_method_has_an_oracle():
    from tests.test_oracles_last import CASES as LAST
    from tests.test_oracles_more import CASES as MORE
    from tests.test_oracles_more import PLAIN_MEAN

    # tests of their own, in test_oracles_more.py, test_oracles_perada.py and test_oracles_flow.py
    apart = {"ScaffoldP", "HypCluster", "KNNPer", "FedDF", "L2GD", "AL2SGD", "PerAda", "Flow"}
    covered = {name.split()[0] for name in (*CASES, *MORE, *PLAIN_MEAN, *LAST)} | apart
    assert covered == {method.__name__ for method in METHODS}


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize(
    ("kind", "batch", "size"), [("regression", None, 4), ("classification", None, 3), ("classification", 4, 3)]
)
@pytest.mark.parametrize("name", CASES)
def test_method_follows_its_paper_step_by_step(name, kind, batch, size, weights, engine):
    module, settings, renamed = CASES[name]
    work = {"steps": 4} if batch is None else {"epochs": 2}
    algorithm = getattr(ft, name)(**COMMON, **settings, **work)
    clients = data(kind)
    federation = ft.Federation.from_arrays(clients, clients).to(torch.float64)
    task = build_task("linear", federation, 0, torch.float64, bias=False)
    plan = make_plan(algorithm, task, federation, batch, SEED, weights)
    plan.federation.order  # noqa: B018 (cached)

    def batches(t, i, phase):
        phase = phase if phase in plan.feed.phases else "train"
        return plan.feed.rows(i, NO_ROUND if phase == "personalize" else t, phase)

    told = {k: v for k, v in {**COMMON, **settings, **renamed}.items() if k not in NOT_THE_ORACLES}
    expected = import_module(f"tests.oracles.{module}").run(
        risks.least_squares if kind == "regression" else risks.softmax,
        clients,
        np.zeros(3 if kind == "regression" else 9),
        rounds=ROUNDS,
        batches=batches,
        cohorts=lambda t: cohort_of(federation, algorithm, size, SEED, t).tolist(),
        weights=plan.weights,
        **told,
    )
    options = {"workers": 1} if engine is LoopEngine else {}
    for t, (shared, personal) in enumerate(trajectory(engine(plan, **options), plan, ROUNDS, size)):
        if expected[t]["shared"] is not None:
            assert np.abs(shared - expected[t]["shared"]).max() <= TOLERANCE, f"shared in round {t}"
        for i, (mine, theirs) in enumerate(zip(personal, expected[t]["personal"], strict=True)):
            assert np.abs(mine - theirs).max() <= TOLERANCE, f"client {i} in round {t}"
    assert np.abs(personal[0]).max() > 0.05  # something was learned: the comparison is not of zeros


def test_fedclup_on_one_batch_per_round_follows_algorithm_2():
    clients = data("regression")
    federation = ft.Federation.from_arrays(clients, clients).to(torch.float64)
    algorithm = ft.FedCLUP(lam=0.6, lr=0.1, steps=5, server_lr=1.0, same_batch=True)
    plan = make_plan(algorithm, build_task("linear", federation, 0, torch.float64, bias=False), federation, 4, SEED, "uniform")
    rows = plan.feed.rows(1, 0, "train")
    assert len(rows) == 5
    assert all((r == rows[0]).all() for r in rows)  # drawn once per round, without replacement
    assert len(set(rows[0].tolist())) == 4
    expected = fedclup.run(
        risks.least_squares,
        clients,
        np.zeros(3),
        rounds=3,
        batches=lambda t, i, phase: plan.feed.rows(i, t, phase),
        cohorts=lambda t: range(4),
        weights=plan.weights,
        lr=0.1,
        server_lr=1.0,
        lam=0.6,
    )
    for t, (shared, _) in enumerate(trajectory(LoopEngine(plan, workers=1), plan, 3, 4)):
        assert np.abs(shared - expected[t]["shared"]).max() <= TOLERANCE


@pytest.mark.parametrize(("lam", "mu", "smoothness"), [(0.5, 1, 10), (1, 1, 1), (0.02, 0.3, 1.7), (50, 0.3, 1.7)])
def test_the_theorys_steps_are_those_of_corollary_2(lam, mu, smoothness):
    from fedtailor.theory.rates import fedclup_steps

    assert tuple(fedclup_steps(lam, mu, smoothness)) == pytest.approx(fedclup.theory(lam, mu, smoothness), rel=1e-12)
