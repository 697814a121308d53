"""DP-SGD: clipping, noise, sampling; what is refused; that it is nothing where it should be nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm
from fedtailor.data import Batches
from fedtailor.data.batches import Work, indices, poisson
from fedtailor.data.secret import NO_USE, Secret, Use
from fedtailor.engine.setup import make_plan
from fedtailor.errors import InvalidArgument
from fedtailor.local import Private, gradient, gradient_on
from fedtailor.local.private import private_gradient
from tests.make import batches, federation, normal, pairs, seeded

OPEN = Private(clip=math.inf, noise=0.0, force=True, sampling="shuffle")  # private in form only
SIZES = [23, 9, 31, 14]
REFUSED = {"AL2SGD", "APFL", "PerFedAvg", "HypCluster", "KNNPer", "FedCLUPDynamic", "ScaffoldP"}
# they count labels, average features, compare losses, or send gradients and Newton directions
REFUSED |= {"FedROD", "FedProto", "FedPAC", "FedFomo", "GIANT", "FlowGate"}


class Grouped(nn.Module):
    """Not a chain, so its rows' gradients are taken row by row; with group norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(3, 8), nn.GroupNorm(2, 8), nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def chain(inputs: int = 3, outputs: int = 2) -> nn.Module:
    """The same as a chain of known layers."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, outputs))


def image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.GroupNorm(1, 3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, dilation=2, bias=False),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def token_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2, bias=False), nn.Flatten(), nn.Linear(10, 3))


def final(algorithm: Algorithm, engine: str, model: Any, fed: ft.Federation | None = None, **options: Any) -> Any:
    given = {"rounds": 2, "batch_size": 8, "dtype": "float64", "evaluate_every": 0, "workers": 1, **options}
    done = ft.run(algorithm, fed or federation(SIZES), model, engine=engine, **given)
    people = [done.engine.personal(done.shared, i, done.store) for i in range(len(SIZES))]
    return {"shared": done.shared, "people": {str(i): p for i, p in enumerate(people)}}


def apart(a: Any, b: Any) -> float:
    return max(
        (float((x - y).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True) if x.numel()), default=0.0
    )


MILD: list[tuple[type[Algorithm], dict[str, Any]]] = [
    (ft.FedAvg, {"epochs": 2}),
    (ft.FedProx, {"mu": 0.5}),
    (ft.Ditto, {"lam": 0.3}),
    (ft.Scaffold, {}),
    (ft.PFedMe, {"inner_steps": 3}),
    (ft.FedCLUP, {"steps": 4, "same_batch": True}),
    (ft.FedAvgFT, {"finetune_epochs": 2}),
    (ft.L2GD, {"p": 0.5, "lam": 0.1}),
    (ft.FedAlt, {}),
    (ft.FedBABU, {"finetune_epochs": 1}),
    (ft.PartialFed, {}),
]


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("model", ["chain", "other"])
@pytest.mark.parametrize(("kind", "options"), MILD, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_without_noise_and_clipping_it_is_the_plain_run(
    kind: type[Algorithm], options: dict[str, Any], model: str, engine: str
) -> None:
    network = seeded(chain if model == "chain" else Grouped)
    plain = kind(lr=0.1, opt=ft.SGD(weight_decay=0.01) if kind is not ft.Scaffold else ft.SGD(), **options)
    open_ = replace(plain, opt=replace(OPEN, opt=plain.opt))
    assert apart(final(plain, engine, network), final(open_, engine, network)) < 1e-12


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("opt", [ft.SGD(momentum=0.9), ft.Adam(weight_decay=0.1)], ids=["momentum", "adam"])
def test_a_linear_model_and_other_optimizers_without_noise(opt: Any, engine: str) -> None:
    plain = ft.FedAvg(lr=0.05, epochs=2, opt=opt, radius=0.3)
    open_ = replace(plain, opt=replace(OPEN, opt=opt))
    assert apart(final(plain, engine, "linear"), final(open_, engine, "linear")) < 1e-12


@pytest.mark.parametrize(("kind", "options"), MILD, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_engines_agree_with_noise(kind: type[Algorithm], options: dict[str, Any]) -> None:
    method = kind(lr=0.1, opt=Private(clip=0.4, noise=0.7, seed=1), **options)
    model: Any = seeded(chain)
    alone = final(method, "loop", model)
    assert apart(alone, final(method, "vectorized", model)) < 1e-10
    other = replace(method, opt=replace(method.opt, seed=2))
    assert apart(alone, final(other, "loop", model)) > 1e-3
    assert apart(alone, final(replace(method, opt=replace(method.opt, sampling="shuffle")), "loop", model)) > 1e-3


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("workers", [1, 2])
def test_engines_and_workers_agree_on_a_linear_model(sampling: str, workers: int) -> None:
    method = ft.Ditto(lr=0.1, opt=Private(clip=0.4, noise=0.7, seed=1, sampling=sampling))
    assert apart(final(method, "loop", "linear", workers=workers), final(method, "vectorized", "linear")) < 1e-10


# -- clipping -----------------------------------------------------------------------------------------------------------
def by_hand(task: ft.Task, x: Tensor, y: Tensor, clip: float, names: list[str]) -> dict[str, Tensor]:
    """Row after row, each with a backward pass of its own."""
    total = {name: torch.zeros_like(p) for name, p in task.init().items() if name in names}
    for i in range(len(y)):
        model = {name: p.requires_grad_(name in names) for name, p in task.init().items()}
        task.risk(model, {"x": x[i : i + 1], "y": y[i : i + 1]}).backward()
        norm = math.sqrt(sum(float((model[name].grad ** 2).sum()) for name in names))
        for name in names:
            total[name] += model[name].grad * min(1.0, clip / norm)
    return total


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: nn.Linear(3, 3), (3,)), (image_net, (2, 9, 9)), (token_net, (5, 3))],
    ids=["linear", "images", "tokens"],
)
@pytest.mark.parametrize("way", ["by layer", "row by row", "stacked"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "part"])
def test_clipped_sums_are_those_of_a_loop_over_rows(build: Callable[[], nn.Module], shape: Any, way: str, frozen: bool) -> None:
    task = ft.Task.from_module(seeded(build), classes=3)
    assert task.clipped is not None or task.layers is not None
    x, y = (
        normal(12, *shape, seed=1) * torch.linspace(0.1, 3, 12, dtype=torch.float64).view(-1, *[1] * len(shape)),
        torch.arange(12) % 3,
    )
    names = [name for name in task.names if not frozen or name not in task.names[:2]] if len(task.names) > 2 else list(task.names)
    norms = [
        math.sqrt(sum(float((g**2).sum()) for g in by_hand(task, x[i : i + 1], y[i : i + 1], 1e9, names).values()))
        for i in range(12)
    ]
    clip = sorted(norms)[5] * 1.0001  # six rows are clipped, six are not
    wanted = by_hand(task, x, y, clip, names)
    used = task if way == "by layer" else replace(task, trainer=None, clipped=None, gradient=None)
    model, batch, stacked = task.init(), {"x": x, "y": y, "key": torch.tensor(3)}, way == "stacked"
    if stacked:
        other = {"x": x.flip(0), "y": y.flip(0), "key": torch.tensor(4)}
        batch = {name: torch.stack([batch[name], other[name]]) for name in batch}
        model = {name: torch.stack([p, p]) for name, p in model.items()}
    opt = Private(clip=clip, noise=0.0, force=True)
    moving = [name in names for name in task.names]
    found = private_gradient(opt, used.risk, used, model, batch, moving, 0, stacked)
    for name, g in zip(task.names, found, strict=True):
        if name not in names:
            assert g is None
            continue
        for one in g if stacked else [g]:
            assert torch.allclose(one * 12, wanted[name], rtol=1e-10, atol=1e-12)


def test_a_network_that_uses_a_layer_twice_or_mixes_rows_is_taken_row_by_row() -> None:
    class Twice(nn.Module):
        rows_apart = True

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))

    class Centered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    tied[1].weight = tied[0].weight
    x, y = normal(6, 3), torch.arange(6) % 2
    for module in (seeded(Twice), tied.double(), seeded(lambda: nn.Sequential(Centered(), nn.Linear(3, 2)))):
        task = ft.Task.from_module(module, classes=2)
        wanted = by_hand(task, x, y, 0.2, list(task.names))
        found = private_gradient(
            Private(clip=0.2, noise=0.0, force=True), task.risk, task, task.init(), {"x": x, "y": y}, [True] * len(wanted), NO_USE
        )
        for g, name in zip(found, task.names, strict=True):
            assert torch.allclose(g * 6, wanted[name], atol=1e-12)


def test_the_penalty_comes_after_the_noise() -> None:
    """A pull much stronger than the clip arrives whole: w1 = w0 - lr (clipped mean + lam (w0 - c))."""
    task = ft.Task.from_module(seeded(nn.Linear, 3, 2), classes=2)
    x, y = normal(5, 3), torch.arange(5) % 2
    center = {name: p + 100.0 for name, p in task.init().items()}
    wanted = by_hand(task, x, y, 1e-3, list(task.names))
    found = ft.descend(
        task.risk, task.init(), batches(x, y, [range(5)]), Private(lr=0.1, clip=1e-3, noise=0.0, force=True), ft.prox(center, 2.0)
    )
    for name, start in task.init().items():
        assert torch.allclose(found[name], start - 0.1 * (wanted[name] / 5 - 200.0), atol=1e-12)


def test_padded_rows_are_nothing() -> None:
    task = ft.Task.from_module(seeded(Grouped), classes=2)
    x, y = normal(4, 3), torch.arange(4) % 2
    real = batches(x, y, [[0, 1, 2], [3, 1, 0]], first_key=5)
    garbage = torch.cat([real["x"], 1e6 * normal(2, 2, 3, seed=9)], 1)
    data = {
        "x": torch.cat([garbage, 1e6 * normal(1, 5, 3)]),
        "y": torch.nn.functional.pad(real["y"], (0, 2, 0, 1)),
        "mask": torch.nn.functional.pad(real["mask"], (0, 2, 0, 1)),
        "key": torch.arange(5, 8),
    }
    opt = Private(lr=0.3, clip=0.5, noise=0.5, seed=1)
    for risk in (task.risk, lambda model, batch: task.risk(model, batch)):  # the second is not known to be the task's own
        padded = ft.descend(risk, task.init(), data, opt)
        assert apart(padded, ft.descend(task.risk, task.init(), real, opt)) < 1e-12


# -- noise --------------------------------------------------------------------------------------------------------------
def pure_noise(key: int, use: int = 0, expected: float = 1.0, size: int = 40_000) -> Tensor:
    """An empty batch has no gradient."""
    opt = Private(clip=0.5, noise=3.0, seed=1)
    model = {"w": torch.zeros(size, dtype=torch.float64)}
    batch = {"x": torch.zeros(0, 1), "y": torch.zeros(0), "key": torch.tensor(key), "expected": torch.tensor(expected)}
    (found,) = private_gradient(opt, lambda m, b: m["w"].sum(), None, model, batch, [True], Use(use, Secret.from_seed(1)))
    assert found is not None
    return found


def test_noise_has_the_deviation_it_should_have_and_is_fresh_in_every_step_client_and_use() -> None:
    """Each statistic of n normal numbers is within five of its standard errors (chance of a miss: 6e-7 each)."""
    n = 40_000
    drawn = [pure_noise(key, use, expected=4.0) for key in (1, 2, -7) for use in (0, 1)]
    for z in drawn:
        scaled = z * 4.0 / 1.5
        assert abs(float(scaled.mean())) < 5 / math.sqrt(n)
        assert abs(float(scaled.var()) - 1) < 5 * math.sqrt(2 / n)
        assert abs(float((scaled**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(n)
    assert torch.equal(pure_noise(1), pure_noise(1))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_steps_clients_rounds_and_branches_have_noise_of_their_own(engine: str) -> None:
    """With a slope that is nothing beside the start, what Ditto's two branches, four clients, two rounds do is uncorrelated."""
    fed = ft.Federation.from_arrays(pairs([6] * 4, d=500), pairs([2] * 4, d=500, seed=1))
    seen: list[Tensor] = []
    method = ft.Ditto(lam=0.0, lr=1.0, steps=2, opt=Private(clip=1e-6, noise=1.0, seed=1))
    from fedtailor.engine.loop import LoopEngine
    from fedtailor.engine.rounds import play
    from fedtailor.engine.setup import build_task
    from fedtailor.engine.vectorized import VectorizedEngine
    from fedtailor.runs.store import Store

    data = fed.to(torch.float64)
    task = build_task("linear", data, 0, torch.float64, True)
    plan = make_plan(method, task, data, 3, 0, "uniform")
    used, store = (LoopEngine(plan, 1) if engine == "loop" else VectorizedEngine(plan)), Store(4)
    before = {i: task.init() for i in range(4)}
    shared = method.init_server(task)[0]
    for _, (now, _) in play(used, shared, {}, store, 2, 4):
        seen.append((now["model"]["weight"] - shared["model"]["weight"]).flatten())  # mean of the clients' first branches
        shared = now
        for i in range(4):
            own = {k: v[0] for k, v in store.get(np.array([i]))["model"].items()}
            seen.append((own["weight"] - before[i]["weight"]).flatten())
            before[i] = own
    n = len(seen[0])
    for i, a in enumerate(seen):
        assert float(a.abs().max()) > 0
        for b in seen[:i]:
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(n)


