"""``prepare``: from a method, a federation, a model and options to everything that a run needs before its first round.

Nothing is trained and nothing is written here, and the same arguments give the same result in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor.algorithms import origin
from fedtailor.algorithms.base import Algorithm
from fedtailor.data import rng, shift
from fedtailor.data.federation import Federation
from fedtailor.data.secret import Secret
from fedtailor.engine.attendance import Attendance
from fedtailor.engine.auto import choose
from fedtailor.engine.base import Engine, Ids, Plan
from fedtailor.engine.beginning import Beginning, beginning_of
from fedtailor.engine.crowd import check_crowd, crowd_of, crowd_spent
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.mixed import check_mixed, mixed_of, with_architectures
from fedtailor.engine.modules import ROWS, findings, refuse
from fedtailor.engine.options import Options
from fedtailor.engine.pieces import augmented_by, batch_length, shortest_batch, with_pieces
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.private import check_end, check_options, not_counted, spent, with_noise
from fedtailor.engine.setup import (
    DTYPES,
    build_task,
    check_bias,
    drawn,
    evaluated_clients,
    made_module,
    make_plan,
    named_model,
    visits_of,
)
from fedtailor.engine.state import State
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.engine.watch import Watch
from fedtailor.errors import InvalidArgument
from fedtailor.metrics.cost import probe
from fedtailor.runs.store import Store
from fedtailor.task import Task
from fedtailor.task.device import AUTO, backend, find, without_double
from fedtailor.task.layers import keyed
from fedtailor.task.placed import check_gain, lowered, placed
from fedtailor.theory.constants import Constants
from fedtailor.theory.resolve import resolve

ABOVE = {"flower": "fedtailor.sites.simulation", "ray": "fedtailor.engine.cluster"}  # engines that are fetched when asked for


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a run needs.

    ``plan`` is the method, with its step sizes and noise settled, on the task and rows that the clients train (after the frozen
    first layers); ``newcomers`` the same for the clients that are held out. ``task`` and ``federation`` are whole: all layers,
    all clients. ``size`` is the number of clients in a round, ``constants`` what the theory's step sizes rest on.
    """

    asked: Algorithm  # as given, before anything was settled
    model: str | nn.Module | Task | Callable[..., nn.Module]
    options: Options
    task: Task
    federation: Federation
    plan: Plan
    newcomers: Plan | None
    size: int
    constants: Constants | None
    notes: tuple[str, ...]
    secret: Secret  # where the noise comes from, if the method is private
    beginning: Beginning | None = None  # the run that a private one starts from
    loop_only: str | None = None  # why the model of the user's own is right on the loop engine alone

    @property
    def device(self) -> torch.device:
        """Where clients and server compute."""
        return self.plan.device

    @property
    def algorithm(self) -> Algorithm:
        return self.plan.algorithm

    @property
    def model_name(self) -> str:
        if isinstance(self.model, str):
            return (
                self.model.rpartition(":")[2] if origin.is_spec(self.model) else self.model
            )  # a file that was moved is the same
        return type(self.model).__name__

    @property
    def is_secret(self) -> bool:
        """Return whether noise comes from the run's secret, which must then be kept to go on."""
        rows, crowd = self.algorithm.opt.privacy, self.plan.crowd
        return (rows is not None and rows.seed is None) or (crowd is not None and not crowd.secret.known)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Bytes down and up, parameters trained and notes on speed, found by letting one client take a step."""
        plan = self.plan.on_host
        return probe(plan if plan.federation.shards is None else plan.over(plan.federation.with_zeros()))

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """Return what the run will have spent when it ends; epsilon is None where the method is not private."""
        out = {"epsilon_max": None, "epsilon": None, **crowd_spent(self.plan, self.options)}
        if self.plan.uses is not None:
            out |= spent(self.plan, visits_of(self.plan, self.options.rounds, self.size))
        elif self.plan.crowd is None:
            return out
        out |= {} if self.beginning is None else self.beginning.added_to(out)
        return {**out, "not_counted": not_counted(self.federation, self._also_read())}

    def _also_read(self) -> list[str]:
        """Return what this run learns from the rows, or may have learnt, beside what epsilon counts."""
        lines = []
        if self.options.score is None and self.task.lead is not None:
            lines.append("the choice of the score, by the share of the rarer class among the training rows (give --score)")
        if self.beginning is not None and not self.beginning.same_rows:
            lines.append(f"what {self.beginning.place}, which was the start, has seen of these rows")
        if self.options.backbone is not None:
            lines.append("what the weights of the backbone have seen of these rows")
        return lines

    @cached_property
    def every(self) -> int:
        """Rounds between evaluations; 0: only at the end."""
        asked, rounds = self.options.evaluate_every, self.options.rounds
        if self.plan.uses is not None and self.plan.uses.end:
            if asked:
                raise InvalidArgument(
                    f"{type(self.algorithm).__name__} trains on a client's rows whenever it is evaluated; under privacy that is "
                    "once, at the end: use evaluate_every=0"
                )
            return 0
        return max(1, rounds // 20) if asked is None else asked

    def is_judged(self, done: int) -> bool:
        """Return whether clients are measured after so many rounds."""
        return done == self.options.rounds or bool(self.every and done % self.every == 0)

    @cached_property
    def sample(self) -> Ids | None:
        """The clients that are measured before the last round; None: all."""
        return evaluated_clients(self.plan, self.options.evaluate_clients)

    def watch(self) -> Watch:
        """Return the callbacks of the run, which have seen nothing yet."""
        return Watch(self.options, self.task.score)

    def start(self) -> State:
        """Return the state before the first round."""
        with keyed(self.plan.key("start", 0)):
            shared, server = self.algorithm.init_server(self.plan.on_host.task)  # the same numbers on every device
        return State(self.plan.here(shared), self.plan.here(server), Store(len(self.plan.federation), device=self.device))

    def engine(self, state: State, earlier: Mapping[str, Any] | None = None) -> tuple[Engine, str]:
        """Return (the engine, why it is this one) for rounds from ``state`` on; a resumed run keeps the ``earlier`` one."""
        name, why = (self.options.engine, "asked for") if earlier is None else (earlier["engine"], earlier["engine_reason"])
        if name == "vectorized":
            if self.loop_only is not None:
                raise InvalidArgument(f"{self.loop_only}; use engine='loop' (auto does)")
            return VectorizedEngine(self.plan), why
        if name == "auto" and self.loop_only is not None:
            name, why = "loop", f"loop: {self.loop_only}"
        if name == "loop":
            return LoopEngine(self.plan, self.options.workers, self.options.worker_timeout), why
        if name in ABOVE:
            return import_module(ABOVE[name]).engine(self.plan, self.options), why
        first = drawn(self.plan, self.size, 0)
        first = first if len(first) else np.arange(len(self.plan.federation))
        sent = self.plan.sent_after(state.shared, state.server, 0, self.options.rounds)
        return choose(self.plan, sent, first, self.options.rounds, self.options.workers, self.options.worker_timeout)


def prepare(
    algorithm: Algorithm,
    federation: Federation,
    model: str | nn.Module | Task | Callable[..., nn.Module] = "linear",
    options: Options | None = None,
    secret: Secret | None = None,
) -> Prepared:
    """Return everything a run needs, checked; what cannot be trained, measured or private is refused here.

    ``secret`` is where the noise of a private run comes from; None draws a fresh one.
    """
    options, model = options or Options(), named_model(model)
    _check(algorithm, federation, options)
    check_options(algorithm, options)
    dtype = DTYPES[options.dtype]
    device = _device(options, dtype)
    federation, inside, outside = readied(federation, options)
    check_bias(model, options.bias)
    made = made_module(model, federation, options.seed)
    mixed = mixed_of(made, federation, options.seed)
    if mixed is not None:
        federation = with_architectures(federation, mixed)
    task = build_task(mixed or made, federation, options.seed, dtype, options.bias, options.backbone)
    task = with_pieces(task, federation if outside is None else federation.take(inside), options)
    augment = augmented_by(options.augment, federation, batch_length(federation, options))
    # frozen first layers see the rows as they are in each step, or rows that are not here
    whole = algorithm.reads_rows or augment is not None or federation.shards is not None
    trained, rows, notes = (task, federation, ()) if whole else after_prefix(task, federation, device)
    problems = [] if _is_ours(model, options) else _problems(trained, rows, options)
    learners = rows if outside is None else rows.take(inside)
    size = options.size(len(learners))
    if algorithm.needs_everyone and size < len(learners):
        raise InvalidArgument(f"{type(algorithm).__name__} needs all clients in every round; use cohort=1.0")
    attendance = _attendance(algorithm, learners, options)
    settled, constants = resolve(algorithm, trained, learners, options.rounds, size, options.batch_size, options.weights)
    secret = secret or Secret.fresh()
    crowd = crowd_of(options, settled, len(learners), size, secret)

    def plan(method: Algorithm, clients: Federation) -> Plan:
        paces = attendance.paces if attendance is not None and clients is learners else None
        made = make_plan(method, trained, clients, options.batch_size, options.seed, options.weights, secret, augment, paces)
        return replace(made, crowd=crowd, attendance=attendance if clients is learners else None)

    if settled.opt.privacy is not None and settled.opt.privacy.target_epsilon is not None:
        open_plan = plan(settled, learners)
        settled = with_noise(settled, open_plan, visits_of(open_plan, options.rounds, size))
    there = placed(trained, device) if options.autocast is None else lowered(placed(trained, device), device)
    newcomers = None if outside is None else plan(settled, rows.take(outside)).on(device, there)
    trains = plan(settled, learners)
    check_crowd(trains)
    if mixed is not None:
        check_mixed(trains, mixed)
    check_end(trains, options)
    began = beginning_of(algorithm, options, federation)
    trains = trains.on(device, there)
    notes = (*task.notes, *notes, *_said(options, trains))
    return Prepared(
        algorithm, model, options, task, federation, trains, newcomers, size, constants, notes, secret, began, refuse(problems)
    )


def _is_ours(model: Any, options: Options) -> bool:
    """Return whether network and loss are the package's own, of which it is known what they do."""
    return isinstance(model, str) and not origin.is_spec(model) and options.loss is None


