"""Models and tasks against plain torch: losses, gradients, parts, batch norm, dropout, and the user's own module."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import fedtailor as ft
from fedtailor import Task, errors, models
from fedtailor.local import SGD, descend
from tests.make import batches, federation, normal, seeded

LOSSES = ("cross_entropy", "mse", "bce")
TOL = {"rtol": 0, "atol": 1e-12}


def targets(loss: str, *shape: int, outputs: int = 3) -> torch.Tensor:
    """y for rows of ``shape``: class numbers, real numbers or 0/1 columns."""
    if loss == "cross_entropy":
        return torch.randint(outputs, shape, generator=torch.Generator().manual_seed(5))
    values = normal(*shape, outputs, seed=5)
    return values if loss == "mse" else (values > 0).double()


def plain_loss(loss: str, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if loss == "cross_entropy":
        return F.cross_entropy(logits, y)
    return 0.5 * F.mse_loss(logits, y) if loss == "mse" else F.binary_cross_entropy_with_logits(logits, y)


def tanh_net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


# -- risk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("make", [tanh_net, lambda: seeded(nn.Linear, 4, 3)], ids=["net", "linear"])
def test_risk_is_the_plain_torch_loss(loss, make):
    module = make()
    task = Task.from_module(module, loss)
    x, y = normal(7, 4), targets(loss, 7)
    want = plain_loss(loss, module(x), y)
    torch.testing.assert_close(task.risk(task.init(), {"x": x, "y": y}), want, **TOL)
    torch.testing.assert_close(task.apply(task.init(), x), module(x), **TOL)


def test_regression_risk_is_half_the_squared_error():
    task = Task.from_module(models.linear(2, 1, bias=False).double(), "mse")
    x, y = normal(6, 2), normal(6, seed=1)
    w = torch.tensor([[0.5, -2.0]], dtype=torch.float64)
    residual = x @ w[0] - y
    torch.testing.assert_close(task.risk({"weight": w}, {"x": x, "y": y}), 0.5 * (residual**2).mean(), **TOL)
    torch.testing.assert_close(task.gradient({"weight": w}, {"x": x, "y": y})["weight"][0], x.T @ residual / 6, **TOL)


@pytest.mark.parametrize("loss", LOSSES)
def test_risk_of_a_masked_batch_is_that_of_its_real_rows(loss):
    task = Task.from_module(tanh_net(), loss)
    x, y = normal(7, 4), targets(loss, 7)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.float64)
    real = mask.bool()
    junk = torch.where(real[:, None], x, torch.full_like(x, 1e3))
    want = task.risk(task.init(), {"x": x[real], "y": y[real]})
    torch.testing.assert_close(task.risk(task.init(), {"x": junk, "y": y, "mask": mask}), want, **TOL)


def test_risk_of_an_empty_batch_is_zero():
    task = Task.from_module(tanh_net())
    batch = {"x": normal(3, 4), "y": targets("cross_entropy", 3), "mask": torch.zeros(3, dtype=torch.float64)}
    assert float(task.risk(task.init(), batch)) == 0


def test_a_module_that_gives_one_number_per_row_can_regress():
    """The usual ``.squeeze(-1)`` at the end of a regression network."""

    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).squeeze(-1)

    module = seeded(Squeezed)
    task = Task.from_module(module, "mse")
    x, y = normal(7, 4), normal(7, seed=3)
    torch.testing.assert_close(task.risk(task.init(), {"x": x, "y": y}), 0.5 * F.mse_loss(module(x), y), **TOL)


def test_an_unknown_loss_is_refused():
    with pytest.raises(errors.InvalidArgument, match=r"unknown loss 'huber'; use one of cross_entropy, mse, bce"):
        Task.from_module(nn.Linear(2, 2), "huber")


# -- the linear model's closed form ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_closed_form_gradient_is_autograds(loss, masked, bias):
    task = Task.from_module(seeded(nn.Linear, 4, 3, bias), loss)
    x, y = normal(6, 4), targets(loss, 6)
    batch = {"x": x, "y": y}
    real = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.float64)
    if masked:
        batch["mask"] = real
    keep = real.bool() if masked else torch.ones(6, dtype=torch.bool)
    model = {k: v.requires_grad_() for k, v in task.init().items()}
    risk = plain_loss(loss, F.linear(x[keep], model["weight"], model.get("bias")), y[keep])
    want = dict(zip(model, torch.autograd.grad(risk, list(model.values())), strict=True))
    got = task.gradient({k: v.detach() for k, v in model.items()}, batch)
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], **TOL)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_closed_form_gradient_takes_clients_side_by_side(loss, masked, bias):
    task = Task.from_module(seeded(nn.Linear, 4, 3, bias), loss)
    model = {k: torch.stack([v, -v, 2 * v]) for k, v in task.init().items()}
    batch = {"x": normal(3, 6, 4), "y": targets(loss, 3, 6)}
    if masked:
        batch["mask"] = (normal(3, 6, seed=8) > 0).double()
        batch["mask"][1] = 0  # a client that has no rows left moves nowhere
    got = task.gradient(model, batch)
    for c in range(3):
        keep = batch["mask"][c].bool() if masked else torch.ones(6, dtype=torch.bool)
        mine = {k: v[c].clone().requires_grad_() for k, v in model.items()}
        if not keep.any():
            assert all(not got[k][c].any() for k in mine)
            continue
        risk = plain_loss(loss, F.linear(batch["x"][c][keep], mine["weight"], mine.get("bias")), batch["y"][c][keep])
        for name, want in zip(mine, torch.autograd.grad(risk, list(mine.values())), strict=True):
            torch.testing.assert_close(got[name][c], want, **TOL)


def test_the_closed_form_gradient_flattens_images_and_leaves_its_arguments_alone():
    task = Task.from_module(models.linear(12, 3).double())
    x, y = normal(5, 3, 2, 2), targets("cross_entropy", 5)
    model = {"weight": normal(3, 12), "bias": normal(3)}
    before = {k: v.clone() for k, v in model.items()}
    got = task.gradient(model, {"x": x, "y": y})
    leaf = {k: v.clone().requires_grad_() for k, v in model.items()}
    want = torch.autograd.grad(F.cross_entropy(F.linear(x.flatten(1), **leaf), y), list(leaf.values()))
    torch.testing.assert_close(got["weight"], want[0], **TOL)
    torch.testing.assert_close(got["bias"], want[1], **TOL)
    assert all(torch.equal(model[k], before[k]) for k in model)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_starts_at_zero(bias):
    module = models.build("linear", (2, 3), 4, seed=3, bias=bias)
    assert {k: tuple(v.shape) for k, v in module.named_parameters()} == {"weight": (4, 6)} | ({"bias": (4,)} if bias else {})
    assert all(not p.any() for p in module.parameters())


def test_a_layer_derived_from_linear_keeps_its_own_forward():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    module = seeded(Doubled, 4, 3)
    task = Task.from_module(module)
    x, y = normal(5, 4), targets("cross_entropy", 5)
    torch.testing.assert_close(task.apply(task.init(), x), module(x), **TOL)
    torch.testing.assert_close(task.risk(task.init(), {"x": x, "y": y}), F.cross_entropy(module(x), y), **TOL)
    F.cross_entropy(module(x), y).backward()
    got = descend(task.risk, task.init(), batches(x, y, [range(5)]), SGD(lr=1.0))
    torch.testing.assert_close(task.init()["weight"] - got["weight"], module.weight.grad, **TOL)


# -- networks by name --------------------------------------------------------------------------------------------------

MLP = 6 * 64 + 64 + 64 * 3 + 3
MLP_WIDE = 6 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3
CNN2 = (9 * 1 + 1) * 32 + (9 * 32 + 1) * 64 + (64 * 2 * 2 + 1) * 128 + 129 * 10  # 8 -> 4 -> 2
CNN3 = (9 * 3 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 64 + (64 * 4 * 4 + 1) * 128 + 129 * 10  # 32 -> 16 -> 8 -> 4
CNN5 = (  # 28 -> 14 -> 7 -> 4, the odd last row kept
    (9 * 1 + 1) * 32
    + (9 * 32 + 1) * 32
    + (9 * 32 + 1) * 64
    + (9 * 64 + 1) * 64
    + (9 * 64 + 1) * 128
    + (128 * 16 + 1) * 128
    + 129 * 47
)


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "count"),
    [
        ("linear", (6,), 3, 6 * 3 + 3),
        ("mlp", (2, 3), 3, MLP),
        ("mlp:5,4", (6,), 3, MLP_WIDE),
        ("cnn2", (8, 8), 10, CNN2),
        ("cnn2", (1, 8, 8), 10, CNN2),
        ("cnn3", (3, 32, 32), 10, CNN3),
        ("cnn5", (28, 28), 47, CNN5),
        ("cnn2:4,5", (8, 8), 10, (9 * 1 + 1) * 4 + (9 * 4 + 1) * 5 + (5 * 4 + 1) * 128 + 129 * 10),
    ],
)
def test_networks_have_the_right_outputs_and_parameters(name, shape, outputs, count):
    module = models.build(name, shape, outputs)
    assert sum(p.numel() for p in module.parameters()) == count
    task = Task.from_module(module)
    assert task.apply(task.init(), torch.zeros(2, *shape)).shape == (2, outputs)


@pytest.mark.parametrize("name", ["mlp", "cnn2"])
def test_the_seed_fixes_the_start_and_the_global_state_is_left_alone(name):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first, again, other = (models.build(name, (8, 8), 3, seed=s).state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


def test_a_network_that_needs_images_refuses_rows_of_features():
    with pytest.raises(errors.ModelMismatch, match="cnn2 needs images"):
        models.build("cnn2", (64,), 10)


def test_a_network_of_two_convolutions_takes_two_widths():
    with pytest.raises(errors.InvalidArgument, match=r"2 convolutions and 3 widths were given.*'cnn2:32,64'"):
        models.build("cnn2:4,5,6", (8, 8), 10)


# -- groups ------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A small ResNet; no name in it says that a layer is a norm, and the head is not called ``fc``."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.second = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 8, 3, padding=1, stride=2, bias=False)
        self.third = nn.BatchNorm2d(8)
        self.downsample = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.second(self.stem(x)))
        x = torch.relu(self.third(self.inner(x)) + self.downsample(x))
        return self.out(x.mean((2, 3)))


def names_of(*paths: str) -> set[str]:
    return {n for p in paths for n in (f"{p}.weight", f"{p}.bias", f"buffer:{p}.running_mean", f"buffer:{p}.running_var")}


def test_norms_are_found_by_module_whatever_they_are_called():
    groups = Task.from_module(Residual()).groups
    assert set(groups["norm"]) == names_of("second", "third", "downsample.1")
    assert set(groups["head"]) == {"out.weight", "out.bias"}
    assert set(groups["body"]) == set(Task.from_module(Residual()).init()) - set(groups["head"])


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.RMSNorm, lambda n: nn.GroupNorm(2, n), lambda n: nn.InstanceNorm1d(n, affine=True)]
)
def test_every_kind_of_norm_is_in_the_group(norm):
    layer = norm(4)
    task = Task.from_module(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)))
    assert set(task.groups["norm"]) == {f"1.{name}" for name, _ in layer.named_parameters()}
    assert set(task.groups["head"]) == {"2.weight", "2.bias"}


def test_the_head_is_the_last_layer_with_weights_and_never_a_norm():
    last_is_norm = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.LayerNorm(2))
    assert set(Task.from_module(last_is_norm).groups["head"]) == {"2.weight", "2.bias"}
    trailing = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softplus())
    assert set(Task.from_module(trailing).groups["head"]) == {"2.weight", "2.bias"}
    assert set(Task.from_module(nn.Linear(3, 2)).groups["head"]) == {"weight", "bias"}
    assert set(Task.from_module(models.cnn(2, (8, 8), 3)).groups["head"]) == {"10.weight", "10.bias"}


def test_groups_may_be_named_by_module_object_or_by_path():
    module = Residual()
    task = Task.from_module(module, groups={"mine": [module.downsample, "stem"], "head": [module.inner]})
    assert set(task.groups["mine"]) == {"downsample.0.weight", "stem.weight"} | names_of("downsample.1")
    assert task.groups["head"] == ("inner.weight",)
    assert set(task.groups["norm"]) == names_of("second", "third", "downsample.1")


@pytest.mark.parametrize("part", ["downsample.7", "fc", nn.Linear(8, 3)])
def test_a_module_that_is_not_in_the_model_is_refused(part):
    with pytest.raises(errors.InvalidArgument, match=r"no module .* its modules are stem, second"):
        Task.from_module(Residual(), groups={"mine": [part]})


def test_features_are_the_input_of_the_head():
    module = seeded(Residual).eval()
    task = Task.from_module(module)
    x = normal(5, 1, 6, 6)
    h = torch.relu(module.second(module.stem(x)))
    h = torch.relu(module.third(module.inner(h)) + module.downsample(h)).mean((2, 3))
    torch.testing.assert_close(task.features(task.init(), x), h, **TOL)
    model = task.init()
    logits = F.linear(task.features(model, x), model["out.weight"], model["out.bias"])
    torch.testing.assert_close(logits, task.apply(model, x), **TOL)


def test_features_follow_the_model_they_are_given():
    task = Task.from_module(tanh_net())
    x, model = normal(5, 4), {k: 2 * v for k, v in task.init().items()}
    want = torch.tanh(F.linear(x, model["0.weight"], model["0.bias"]))
    torch.testing.assert_close(task.features(model, x), want, **TOL)


# -- blocks ------------------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Tanh(),
        nn.Linear(5, 3),
        nn.ELU(),
    )


def one_activation() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), act, nn.Linear(6, 5), act, nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (lambda: models.mlp(16, 3, (6, 5)), 3),
        (lambda: models.cnn(2, (4, 4), 3), 4),
        (normed, 3),
        (lambda: nn.Linear(16, 3), 1),
        (one_activation, 3),
    ],
    ids=["mlp", "cnn2", "normed", "linear", "one activation object in two places"],
)
def test_the_blocks_in_order_are_the_model(make, layers):
    task = Task.from_module(seeded(make))
    model = {k: v + 0.1 * normal(*v.shape, seed=4).abs() for k, v in task.init().items()}
    x = normal(5, 4, 4) if layers != 1 else normal(5, 16)
    assert len(task.blocks) == layers
    out = x
    for block in task.blocks:
        out = block(model, out)
    torch.testing.assert_close(out, task.apply(model, x), **TOL)
    assert sorted(n for block in task.blocks for n in block.parameters) == sorted(model)


def test_a_norm_belongs_to_the_layer_before_it_and_a_block_ends_before_the_activation():
    blocks = Task.from_module(normed()).blocks
    assert set(blocks[0].parameters) == {"1.weight", "1.bias"} | names_of("2")
    assert [block.path for block in blocks] == [("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8")]


def test_blocks_may_be_declared_for_any_module():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(self.first(x))

    module = seeded(Two)
    assert Task.from_module(module).blocks == ()
    task = Task.from_module(module, blocks=["first", module.last])
    x, model = normal(5, 4), task.init()
    torch.testing.assert_close(task.blocks[1](model, task.blocks[0](model, x)), module(x), **TOL)


# -- batch norm --------------------------------------------------------------------------------------------------------


def flat_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Tanh(), nn.Linear(5, 3))


def image_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, eps=1e-3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


NORMED = {"1d": (flat_norm, (4,)), "2d": (image_norm, (1, 4, 4))}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's numbers under our names; whole numbers left out."""
    own = {k: v.detach() for k, v in module.named_parameters()}
    return own | {f"buffer:{k}": v.detach() for k, v in module.named_buffers() if v.is_floating_point()}


