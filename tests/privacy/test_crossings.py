"""DP-SGD where methods take turns on a batch, use parts of the rows, or read sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

import fedtailor as ft
from fedtailor import tree
from fedtailor.data.batches import Work, members, poisson
from fedtailor.data.feed import Feed
from fedtailor.data.guard import Guard
from fedtailor.data.secret import Secret
from fedtailor.engine.private import parts, spends
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.errors import InvalidArgument
from fedtailor.local import Private, Turn, alternate
from fedtailor.local.private import private_gradient
from fedtailor.models import LSTM
from fedtailor.privacy.accountant import Spend, epsilon, gathered
from tests.make import batches, federation, normal, numbered, seeded
from tests.privacy.test_private import OPEN, apart
from tests.privacy.test_private import final as ended

SIZES = [13, 6, 1, 9]
TOKENS = 5


def final(algorithm: ft.Algorithm, engine: str, model: nn.Module, fed: ft.Federation | None = None, **options: Any) -> Any:
    return ended(algorithm, engine, model, fed or federation(SIZES), **{"batch_size": 4, **options})


def layers() -> nn.Module:
    """Two blocks, with dropout before the second: a mask must be the row's own, whether it comes alone or in a batch."""
    return seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 2)))


def sequences(even: bool, per_position: bool = True) -> ft.Federation:
    draw = np.random.default_rng(4)

    def split(counts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        out = []
        for n in counts:
            x, y = draw.integers(0, TOKENS, (n, 5)), draw.integers(0, TOKENS, (n, 5))
            lengths = np.full(n, 4) if even else draw.integers(1, 6, n)
            out.append((x, np.where(np.arange(5) < lengths[:, None], y, -1) if per_position else y[:, -1]))
        return out

    return ft.Federation.from_arrays(split(SIZES), split([3] * 4), tokens=TOKENS, task="classification")


def lstm(per_position: bool = True, dropout: float = 0.3, hidden: tuple[int, ...] = (4, 4)) -> nn.Module:
    return seeded(lambda: LSTM(TOKENS, TOKENS, 3, hidden, per_position=per_position, dropout=dropout))


# -- turns on a batch ---------------------------------------------------------------------------------------------------
def two_turns(params: Any, batch: Any, mine: str) -> torch.Tensor:
    """Row by row a.x (its slope in a: x) on the first turn, b (a.x) (its slope in b: a.x) on the second."""
    each = batch["x"] @ params["a"]["w"] * (params["b"]["w"] if mine == "b" else 1.0)
    mask = batch.get("mask")
    return each.mean() if mask is None else (each * mask).sum() / mask.sum().clamp(min=1)


TURNS = [
    Turn("a", lambda p, batch: two_turns(p, batch, "a"), Private(lr=0.3, clip=0.9, noise=0.0, force=True)),
    Turn("b", lambda p, batch: two_turns(p, batch, "b"), Private(lr=0.2, clip=0.5, noise=0.0, force=True)),
]


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_every_turn_clips_its_own_gradients_from_where_the_turn_before_left_the_parameters(engine: str) -> None:
    x = normal(7, 3) * torch.linspace(0.2, 2, 7, dtype=torch.float64).unsqueeze(1)
    steps = [[0, 1, 2, 3], [4, 5, 6, 0]]
    start = {"a": {"w": normal(3, seed=1)}, "b": {"w": torch.tensor(1.5, dtype=torch.float64)}}
    data = batches(x, torch.zeros(7), steps)
    if engine == "loop":
        found = alternate(TURNS, start, data)
    else:
        wide = {name: torch.nn.functional.pad(data[name], (0, 0, 0, 2) if name == "x" else (0, 2)) for name in ("x", "y", "mask")}
        many = {name: value.unsqueeze(0) for name, value in {**wide, "key": data["key"]}.items()}
        found = tree.map(lambda leaf: leaf[0], vmap(lambda mine: alternate(TURNS, start, mine))(many))
    a, b, short = start["a"]["w"].numpy().copy(), 1.5, 0
    for rows in steps:
        z = x.numpy()[rows]
        norms = np.linalg.norm(z, axis=1)
        a = a - 0.3 * (z * np.minimum(1, 0.9 / norms)[:, None]).sum(0) / 4
        b = b - 0.2 * np.clip(z @ a, -0.5, 0.5).sum() / 4
        short += (norms > 0.9).sum() + (abs(z @ a) > 0.5).sum()
    assert 4 < short < 16  # some are clipped, some are not
    assert np.allclose(found["a"]["w"], a, atol=1e-12)
    assert np.allclose(found["b"]["w"], b, atol=1e-12)


def test_turns_are_uses_of_the_batches_with_noise_of_their_own_and_all_must_be_private() -> None:
    n, guard = 20_000, Guard("Flow", Secret.from_seed(1))
    start = {"a": {"w": torch.zeros(n, dtype=torch.float64)}, "b": {"w": torch.zeros(n, dtype=torch.float64)}}
    opt = Private(lr=1.0, clip=1.0, noise=1.0, seed=1)
    turns = [Turn(name, lambda p, batch: (p["a"]["w"] * 0).sum(), opt) for name in ("a", "b")]
    data = guard.over(batches(torch.zeros(2, 1), torch.zeros(2), [[0, 1]]), "train")
    once = alternate(turns, start, data)
    again = alternate(turns, start, data)
    assert guard.seen == {"train": 4}
    drawn = [2 * leaf for found in (once, again) for leaf in tree.leaves(found)]  # the noise over two rows
    for i, z in enumerate(drawn):
        assert abs(float(z.var()) - 1) < 5 * math.sqrt(2 / n)
        for other in drawn[:i]:
            assert abs(float(torch.corrcoef(torch.stack([z, other]))[0, 1])) < 5 / math.sqrt(n)
    with pytest.raises(InvalidArgument, match=r"^Flow descends on a client's rows without its private optimiser[^\n]*$"):
        alternate([turns[0], replace(turns[1], opt=ft.SGD(lr=0.1))], start, data)
    with pytest.raises(InvalidArgument, match=r"^Flow uses its batches \(train\) 2 times in a round, but 1 are accounted for"):
        alternate(turns, start, Guard("Flow", Secret.from_seed(1), {"train": 1}).over(data.data, "train"))


# -- Flow ---------------------------------------------------------------------------------------------------------------
FLOWS: dict[str, dict[str, Any]] = {
    "plain": {"router_dropout": 0.3, "deploy": "all"},
    "whole models": {"routing": "model", "order": "router-first", "split": "whole"},
    "fixed": {"q0": 0.4, "redraw": True},
    "pi": {"variant": "pi", "order": "global-first"},
    "own": {"global_risk": "own", "warmup": 1},
}


def flow(opt: Any, **options: Any) -> ft.Flow:
    return ft.Flow(lr=0.3, router_lr=0.2, local_steps=2, gamma=0.1, opt=opt, **options)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("options", FLOWS.values(), ids=FLOWS)
def test_flow_without_noise_and_clipping_is_plain_flow(options: dict[str, Any], engine: str) -> None:
    plain = final(flow(ft.SGD(momentum=0.5), **options), engine, layers())
    assert apart(plain, final(flow(replace(OPEN, opt=ft.SGD(momentum=0.5)), **options), engine, layers())) < 1e-12


@pytest.mark.parametrize("options", FLOWS.values(), ids=FLOWS)
def test_engines_agree_on_private_flow(options: dict[str, Any]) -> None:
    method = flow(Private(clip=0.3, noise=0.5, seed=1), **options)
    alone = final(method, "loop", layers())
    assert apart(alone, final(method, "vectorized", layers())) < 1e-10
    other = replace(method, opt=replace(method.opt, seed=2))
    assert apart(alone, final(other, "loop", layers())) > 1e-3


def test_flow_on_a_recurrent_network() -> None:
    """Its dropouts, the router's among them, are the row's own at every position; engines agree."""
    fed, model = sequences(even=True), lstm(hidden=(4,))
    for opts in ((ft.SGD(), OPEN), (Private(clip=0.2, noise=0.5, seed=1),) * 2):
        found = [
            final(flow(opt, steps=2, deploy_steps=1, router_dropout=0.3), engine, model, fed, rounds=1)
            for opt, engine in zip(opts, ("loop", "vectorized"), strict=True)
        ]
        assert apart(*found) < 1e-10


def test_batch_norm_under_flow_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InvalidArgument, match=r"^batch norm cannot be private[^\n]*$"):
        ft.run(ft.Flow(opt=Private()), federation([9, 8]), model)


