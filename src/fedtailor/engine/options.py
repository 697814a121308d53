"""Settings, each listed once: what ``run``, ``advise``, ``sweep`` and ``pretrain`` can be asked for, checked and frozen.

Keyword arguments, flags, TOML files, ``--help`` and the identity of a run directory are all made from these classes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from fedtailor.engine.checked import Checked

TaskName = Literal["classification", "regression", "multilabel"]  # the names of ``task.kinds``, which would load torch

LARGEST = 2**63 - 1  # of a seed, and of a whole number in TOML
ONE = "1 client"
COHORT = f"must be a share (a number with a point, up to 1.0), a number of clients from 2 on, or {ONE!r}"


class Training(Checked):
    """The settings by which a method is trained, whoever asks."""

    rounds: int = Field(100, ge=1, le=LARGEST, description="Rounds of training.")
    batch_size: int | None = Field(None, ge=1, le=LARGEST, description="Rows per step; None is all of a client's rows.")
    seed: int = Field(0, ge=0, le=LARGEST, description="Seed of training.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision.")
    bias: bool = Field(True, description="A constant term in the linear model.")
    weights: Literal["uniform", "size"] = Field("uniform", description="Weights of the clients in the mean.")
    backbone: str | None = Field(
        None, description="Weights to start from: a .safetensors or .pt file, or imagenet (effnet-lite0)."
    )
    score: str | None = Field(
        None,
        description="What is tuned, ranked and tested: accuracy, auc, average_precision, f1, balanced_accuracy, sensitivity@0.9, "
        "log_loss, brier, mse, mae, rmse, r2 (default: accuracy, auc where one of two classes is rare, mse of numbers).",
    )


class Cohort(Checked):
    """The settings that say who takes part in a round."""

    cohort: str | float | int = Field(
        1.0,
        description='Clients per round: a share (0.1, 1.0), a number (10), "1 client", mine.py:who, or a table of who is there '
        "(.csv with the columns round, client, lost, pace).",
    )

    @field_validator("cohort", mode="before")
    @classmethod
    def _share_or_number(cls, value: Any) -> Any:
        if isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".csv"):
            return os.fspath(value)
        if callable(value) or (isinstance(value, str) and ":" in value):
            from fedtailor.algorithms.origin import specs_of

            return specs_of(value, False)
        return count_of(int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value)

    def size(self, clients: int) -> int:
        """Return the number of clients in a round."""
        from fedtailor.server.cohort import cohort_size

        if self.attendance is not None:
            return clients
        return 1 if isinstance(self.cohort, str) else cohort_size(self.cohort, clients)

    @property
    def attendance(self) -> str | None:
        """The function or the table that says who takes part; None where clients are drawn."""
        return self.cohort if isinstance(self.cohort, str) and self.cohort != ONE else None


class Members(Checked):
    """Privacy of whole clients: their uploads clipped, noise on the sum."""

    user_clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Privacy of whole clients: clip uploads to this norm."
    )
    user_noise: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Privacy of whole clients: noise on the sum, as a multiple of the clip."
    )
    user_target_epsilon: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Privacy of whole clients: find the noise for this epsilon."
    )
    user_delta: float | None = Field(
        None, gt=0, lt=1, description="Privacy of whole clients: delta (default: min(1e-5, 1/(10 clients)))."
    )
    user_seed: int | None = Field(
        None, ge=0, le=LARGEST, description="Make draws and noise of user privacy repeatable; the run is then not private."
    )


class Options(Cohort, Members, Training):
    """The settings of a run."""

    engine: Literal["auto", "loop", "vectorized", "flower", "ray"] = Field("auto", description="How clients are simulated.")
    address: str | None = Field(
        None, description="The cluster of engine ray: auto, or HOST:PORT (default: one that is started on this machine)."
    )
    on_nodes: Literal["loop", "vectorized"] | None = Field(
        None, description="How the nodes of engine ray compute (default: vectorized for linear models, else loop)."
    )
    workers: int | None = Field(
        None, ge=1, le=LARGEST, description="Processes of the loop engine, of flower's and of ray's (default: the cores)."
    )
    worker_timeout: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="Seconds after which a process that neither answers nor computes is stuck."
    )
    task: TaskName | None = Field(None, description="Guessed from the labels.")
    evaluate_every: int | None = Field(
        None, ge=0, le=LARGEST, description="Rounds between evaluations (0: at the end only; default: about twenty in all)."
    )
    evaluate_clients: int | None = Field(
        None, ge=1, le=LARGEST, description="Clients measured between the rounds, a sample (default: all); at the end it is all."
    )
    new_clients: float = Field(0.0, ge=0, lt=1, description="Share of clients held out, to meet the final model.")
    shift: tuple[str, ...] = Field((), description="Test images to corrupt as well, as contrast:3 (severity 1 to 5).")
    loss: str | None = Field(
        None,
        description="huber (of numbers; huber@2.5 sets its delta), or one of your own: mine.py:my_loss (default: the task's).",
    )
    augment: str | None = Field(
        None, description="A function of your own that changes the rows of a batch, (x, draw) to rows: mine.py:flip."
    )
    class_weights: Literal["balanced"] | tuple[float, ...] | None = Field(
        None, description="Weights of the classes in the loss, separated by commas, or balanced: rare ones count more."
    )
    threshold: Literal["f1", "balanced_accuracy", "accuracy"] | None = Field(
        None,
        description="Of two classes: choose on validation rows from which probability on the second is said, for this measure.",
    )
    metrics: tuple[str, ...] = Field(
        (), description="Measures of your own, a client's (logits, y) to a number: mine.py:f1,mine.py:recall."
    )
    patience: int | None = Field(
        None, ge=1, le=LARGEST, description="End once validation has not improved for this many rounds, with the best round."
    )
    callbacks: tuple[str, ...] = Field(
        (), description="Functions of your own that are told of every round and may end the run: mine.py:watch."
    )
    start: str | None = Field(
        None,
        description="Warm start: the directory of a finished run (its shared model), or a file of weights (.safetensors, .pt).",
    )
    checkpoint_every: int | None = Field(
        None, ge=1, le=LARGEST, description="Rounds between checkpoints (default: by the clock, a twentieth of the time)."
    )
    device: str = Field("cpu", description="Where to compute: cpu, cuda, cuda:N, mps, or auto (the first of cuda, mps, cpu).")
    autocast: Literal["bf16"] | None = Field(
        None, description="Lower precision of the network's passes, on a device that gains by it."
    )

    # the training does not depend on these
    LATER: ClassVar[tuple[str, ...]] = (
        "score",
        "augment",
        "autocast",
        "threshold",
        "evaluate_clients",
        "on_nodes",
    )  # unknown to earlier versions: left out where they are not set
    PRIVATE: ClassVar[bool] = True
    HOW: ClassVar[tuple[str, ...]] = ("address", "workers", "worker_timeout", "device", "checkpoint_every", "shift", "start")

    @field_validator("loss", "augment", "metrics", "callbacks", mode="before")
    @classmethod
    def _functions_by_name(cls, value: Any, info: ValidationInfo) -> Any:
        """A function is written as where it is to be found; of ``metrics={"f1": function}`` the names go before it."""
        if value is None or value == () or (info.field_name == "loss" and is_huber(value)):
            return value
        from fedtailor.algorithms.origin import specs_of

        return specs_of(value, info.field_name in ("metrics", "callbacks"))

    @field_validator("start", mode="before")
    @classmethod
    def _state_by_word(cls, value: Any) -> Any:
        """A state dict is written as a checksum."""
        if not isinstance(value, Mapping):
            return value
        from fedtailor.engine.start import in_words

        return in_words(value)

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        from fedtailor.task.device import checked

        return checked(value)

    @field_validator("class_weights", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        """``--class-weights balanced`` comes as a list of one word."""
        if value is None or value in ("balanced", ["balanced"], ("balanced",)):
            return None if value is None else "balanced"
        try:
            weights = tuple(float(word) for word in value)
        except (TypeError, ValueError):
            raise ValueError("must be 'balanced' or one positive number per class") from None
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError("must be 'balanced' or one positive number per class")
        return weights

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for a run to be the same run."""
        return {
            name: value
            for name, value in self.plain().items()
            if name not in self.HOW and value != () and not (value is None and name in self.LATER)
        }


