"""Flow against its transcription: float64, both engines, step by step, to 1e-7."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.algorithms.flow import AT_THE_END
from fedtailor.engine.base import NO_ROUND
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, cohort_of, make_plan, play
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs.store import Store
from tests.oracles import flow

D, K, ROUNDS, SEED, TOLERANCE = 3, 3, 3, 4, 1e-7
SIZES = (9, 14, 5, 11)
RATES = {"lr": 0.3, "local_lr": 0.4, "router_lr": 0.5}
PHASE = {"local": "local", "global": "train", "deploy-local": "personalize", "deploy-global": AT_THE_END}
# batch, clients of a round, epochs of the three kinds of work, the run's weights (which Flow must not look at)
SETTINGS = [(None, 4, 2, "size"), (3, 3, 1, "uniform"), (4, 2, 2, "size")]

# name -> (options of the method, what the transcription is told beside the rates and gamma)
CASES = {
    "plain": ({}, {}),
    "no regulariser": ({"gamma": 0.0}, {}),
    "strong regulariser": ({"gamma": 0.5}, {}),
    "router first": ({"order": "router-first"}, {"order": "router-first"}),
    "global first": ({"order": "global-first"}, {"order": "global-first"}),
    "fixed q0": ({"q0": 0.7}, {"q0": 0.7}),
    "whole models": ({"routing": "model"}, {"layers": [3]}),
    "uneven parts": ({"split": 0.75}, {}),
    "parts drawn anew": ({"redraw": True}, {}),
    "all rows in both parts": ({"split": "whole"}, {}),
    "a level less than routes": ({"router_widths": (5, 4)}, {}),
    "soft inference": ({"inference": "soft"}, {}),
    "router as received": ({"deploy": "local"}, {}),
    "all adapts": ({"deploy": "all"}, {}),
    "all adapts, global first": ({"deploy": "all", "order": "global-first"}, {"order": "global-first"}),
    "own model of all rows at the end": ({"deploy_rows": "whole"}, {}),
    "longer at the end": ({"deploy_epochs": 3}, {}),
}


def data():
    draw = np.random.default_rng(7)
    return [(draw.normal(size=(n, D)) + 0.4 * i, np.r_[0, 1, 2, draw.integers(0, K, n - K)]) for i, n in enumerate(SIZES)]


def planned(options, batch, epochs, weights):
    clients = data()
    federation = ft.Federation.from_arrays(clients, clients).to(torch.float64)
    method = ft.Flow(**{"gamma": 0.05, "epochs": epochs, "local_epochs": 2, **RATES, **options})
    task = build_task("mlp:6,5", federation, 0, torch.float64, bias=True)
    return clients, make_plan(method, task, federation, batch, SEED, weights)


def layers(model):
    """[(weight, bias)] of a named MLP."""
    names = sorted({name.rsplit(".", 1)[0] for name in model}, key=int)
    return [(model[f"{name}.weight"], model[f"{name}.bias"]) for name in names]


def chains(router):
    count = {kind: sum(name.startswith(f"{kind}.") for name in router) // 2 for kind in ("base", "exit")}
    return {
        kind: [(router[f"{kind}.{j}.weight"], router[f"{kind}.{j}.bias"]) for j in range(1, n + 1)] for kind, n in count.items()
    }


def apart(ours, theirs):
    pairs = zip(flow.leaves(ours), flow.leaves(theirs), strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def trajectory(kind, plan, size, probe):
    """After each round: the shared tree and every client's logits on ``probe``."""
    engine = kind(plan, **({"workers": 1} if kind is LoopEngine else {}))
    store, ids = Store(len(plan.federation)), np.arange(len(plan.federation))
    shared, server = plan.algorithm.init_server(plan.task)
    for _, (now, _) in play(engine, shared, server, store, ROUNDS, size, SEED):
        found = {
            int(i): row for part, rows in engine.on_common(now, ids, store, probe) for i, row in zip(part, rows, strict=True)
        }
        yield now, [found[int(i)] for i in ids]


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(
    ("case", "batch", "size", "epochs", "weights"),
    [("plain", *setting) for setting in SETTINGS] + [(case, *SETTINGS[1]) for case in CASES if case != "plain"],
)
def test_flow_follows_its_paper_step_by_step(case, batch, size, epochs, weights, engine):
    options, more = CASES[case]
    clients, plan = planned(options, batch, epochs, weights)
    method, phases = plan.algorithm, plan.feed.phases

    def rows(t, i, phase):
        name = PHASE[phase]
        deploying = phase.startswith("deploy-")
        return plan.feed.rows(i, NO_ROUND if deploying else t, name) if name in phases else []

    start, _ = method.init_server(plan.task)
    psi = chains(start["router"]) if "router" in start else {"base": [], "exit": []}
    expected = flow.rounds(
        layers(start["model"]),
        psi,
        clients,
        [cohort_of(plan.federation, method, size, SEED, t).tolist() for t in range(ROUNDS)],
        rows,
        {**RATES, "gamma": method.gamma, **more},
        sizes=lambda t, i: int(phases["train"].rows(np.array([SIZES[i]]))[0]),
        adapt="router" if method.deploy == "router" else method.deploy,
    )
    told = {name: value for name, value in more.items() if name in ("q0", "layers")}
    probe = torch.from_numpy(np.random.default_rng(3).normal(size=(25, D)) * 2)
    for t, (shared, logits) in enumerate(trajectory(engine, plan, size, probe)):
        theirs = expected[t]
        assert apart(layers(shared["model"]), theirs["w_g"]) <= TOLERANCE, f"the model in round {t}"
        if method.routed:
            assert apart(chains(shared["router"]), theirs["psi"]) <= TOLERANCE, f"the router in round {t}"
        for i, model in enumerate(theirs["personal"]):
            wanted = flow.predict(model, probe, hard=method.inference == "hard", **told)
            assert float((logits[i] - wanted).abs().max()) <= TOLERANCE, f"client {i} in round {t}"
    assert apart(layers(start["model"]), expected[-1]["w_g"]) > 0.05
    if method.routed:
        assert apart(chains(start["router"]), expected[-1]["psi"]) > 0.01


