"""``check_model`` names what of a module breaks which promise."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.task import Task
from tests.engine.test_modules import MIXING, RANDOM, Counting, Following, Recurrent, Small, Tied, normed
from tests.make import normal, seeded


@pytest.mark.parametrize("module", [Small, normed, lambda: nn.Linear(3, 2), lambda: Following(True)])
def test_a_module_that_keeps_every_promise_has_no_finding(module):
    assert ft.check_model(seeded(module)) == []


@pytest.mark.parametrize(
    ("module", "promise", "refused", "loop_only"),
    [
        (RANDOM["functional dropout"], "randomness", False, True),
        (RANDOM["noise"], "randomness", False, True),
        (MIXING["centred"], "rows apart", False, True),
        (Counting, "buffers", True, False),
        (Tied, "tied weights", False, False),
    ],
)
def test_a_finding_names_the_promise_and_what_follows(module, promise, refused, loop_only):
    found = ft.check_model(seeded(module))[0]
    assert (found.promise, found.refused, found.loop_only) == (promise, refused, loop_only)
    assert found.words


def test_rows_may_be_given():
    assert ft.check_model(seeded(Recurrent), normal(4, 3))[0].promise == "engines agree"
    assert ft.check_model(Task.from_module(seeded(Small)), normal(4, 3), torch.tensor([0, 1, 1, 0])) == []
    regression = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    assert ft.check_model(regression, loss="mse") == []


def test_what_cannot_be_checked_says_what_to_give():
    with pytest.raises(InvalidArgument, match=r"check_model\(module, x\)"):
        ft.check_model(seeded(Recurrent))
    with pytest.raises(InvalidArgument, match="needs a torch"):
        ft.check_model("linear")


def test_a_module_with_different_shapes_in_training_is_said_to_fail():
    module = Small(lambda h, training: h[:, :2] if training else h)
    with pytest.raises(InvalidArgument, match="fails in a training step"):
        ft.check_model(module)


def test_lazy_layers_and_compiled_modules_are_named():
    (lazy,) = ft.check_model(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), normal(4, 3))
    assert (lazy.promise, lazy.refused) == ("form", True)
    assert "layer 0 is lazy" in lazy.words
    (compiled,) = ft.check_model(torch.compile(seeded(normed), backend="eager"))
    assert (compiled.promise, compiled.refused, compiled.loop_only) == ("compiled", False, False)


def test_what_has_no_copy_is_a_finding():
    module = seeded(Small)
    module.lock = threading.Lock()
    (found,) = ft.check_model(module)
    assert (found.promise, found.refused) == ("form", True)
    assert "cannot be copied" in found.words


def test_rows_that_do_not_fit_are_refused_in_words():
    with pytest.raises(ModelMismatch, match=r"does not take rows of shape \(5,\)"):
        ft.check_model(seeded(Small), normal(4, 5))
