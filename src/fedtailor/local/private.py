"""DP-SGD as an optimiser: every row's gradient clipped, Gaussian noise added to their sum (Abadi et al. 2016, Algorithm 1).

A method does not know that it is private. Penalties, weight decay and projections are free of data and come after the noise.
The noise comes from a secret of the run (``data/secret.py``), bound to the method, its settings, the client, the round, the
phase, the step and which descent on these batches it is; the same on both engines. It is drawn in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.func import grad as func_grad
from torch.func import vmap

from fedtailor import tree
from fedtailor.data.secret import Secret, Use
from fedtailor.errors import InvalidArgument
from fedtailor.local.gradients import Gradient, Source
from fedtailor.local.optim import SGD, Optimizer, State
from fedtailor.local.schedule import Rate
from fedtailor.task import Task
from fedtailor.task.device import moved
from fedtailor.task.rows import shrink

AT_ONCE = 2**24  # numbers of rows' gradients that are written down at a time


@dataclass(frozen=True, repr=False)
class Private(Optimizer):
    """``opt`` with privatised gradients: rows clipped to norm ``clip``, noise of deviation ``noise * clip`` on their sum.

    ``sampling`` is ``poisson`` (every row enters every step with probability batch_size/rows, which the accountant makes use of;
    the sum is divided by the expected batch) or ``shuffle`` (epochs of permuted rows, no amplification). ``target_epsilon``
    stands in the place of ``noise``, which is found before the run so that no client spends more. ``delta`` is
    min(1e-5, 1/(10 rows)) of each client if not given. ``accountant`` is ``prv`` (privacy loss distribution, tight) or ``rdp``.

    ``seed`` makes the noise repeatable, for tests and papers: whoever knows it can take the noise off again, so such a run is
    marked as not private. ``force`` allows what protects nobody: no noise, or a delta of one in the number of rows and more.
    """

    opt: Optimizer = field(default_factory=SGD)
    clip: float = 1.0
    noise: float | None = None  # 1 if target_epsilon is not given either
    target_epsilon: float | None = None
    delta: float | None = None
    sampling: str = "poisson"
    accountant: str = "prv"
    seed: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.opt, Optimizer) or self.opt.privacy is not None:
            raise InvalidArgument(f"Private: opt must be an optimizer such as ft.SGD(momentum=0.9), not {self.opt!r}")
        if self.opt.lr != type(self.opt)().lr or self.opt.radius is not None:
            raise InvalidArgument("Private: give lr and radius to the method, for instance ft.FedAvg(lr=0.5), not to opt")
        if self.weight_decay:
            raise InvalidArgument("Private: give weight_decay to its opt, as ft.Private(opt=ft.SGD(weight_decay=0.1))")
        for name, value, good in (
            ("clip", self.clip, lambda v: v > 0),
            ("noise", self.noise, lambda v: 0 <= v < math.inf),
            ("target_epsilon", self.target_epsilon, lambda v: 0 < v < math.inf),
            ("delta", self.delta, lambda v: 0 < v < 1),
        ):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is None and name != "clip":
                continue
            if not number or not good(value):
                bounds = "at least 0" if name == "noise" else "between 0 and 1" if name == "delta" else "greater than 0"
                raise InvalidArgument(f"Private: {name} must be a number {bounds}, not {value!r}")
        if self.noise is not None and self.target_epsilon is not None:
            raise InvalidArgument("Private: give noise or target_epsilon, not both")
        if self.noise == 0 and not self.force:
            raise InvalidArgument("Private: noise=0 protects nobody; give noise above 0, or force=True to try it all the same")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise InvalidArgument(f"Private: seed must be a whole number of at least 0, not {self.seed!r}")
        if math.isinf(self.clip) and self.noise != 0:
            raise InvalidArgument("Private: without clipping (clip=inf) no noise suffices; give a finite clip, or noise=0")
        for name, known in (("sampling", ("poisson", "shuffle")), ("accountant", ("prv", "rdp"))):
            if getattr(self, name) not in known:
                raise InvalidArgument(f"Private: {name} must be {' or '.join(known)}, not {getattr(self, name)!r}")

    def __repr__(self) -> str:
        plain = type(self)()
        shown = [f.name for f in fields(self) if f.repr and getattr(self, f.name) != getattr(plain, f.name)]
        return f"Private({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def multiplier(self) -> float:
        """The noise's deviation over ``clip``."""
        if self.target_epsilon is not None:
            raise InvalidArgument("the noise for target_epsilon is known only once there are data; use ft.run")
        return 1.0 if self.noise is None else self.noise

    def using(self, lr: Rate, radius: float | None) -> Self:
        return replace(self, lr=lr, radius=radius)

    @property
    def privacy(self) -> Private:
        return self

    @property
    def plain(self) -> Optimizer:
        return self.opt

    def around(self, opt: Optimizer) -> Self:
        return replace(self, lr=opt.lr, opt=replace(opt, lr=SGD().lr), radius=opt.radius)

    def secret(self) -> Secret:
        """Return where noise comes from: what the seed stands for, or a secret drawn on the spot."""
        return Secret.fresh() if self.seed is None else Secret.from_seed(self.seed)

    def gradient(self, source: Source, use: Use) -> Gradient:
        """Clipped and noisy, of the parameters that move; buffers stay."""
        use = use if use.secret is not None else Use(use.number, self.secret())
        moving = [bool(pace) and not is_buffer for is_buffer, pace in zip(source.buffers, source.paces, strict=True)]
        return lambda leaves, batch: private_gradient(
            self, source.risk, source.task, source.params(leaves), batch, moving, use, source.stacked
        )

    def init(self, params: Sequence[Tensor]) -> State:
        return self.opt.init(params)

    def step_(self, *arguments: Any, **options: Any) -> None:
        self.opt.using(self.lr, self.radius).step_(*arguments, **options)

    def _move_(self, param: Tensor, grad: Tensor, memory: list[Tensor], lr: float | Tensor, step: int) -> None:
        self.opt._move_(param, grad, memory, lr, step)