def torch_steps(module: nn.Module, x, y, index, lr: float = 0.1) -> dict[str, torch.Tensor]:
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr)
    for rows in index:
        optimizer.zero_grad()
        F.cross_entropy(module(x[list(rows)]), y[list(rows)]).backward()
        optimizer.step()
    return state_of(module)


def assert_models(got, want) -> None:
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda text, name=name: f"{name}: {text}", **TOL)


@pytest.mark.parametrize("kind", NORMED)
def test_the_training_pass_is_torchs_batch_norm(kind):
    make, shape = NORMED[kind]
    module = seeded(make)
    task = Task.from_module(module)
    x = normal(6, *shape)
    logits, moved = task.forward(task.init(), {"x": x})
    torch.testing.assert_close(logits, module.train()(x), **TOL)
    assert_models(moved, {k: v for k, v in state_of(module).items() if k.startswith("buffer:")})


@pytest.mark.parametrize("kind", NORMED)
def test_descent_moves_weights_and_running_statistics_as_torch_does(kind):
    make, shape = NORMED[kind]
    task = Task.from_module(seeded(make))
    x, y = 2 + 3 * normal(12, *shape), targets("cross_entropy", 12)
    index = np.stack([np.random.default_rng(s).permutation(12)[:5] for s in range(6)])
    want = torch_steps(seeded(make), x, y, index)
    got = descend(task.risk, task.init(), batches(x, y, index), SGD(lr=0.1))
    assert_models(got, want)
    module = seeded(make)
    module.load_state_dict({k.removeprefix("buffer:"): v for k, v in got.items()}, strict=False)
    torch.testing.assert_close(task.apply(got, x), module.eval()(x), **TOL)