# -- parts of the rows --------------------------------------------------------------------------------------------------
def test_poisson_samples_within_a_part_are_of_its_rows_each_with_its_probability() -> None:
    steps, sizes, work = 4_000, np.array([40, 1, 30]), Work(steps=4_000, part=(0.25, 1.0))
    part_keys = np.array([7, 8, 9], np.uint64)
    index, counts = poisson(np.arange(3, dtype=np.uint64), sizes, work, 6, part_keys)
    assert counts.tolist() == [steps] * 3
    assert (index[1, :, 0] == 0).all()  # a single row is in every part
    for client, size in ((0, 30), (2, 22)):  # 3/4 of 40, 30 less 8
        inside = np.bincount(index[client][index[client] >= 0], minlength=sizes[client]) / steps
        part = members(part_keys, sizes, work)[client]
        assert np.flatnonzero(inside).tolist() == part[part >= 0].tolist()
        assert np.count_nonzero(inside) == size
        q = 6 / size
        assert (abs(inside[inside > 0] - q) < 5 * math.sqrt(q * (1 - q) / steps)).all()
        widths = (index[client] >= 0).sum(1)
        assert abs(widths.var() / (size * q * (1 - q)) - 1) < 0.15


@pytest.mark.parametrize("same", [False, True], ids=["fresh", "same batch"])
def test_engines_are_fed_the_same_samples_of_a_part_and_expect_its_share(same: bool) -> None:
    fed = numbered([20, 1, 9, 31])
    phases = {"train": Work(steps=5, part=(0.4, 1.0), same_batch=same), "local": Work(epochs=2, part=(0.0, 0.4))}
    feed = Feed(fed, phases, 4, 0, "poisson")
    many = feed.many(np.arange(4), 3)
    for i in range(4):
        one = feed.one(i, 3)
        assert one["rows"] == many["rows"][0, i] == [12, 1, 5, 19][i]
        for mine, wide, rows in ((one, many, [12, 1, 5, 19][i]), (one["local"], many["local"], [8, 1, 4, 12][i])):
            steps = list(mine.batches())
            for s, step in enumerate(steps):
                assert torch.equal(wide["y"][s, i][wide["mask"][s, i] > 0], step["y"])
                assert step["expected"] == wide["expected"][s, i] == min(4, rows)
            assert (wide["expected"][len(steps) :, i] == 0).all()