# -- Poisson sampling ---------------------------------------------------------------------------------------------------
def test_every_row_enters_with_its_probability_and_on_its_own() -> None:
    steps, sizes = 4_000, np.array([40, 10, 7])
    index, counts = poisson(np.arange(3, dtype=np.uint64), sizes, Work(steps=steps), 8)
    assert counts.tolist() == [steps] * 3
    assert (np.sort(index[2, :, :7], 1) == np.arange(7)).all()  # fewer rows than a batch: all of them, always
    assert (index[2, :, 7:] == -1).all()
    for client, size in ((0, 40), (1, 10)):
        inside = np.zeros((steps, size))
        when, place = np.nonzero(index[client] >= 0)
        inside[when, index[client][when, place]] += 1
        assert inside.max() == 1
        q, bound = 8 / size, 5 * math.sqrt(8 / size * (1 - 8 / size) / steps)
        assert (abs(inside.mean(0) - q) < bound).all()
        together = inside.T @ inside / steps
        off = together[~np.eye(size, dtype=bool)]
        assert (abs(off - q * q) < 5 * math.sqrt(q * q * (1 - q * q) / steps)).all()
        lag = (inside[1:] * inside[:-1]).mean(0)
        assert (abs(lag - q * q) < 5 * math.sqrt(q * q * (1 - q * q) / steps)).all()
        widths = inside.sum(1)
        assert abs(widths.var() / (size * q * (1 - q)) - 1) < 0.15