@pytest.mark.parametrize("kind", NORMED)
def test_padded_clients_side_by_side_have_the_statistics_of_torch(kind):
    """Clients with 6, 3 and 5 rows in a batch of 6, and one with fewer steps; the padding holds large numbers."""
    make, shape = NORMED[kind]
    task = Task.from_module(seeded(make))
    widths, steps = [6, 3, 5], [4, 4, 2]
    x, y = normal(4, 3, 6, *shape), targets("cross_entropy", 4, 3, 6)
    mask = torch.stack([(torch.arange(6) < w).double().expand(4, 6) for w in widths], 1).clone()
    mask[2:, 2] = 0
    x = torch.where(mask.view(4, 3, 6, *[1] * len(shape)) > 0, x, torch.full_like(x, 50.0))
    start = {k: v.expand(3, *v.shape) for k, v in task.init().items()}
    got = vmap(lambda p, d: descend(task.risk, p, d, SGD(lr=0.1)), in_dims=(0, 1))(start, {"x": x, "y": y, "mask": mask})
    for c in range(3):
        module = seeded(make).train()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for s in range(steps[c]):
            optimizer.zero_grad()
            F.cross_entropy(module(x[s, c, : widths[c]]), y[s, c, : widths[c]]).backward()
            optimizer.step()
        assert_models({k: v[c] for k, v in got.items()}, state_of(module))