OPT = Private(clip=1.0, noise=2.0, seed=1)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        # 40 rows: 20 in each part, batches of 8, 3 and 2 steps. 11 rows: 6 in zeta_l, 5 in zeta_g. One row is in both
        (
            flow(OPT, steps=3, deploy_steps=4),
            [[Spend(0.4, 12)], [Spend(0.4, 4), Spend(0.4, 15, 2)], [Spend(1, 1, 6)], [Spend(1, 1, 16)], [Spend(1, 1, 14)]],
        ),
        # anew in every round: a row may be in either part each time
        (
            flow(OPT, steps=3, redraw=True, deploy="local"),
            [[Spend(0.4, 12), Spend(0.4, 15, 2)], [Spend(1, 1, 18)], [Spend(1, 1, 10)]],
        ),
        (flow(OPT, steps=3, split="whole", q0=0.5), [[Spend(0.2, 27)], [Spend(8 / 11, 12)], [Spend(1, 1, 7)]]),
        # rounds of warming up are charged as the others
        (flow(OPT, steps=3, warmup=3, deploy="local"), None),
    ],
    ids=["parts", "redraw", "whole", "warmup"],
)  # fmt: skip
def test_a_row_is_charged_for_the_part_it_is_in(method: ft.Flow, wanted: list[list[Spend]] | None) -> None:
    fed, visits = federation([40, 11, 1]).to(torch.float64), np.array([5, 2, 1])
    plan = make_plan(method, build_task("mlp", fed, 0, torch.float64, True), fed, 8, 0, "uniform")
    found = [gathered(s) for s in spends(plan, visits)]
    owners = [client for client, _ in parts(plan)]
    assert all(a <= b for a, b in pairwise(owners))
    assert set(owners) == {0, 1, 2}
    if wanted is None:
        plain = make_plan(replace(method, warmup=0), plan.task, fed, 8, 0, "uniform")
        assert found == [gathered(s) for s in spends(plain, visits)]
    else:
        assert found == [gathered(spend) for spend in wanted]