def private_gradient(
    opt: Private,
    risk: Callable[[Any, Mapping[str, Tensor]], Tensor],
    task: Task | None,
    params: Any,
    batch: Mapping[str, Tensor],
    moving: Sequence[bool],
    use: Use,
    stacked: bool = False,
) -> list[Tensor | None]:
    """Return the privatised gradient of ``risk`` on a batch, leaf by leaf; None where ``moving`` says that a leaf stays.

    ``use`` says where the noise comes from, and tells apart the descents that walk through the same batches.
    With ``stacked`` every tensor has a first client axis.
    """
    sums = _clipped_sums(opt.clip, risk, task, params, batch, moving, stacked)
    if opt.multiplier:
        wide = opt.clip * opt.multiplier
        fresh = _Normals.apply(batch["key"], use, [s for s in sums if s is not None], stacked)
        drawn = iter(fresh if isinstance(fresh, tuple) else (fresh,))
        sums = [None if s is None else s + wide * next(drawn) for s in sums]
    rows = batch.get("expected")
    if rows is None:
        mask = batch.get("mask")
        rows = torch.tensor(float(batch["y"].shape[int(stacked)])) if mask is None else mask.sum(-1).clamp(min=1)
    rows = moved(rows, batch["y"].device)
    return [None if s is None else s / _beside(rows, s, stacked) for s in sums]


def _beside(rows: Tensor, leaf: Tensor, stacked: bool) -> Tensor:
    return rows.to(leaf).view(-1, *[1] * (leaf.dim() - 1)) if stacked and rows.dim() else rows.to(leaf)


