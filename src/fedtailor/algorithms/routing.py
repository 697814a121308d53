"""Two versions of a model, global g and local v, taken together layer by layer: softly, or row by row along chosen paths.

A *route* is a place where the two can be told apart: a block of the task in which something moves, or the whole model. What
stands before a block's layer (activation, pooling, dropout, frozen layers) is the same in both and is applied once, to what the
block before it made of both versions; where a layer itself holds dropout, the two versions share its masks. Recurrent layers,
whose states are mixed at every position, are not here but in ``models/recurrent.py``.

**Batch norm.** In a training pass both versions normalise with the batch at hand, which is the mixture that reaches the block.
The statistics that are handed back are those of g: the caller keeps them with g (``Task.risk_of``); those of v do not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.task import Task
from fedtailor.task.layers import rehearsed, under_way
from fedtailor.task.parts import Block, joined

Model = Mapping[str, Tensor]
TRIAL_ROWS = 3  # rows on which declared blocks are tried
ROUTES_AHEAD = 2  # routes for which rows are put in order at once: more would cut them into ever smaller groups


@dataclass(frozen=True)
class WholeModel:
    """The model as one route: its outputs are mixed (FLOW Algorithm 2)."""

    task: Task

    def before(self, x: Tensor, training: bool = False) -> Tensor:
        return x

    def layer(self, model: Model, x: Tensor, training: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        if not training or self.task.forward is None:
            return self.task.apply(dict(model), x), {}
        now = under_way()
        return self.task.forward(dict(model), {"x": x, **{k: v for k, v in now._asdict().items() if k in ("mask", "key", "row")}})


Route = Block | WholeModel


def routes(task: Task, routing: Literal["layer", "model"]) -> tuple[Route, ...]:
    return (WholeModel(task),) if routing == "model" else joined(task.blocks)


def check_blocks(task: Task) -> None:
    """Refuse a model that declares no blocks, or whose blocks one after another are not the model."""
    how = "Task.from_module(module, blocks=['conv1', 'conv2', 'head'])"
    if not task.blocks:
        raise ModelMismatch(
            f"routing layer by layer needs the model's blocks and this model declares none; name its layers in order with {how}, "
            "or route whole models with routing='model'"
        )
    if task.inputs is None:
        return
    count = TRIAL_ROWS * task.inputs[:0].new_ones((1, *task.inputs.shape[1:])).numel()
    x = (torch.arange(count) * 0.7).sin().to(task.inputs).view(TRIAL_ROWS, *task.inputs.shape[1:])
    model = task.init()
    with torch.no_grad():
        expected = output = task.apply(model, x)
        try:
            output = x
            for block in task.blocks:
                output = block(model, output)
            same = output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
        except RuntimeError:
            same = False
    if not same:
        raise ModelMismatch(
            f"the declared blocks ({', '.join(b.name for b in task.blocks)}), one after another, are not the model; declare "
            "every module from input to output in order, activations too, or route whole models with routing='model'"
        )


def soft(paths: Sequence[Route], g: Model, v: Model, q: Tensor, x: Tensor, training: bool = False) -> tuple[Tensor, Any]:
    """Return (output, buffers of g after the pass) of x <- q_0 g(x) + q_1 v(x), route by route (FLOW Eq. (3)).

    ``q`` is [rows, routes, 2], or [1, routes, 2] where all rows have the same.
    """
    buffers: dict[str, Tensor] = {}
    for j, path in enumerate(paths):
        x = path.before(x, training)
        with rehearsed():
            local, _ = path.layer(v, x, training)
        common, new = path.layer(g, x, training)
        buffers |= new
        shape = (-1, *[1] * (common.dim() - 1))
        x = q[:, j, 0].view(shape) * common + q[:, j, 1].view(shape) * local
    return x, buffers


def hard(paths: Sequence[Route], g: Model, v: Model, to_global: Tensor, x: Tensor) -> Tensor:
    """Return the output of every row on its own path: ``to_global`` [rows, routes] says where it takes g, not v.

    Rows are put in order of the next routes, so that a layer runs only on the rows that chose it, and on slices. Under vmap
    groups cannot depend on data: there both versions run and the chosen output is kept, which gives the same rows (up to
    the last digits, since the shape of a product decides in which order its terms are added).
    """
    if torch._C._functorch.is_batchedtensor(to_global):
        return _hard_under_vmap(paths, g, v, to_global, x)
    order = torch.arange(len(x), device=x.device)  # order[i] is the row at place i
    for first in range(0, len(paths), ROUTES_AHEAD):
        ahead = to_global[order, first : first + ROUTES_AHEAD]
        place = (ahead * 2 ** torch.arange(ahead.shape[1], device=x.device).flip(0)).sum(1).argsort(stable=True)
        if bool((place.diff() < 0).any()):
            x, order, ahead = x.index_select(0, place), order[place], ahead[place]
        groups = [(x, ahead)]  # rows that have run alike so far; those that go local in the next layer stand first
        for j, path in enumerate(paths[first : first + ROUTES_AHEAD]):
            groups = [part for x, marks in groups for part in _split(path, g, v, x, marks, j)]
        x = torch.cat([x for x, _ in groups]) if len(groups) > 1 else groups[0][0]
    return x if bool((order.diff() > 0).all()) else x.index_select(0, order.argsort())


def _split(path: Route, g: Model, v: Model, x: Tensor, marks: Tensor, j: int) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of a route, and their marks, for rows of which the first go through v and the others through g."""
    cut = len(marks) - int(marks[:, j].sum())
    x = path.before(x)
    parts = [(v, x[:cut], marks[:cut])] if cut else []
    parts += [(g, x[cut:], marks[cut:])] if cut < len(x) or not cut else []
    return [(path.layer(model, rows)[0], marks) for model, rows, marks in parts]


def _hard_under_vmap(paths: Sequence[Route], g: Model, v: Model, to_global: Tensor, x: Tensor) -> Tensor:
    for j, path in enumerate(paths):
        x = path.before(x)
        common, local = path.layer(g, x)[0], path.layer(v, x)[0]
        x = torch.where(to_global[:, j].view(-1, *[1] * (common.dim() - 1)), common, local)
    return x


def need_numbers(task: Task) -> Tensor:
    """Return an empty tensor with the shape and type of the rows, which must be floats: the router reads them as numbers."""
    if task.inputs is None:
        raise InvalidArgument("the router's size depends on the rows; use ft.run, or dataclasses.replace(task, inputs=x[:0])")
    if not task.inputs.is_floating_point():
        kind = str(task.inputs.dtype).removeprefix("torch.")
        raise InvalidArgument(
            f"the router reads rows of numbers, and these are of type {kind}; give the features as floats, or tokens to an "
            "lstm with routing='layer'"
        )
    return task.inputs