def test_a_clients_samples_do_not_depend_on_who_else_is_drawn_for_or_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, sizes, work = np.array([5, 6, 7], np.uint64), np.array([30, 12, 50]), Work(epochs=2)
    together, counts = poisson(keys, sizes, work, 6)
    monkeypatch.setattr("fedtailor.data.batches.WORDS", 64)
    for i in range(3):
        alone, count = poisson(keys[i : i + 1], sizes[i : i + 1], work, 6)
        assert count[0] == counts[i] == indices(keys[i : i + 1], sizes[i : i + 1], work, 6)[1][0]
        width = alone.shape[2]
        assert (together[i, : count[0], :width] == alone[0]).all()
        assert (together[i, count[0] :] == -1).all()


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("batch", [1, 8, None])
def test_poisson_steps_divide_by_the_expected_batch(engine: str, batch: int | None) -> None:
    """FedAvg of least squares, written down in NumPy: a sum over the sampled rows, over the mean size of a sample."""
    fed = federation(SIZES, kind="regression")
    method = ft.FedAvg(lr=0.2, epochs=2, opt=Private(clip=0.7, noise=0.0, force=True))
    done = ft.run(method, fed, "linear", engine=engine, batch_size=batch, rounds=3, dtype="float64", evaluate_every=0, workers=1)
    found, feed = done.shared["model"], done.engine.plan.feed
    w, empty = np.zeros(4), 0
    for number in range(3):
        ends = []
        for i, n in enumerate(SIZES):
            x, y = (t.double().numpy() for t in fed.train.client(i))
            x, v = np.hstack([x, np.ones((n, 1))]), w.copy()
            for rows in feed.rows(i, number, "train"):
                each = (x[rows] @ v - y[rows])[:, None] * x[rows]
                norm = np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-30)
                v = v - 0.2 * (each * np.minimum(1, 0.7 / norm)).sum(0) / min(batch or n, n)
                empty += not len(rows)
            ends.append(v)
        w = np.mean(ends, 0)
    assert (empty > 0) == (batch == 1)
    assert np.allclose(np.r_[found["weight"].numpy().ravel(), found["bias"].numpy()], w, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_scaffold_counts_empty_steps(engine: str) -> None:
    """c_i = (w - y)/(K lr) with K all steps, those with no row as well."""
    method = ft.Scaffold(lr=0.1, steps=12, opt=Private(clip=1.0, noise=1.0, seed=1))
    fed = federation([40, 40])
    plan = make_plan(method, ft.Task.from_module(seeded(nn.Linear, 3, 2), classes=2), fed.to(torch.float64), 1, 0, "uniform")
    assert any(not len(rows) for rows in plan.feed.rows(0, 0, "train"))
    done = ft.run(method, fed, "linear", rounds=1, batch_size=1, engine=engine, dtype="float64", workers=1)
    control = tree.leaves(done.shared["control"])[0]
    moved = tree.leaves(done.shared["model"])[0]  # from zero
    assert torch.allclose(control, -moved / (12 * 0.1), atol=1e-12)


# -- what is refused ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_method_is_private_or_says_why_not(kind: type[Algorithm]) -> None:
    """No method that is let through ever shows a row to anything but a private descent: the guard would have refused."""
    pace: dict[str, Any] = {} if kind in (ft.L2GD, ft.AL2SGD, ft.GIANT) else {"steps": 2}
    method = kind(opt=Private(clip=1.0, noise=1.0), **pace)
    fed = replace(federation([12, 9], val=True), public=torch.zeros(4, 3))
    model = seeded(chain).float()
    if kind.__name__ in REFUSED:
        with pytest.raises(InvalidArgument, match=f"^{kind.__name__} cannot be private: [^\n]*leave privacy out$"):
            ft.run(method, fed, model, rounds=2, batch_size=4, evaluate_every=0)
        return
    for engine in ("loop", "vectorized"):
        done = ft.run(method, fed, model, rounds=2, batch_size=4, evaluate_every=0, engine=engine, workers=1)
        assert done.summary["epsilon_max"] >= done.summary["epsilon"] > 0


def test_scaffoldp_is_private_without_its_first_gradients() -> None:
    method = ft.ScaffoldP(first="zeros", steps=2, opt=Private())
    assert ft.run(method, federation([9, 8]), "mlp", rounds=2, batch_size=4).summary["epsilon"] > 0


@dataclass(frozen=True, kw_only=True)
class Sneaky(Algorithm):
    """Looks at rows behind the optimiser's back, in one of several ways, from round ``since`` on."""

    how: str = "gradient"
    since: int = 0

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        w = shared["model"]
        model = ft.descend(task.risk, w, data, self.optimizer(rnd))
        if rnd.number >= self.since:
            model = self.peek(task, model, data, rnd)
        return {"delta": tree.sub(model, w)}, personal

    def peek(self, task, model, data, rnd):
        if self.how == "gradient":
            return tree.add(model, gradient(task.risk, model, data), -1.0)
        if self.how == "scan":
            return ft.scan(lambda m, batch: tree.add(m, gradient_on(task.risk, m, batch), -1.0), model, data)
        if self.how == "rows":
            return {**model, "bias": model["bias"] + data["x"].sum()}
        if self.how == "validation":
            return {**model, "bias": model["bias"] + data["val"]["y"].sum()}
        if self.how == "other optimiser":
            return ft.descend(task.risk, model, data, ft.SGD(lr=0.1))
        return ft.descend(task.risk, model, data, self.optimizer(rnd))

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.add(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("since", [0, 5])
@pytest.mark.parametrize("how", ["gradient", "scan", "rows", "validation", "other optimiser", "twice"])
def test_a_method_that_looks_at_rows_by_other_ways_is_stopped(how: str, since: int, engine: str) -> None:
    method = Sneaky(how=how, since=since, steps=2, opt=Private())
    fed = federation([9, 8], val=True)

    def go() -> ft.Run:
        return ft.run(method, fed, "linear", rounds=7, batch_size=4, engine=engine, workers=1)

    if how == "twice" and since == 0:  # seen beforehand, and paid for
        once = ft.run(ft.FedAvg(steps=2, opt=Private()), fed, "linear", rounds=7, batch_size=4)
        assert go().summary["epsilon"] > 1.3 * once.summary["epsilon"]
        return
    with pytest.raises(InvalidArgument, match=r"^Sneaky [^\n]*leave privacy out$"):
        go()


def test_batch_norm_is_refused_and_group_norm_offered() -> None:
    with pytest.raises(InvalidArgument, match=r"mixes the rows[^\n]*group norm"):
        ft.run(ft.FedAvg(opt=Private()), federation([9, 8]), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def test_steps_of_the_theory_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not private"):
        ft.run(ft.FedCLUP(steps="theory", opt=Private()), federation([9, 8]))


def test_a_method_that_fine_tunes_is_evaluated_once() -> None:
    method, fed = ft.FedAvgFT(opt=Private()), federation([9, 8])
    with pytest.raises(InvalidArgument, match="evaluate_every=0"):
        ft.run(method, fed, rounds=3, evaluate_every=1)
    done = ft.run(method, fed, rounds=3)
    assert ["acc_personal" in record for record in done.history] == [False, False, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": 0.0}, "clip must be"),
        ({"clip": "1"}, "clip must be"),
        ({"clip": None}, "clip must be"),
        ({"noise": -1.0}, "noise must be"),
        ({"noise": math.inf}, "noise must be"),
        ({"noise": 1.0, "target_epsilon": 1.0}, "not both"),
        ({"target_epsilon": 0.0}, "target_epsilon must be"),
        ({"delta": 1.0}, "delta must be"),
        ({"clip": math.inf}, "finite clip"),
        ({"sampling": "epochs"}, "poisson or shuffle"),
        ({"accountant": "moments"}, "prv or rdp"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"opt": Private()}, "opt must be"),
        ({"opt": ft.SGD(lr=0.3)}, "give lr"),
    ],
    ids=lambda v: "" if isinstance(v, str) else "-".join(f"{k}={x}" for k, x in v.items() if not hasattr(x, "lr")),
)
def test_settings_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Private(**options)


def test_the_laws_hold_under_privacy() -> None:
    opt = Private(clip=0.5, noise=0.8)
    # all but the limits: Ditto's personal branch is Local with noise of its own
    assert len(ft.check_algorithm(ft.Ditto(opt=opt, steps=2), model=seeded(chain, 4, 3), laws=range(1, 10))) == 9


def test_leaves_no_trace_in_the_module() -> None:
    """Hooks are taken away again, also after an error."""
    task = ft.Task.from_module(seeded(chain), classes=2)
    opt = Private(clip=1.0, noise=0.0, force=True)
    x, y = normal(4, 3), torch.arange(4) % 2
    ft.descend(task.risk, task.init(), batches(x, y, [range(4)]), opt)
    with pytest.raises(RuntimeError):
        ft.descend(task.risk, task.init(), Batches(x[:, :2], y, np.arange(4)[None], np.zeros(1, np.int64)), opt)
    assert task.trainer is not None
    assert not any(module._forward_hooks for module in task.trainer.modules())


# -- does it protect? -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_membership_shows_without_privacy_and_hardly_with() -> None:
    """A loss threshold tells members from others where random labels are learnt by heart; at epsilon 2 it can hardly.

    Epsilon bounds what any attack could do; this one is asked to do no better than guessing.
    """
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(600, 40)), draw.integers(0, 2, 600)
    members, others = (
        [(x[i : i + 100], y[i : i + 100]) for i in (0, 100, 200)],
        [(x[i : i + 100], y[i : i + 100]) for i in (300, 400, 500)],
    )
    fed = ft.Federation.from_arrays(members, others)

    def auc(opt: Any) -> tuple[float, dict[str, Any]]:
        done = ft.run(
            ft.FedAvg(lr=0.5, epochs=2, opt=opt),
            fed,
            "mlp:64",
            rounds=30,
            batch_size=20,
            evaluate_every=0,
            engine="loop",
            workers=1,
        )
        losses = []
        for rows, labels in ((x[:300], y[:300]), (x[300:], y[300:])):
            logits = done.predict_global(torch.tensor(rows, dtype=torch.float32))
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="none").numpy())
        return float((losses[0][:, None] < losses[1][None, :]).mean()), done.summary

    plain, _ = auc(ft.SGD())
    hidden, summary = auc(Private(clip=1.0, target_epsilon=2.0))
    assert summary["epsilon_max"] <= 2.0
    assert plain > 0.75
    # half plus the deviation of an AUC of 300 against 300 that means nothing, four times
    assert hidden < 0.5 + 4 * math.sqrt((300 + 300 + 1) / (12 * 300 * 300))
