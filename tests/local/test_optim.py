"""Local optimisers, schedules, projection and penalties against torch.optim and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import fedtailor as ft
from fedtailor import Task, errors
from fedtailor.local import SGD, Adam, Penalty, descend, linear, prox
from fedtailor.local.schedule import Cosine, Exponential, Harmonic, Milestones, at
from tests.make import batches, federation, normal, pairs, seeded

STEPS, ROWS, WIDTH = 10, 12, 5
RNG = np.random.default_rng(0)
INDEX = np.stack([RNG.permutation(ROWS)[:WIDTH] for _ in range(STEPS)])


def net(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), seed=seed)


def rows(seed: int = 0):
    return normal(ROWS, 3, seed=seed), (normal(ROWS, seed=seed + 100) > 0).long()


def torch_loop(module: nn.Module, make, x, y, index=INDEX, lrs=None) -> dict[str, torch.Tensor]:
    """The plain torch training loop."""
    optimizer = make(module.parameters())
    for k, take in enumerate(index):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[k]
        optimizer.zero_grad()
        F.cross_entropy(module(x[take]), y[take]).backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in module.named_parameters()}


def assert_near(got, want, tol=1e-12):
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=tol, msg=lambda text, name=name: f"{name}: {text}")


OPTIMIZERS = {
    "sgd": (SGD(lr=0.3), lambda p: torch.optim.SGD(p, 0.3)),
    "momentum": (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "decay": (SGD(lr=0.3, weight_decay=0.05), lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.05)),
    "both": (
        SGD(lr=0.1, momentum=0.7, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.7, weight_decay=0.05),
    ),
    "adam": (Adam(lr=0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adam decay": (Adam(lr=0.05, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.1)),
    "adam betas": (
        Adam(lr=0.05, beta1=0.5, beta2=0.8, eps=1e-3),
        lambda p: torch.optim.Adam(p, 0.05, betas=(0.5, 0.8), eps=1e-3),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_are_those_of_torch_optim(name):
    ours, theirs = OPTIMIZERS[name]
    x, y = rows()
    task = Task.from_module(net())
    got = descend(task.risk, task.init(), batches(x, y, INDEX), ours)
    assert_near(got, torch_loop(net(), theirs, x, y))


@pytest.mark.parametrize("own_risk", [True, False], ids=["stacked", "traced"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_ragged_clients_take_the_steps_of_torch_optim(name, own_risk):
    """Three clients under vmap, with 10, 4 and 7 steps; what they do after their last step is nothing."""
    ours, theirs = OPTIMIZERS[name]
    task = Task.from_module(net())
    risk = task.risk if own_risk else lambda p, b: task.risk(p, b)
    many = [rows(s) for s in range(3)]
    work = [10, 4, 7]
    index = np.stack([INDEX, INDEX, INDEX], 1)  # [steps, clients, batch]
    data = {
        "x": torch.stack([many[c][0][index[:, c]] for c in range(3)], 1),
        "y": torch.stack([many[c][1][index[:, c]] for c in range(3)], 1),
        "mask": torch.stack([(torch.arange(STEPS) < n).double()[:, None].expand(STEPS, WIDTH) for n in work], 1),
    }
    start = {k: torch.stack([Task.from_module(net(s)).init()[k] for s in range(3)]) for k in task.init()}
    got = vmap(lambda p, d: descend(risk, p, d, ours), in_dims=(0, 1))(start, data)
    for c in range(3):
        want = torch_loop(net(c), theirs, *many[c], INDEX[: work[c]])
        assert_near({k: v[c] for k, v in got.items()}, want)


def test_descend_leaves_its_start_and_its_data_alone():
    x, y = rows()
    task = Task.from_module(net())
    start = task.init()
    before = {k: v.clone() for k, v in start.items()}
    rows_before = x.clone()
    descend(task.risk, start, batches(x, y, INDEX), Adam(lr=0.5))
    assert_near(start, before, 0)
    assert torch.equal(x, rows_before)
    assert all(not v.requires_grad and v.grad is None for v in start.values())


def test_optimiser_state_is_fresh_in_every_descent():
    """Ten steps in one go keep the momentum, five and five lose it."""
    x, y = rows()
    task, opt = Task.from_module(net()), SGD(lr=0.1, momentum=0.9)
    half = descend(task.risk, task.init(), batches(x, y, INDEX[:5]), opt)
    got = descend(task.risk, half, batches(x, y, INDEX[5:]), opt)
    module = net()
    torch_loop(module, OPTIMIZERS["momentum"][1], x, y, INDEX[:5])
    assert_near(got, torch_loop(module, OPTIMIZERS["momentum"][1], x, y, INDEX[5:]))


@pytest.mark.parametrize(
    "make", [lambda: SGD(momentum=1.0), lambda: SGD(momentum=-0.1), lambda: SGD(weight_decay=-1), lambda: Adam(weight_decay=-1)]
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(errors.InvalidArgument, match=r"momentum|weight_decay"):
        make()


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 2, 5, 9, 10, 11, 40])
def test_schedules_are_their_formulas(k):
    assert Exponential(0.5, 0.9).at(k) == pytest.approx(0.5 * 0.9**k, rel=1e-14)
    half = 0.1 + (0.5 - 0.1) * (1 + math.cos(math.pi * min(k, 10) / 10)) / 2
    assert Cosine(0.5, 10, 0.1).at(k) == pytest.approx(half, rel=1e-14)
    past = (k >= 2) + (k >= 10)
    assert Milestones(0.5, (2, 10), 0.2).at(k) == pytest.approx(0.5 * 0.2**past, rel=1e-14)
    assert Harmonic(0.5).at(k) == pytest.approx(0.5 / (k + 1), rel=1e-14)
    assert Harmonic(0.5, per="step").at(3)(k) == pytest.approx(0.5 / (k + 1), rel=1e-14)
    assert at(0.25, k) == 0.25


def test_cosine_starts_at_start_and_ends_at_end():
    assert Cosine(0.5, 10, 0.1).at(0) == pytest.approx(0.5)
    assert Cosine(0.5, 10, 0.1).at(5) == pytest.approx(0.3)
    assert Cosine(0.5, 10, 0.1).at(10) == pytest.approx(0.1)


def test_a_step_size_per_step_takes_effect():
    x, y = rows()
    task = Task.from_module(net())
    lrs = [0.5 / (k + 1) for k in range(STEPS)]
    want = torch_loop(net(), lambda p: torch.optim.SGD(p, 0.5), x, y, lrs=lrs)
    assert_near(descend(task.risk, task.init(), batches(x, y, INDEX), SGD(lr=Harmonic(0.5, "step").at(0))), want)


def test_a_step_size_per_step_starts_again_in_every_round():
    """Least squares with x = y = 1 from w = 0: every step multiplies the error by 1 - lr."""
    one = [(np.ones((4, 1)), np.ones(4))] * 2
    fed = ft.Federation.from_arrays(one, one, task="regression")
    algorithm = ft.FedAvg(lr=Harmonic(0.5, per="step"), steps=3)
    run = ft.run(algorithm, fed, bias=False, rounds=2, dtype="float64", engine="loop")
    error = np.prod([1 - 0.5 / (k + 1) for k in range(3)]) ** 2
    assert run.predict_global(np.ones((1, 1))).item() == pytest.approx(1 - error, abs=1e-13)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("schedule", [Exponential(0.4, 0.5), Cosine(0.4, 3), Milestones(0.4, (1, 3)), Harmonic(0.4)])
def test_a_step_size_per_round_takes_effect(schedule, engine):
    one = [(np.ones((4, 1)), np.ones(4))] * 2
    fed = ft.Federation.from_arrays(one, one, task="regression")
    run = ft.run(ft.FedAvg(lr=schedule, steps=2), fed, bias=False, rounds=4, dtype="float64", engine=engine)
    error = np.prod([(1 - schedule.at(r)) ** 2 for r in range(4)])
    assert run.predict_global(np.ones((1, 1))).item() == pytest.approx(1 - error, abs=1e-13)


# -- projection --------------------------------------------------------------------------------------------------------


def norm(model) -> float:
    return math.sqrt(sum(float((v**2).sum()) for k, v in model.items() if not k.startswith("buffer:")))


def quadratic(params, batch):
    """1/2 ||p - target||^2, whatever the rows: one step with lr 1 lands on the target."""
    return 0.5 * ((params["w"] - batch["x"][0]) ** 2).sum() + 0.5 * (params["b"] - batch["y"][0]) ** 2


@pytest.mark.parametrize("radius", [0.5, 2.0, 100.0])
def test_a_step_ends_on_the_ball_or_is_left_alone(radius):
    target = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64)
    height = torch.tensor([12.0], dtype=torch.float64)
    start = {"w": torch.zeros(3, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
    got = descend(quadratic, start, batches(target, height, [[0]]), SGD(lr=1.0, radius=radius))
    shrink = min(1.0, radius / 13.0)
    assert_near(got, {"w": target[0] * shrink, "b": height[0] * shrink})
    assert norm(got) <= radius * (1 + 1e-12)


def test_inside_the_ball_nothing_is_touched_to_the_last_bit():
    x, y = rows()
    task = Task.from_module(net())
    free = descend(task.risk, task.init(), batches(x, y, INDEX), SGD(lr=0.1))
    projected = descend(task.risk, task.init(), batches(x, y, INDEX), SGD(lr=0.1, radius=1e3))
    assert_near(projected, free, 0)


def test_the_projection_comes_after_every_step():
    x, y = rows()
    task, radius = Task.from_module(net()), 0.8
    got = descend(task.risk, task.init(), batches(x, y, INDEX), SGD(lr=0.3, radius=radius))
    module = net()
    for take in INDEX:
        F.cross_entropy(module(x[take]), y[take]).backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.3 * p.grad
                p.grad = None
            size = nn.utils.parameters_to_vector(module.parameters()).norm()
            for p in module.parameters():
                p *= min(1.0, radius / float(size))
    assert_near(got, dict(module.named_parameters()))


@pytest.mark.parametrize("own_risk", [True, False], ids=["stacked", "traced"])
def test_the_projection_is_per_client_in_the_vectorized_path(own_risk):
    """One client outside the ball is pulled back, its neighbour inside is not touched."""
    task = Task.from_module(seeded(nn.Linear, 2, 1), "mse")
    risk = task.risk if own_risk else lambda p, b: task.risk(p, b)
    weight = torch.tensor([[[30.0, 40.0]], [[0.3, 0.4]]], dtype=torch.float64)
    start = {"weight": weight, "bias": torch.zeros(2, 1, dtype=torch.float64)}
    data = {  # x = 0, y = 0: the gradient is zero, only the projection acts
        "x": torch.zeros(1, 2, 3, 2, dtype=torch.float64),
        "y": torch.zeros(1, 2, 3, dtype=torch.float64),
        "mask": torch.ones(1, 2, 3, dtype=torch.float64),
    }
    got = vmap(lambda p, d: descend(risk, p, d, SGD(lr=0.1, radius=5.0)), in_dims=(0, 1))(start, data)
    assert_near(got, {"weight": torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]], dtype=torch.float64), "bias": start["bias"]})


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_personal_models_of_a_run_stay_in_the_ball(engine):
    fed = federation([6, 9, 4], kind="regression")
    free = ft.run(ft.Local(lr=0.2, steps=20), fed, rounds=2, engine=engine, dtype="float64")
    projected = ft.run(ft.Local(lr=0.2, steps=20, radius=0.3), fed, rounds=2, engine=engine, dtype="float64")
    assert min(norm(free.model(i)) for i in range(3)) > 0.3
    for i in range(3):
        assert norm(projected.model(i)) == pytest.approx(0.3, rel=1e-12)


def test_buffers_are_not_projected():
    task = Task.from_module(seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))))
    x, y = rows()
    got = descend(task.risk, task.init(), batches(x, y, INDEX[:1]), SGD(lr=0.1, radius=0.01))
    free = descend(task.risk, task.init(), batches(x, y, INDEX[:1]), SGD(lr=0.1))
    assert norm(got) <= 0.01 * (1 + 1e-12)
    for name in ("buffer:1.running_mean", "buffer:1.running_var"):
        assert torch.equal(got[name], free[name])


# -- penalties ---------------------------------------------------------------------------------------------------------


def small():
    """Parameters with a buffer, and a risk in which the buffer plays no part."""
    params = {"w": normal(2, 3, seed=1), "b": normal(2, seed=2), "buffer:m": normal(2, seed=3)}

    def risk(p, batch):
        return ((batch["x"] @ p["w"].T + p["b"]) ** 2).mean()

    return params, risk, normal(ROWS, 3), torch.zeros(ROWS)


PENALTIES = {
    "prox": lambda other: prox(other, 0.7),
    "prox by tensor": lambda other: prox(other, torch.tensor(0.7, dtype=torch.float64)),
    "linear": lambda other: linear(other),
    "both": lambda other: prox(other, 0.7) + linear({k: 3 * v for k, v in other.items()}),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_descend_adds_the_gradient_of_the_penaltys_value(name):
    params, risk, x, y = small()
    other = {k: normal(*v.shape, seed=9) for k, v in params.items()}
    penalty = PENALTIES[name](other)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss = risk(leaves, {"x": x[INDEX[0]]}) + penalty.value(leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    want = {k: v - (0 if g is None else 0.1 * g) for (k, v), g in zip(params.items(), grads, strict=True)}
    assert_near(descend(risk, params, batches(x, y, INDEX[:1]), SGD(lr=0.1), penalty), want)


@pytest.mark.parametrize("name", PENALTIES)
def test_the_penalty_is_the_same_stacked_over_clients(name):
    task = Task.from_module(net())
    x, y = rows()
    start = {k: torch.stack([v, 2 * v]) for k, v in task.init().items()}
    other = {k: torch.stack([normal(*v.shape, seed=9), normal(*v.shape, seed=8)]) for k, v in task.init().items()}
    data = {"x": x[INDEX].unsqueeze(1).expand(-1, 2, -1, -1), "y": y[INDEX].unsqueeze(1).expand(-1, 2, -1)}
    data["mask"] = torch.ones(STEPS, 2, WIDTH, dtype=torch.float64)
    for risk in (task.risk, lambda p, b: task.risk(p, b)):
        got = vmap(lambda p, o, d, risk=risk: descend(risk, p, d, SGD(lr=0.1), PENALTIES[name](o)), in_dims=(0, 0, 1))(
            start, other, data
        )
        for c in range(2):
            mine = {k: v[c] for k, v in start.items()}
            penalty = PENALTIES[name]({k: v[c] for k, v in other.items()})
            want = descend(task.risk, mine, batches(x, y, INDEX), SGD(lr=0.1), penalty)
            assert_near({k: v[c] for k, v in got.items()}, want)


def test_a_weight_per_client_pulls_each_client_by_its_own():
    """Zero features: the risk is flat, and a step shrinks the distance to the centre by 1 - lr * weight."""
    task = Task.from_module(seeded(nn.Linear, 2, 1), "mse")
    start = {"weight": normal(3, 1, 2), "bias": torch.zeros(3, 1, dtype=torch.float64)}
    center = {"weight": torch.zeros(1, 2, dtype=torch.float64), "bias": torch.zeros(1, dtype=torch.float64)}
    data = {
        "x": torch.zeros(2, 3, 4, 2, dtype=torch.float64),
        "y": torch.zeros(2, 3, 4, dtype=torch.float64),
        "mask": torch.ones(2, 3, 4, dtype=torch.float64),
    }
    pulls = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    got = vmap(lambda p, d, t: descend(task.risk, p, d, SGD(lr=0.1), prox(center, t)), in_dims=(0, 1, 0))(start, data, pulls)
    assert_near(got, {"weight": start["weight"] * ((1 - 0.1 * pulls) ** 2).view(3, 1, 1), "bias": start["bias"]})


def test_prox_and_linear_are_their_formulas():
    params, _, _, _ = small()
    other = {k: normal(*v.shape, seed=9) for k, v in params.items()}
    trained = ("w", "b")
    apart = sum(float(((params[k] - other[k]) ** 2).sum()) for k in trained)
    inner = sum(float((params[k] * other[k]).sum()) for k in trained)
    assert float(prox(other, 0.7).value(params)) == pytest.approx(0.35 * apart, rel=1e-12)
    assert float(linear(other).value(params)) == pytest.approx(inner, rel=1e-12)
    assert float((linear(other) + prox(other, 0.7)).value(params)) == pytest.approx(0.35 * apart + inner, rel=1e-12)
    assert float(Penalty().value(params)) == 0


def test_two_penalties_of_one_kind_are_refused():
    params, _, _, _ = small()
    with pytest.raises(ValueError, match="same kind"):
        prox(params, 1.0) + prox(params, 2.0)
    with pytest.raises(ValueError, match="same kind"):
        linear(params) + linear(params)


def test_buffers_are_never_penalised():
    task = Task.from_module(seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))))
    x, y = rows()
    far = {k: v + 5.0 for k, v in task.init().items()}
    data = batches(x, y, INDEX[:1])
    free = descend(task.risk, task.init(), data, SGD(lr=0.1))
    penalized = descend(task.risk, task.init(), data, SGD(lr=0.1), prox(far, 3.0) + linear(far))
    for name in free:
        if name.startswith("buffer:"):
            assert torch.equal(penalized[name], free[name])
        else:
            want = free[name] - 0.1 * (3.0 * -5.0 + far[name])
            torch.testing.assert_close(penalized[name], want, rtol=0, atol=1e-12)


def test_the_penalty_goes_by_key_not_by_order():
    """A centre whose keys were inserted in another order is the same centre."""
    params = {"u": torch.zeros(2, dtype=torch.float64), "v": torch.zeros(2, dtype=torch.float64)}
    center = {"v": torch.full((2,), 7.0, dtype=torch.float64), "u": torch.ones(2, dtype=torch.float64)}
    x, y = normal(4, 2), torch.zeros(4)
    for penalty, step in ((prox(center, 1.0), 0.1), (linear(center), -0.1)):
        got = descend(lambda p, b: 0.0 * (p["u"].sum() + p["v"].sum()), params, batches(x, y, [[0]]), SGD(lr=0.1), penalty)
        assert_near(got, {k: step * center[k] for k in params})


def test_fedprox_is_gradient_descent_on_risk_plus_penalty():
    """Least squares, one client, full batch: FedProx's local steps by hand in NumPy."""
    (x, y), *_ = data = pairs([8], kind="regression")
    fed = ft.Federation.from_arrays(data, data, task="regression")
    run = ft.run(ft.FedProx(mu=0.5, lr=0.1, steps=4), fed, bias=False, rounds=3, dtype="float64", engine="loop")
    w = np.zeros(3)
    for _ in range(3):
        g = w.copy()
        for _ in range(4):
            w = w - 0.1 * (x.T @ (x @ w - y) / len(y) + 0.5 * (w - g))
    np.testing.assert_allclose(run.model()["weight"].numpy()[0], w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda a, b, c: 0.1, r"fails in round 0, step 0 \(TypeError: .*let it take the round, or \(round, step\)"),
        (lambda round: {}[round], r"fails in round 0 \(KeyError: 0\)"),
        (lambda round: -0.1, r"gives -0.1 in round 0; let it return a number greater than 0"),
    ],
)
def test_a_step_size_by_a_function_that_fails_says_where(function, says):
    """Before: torn out of the function's own error, or a sentence about how a Lambda is made."""
    with pytest.raises(errors.InvalidArgument, match=says):
        ft.FedAvg(lr=function)


def test_a_step_size_may_be_a_number_of_numpys():
    assert ft.FedAvg(lr=lambda round: np.float32(0.5)).lr.at(0) == 0.5