@pytest.mark.parametrize("kind", NORMED)
def test_a_masked_batch_is_the_smaller_batch(kind):
    make, shape = NORMED[kind]
    task = Task.from_module(seeded(make))
    x = normal(6, *shape)
    real = torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    small, moved = task.forward(task.init(), {"x": x[real]})
    wide, moved_wide = task.forward(task.init(), {"x": x, "mask": real.double()})
    torch.testing.assert_close(wide[real], small, **TOL)
    assert_models(moved_wide, moved)


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_of_one_row_is_normalised_by_the_running_statistics_and_leaves_them_alone(masked):
    task = Task.from_module(seeded(flat_norm))
    model = task.init()
    model["buffer:1.running_mean"] += 0.5
    model["buffer:1.running_var"] *= 2
    x = normal(3, 4)
    batch = {"x": x, "mask": torch.tensor([1.0, 0, 0], dtype=torch.float64)} if masked else {"x": x[:1]}
    logits, moved = task.forward(model, batch)
    torch.testing.assert_close(logits[:1], task.apply(model, x[:1]), **TOL)
    assert all(torch.equal(moved[k], model[k]) for k in moved)
    y = targets("cross_entropy", 3)
    got = descend(task.risk, model, batches(x, y, [[0]]), SGD(lr=0.1))
    assert all(torch.equal(got[k], model[k]) for k in moved)
    assert all(torch.isfinite(v).all() for v in got.values())