def _problems(task: Task, rows: Federation, options: Options) -> list[Any]:
    """Return what is wrong with a module or a loss of the user's, which are tried on a few rows."""
    length = batch_length(rows, options)
    return findings(task, *rows.few(max(ROWS, length)), length, shortest_batch(rows, options))


def readied(federation: Federation, options: Options) -> tuple[Federation, Ids, Ids | None]:
    """Return the federation as a run uses it, the clients that train, and those that are held out, if any are."""
    outside = newcomers_of(federation, options.new_clients, options.seed)
    inside = np.setdiff1d(np.arange(len(federation)), () if outside is None else outside)
    if outside is not None:
        federation = federation.fitted_to(inside)
    return federation.to(DTYPES[options.dtype]).as_task(options.task or federation.kind), inside, outside


def _attendance(algorithm: Algorithm, learners: Federation, options: Options) -> Attendance | None:
    """Return who takes part in the rounds, where the user says it."""
    if options.attendance is None:
        return None
    if algorithm.needs_everyone:
        raise InvalidArgument(f"{type(algorithm).__name__} needs all clients in every round; use cohort=1.0")
    if options.user_clip is not None:
        raise InvalidArgument("where whole clients are private, each is drawn by chance; give cohort a share, not who is there")
    return Attendance(options.attendance, learners, options.seed, algorithm.roll_call)