class StepSettings(Checked):
    """Local work and step size of methods that are chosen by us."""

    steps: int | None = Field(
        None, ge=1, le=LARGEST, description="Steps per round (default: 10 on all rows, 2 epochs on batches)."
    )
    epochs: int | None = Field(None, ge=1, le=LARGEST, description="Epochs per round, in place of steps.")
    lr: float | None = Field(None, gt=0, allow_inf_nan=False, description="Step size (default: found from the data, or 0.1).")


class AdviceOptions(StepSettings, Training):
    """The settings of advice."""

    rounds: int = Field(50, ge=1, le=LARGEST, description="Rounds that the advised method would be trained for.")
    budget: int | str | None = Field(
        None, description="What the trials may cost over all methods tried: rounds (40) or traffic (5MB)."
    )


class SweepOptions(Cohort, StepSettings, Training):
    """The settings of a sweep over lam."""

    rounds: int = Field(50, ge=1, le=LARGEST, description="Rounds that a run with one lam would take.")
    lams: int | tuple[float, ...] = Field(10, description="How many lams, or the lams themselves, separated by commas.")
    targets: tuple[float, ...] | None = Field(None, description="Scores to reach in the fewest rounds, separated by commas.")
    dynamic: bool = Field(True, description="Run the schedule with a growing lam beside it.")

    @field_validator("lams", mode="before")
    @classmethod
    def _number_or_list(cls, value: Any) -> Any:
        """``--lams 5`` comes as a list of one word: it is how many."""
        words = [value] if isinstance(value, str | Real) else value
        try:
            if isinstance(value, bool):
                raise ValueError
            numbers = [float(word) for word in words]
        except (TypeError, ValueError, OverflowError):
            raise ValueError("must be a number of lams, or the lams separated by commas") from None
        few = isinstance(value, Integral) or (len(numbers) == 1 and str(next(iter(words))).strip().isdecimal())
        return int(numbers[0]) if few else numbers