def test_one_image_has_a_variance_over_its_pixels():
    module = seeded(image_norm)
    task = Task.from_module(module)
    x = normal(1, 1, 4, 4)
    logits, moved = task.forward(task.init(), {"x": x})
    torch.testing.assert_close(logits, module.train()(x), **TOL)
    assert_models(moved, {k: v for k, v in state_of(module).items() if k.startswith("buffer:")})


def test_batch_norm_without_affine_or_without_statistics_is_torchs():
    for options in ({"affine": False}, {"track_running_stats": False}):
        make = lambda options=options: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, **options), nn.Linear(5, 3))  # noqa: E731
        task, module = Task.from_module(seeded(make)), seeded(make).train()
        x = normal(6, 4)
        for mask in ({}, {"mask": torch.ones(6, dtype=torch.float64)}):
            torch.testing.assert_close(task.forward(task.init(), {"x": x, **mask})[0], module(x), **TOL)


def test_whole_number_buffers_do_not_travel():
    module = flat_norm()
    module.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    assert {k for k in Task.from_module(module).init() if k.startswith("buffer:")} == {
        "buffer:1.running_mean",
        "buffer:1.running_var",
    }


def test_batch_norm_without_a_momentum_is_refused():
    with pytest.raises(errors.InvalidArgument, match="momentum"):
        Task.from_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))