def _device(options: Options, dtype: torch.dtype) -> torch.device:
    """Return where to compute; refuse what a device cannot do."""
    device = find(options.device, dtype)
    if device.type != "cpu" and options.engine in ABOVE:
        raise InvalidArgument(f"engine={options.engine!r} computes on the CPU, not on {device}; use loop, vectorized or auto")
    if device.type != "cpu" and (options.workers or 1) > 1:
        raise InvalidArgument(f"worker processes share the CPU, not {device}; leave workers out, or use device='cpu'")
    if options.autocast is not None:
        check_gain(device, dtype)
    return device


def _said(options: Options, plan: Plan) -> list[str]:
    """Return what a reader should know about where the run was computed; nothing on the CPU."""
    if plan.host is None:
        if options.device == AUTO and options.dtype == "float64":
            return [f"Computed on the CPU: {kind} has no float64." for kind in without_double()]
        return []
    title, streamed = backend(plan.device).title(plan.device), plan.federation is plan.host.federation
    rows = "; the rows stay in the computer's memory and are copied batch by batch" if streamed else ""
    return [f"Computed on {plan.device} ({title}){', with passes in bfloat16' if options.autocast else ''}{rows}."]


def newcomers_of(federation: Federation, share: float, seed: int) -> Ids | None:
    """Return the clients that are held out, or None."""
    if share == 0:
        return None
    count = max(1, round(share * len(federation)))
    if count >= len(federation):
        raise InvalidArgument(f"new_clients={share} leaves none of the {len(federation)} clients to train on; use less")
    drawn = rng.generator(seed, "new clients").choice(len(federation), count, replace=False)
    return np.sort(federation.order[drawn])


