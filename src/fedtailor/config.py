"""Settings of a run or a comparison, checked: the same names on the command line, in a TOML file and in config.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from fedtailor.errors import CannotWrite, InvalidArgument, nearest

if TYPE_CHECKING:
    from fedtailor.algorithms.base import Algorithm
    from fedtailor.data.federation import Federation

BOOKKEEPING = ("format", "version", "command")  # written to config.toml, no flags
TABLE_FLAGS = ("client", "label", "features", "drop", "split", "standardize", "missing")  # for tables and folders only
DEFAULT_METHODS = ("local", "fedavg", "fedavgft", "fedprox", "fedprox-personal", "fedclup", "pfedme", "ditto")
SHOWN = 60  # letters of a wrong value that a message repeats
LARGEST = 2**63 - 1  # of a seed, and of a whole number in TOML
SWITCHES = ("bias", "tune", "dynamic")  # the settings that are true or false
Weights = Annotated[
    str | None, Field(description="Weights to start from: a .safetensors or .pt file, or imagenet (effnet-lite0).")
]


class DataSettings(BaseModel):
    """Where the clients' rows come from."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    data: str = Field(description="A data set by name (see: fedtailor data list), a table (.csv, .parquet) or a folder.")
    client: str | None = Field(None, description="The column that says whose row it is.")
    label: str | None = Field(None, description="The column to predict.")
    features: list[str] | None = Field(None, description="The columns to predict from (default: all others).")
    drop: list[str] | None = Field(None, description="Columns to leave out.")
    split: str | None = Field(None, description="A column that says train, val or test.")
    standardize: Literal["pooled", "client", "none"] | None = Field(
        None, description="Scale features by everyone's training rows, by the client's own, or not."
    )
    missing: Literal["fill", "drop", "refuse"] | None = Field(None, description="What to do with missing values.")
    clients: int | None = Field(None, ge=1, description="How many clients a pooled data set is dealt to.")
    partition: str | None = Field(None, description="How: iid, dirichlet:0.3, classes:2, quantity:0.5, natural, domain.")
    min_samples: int | None = Field(None, ge=1, description="Leave out clients with fewer rows.")
    test_share: float | None = Field(None, gt=0, lt=1, description="Share of a client's rows to test on.")
    val_share: float | None = Field(None, ge=0, lt=1, description="Share of a client's rows to choose settings on.")
    data_seed: int | None = Field(None, ge=0, le=LARGEST, description="Seed of the partition and the splits.")
    data_dir: str | None = Field(None, description="Where data sets lie (default: $FEDTAILOR_DATA).")
    public: str | None = Field(None, description="Unlabelled rows for all: a set of images or a .npy file, as cifar100:5000.")
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="Other options of the data set, as n=100.")
    task: Literal["classification", "regression", "multilabel"] | None = Field(None, description="Guessed from the labels.")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, given: Any, info: ValidationInfo) -> Any:
        """``rounds = true`` is a slip, not one round."""
        if isinstance(given, bool) and info.field_name not in SWITCHES:
            raise ValueError("must have a value of another kind")
        return given

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """From plain values; a refusal is one line that names the setting.

        Values with a ``format`` are a run directory's, where no ``batch_size`` is Python's None: all of a client's rows.
        """
        given = {
            key.replace("-", "_") if key != "with" else key: value for key, value in values.items() if key not in BOOKKEEPING
        }
        if "format" in values and "batch_size" in cls.model_fields:
            given.setdefault("batch_size", 0)
        try:
            return cls(**given)
        except ValidationError as error:
            raise InvalidArgument(where + _said(error, cls)) from None

    def federation(self) -> Federation:
        from fedtailor.data.sources import load

        names = {**{f: f for f in TABLE_FLAGS}, "clients": "clients", "partition": "partition", "min_samples": "min_samples"}
        names |= {
            "test_share": "test_share",
            "val_share": "val_share",
            "data_seed": "seed",
            "data_dir": "data_dir",
            "public": "public",
        }
        options = {option: getattr(self, flag) for flag, option in names.items() if getattr(self, flag) is not None}
        try:
            if self.is_table() and self.task is not None:
                options["task"] = self.task
            return load(self.data, **{**options, **self.with_})
        except CannotWrite:
            raise
        except OSError as error:
            raise InvalidArgument(f"{_shown(self.data)} cannot be read ({error.strerror}); check the path") from error

    def is_table(self) -> bool:
        return Path(self.data).exists() or Path(self.data).suffix in (".csv", ".tsv", ".gz", ".parquet")

    def toml(self) -> str:
        """As a file: what differs from the defaults, and the rounds."""
        values = self.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
        if "rounds" in type(self).model_fields:
            values["rounds"] = self.rounds  # type: ignore[attr-defined]
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        return tomli_w.dumps({**{k: v for k, v in values.items() if k not in tables}, **{k: v for k, v in tables.items() if v}})