class PretrainOptions(Checked):
    """The settings of pretraining."""

    epochs: int = Field(10, ge=1, le=LARGEST, description="Passes through the rows.")
    lr: float = Field(0.05, gt=0, allow_inf_nan=False, description="First step size; it falls to zero along a cosine.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    weight_decay: float = Field(5e-4, ge=0, allow_inf_nan=False, description="Weight decay of SGD.")
    batch_size: int = Field(64, ge=1, le=LARGEST, description="Rows per step.")
    method: str = Field(
        "pooled", description="pooled puts the rows together; a method such as fedavg leaves them with the clients."
    )
    seed: int = Field(0, ge=0, le=LARGEST, description="Seed of training.")
    backbone: str | None = Training.model_fields["backbone"]  # type: ignore[assignment]


def count_of(cohort: Any) -> float | int | str:
    """Return a cohort made plain: a share in (0, 1] as a float, a number of clients as an int, one client as "1 client".

    A bare 1 is refused: it may mean everyone or one client. Text is read as on the command line.
    """
    if isinstance(cohort, str):
        number = re.fullmatch(r"\s*(\d+) *clients?\s*", cohort)
        if number and int(number[1]) > 0:
            return int(number[1]) if int(number[1]) > 1 else ONE
        try:
            cohort = int(cohort) if re.fullmatch(r"\s*[+-]?\d+\s*", cohort) else float(cohort)
        except ValueError:
            raise ValueError(COHORT) from None
    if isinstance(cohort, bool) or not isinstance(cohort, int | float):
        raise ValueError(COHORT)
    if not math.isfinite(cohort):
        raise ValueError("must be a finite number")
    if cohort <= 0:
        raise ValueError(f"must be greater than 0: {COHORT}")
    if isinstance(cohort, int) and cohort == 1:
        raise ValueError(f"may mean everyone or one client: write 1.0 for all clients, {ONE!r} for one")
    if cohort <= 1:
        return float(cohort)
    if cohort != int(cohort):
        raise ValueError(COHORT)
    return int(cohort)


def is_huber(loss: Any) -> bool:
    """Return whether a loss is Huber's by name: huber, or huber@2.5 with the delta in units of the label."""
    return isinstance(loss, str) and re.fullmatch(r"huber(@.*)?", loss.strip().lower()) is not None