def _clipped_sums(
    clip: float, risk: Any, task: Task | None, params: Any, batch: Mapping[str, Tensor], moving: Sequence[bool], stacked: bool
) -> list[Tensor | None]:
    leaves = tree.leaves(params)
    paths = [path for path, _ in tree.items(params)]
    if not batch["y"].shape[int(stacked)]:
        return [torch.zeros_like(leaf) if moves else None for leaf, moves in zip(leaves, moving, strict=True)]
    if task is not None and (task.clipped is not None or not stacked):
        names = [path for path, moves in zip(paths, moving, strict=True) if moves]
        clipped = task.clipped_rows({k: leaf.detach() for k, leaf in params.items()}, batch, clip, names)
        if clipped is not None:
            zero = {k: leaf for k, leaf in params.items() if k in names and k not in clipped}
            return [
                None if not moves else torch.zeros_like(zero[path]) if path in zero else clipped[path]
                for path, moves in zip(paths, moving, strict=True)
            ]
    inside = {name: batch[name] for name in ("x", "y", "mask", "key") if name in batch}
    if stacked:
        clients = len(batch["y"])
        sums = vmap(lambda p, b: _by_row(clip, risk, p, b, moving, AT_ONCE // clients), randomness="error")(params, inside)
    else:
        sums = _by_row(clip, risk, params, inside, moving, AT_ONCE)
    queue = iter(sums)
    return [next(queue) if moves else None for moves in moving]


def _by_row(
    clip: float, risk: Any, params: Any, batch: Mapping[str, Tensor], moving: Sequence[bool], at_once: int
) -> tuple[Tensor, ...]:
    """Return, for one client, the gradient of each row's own risk, some rows at a time."""
    leaves = [leaf.detach() for leaf in tree.leaves(params)]
    own = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
    key, total = batch.get("key"), [torch.zeros_like(leaf) for leaf in own]

    def loss(moved: list[Tensor], x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        queue = iter(moved)
        model = tree.refill(params, (next(queue) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)))
        one = {"x": x.unsqueeze(0), "y": y.unsqueeze(0), "row": row}
        return risk(model, one if key is None else {**one, "key": key})

    rows = len(batch["y"])
    several = max(1, at_once // max(1, sum(leaf.numel() for leaf in own)))
    for start in range(0, rows, several):
        part = slice(start, min(start + several, rows))
        grads = vmap(func_grad(loss), in_dims=(None, 0, 0, 0), randomness="different")(
            own, batch["x"][part], batch["y"][part], torch.arange(part.start, part.stop, device=batch["y"].device)
        )
        squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads]).sum(0)  # a number has no axis
        factor = shrink(squares.sqrt(), clip)
        if "mask" in batch:
            factor = factor * batch["mask"][part]
        total = [t + torch.tensordot(factor, g, 1) for t, g in zip(total, grads, strict=True)]
    return tuple(total)


class _Normals(torch.autograd.Function):
    """Standard normal numbers from a key: one operation to ``vmap``, drawn client by client."""

    generate_vmap_rule = False

    @staticmethod
    def forward(key: Tensor, use: Use, like: list[Tensor], stacked: bool) -> tuple[Tensor, ...]:
        shapes = [leaf.shape[int(stacked) :] for leaf in like]
        drawn = _draw(key if stacked else key.unsqueeze(0), use, shapes, like)
        return drawn if stacked else tuple(part.squeeze(0) for part in drawn)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: Tensor, use: Use, like: list[Tensor], stacked: bool) -> Any:
        keys = key.expand(info.batch_size) if in_dims[0] is None else key
        shapes = [leaf.shape if d is None else leaf.movedim(d, 0).shape[1:] for leaf, d in zip(like, in_dims[2], strict=True)]
        drawn = _draw(keys, use, shapes, like)
        return drawn, (0,) * len(drawn)


def _draw(keys: Tensor, use: Use, shapes: Sequence[torch.Size], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return standard normal numbers [keys, *shape], from a generator of its own for every key, where ``like`` is."""
    assert use.secret is not None
    sizes = [shape.numel() for shape in shapes]
    kind = np.float64 if any(leaf.dtype == torch.float64 for leaf in like) else np.float32
    words = keys.detach().cpu().tolist()
    flat = np.empty((len(words), sum(sizes)), kind)
    for row, word in zip(flat, words, strict=True):
        use.secret.generator(word, use.number).standard_normal(out=row, dtype=kind)
    parts = torch.from_numpy(flat).to(like[0].device).split(sizes, 1)
    return tuple(p.reshape(len(words), *shape).to(leaf.dtype) for p, shape, leaf in zip(parts, shapes, like, strict=True))
