"""What a module of the user's own does to the promises of the package, found by trying it once on a few rows.

A run keeps its promises only if the training pass is a function of (model, batch, key), row by row, that ``vmap`` can take. What
breaks that on every engine is refused; what breaks it on padded rows or under ``vmap`` leaves the loop engine, and is said.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from fedtailor import tree
from fedtailor.errors import FedtailorError, InvalidArgument
from fedtailor.local.gradients import Source, plain
from fedtailor.task import Task
from fedtailor.task.layers import keyed
from fedtailor.task.own import OURS, tied

ROWS, PADDING = 4, 3  # rows tried, and how many are padded to them
MANY = 64  # entries of a list that are looked at
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-7}  # relative to the largest entry of a gradient
Grads = list[Tensor]


@dataclass(frozen=True)
class ModuleProblem:
    """A promise that a module does not keep.

    ``refused``: no engine is right; ``loop_only``: the loop engine is; neither: it is good to know.
    """

    promise: str
    words: str
    refused: bool = False
    loop_only: bool = False


def findings(task: Task, x: Tensor, y: Tensor, rows: int = ROWS, shortest: int = ROWS) -> list[ModuleProblem]:
    """Return what a task breaks of the package's promises, tried on a few of these rows; one that is refused ends the search.

    ``rows`` is the length of a batch: what is drawn at that length alone is found too. ``shortest`` is that of the shortest.
    """
    with _left_alone(task):
        return _found(_Trial(task, _batch(x, y, ROWS), _batch(x, y, rows), _batch(x, y, shortest)))


def _found(tried: _Trial) -> list[ModuleProblem]:
    problems: list[ModuleProblem] = []
    for look in (_losses, _overwritten, _buffers, _outside, _memory, _short, _draws, _evaluation, _padding, _stacking, _tied):
        if (one := look(tried)) is not None:
            problems.append(one)
            if one.refused:
                break
    return problems


def refuse(problems: list[ModuleProblem]) -> str | None:
    """Raise for what no engine gets right; return why only the loop engine will do, or None."""
    for one in problems:
        if one.refused:
            raise InvalidArgument(one.words)
    return next((one.words for one in problems if one.loop_only), None)


def _batch(x: Tensor, y: Tensor, rows: int) -> dict[str, Tensor]:
    """Return the first rows as a batch, copied: a module may write to what it is given."""
    return {"x": x[:rows].clone(), "y": y[:rows].clone(), "key": torch.tensor(7)}


class _Trial:
    """A task and a batch, and the first gradient on it; ``whole`` and ``short`` are the longest and shortest that a run has."""

    def __init__(self, task: Task, batch: Mapping[str, Tensor], whole: Mapping[str, Tensor], short: Mapping[str, Tensor]) -> None:
        self.task, self.batch, self.short, self.model = task, batch, short, task.init()
        self.source = Source(task.risk, None, self.model, {})
        self.known = {name: value.clone() for name, value in self._counts()}
        self.lent = {
            "the rows": batch["x"],
            "the labels": batch["y"],
            **{f"its {name}": leaf for name, leaf in self.model.items()},
        }
        self.as_lent = {what: value.clone() for what, value in self.lent.items()}
        before = _generators()
        try:
            with keyed(7):  # as a visit is
                self.first = self.gradient(batch)
            kept = self.kept()
            with keyed(7):
                self.again = self.gradient(batch)
            self.changed = _changed(self.kept(), kept)
            self.drawn = self._draws(batch) or (len(whole["y"]) > len(batch["y"]) and self._draws(whole))
        except FedtailorError:
            raise
        except Exception as error:
            raise InvalidArgument(f"the module fails in a training step: {_line(error)}; try it with torch first") from error
        self.moved = [name for name, was, now in zip(GENERATORS, before, _generators(), strict=True) if was != now]

    def _draws(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether torch's generator is drawn from: a row's place leaves it to itself, so that draws show."""
        before = torch.get_rng_state()
        self.gradient({**batch, "row": torch.tensor(0)})
        moved = not torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(before)
        return moved

    def gradient(self, batch: Mapping[str, Tensor]) -> Grads:
        grads = plain(self.source)(tree.leaves(self.model), batch)
        if any(g is not None and g.layout != torch.strided for g in grads):
            raise InvalidArgument("the module gives sparse gradients, which cannot be averaged; let it give dense ones")
        return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, tree.leaves(self.model), strict=True)]

    def _counts(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that are no part of a model: whole numbers."""
        trainer = self.task.trainer
        return [] if trainer is None else [(n, b) for n, b in trainer.named_buffers() if not b.is_floating_point()]

    def kept(self) -> dict[tuple[int, str], str]:
        """Return what layers of the user's own hold beside parameters and buffers, in words that are equal where it is."""
        return {
            (copy, f"{path}.{name}" if path else name): _in_words(value)
            for copy, path, layer in _own_layers(self.task)
            for name, value in vars(layer).items()
            if name not in OF_TORCH
        }

    @property
    def counting(self) -> list[str]:
        """The whole-number buffers that have changed."""
        return [name for name, value in self._counts() if not torch.equal(value, self.known[name])]

    def padded(self) -> dict[str, Tensor]:
        """Return the batch with padded rows, which repeat the first as the engine's do."""
        wide = {name: torch.cat([t, t[:1].expand(PADDING, *t.shape[1:])]) for name, t in self.batch.items() if name in ("x", "y")}
        rows = len(self.batch["y"])
        mask = torch.cat([torch.ones(rows), torch.zeros(PADDING)]).to(next(iter(self.model.values())).dtype)
        return {**wide, "mask": mask, "key": self.batch["key"]}


GENERATORS = ("torch", "NumPy", "Python")
OF_TORCH = frozenset(vars(nn.Module()))  # where torch keeps parameters, buffers, hooks and layers


def _own_layers(task: Task) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield the layers of the user's own in the copy that trains (0) and in the one that evaluates (1), with their paths."""
    evaluator = getattr(getattr(task.apply, "__self__", None), "evaluator", None)
    for copy, root in enumerate((task.trainer, evaluator)):
        for path, layer in () if root is None else root.named_modules():
            if not type(layer).__module__.startswith(OURS):
                yield copy, path, layer


@contextmanager
def _left_alone(task: Task) -> Iterator[None]:
    """Give layers back what they held before: what a pass leaves there may be tied to it."""
    before = [(layer, vars(layer).copy()) for _, _, layer in _own_layers(task)]
    try:
        yield
    finally:
        for layer, held in before:
            vars(layer).clear()
            vars(layer).update(held)


def _changed(now: Mapping[tuple[int, str], str], before: Mapping[tuple[int, str], str]) -> str | None:
    """Return the name of the first attribute that is not what it was; None where all are."""
    return next((name for (copy, name), value in now.items() if before.get((copy, name)) != value), None)


def _in_words(value: Any, depth: int = 3) -> str:
    """Numbers, texts and tensors, also in lists and the like, as a text that tells them apart; other things by their kind."""
    if isinstance(value, Tensor):
        hidden = is_functorch_wrapped_tensor(value) or value.layout != torch.strided or value.is_meta or value.is_quantized
        numbers = torch.empty(0) if hidden else value.detach().cpu().resolve_conj().resolve_neg()
        bits = numbers.contiguous().view(-1).view(torch.uint8)  # NumPy does not know all types of numbers
        return f"{value.dtype} {tuple(value.shape)} {hash(bits.numpy().tobytes())}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hash(value.tobytes())}"
    if isinstance(value, (list, tuple, deque)) and depth:
        return f"[{len(value)} {' '.join(_in_words(part, depth - 1) for part in islice(value, MANY))}]"
    if isinstance(value, dict) and depth:
        return f"{{{len(value)} {' '.join(f'{key}: {_in_words(part, depth - 1)}' for key, part in islice(value.items(), MANY))}}}"
    if isinstance(value, torch.Generator):
        return str(hash(value.get_state().numpy().tobytes()))
    return repr(value) if isinstance(value, (bool, int, float, complex, str, type(None))) else type(value).__name__


def _generators() -> tuple[bytes, str, int]:
    """Return the states of the global random generators."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), f"{numpy_state[1].tobytes()!r}{numpy_state[2:]}", hash(random.getstate())


def _same(a: Any, b: Any) -> bool:
    """Return whether two lists of tensors agree, up to the order of sums."""
    largest = max((float(t.detach().abs().max()) for t in b if t.numel()), default=0.0)
    if not all(bool(torch.isfinite(t).all()) for t in (*a, *b)):
        return True  # nothing can be said
    close = CLOSE.get(b[0].dtype, 1e-3) * max(largest, 1e-6)
    return all(float((p - q).detach().abs().max()) <= close for p, q in zip(a, b, strict=True) if q.numel())


def _unchanged(now: Tensor, before: Tensor) -> bool:
    return torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# -- what is looked at ---------------------------------------------------------------------------------------------------
def _losses(trial: _Trial) -> ModuleProblem | None:
    task, (x, y) = trial.task, (trial.batch["x"], trial.batch["y"])
    with torch.no_grad():
        losses = task.example_loss(task.apply(trial.model, x), y)
    if isinstance(losses, Tensor) and tuple(losses.shape) == (len(y),):
        return None
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    return ModuleProblem(
        "losses", f"the loss gives {shape} for {len(y)} rows; let it return one number per row (no mean)", refused=True
    )


@torch.no_grad()
def _overwritten(trial: _Trial) -> ModuleProblem | None:
    """Rows, labels and parameters are everybody's: what is written to them would stay."""
    trial.task.apply(trial.model, trial.batch["x"])
    what = next((what for what, value in trial.lent.items() if not _unchanged(value, trial.as_lent[what])), None)
    if what is None:
        return None
    words = f"the module (or its loss) writes to {what} in place when it is called"
    return ModuleProblem("memory", words + "; let it work on a copy (inplace=False, no max_norm)", refused=True)


def _buffers(trial: _Trial) -> ModuleProblem | None:
    if not trial.counting:
        return None
    return ModuleProblem(
        "buffers",
        f"the buffer {trial.counting[0]} counts in whole numbers while the module trains, and can neither be kept per client nor "
        "averaged; make it a floating-point buffer, or leave it out",
        refused=True,
    )


def _outside(trial: _Trial) -> ModuleProblem | None:
    others = [name for name in trial.moved if name != "torch"]
    if not others:
        return None
    where = f"{others[0]}'s global generator"
    return ModuleProblem(
        "randomness", f"the module draws from {where}, which no seed of a run reaches; draw with torch", refused=True
    )


def _remembers(name: str) -> ModuleProblem:
    words = (
        f"the module changes {name} when it is called, which is no parameter and no buffer: what it keeps there of one client "
    )
    return ModuleProblem(
        "memory", words + "would reach another; leave it out, or register it as a floating-point buffer", refused=True
    )


def _short(trial: _Trial) -> ModuleProblem | None:
    """Return the problem of a module that fails on the shortest batch, or None: a client's last one may be of a single row."""
    try:
        with keyed(7):
            trial.gradient(trial.short)
    except Exception as error:
        length = len(trial.short["y"])
        words = (
            f"the module fails on a batch of {length} row{'s' * (length > 1)} ({_line(error)}), and the shortest batch of these "
        )
        return ModuleProblem(
            "rows apart", words + "clients is so short; use another batch_size, or let the module take it", refused=True
        )
    return None


def _memory(trial: _Trial) -> ModuleProblem | None:
    if trial.changed is not None:
        return _remembers(trial.changed)
    if _same(trial.again, trial.first):
        return None
    words = (
        "the module gives another gradient the second time on the same batch: it remembers something outside its parameters and "
    )
    return ModuleProblem("memory", words + "buffers; register it as a floating-point buffer", refused=True)


def _draws(trial: _Trial) -> ModuleProblem | None:
    if not trial.drawn:
        return None
    words = "the module draws from torch's generator (F.dropout, torch.rand, ...), which clients that train at once would share"
    return ModuleProblem("randomness", words, loop_only=True)


@torch.no_grad()
def _evaluation(trial: _Trial) -> ModuleProblem | None:
    task, x, before, others = trial.task, trial.batch["x"], torch.get_rng_state(), _generators()[1:]
    outputs, kept = task.apply(trial.model, x), trial.kept()
    drawn = not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    if drawn:
        return ModuleProblem("randomness", "the module draws random numbers also when it predicts", loop_only=True)
    again = task.apply(trial.model, x)
    if (changed := _changed(trial.kept(), kept)) is not None:
        return _remembers(changed)
    if _generators()[1:] != others or not _same([again], [outputs]):
        words = "the module predicts other numbers the second time on the same rows: it draws or remembers something by itself"
        return ModuleProblem("memory", words + "; let it predict by its parameters and buffers alone", refused=True)
    if _same([task.apply(trial.model, trial.padded()["x"])[: len(x)]], [outputs]):
        return None
    return ModuleProblem("rows apart", "what the module predicts for a row depends on the rows beside it", loop_only=True)


def _padding(trial: _Trial) -> ModuleProblem | None:
    if trial.drawn or _same(trial.gradient(trial.padded()), trial.first):
        return None
    words = "the module mixes the rows of a batch (statistics of its own over rows), and padded rows would change its numbers"
    return ModuleProblem("rows apart", words, loop_only=True)


def _stacking(trial: _Trial) -> ModuleProblem | None:
    """Two clients at once, the second with padding."""
    if trial.drawn:
        return None
    two: Callable[[Tensor], Tensor] = lambda t: t.unsqueeze(0).expand(2, *t.shape).contiguous()  # noqa: E731
    source = Source(trial.task.risk, trial.task, tree.map(two, trial.model), {}, stacked=True)
    try:
        stacked = plain(source)(tree.leaves(source.like), tree.map(two, trial.padded()))
    except Exception as error:  # vmap refuses models in many ways, each with its own exception
        return ModuleProblem("engines agree", f"the module cannot be vectorized ({_line(error)})", loop_only=True)
    second = [torch.zeros_like(p) if g is None else g[1] for g, p in zip(stacked, trial.first, strict=True)]
    if _same(second, trial.first):
        return None
    return ModuleProblem("engines agree", "the module gives other gradients where clients are stacked", loop_only=True)


def _tied(trial: _Trial) -> ModuleProblem | None:
    shared = {} if trial.task.trainer is None else tied(trial.task.trainer)
    if not shared:
        return None
    one, other = next(iter(shared.items()))
    return ModuleProblem("tied weights", f"{one} is {other}: one parameter, which moves with the groups of both layers")