def test_epsilon_of_flow_is_that_of_the_part_that_spends_most_and_a_target_is_kept() -> None:
    fed = federation([40, 30])
    done = ft.run(flow(OPT, steps=3, deploy_steps=4), fed, layers(), rounds=5, batch_size=8, engine="vectorized").summary
    # two turns a batch in the rounds, one (the router's) at the end
    each = [epsilon([Spend(8 / n, 4), Spend(8 / n, 15, 2)], 2.0, 1e-5) for n in (20, 15)]
    assert done["epsilon"] == pytest.approx(np.mean(each))
    assert done["epsilon_max"] == max(each)
    aimed = flow(Private(target_epsilon=3.0), steps=3, deploy_steps=4, warmup=4)
    found = ft.run(aimed, fed, layers(), rounds=5, batch_size=8, engine="vectorized").summary
    assert 2.9 < found["epsilon_max"] <= 3.0


# -- sequences ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("per_position", [False, True], ids=["last", "every position"])
def test_a_recurrent_network_without_noise_and_clipping_is_the_plain_run(per_position: bool, engine: str) -> None:
    """Where rows have as many positions; elsewhere the plain risk weighs rows by them, and privacy does not."""
    fed, model = sequences(True, per_position), lstm(per_position)
    plain, open_ = (final(ft.Ditto(lr=0.5, lam=0.2, opt=opt), engine, model, fed) for opt in (ft.SGD(), OPEN))
    assert apart(plain, open_) < 1e-12


def test_engines_agree_on_private_sequences_of_uneven_length() -> None:
    method = ft.Ditto(lr=0.5, lam=0.2, opt=Private(clip=0.1, noise=0.5, seed=1))
    assert apart(final(method, "loop", lstm(), sequences(False)), final(method, "vectorized", lstm(), sequences(False))) < 1e-10


@pytest.mark.parametrize("stacked", [False, True], ids=["loop", "vectorized"])
def test_a_sequence_is_clipped_as_a_whole_and_counts_as_one_row_however_long(stacked: bool) -> None:
    task = ft.Task.from_module(lstm(dropout=0.0))
    draw = np.random.default_rng(0)
    x, y = (torch.from_numpy(draw.integers(0, TOKENS, (6, 5))) for _ in range(2))
    y = y.masked_fill(torch.arange(5) >= torch.tensor([5, 1, 3, 2, 0, 4])[:, None], -1)  # one has no label at all
    total, norms = {name: torch.zeros_like(p) for name, p in task.init().items()}, []
    clip = 0.45
    for row in range(6):
        model = {name: p.requires_grad_() for name, p in task.init().items()}
        logits = task.apply(model, x[row : row + 1])[0].log_softmax(-1)
        real = [t for t in range(5) if y[row, t] >= 0]
        if not real:
            continue
        (-sum(logits[t, y[row, t]] for t in real) / len(real)).backward()  # type: ignore[operator]
        norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in model.values())))
        for name, p in model.items():
            total[name] += p.grad * min(1, clip / norms[-1])
    assert min(norms) < clip < max(norms)
    start, batch = task.init(), {"x": x, "y": y, "key": torch.tensor(0)}
    if stacked:
        start, batch = ({name: torch.stack([v, v]) for name, v in part.items()} for part in (start, batch))
    opt = Private(clip=clip, noise=0.0, force=True)
    found = private_gradient(opt, task.risk, task, start, batch, [True] * len(start), 0, stacked)
    for name, g in zip(task.names, found, strict=True):
        assert g is not None
        for one in g if stacked else [g]:
            assert torch.allclose(one * 6, total[name], atol=1e-12)


def test_a_private_run_on_sequences_says_that_they_count_alike() -> None:
    note = "under privacy every sequence counts alike"
    for opt, said in ((Private(), True), (ft.SGD(), False)):
        found = ft.run(ft.FedAvg(opt=opt), sequences(False), "lstm:3,4", rounds=1, batch_size=8).summary
        assert any(note in line for line in found["notes"]) == said