class Settings(DataSettings):
    """What a run and a comparison have in common."""

    model: str = Field("linear", description="A network by name (see: fedtailor list models).")
    backbone: Weights = None
    rounds: int = Field(100, ge=1, le=LARGEST, description="Rounds of training.")
    batch_size: int = Field(32, ge=0, le=LARGEST, description="Rows per step; 0 is all of a client's rows.")
    cohort: float = Field(1.0, gt=0, allow_inf_nan=False, description="Clients per round: a share up to 1, or a number.")
    seed: int = Field(0, ge=0, le=LARGEST, description="Seed of training.")
    engine: Literal["auto", "loop", "vectorized"] = Field("auto", description="How clients are simulated.")
    workers: int | None = Field(None, ge=1, description="Processes of the loop engine (default: the cores).")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision.")
    bias: bool = Field(True, description="A constant term in the linear model.")
    weights: Literal["uniform", "size"] = Field("uniform", description="Weights of the clients in the mean.")
    evaluate_every: int | None = Field(None, ge=0, description="Rounds between evaluations (0: at the end only).")
    new_clients: float = Field(0.0, ge=0, lt=1, description="Share of clients held out, to meet the final model.")
    shift: list[str] | None = Field(None, description="Test images to corrupt as well, as contrast:3 (severity 1 to 5).")
    checkpoint_every: int | None = Field(None, ge=1, description="Rounds between checkpoints (default: by the clock).")
    device: Literal["cpu"] = Field("cpu", description="Where to compute.")
    dp_clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Private (DP-SGD): clip rows' gradients to this norm."
    )
    dp_noise: float | None = Field(None, ge=0, allow_inf_nan=False, description="Private: noise, as a multiple of the clip.")
    target_epsilon: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Private: find the noise with which no client spends more."
    )
    dp_delta: float | None = Field(None, gt=0, lt=1, description="Private: delta (default: min(1e-5, 1/(10 rows)) of a client).")
    dp_sampling: Literal["poisson", "shuffle"] | None = Field(
        None, description="Private: rows of a batch drawn one by one (poisson, amplifies), or epochs."
    )

    def private(self, algorithm: Algorithm) -> Algorithm:
        """The method with a private optimiser around its own, if the flags ask for one."""
        from dataclasses import replace

        from fedtailor.local import Private

        names = {"clip": "dp_clip", "noise": "dp_noise", "target_epsilon": "target_epsilon", "delta": "dp_delta"}
        given = {key: getattr(self, flag) for key, flag in {**names, "sampling": "dp_sampling"}.items()}
        given = {key: value for key, value in given.items() if value is not None}
        if not given:
            return algorithm
        if "noise" in given and "target_epsilon" in given:
            raise InvalidArgument("give --dp-noise or --target-epsilon, not both")
        if isinstance(algorithm.opt, Private):
            raise InvalidArgument("privacy is set twice; give the flags (--dp-clip, ...) or a private opt, not both")
        return replace(algorithm, opt=Private(opt=algorithm.opt, **given))

    def options(self) -> dict[str, Any]:
        """What ``ft.run`` takes, beside the method, the data and the model."""
        names = (
            "rounds",
            "seed",
            "engine",
            "workers",
            "dtype",
            "task",
            "bias",
            "weights",
            "evaluate_every",
            "new_clients",
            "device",
            "backbone",
        )
        out = {name: getattr(self, name) for name in names}
        out["batch_size"] = self.batch_size or None
        out["cohort"] = int(self.cohort) if self.cohort > 1 and self.cohort == int(self.cohort) else self.cohort
        out["checkpoint_every"] = self.checkpoint_every
        out["shift"] = tuple(self.shift or ())
        return out


class AdviseSettings(DataSettings):
    """What advice is asked about: the data, the model, and how a method would be trained."""

    model: str = Field("linear", description="A network by name (see: fedtailor list models).")
    backbone: Weights = None
    rounds: int = Field(50, ge=1, le=LARGEST, description="Rounds that the advised method would be trained for.")
    batch_size: int = Field(0, ge=0, le=LARGEST, description="Rows per step; 0 is all of a client's rows.")
    steps: int | None = Field(None, ge=1, description="Steps per round (default: 10 on all rows, 2 epochs on batches).")
    epochs: int | None = Field(None, ge=1, description="Epochs per round, in place of steps.")
    lr: float | None = Field(None, gt=0, allow_inf_nan=False, description="Step size (default: found from the data, or 0.1).")
    budget: str | None = Field(None, description="What the trials may cost over all methods tried: rounds (40) or traffic (5MB).")
    seed: int = Field(0, ge=0, le=LARGEST, description="Seed of training.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision.")
    bias: bool = Field(True, description="A constant term in the linear model.")
    weights: Literal["uniform", "size"] = Field("uniform", description="Weights of the clients in the mean.")

    def options(self) -> dict[str, Any]:
        """What ``ft.advise`` takes, beside the data and the model."""
        names = ("rounds", "steps", "epochs", "lr", "budget", "seed", "dtype", "bias", "weights", "backbone")
        return {**{name: getattr(self, name) for name in names}, "batch_size": self.batch_size or None}