# -- dropout -----------------------------------------------------------------------------------------------------------


def identity(*layers: nn.Module, width: int = 50) -> Task:
    """The layers, then a linear map that is the identity: what comes out is what the layers let through."""
    last = nn.Linear(width, width, bias=False)
    nn.init.eye_(last.weight)
    return Task.from_module(nn.Sequential(*layers, last).double(), "mse")


def through(task: Task, key: int, x: torch.Tensor) -> torch.Tensor:
    return task.forward(task.init(), {"x": x, "key": torch.tensor(key)})[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_drops_a_share_p_and_keeps_the_mean(p):
    out = through(identity(nn.Dropout(p)), 123456789, torch.ones(400, 50, dtype=torch.float64))
    n = out.numel()
    assert float((out == 0).double().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5)
    assert torch.unique(out[out != 0]).tolist() == pytest.approx([1 / (1 - p)])
    assert float(out.mean()) == pytest.approx(1, abs=4 * (p / (1 - p) / n) ** 0.5)
    by_column, by_row = (out == 0).double().mean(0), (out == 0).double().mean(1)
    assert (by_column - p).abs().max() < 5 * (p * (1 - p) / 400) ** 0.5
    assert (by_row - p).abs().max() < 5 * (p * (1 - p) / 50) ** 0.5


def test_the_key_and_nothing_else_makes_the_mask():
    task, x = identity(nn.Dropout(0.5)), torch.ones(20, 50, dtype=torch.float64)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = through(task, 7, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(through(task, 7, x), first)
    assert torch.equal(through(identity(nn.Dropout(0.5)), 7, x), first)


def test_neighbouring_keys_give_unrelated_masks():
    task, x = identity(nn.Dropout(0.5)), torch.ones(40, 50, dtype=torch.float64)
    masks = [through(task, key, x) > 0 for key in range(6)]
    for i in range(6):
        for j in range(i):
            assert float((masks[i] == masks[j]).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 2000**0.5)


def test_two_dropout_layers_draw_two_masks():
    middle = nn.Linear(50, 50, bias=False)
    nn.init.eye_(middle.weight)
    out = through(identity(nn.Dropout(0.5), middle, nn.Dropout(0.5)), 7, torch.ones(40, 50, dtype=torch.float64))
    assert float((out > 0).double().mean()) == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 2000) ** 0.5)