def test_the_transcription_tells_the_options_apart():
    """A step by step comparison of two options would be no test of either if they gave the same numbers."""
    ends = {}
    for case, (options, _) in CASES.items():
        _, plan = planned(options, 3, 1, "uniform")
        probe = torch.from_numpy(np.random.default_rng(3).normal(size=(25, D)) * 2)
        ends[case] = torch.stack(list(trajectory(LoopEngine, plan, 3, probe))[-1][1])
    for case, found in ends.items():
        if case != "plain":
            assert float((found - ends["plain"]).abs().max()) > 1e-4, case


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size", "epochs", "weights"), SETTINGS[:2])
def test_pi_flow_trains_its_second_path_as_the_docstring_says(batch, size, epochs, weights, engine):
    """The paper leaves open how; the steps are the transcription's, put together for this reading."""
    clients, plan = planned({"variant": "pi"}, batch, epochs, weights)
    start, _ = plan.algorithm.init_server(plan.task)
    g, u, psi = layers(start["model"]), layers(start["other"]), chains(start["router"])
    probe = torch.from_numpy(np.random.default_rng(3).normal(size=(25, D)) * 2)
    ce = flow.RISKS["ce"]
    for t, (shared, logits) in enumerate(trajectory(engine, plan, size, probe)):
        sent = []
        for i in cohort_of(plan.federation, plan.algorithm, size, SEED, t).tolist():
            x, y = map(flow.as_double, clients[i])
            mine, common, router = u, g, psi
            for r in plan.feed.rows(i, t, "local"):
                mine = flow.step(mine, RATES["local_lr"], lambda w, x=x[r], y=y[r]: ce(flow.block(w, x, False), y))
            for r in plan.feed.rows(i, t, "train"):
                xr, yr = x[r], y[r]

                def mixed(w, p, xr=xr, yr=yr, mine=mine):
                    return ce(flow.personalised(w, mine, p, xr), yr)

                router = flow.step(
                    router, RATES["router_lr"], lambda p, w=common, xr=xr: mixed(w, p) + flow.regulariser(p, xr, 0.05)
                )
                common = flow.step(common, RATES["lr"], lambda w, p=router: mixed(w, p))
            n = np.array([SIZES[i]])
            sent.append((common, mine, router, *(int(plan.feed.phases[phase].rows(n)[0]) for phase in ("train", "local"))))
        here, there = (sum(s[k] for s in sent) for k in (3, 4))
        g, psi = (flow.mean([(s[k], s[3] / here) for s in sent]) for k in (0, 2))
        u = flow.mean([(s[1], s[4] / there) for s in sent])
        for name, theirs in (("model", g), ("other", u)):
            assert apart(layers(shared[name]), theirs) <= TOLERANCE, f"{name} in round {t}"
        assert apart(chains(shared["router"]), psi) <= TOLERANCE
        for found in logits:
            assert float((found - flow.predict((g, u, psi), probe)).abs().max()) <= TOLERANCE
    assert apart(g, u) > 0.05