class SweepSettings(DataSettings):
    """What is swept: the data, the model, the degrees of personalisation, and how long a run for one of them would be."""

    model: str = Field("linear", description="A network by name (see: fedtailor list models).")
    backbone: Weights = None
    lams: int | list[float] = Field(10, description="How many lams, or the lams themselves, separated by commas.")
    rounds: int = Field(50, ge=1, le=LARGEST, description="Rounds that a run with one lam would take.")
    targets: list[float] | None = Field(None, description="Scores to reach in the fewest rounds, separated by commas.")
    batch_size: int = Field(0, ge=0, le=LARGEST, description="Rows per step; 0 is all of a client's rows.")
    steps: int | None = Field(None, ge=1, description="Steps per round (default: 10 on all rows, 2 epochs on batches).")
    epochs: int | None = Field(None, ge=1, description="Epochs per round, in place of steps.")
    lr: float | None = Field(None, gt=0, allow_inf_nan=False, description="Step size (default: found from the data, or 0.1).")
    cohort: float = Field(1.0, gt=0, allow_inf_nan=False, description="Clients per round: a share up to 1, or a number.")
    seed: int = Field(0, ge=0, le=LARGEST, description="Seed of training.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision.")
    bias: bool = Field(True, description="A constant term in the linear model.")
    weights: Literal["uniform", "size"] = Field("uniform", description="Weights of the clients in the mean.")
    dynamic: bool = Field(True, description="Run the schedule with a growing lam beside it.")

    @field_validator("lams", mode="before")
    @classmethod
    def _lams(cls, given: Any) -> Any:
        """``--lams 5`` comes as a list of one word: it is how many."""
        words = given if isinstance(given, list) else [given]
        try:
            numbers = [float(word) for word in words]
        except (TypeError, ValueError, OverflowError):
            raise ValueError("must be a number of lams, or the lams separated by commas") from None
        return int(words[0]) if len(words) == 1 and str(words[0]).strip().isdecimal() else numbers

    def options(self) -> dict[str, Any]:
        """What ``ft.sweep`` takes, beside the data and the model."""
        names = ("lams", "rounds", "targets", "steps", "epochs", "lr", "seed", "dtype", "bias", "weights", "dynamic", "backbone")
        cohort = int(self.cohort) if self.cohort > 1 and self.cohort == int(self.cohort) else self.cohort
        return {**{name: getattr(self, name) for name in names}, "batch_size": self.batch_size or None, "cohort": cohort}