def _check_unread(folder: str, options: Options) -> None:
    """Refuse what needs rows in this process, where only the nodes of a cluster read them."""
    needs = {
        f"engine={options.engine!r}": options.engine != "ray",
        "new_clients": options.new_clients != 0,
        "shift": any(spec != shift.CIFAR10_1 for spec in options.shift),
    }
    for what, asked in needs.items():
        if asked:
            raise InvalidArgument(
                f"{what} needs clients' rows here, and those of {folder} are for nodes to read (engine='ray'); leave it out, or "
                f"read them all: Federation.from_shards({folder!r})"
            )


def _check(algorithm: Any, federation: Any, options: Options) -> None:
    """Refuse what is no method or no federation, and corruptions that are unknown or of rows that are no images."""
    if not isinstance(algorithm, Algorithm):
        hint = "; create it first, for instance ft.FedAvg()" if isinstance(algorithm, type) else ""
        raise InvalidArgument(f"algorithm must be an Algorithm, not {algorithm!r}{hint}")
    if not isinstance(federation, Federation):
        raise InvalidArgument(f"federation must be a Federation (see Federation.from_arrays), not {type(federation).__name__}")
    if federation.shards is not None:
        _check_unread(federation.shards.folder, options)
    if options.threshold is not None and (federation.val is None or federation.labels != 2 or federation.per_position):
        lacks = "there are no validation rows" if federation.val is None else "there are not two classes, one per row"
        raise InvalidArgument(f"a threshold of two classes is chosen on validation rows, and {lacks}; leave threshold out")
    if options.patience is not None and (federation.val is None or options.evaluate_every == 0):
        lacks = "validation rows" if federation.val is None else "evaluations between the rounds (evaluate_every)"
        raise InvalidArgument(f"patience looks at validation, and there are no {lacks}; give them, or leave patience out")
    if options.evaluate_clients is not None and (options.patience is not None or options.callbacks):
        who = "patience" if options.patience is not None else "a callback"
        raise InvalidArgument(
            f"{who} may end the run with any round, whose measures are of all clients, and evaluate_clients measures a sample; "
            "leave one of them out"
        )
    for spec in options.shift:
        if spec != shift.CIFAR10_1:
            shift.corrupted(federation.test.x[:1], *shift.parse(spec))