def test_one_dropout_layer_called_twice_draws_two_masks():
    """``self.drop`` used after every layer is how most networks are written; torch draws anew at each call."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.drop(x))

    out = through(identity(Twice()), 7, torch.ones(40, 50, dtype=torch.float64))
    assert float((out > 0).double().mean()) == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 2000) ** 0.5)


def test_one_dropout_object_in_two_places_obeys_the_key_in_both():
    drop = nn.Dropout(0.5)
    task, x = identity(drop, nn.Identity(), drop), torch.ones(40, 50, dtype=torch.float64)
    torch.manual_seed(0)
    first = through(task, 7, x)
    torch.manual_seed(1)
    assert torch.equal(through(task, 7, x), first)


def test_dropout_does_nothing_in_evaluation():
    task, x = identity(nn.Dropout(0.5)), normal(5, 50)
    assert torch.equal(task.apply(task.init(), x), x)


def test_dropout_of_channels_drops_them_whole():
    class Channels(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.head = nn.Dropout2d(0.5), nn.Linear(1, 1)

        def forward(self, x):
            return self.drop(x)

    task = Task.from_module(Channels(), "mse")
    out = task.forward(task.init(), {"x": torch.ones(30, 20, 3, 3), "key": torch.tensor(3)})[0]
    per_channel = (out > 0).double().mean((2, 3))
    assert set(per_channel.unique().tolist()) == {0.0, 1.0}
    assert float(per_channel.mean()) == pytest.approx(0.5, abs=5 * 0.5 / 600**0.5)


def test_dropout_is_the_same_for_a_client_alone_and_under_vmap():
    task, x = identity(nn.Dropout(0.4)), normal(3, 6, 50)
    keys = torch.tensor([5, -8, 2**60])
    many = vmap(lambda rows, key: task.forward(task.init(), {"x": rows, "key": key})[0])(x, keys)
    for c in range(3):
        assert torch.equal(many[c], through(task, int(keys[c]), x[c]))


def test_dropout_without_a_key_is_refused():
    task = identity(nn.Dropout(0.5))
    with pytest.raises(errors.InvalidArgument, match="key"):
        task.forward(task.init(), {"x": normal(2, 50)})


def test_engines_agree_on_a_network_with_dropout_and_batch_norm():
    """Ragged clients, so that the vectorized engine pads; 8 rows are one batch, 11 are two."""
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)))
    fed = federation([8, 11, 9, 25])
    options = {"rounds": 2, "batch_size": 10, "dtype": "float64", "evaluate_every": 0}
    loop, stacked = (ft.run(ft.FedAvg(lr=0.1, epochs=2), fed, module, engine=e, **options) for e in ("loop", "vectorized"))
    for name, value in loop.model().items():
        torch.testing.assert_close(stacked.model()[name], value, rtol=0, atol=1e-11)


# -- the user's module -------------------------------------------------------------------------------------------------


def test_a_modules_own_weights_are_the_start():
    module = seeded(flat_norm)
    module[1].running_mean += 3.0
    assert_models(Task.from_module(module).init(), state_of(module))
    fed = federation([6, 6], d=4)
    run = ft.run(ft.FedAvg(lr=1e-300, steps=1), fed, module, rounds=1, dtype="float64", engine="loop")
    for name, value in module.named_parameters():
        torch.testing.assert_close(run.model()[name], value, rtol=0, atol=1e-290)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("training", [True, False])
def test_the_users_module_is_never_changed_by_a_run(engine, training):
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2)).train(training)
    before = copy.deepcopy(module.state_dict())
    kinds = [type(m) for m in module.modules()]
    fed = federation([6, 9], d=4)
    ft.run(ft.FedAvg(lr=0.5, steps=3), fed, module, rounds=2, batch_size=4, dtype="float64", engine=engine)
    after = module.state_dict()
    assert all(torch.equal(after[k], before[k]) and after[k].dtype == before[k].dtype for k in before)
    assert [type(m) for m in module.modules()] == kinds
    assert all(m.training is training for m in module.modules())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_parameters_that_the_user_froze_are_not_trained(engine):
    """Fine-tuning the head of a trained network: requires_grad = False on the rest."""
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    module[0].requires_grad_(False)
    run = ft.run(ft.FedAvg(lr=0.5, steps=3), federation([6, 9], d=4), module, rounds=2, dtype="float64", engine=engine)
    assert torch.equal(run.model()["0.weight"], module[0].weight)
    assert not torch.equal(run.model()["2.weight"], module[2].weight)


def test_making_a_task_leaves_the_module_alone():
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2))
    kinds, before = [type(m) for m in module.modules()], copy.deepcopy(module.state_dict())
    task = Task.from_module(module)
    task.forward(task.init(), {"x": torch.randn(6, 4), "key": torch.tensor(1)})
    task.apply(task.init(), torch.randn(6, 4))
    assert [type(m) for m in module.modules()] == kinds
    assert all(m.training for m in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_start_of_a_task_is_a_copy_every_time():
    module = seeded(flat_norm)
    task = Task.from_module(module)
    before = {k: v.clone() for k, v in task.init().items()}
    for value in task.init().values():
        value.fill_(9.0)
    with torch.no_grad():
        module[0].weight.fill_(9.0)
    assert_models(task.init(), before)


def test_training_leaves_the_tasks_start_and_evaluation_alone():
    task = Task.from_module(seeded(flat_norm))
    x, y = normal(6, 4), targets("cross_entropy", 6)
    start, logits = task.init(), task.apply(task.init(), x)
    descend(task.risk, task.init(), batches(x, y, [range(6)] * 3), SGD(lr=0.5))
    assert_models(task.init(), start)
    assert torch.equal(task.apply(start, x), logits)


def test_the_split_model_is_one_logit_of_shared_and_personal_features():
    module = models.build("split-linear:2", (5,), 2)
    task = Task.from_module(module)
    assert task.groups["features"] == ("features.weight",)
    u, v, x = normal(1, 2), normal(1, 3, seed=1), normal(7, 5, seed=2)
    logits = task.apply({"common.weight": u, "features.weight": v}, x)
    torch.testing.assert_close(logits[:, 1] - logits[:, 0], (x[:, :2] @ u.T + x[:, 2:] @ v.T)[:, 0], **TOL)
    assert all(not leaf.any() for leaf in task.init().values())
    draw = np.random.default_rng(0)
    clients = [(a := draw.normal(size=(20, 5)), (a[:, 0] + i * a[:, 4] > 0).astype(int)) for i in range(3)]
    run = ft.run(
        ft.FedAvgP(personal="features", steps=5), ft.Federation.from_arrays(clients, clients), "split-linear:2", rounds=3
    )
    assert set(run.personal[0]["model"]) == {"features.weight"}
    for name, words in (("split-linear", "four shared"), ("split-linear:5", "from 1 to 4"), ("split-linear:0", "from 1 to 4")):
        with pytest.raises(errors.InvalidArgument, match=words):
            models.build(name, (5,), 2)