class PretrainSettings(DataSettings):
    """A network trained on all clients' rows, to start from elsewhere."""

    model: str = Field("resnet8", description="A network by name (see: fedtailor list models).")
    epochs: int = Field(10, ge=1, le=LARGEST, description="Passes through the rows.")
    lr: float = Field(0.05, gt=0, allow_inf_nan=False, description="First step size; it falls to zero along a cosine.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    weight_decay: float = Field(5e-4, ge=0, allow_inf_nan=False, description="Weight decay of SGD.")
    batch_size: int = Field(64, ge=1, le=LARGEST, description="Rows per step.")
    method: Literal["pooled", "fedavg"] = Field("pooled", description="Put the rows together, or leave them with the clients.")
    seed: int = Field(0, ge=0, le=LARGEST, description="Seed of training.")
    backbone: Weights = None

    def options(self) -> dict[str, Any]:
        """What ``pretrain`` takes, beside the data and the model."""
        names = ("epochs", "lr", "momentum", "weight_decay", "batch_size", "method", "seed", "backbone")
        return {name: getattr(self, name) for name in names}


class RunSettings(Settings):
    method: str = Field("fedclup", description="The method (see: fedtailor list algorithms).")
    set_: dict[str, Any] = Field(default_factory=dict, alias="set", description="Settings of the method, as lam=0.5.")

    def algorithm(self) -> Algorithm:
        from fedtailor.algorithms.settings import make

        return self.private(make(self.method, self.set_))


class CompareSettings(Settings):
    methods: list[str] = Field(list(DEFAULT_METHODS), min_length=1, description="The methods, separated by commas.")
    set_: dict[str, Any] = Field(
        default_factory=dict, alias="set", description="Settings, for all that have them as lr=0.1, for one as fedclup.lam=0.5."
    )
    seeds: int = Field(1, ge=1, description="How many seeds; the table then gives mean and deviation.")
    tune: bool = Field(False, description="Choose step size and penalty on validation, from a small grid per method.")
    grid: dict[str, list[float]] | None = Field(None, description="The grid to tune over, as lr=0.1,0.3.")

    def algorithms(self) -> dict[str, Algorithm]:
        """By label. A setting for all goes to the methods that have it; one that none has is refused."""
        import dataclasses

        from fedtailor.algorithms.settings import find, make

        own: dict[str, dict[str, Any]] = {k: dict(v) for k, v in self.set_.items() if isinstance(v, dict) and "kind" not in v}
        common = {k: v for k, v in self.set_.items() if k not in own}
        kinds = {label: find(str(own.get(label, {}).get("method", label))) for label in self.methods}
        fields = {label: {f.name for f in dataclasses.fields(kind)} for label, kind in kinds.items()}
        for key in common:
            if not any(key in known for known in fields.values()):
                every = sorted(set().union(*fields.values()))
                raise InvalidArgument(f"none of the methods has a setting {key!r}; {nearest(key, every, 'their settings are')}")
        for label in own:
            if label not in kinds and not any(kind is find(label) for kind in kinds.values()):
                raise InvalidArgument(f"settings are given for {label!r}, which is not among the methods {', '.join(kinds)}")
        out: dict[str, Algorithm] = {}
        for label, kind in kinds.items():
            alike = [given for name, given in own.items() if name not in kinds and find(name) is kind]
            mine = join(*alike, own.get(label, {}))
            values = {k: v for k, v in common.items() if k in fields[label]} | {k: v for k, v in mine.items() if k != "method"}
            shown = label if label in own and "method" in own[label] else kind.__name__
            if shown in out:
                raise InvalidArgument(f"{label} is given twice; name each method once")
            out[shown] = self.private(make(kind.__name__, values))
        return out


def read(path: Path) -> dict[str, Any]:
    """The values of a TOML file; ``Settings.of`` checks them."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"there is no file {path}; give a TOML file with the names of the flags") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as text ({error}); give a TOML file") from None
    except (ValueError, RecursionError) as error:  # also numbers with thousands of digits, and thousands of brackets
        raise InvalidArgument(f"{path} is not TOML: {' '.join(str(error).split())}") from None


def flags(kind: type[DataSettings]) -> list[str]:
    """Names of the settings, as they stand in a file."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def _said(error: ValidationError, kind: type[DataSettings]) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "the settings"
    if first["type"] == "extra_forbidden":
        return f"unknown setting {_shown(name)}; {nearest(name, flags(kind), 'the settings are')}"
    if not name.isprintable():
        name = _shown(name)
    if first["type"] == "missing":
        return f"{name} is missing; give it"
    what = first["msg"].replace("Input should be", "must be").replace("Value error, ", "")
    return f"{name} {what}, not {_shown(first.get('input'))}"


def _shown(given: Any) -> str:
    """A value for a message: in one line, not too long."""
    quoted = repr(given)
    return quoted if len(quoted) <= SHOWN else f"{quoted[:SHOWN]}..."


def join(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; tables (set, with, grid) are joined key by key."""
    out: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            known = out.get(key)
            out[key] = join(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return out


def assignments(pairs: Sequence[str], what: str) -> dict[str, Any]:
    """``["lam=0.5", "fedclup.lr=0.1"]`` as (nested) values."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        where, dot, last = name.strip().rpartition(".")
        if not equals or not last or (dot and not where):
            raise InvalidArgument(f"{what} must look like NAME=VALUE, not {_shown(pair)}")
        target, key = (out.setdefault(where, {}), last.replace("-", "_")) if where else (out, last.replace("-", "_"))
        if not isinstance(target, dict) or (not where and isinstance(out.get(key), dict)):
            raise InvalidArgument(f"{what} gives {where or key} a value and settings of its own as well; leave one of them out")
        target[key] = value(text)
    return out


def value(text: str) -> Any:
    """A word of the command line as TOML would read it: number, truth value, list, table; otherwise the word itself."""
    plain = text.strip()
    try:
        found = tomllib.loads(f"v = {plain}")
        if len(found) == 1:
            return found["v"]
    except (ValueError, RecursionError):
        pass
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if "," in plain:
        return [value(part) for part in plain.split(",") if part.strip()]
    try:
        return float(plain)  # 1e3, .5
    except ValueError:
        return plain
