"""Settings of a run or a comparison, checked: the same names on the command line, in a TOML file and in config.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import Field, field_validator

from fedtailor.engine.checked import Checked, shown
from fedtailor.engine.options import LARGEST, AdviceOptions, Options, PretrainOptions, SweepOptions, TaskName
from fedtailor.engine.repeats import SPLITS, splits_of
from fedtailor.errors import CannotWrite, FedtailorError, InvalidArgument, nearest

if TYPE_CHECKING:
    from fedtailor.algorithms.base import Algorithm
    from fedtailor.data.federation import Federation
    from fedtailor.data.sources import Source
    from fedtailor.engine.prepare import Prepared

BOOKKEEPING = ("format", "version", "command", "data_sha256")  # written to config.toml, no flags
TABLE_FLAGS = (  # for tables and folders only
    *("client", "label", "features", "drop", "split", "standardize", "missing"),
    *("na", "keep_na", "merge_clients", "merge_labels", "columns", "row_weights"),
)
DEFAULT_METHODS = ("local", "fedavg", "fedavgft", "fedprox", "fedprox-personal", "fedclup", "pfedme", "ditto")
Part = TypeVar("Part", bound=Checked)


class DataSettings(Checked):
    """The settings that say where the clients' rows come from."""

    data: str = Field(
        description="A data set by name (see: fedtailor data list), a table (.csv, .parquet), a folder, your own: mine.py:data."
    )
    client: str | None = Field(None, description="The column that says whose row it is.")
    label: str | None = Field(None, description="The column to predict.")
    features: list[str] | None = Field(None, description="The columns to predict from (default: all others).")
    drop: list[str] | None = Field(None, description="Columns to leave out.")
    split: str | None = Field(None, description="A column that says train, val or test.")
    standardize: Literal["pooled", "client", "none"] | None = Field(
        None, description="Scale features by everyone's training rows, by the client's own, or not."
    )
    missing: Literal["fill", "drop", "refuse"] | None = Field(None, description="What to do with missing values.")
    na: list[str] | None = Field(None, description="More marks of missing values, as '?,-99', in all columns.")
    keep_na: bool | None = Field(None, description="Read NA, null, None and the like as words; only an empty cell is missing.")
    merge_clients: bool | None = Field(None, description="Make one of clients that look alike (case, spaces, leading zeros).")
    merge_labels: bool | None = Field(None, description="Make one of classes that look alike.")
    columns: str | None = Field(
        None,
        description="How each column is read: a TOML file that data describe --save-columns wrote; nothing is learnt from rows.",
    )
    row_weights: str | None = Field(
        None, description="A column of numbers: how much each training row counts in the loss (2 is the row twice)."
    )
    clients: int | None = Field(None, ge=1, description="How many clients a pooled data set is dealt to.")
    partition: str | None = Field(None, description="How: iid, dirichlet:0.3, classes:2, quantity:0.5, natural, domain.")
    min_samples: int | None = Field(None, ge=1, description="Leave out clients with fewer rows.")
    test_share: float | None = Field(None, gt=0, lt=1, description="Share of a client's rows to test on.")
    val_share: float | None = Field(None, ge=0, lt=1, description="Share of a client's rows to choose settings on.")
    data_seed: int | None = Field(None, ge=0, le=LARGEST, description="Seed of the partition and the splits.")
    data_dir: str | None = Field(None, description="Where data sets lie (default: $FEDTAILOR_DATA).")
    public: str | None = Field(None, description="Unlabelled rows for all: a set of images or a .npy file, as cifar100:5000.")
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="Other options of the data set, as n=100.")
    task: TaskName | None = Field(None, description="Guessed from the labels.")

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Return the settings with these plain values; an error is one line that names the setting.

        Values with a ``format`` are a run directory's, where no ``batch_size`` is Python's None: all of a client's rows.
        """
        settings = {
            key.replace("-", "_") if key != "with" else key: value for key, value in values.items() if key not in BOOKKEEPING
        }
        if "format" in values and "batch_size" in cls.model_fields:
            settings.setdefault("batch_size", 0)
        if "format" in values and settings.get("cohort") == 1:
            settings["cohort"] = 1.0  # an earlier version took a bare 1 for everyone
        return super().of(settings, where)

    def federation(self) -> Federation:
        from fedtailor.algorithms.origin import is_spec
        from fedtailor.data.sources import load, origin_of

        flags = (*TABLE_FLAGS, "clients", "partition", "min_samples", "test_share", "val_share", "data_dir", "public")
        options = {flag: getattr(self, flag) for flag in flags} | {"seed": self.data_seed}
        options = {name: value for name, value in options.items() if value is not None}
        if is_spec(self.data):
            return self._own(options)
        try:
            origin = origin_of(self.data)
            if self.task is not None and "task" in origin.options:
                options["task"] = self.task
            federation = load(self.data, **{**options, **self._reading(origin.read), **self.with_})
            return federation if self.task is None else federation.as_task(self.task)
        except CannotWrite:
            raise
        except OSError as error:
            raise InvalidArgument(f"{shown(self.data)} cannot be read ({error.strerror}); check the path") from error

    def _reading(self, source: Source) -> dict[str, Any]:
        """Return how rows are read where nobody says so: on a cluster, every node reads the shards of its clients."""
        return {}

    def _own(self, options: dict[str, Any]) -> Federation:
        """Return the federation that a function of the user's own makes; of what else it returns, ``from_datasets`` makes one."""
        from dataclasses import replace

        from fedtailor.algorithms.origin import function_of, name_of, specs_of
        from fedtailor.data import Federation

        spec = specs_of(self.data, False)
        try:
            made = function_of(spec)(**self.with_)
        except FedtailorError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidArgument(f"the data {name_of(spec)} cannot be made ({type(error).__name__}: {text})") from error
        if isinstance(made, Federation) and options:
            raise InvalidArgument(
                f"{name_of(spec)} returns a federation, which is dealt already; leave {next(iter(options))} out"
            )
        if not isinstance(made, Federation):
            sources = made if isinstance(made, tuple) and len(made) == 3 and not hasattr(made[0], "shape") else (made,)
            try:
                made = Federation.from_datasets(*sources, **options, **({} if self.task is None else {"task": self.task}))
            except TypeError as error:
                raise InvalidArgument(f"what {name_of(spec)} returns takes no such option ({error})") from error
        made = made if self.task is None else made.as_task(self.task)
        return replace(made, name=name_of(spec), recipe={"data": spec, **options, **self.with_})

    def toml(self) -> str:
        """Return the settings as a TOML file: those that differ from their defaults, and the rounds."""
        values = self.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
        if "rounds" in type(self).model_fields:
            values["rounds"] = self.rounds  # type: ignore[attr-defined]
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        return tomli_w.dumps({**{k: v for k, v in values.items() if k not in tables}, **{k: v for k, v in tables.items() if v}})


class Settings(Options, DataSettings):
    """The settings that a run and a comparison have in common: all options of a run, the model, and privacy."""

    model: str = Field(
        "linear", description="A network by name (see: fedtailor list models), or a function that makes one: mine.py:net."
    )
    batch_size: int = Field(32, ge=0, le=LARGEST, description="Rows per step; 0 is all of a client's rows.")
    dp_clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Private (DP-SGD): clip rows' gradients to this norm."
    )
    dp_noise: float | None = Field(None, ge=0, allow_inf_nan=False, description="Private: noise, as a multiple of the clip.")
    target_epsilon: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Private: find the noise with which no client spends more."
    )
    dp_delta: float | None = Field(None, gt=0, lt=1, description="Private: delta (default: min(1e-5, 1/(10 rows)) of a client).")
    dp_seed: int | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="Private: make the noise repeatable, for tests and papers; the run is then not private.",
    )
    dp_force: bool | None = Field(None, description="Private: allow no noise, or a delta of one in the rows and more.")
    dp_sampling: Literal["poisson", "shuffle"] | None = Field(
        None, description="Private: rows of a batch drawn one by one (poisson, amplifies), or epochs."
    )

    def private(self, algorithm: Algorithm) -> Algorithm:
        """Return the method with a private optimiser around its own, if the flags ask for one."""
        from dataclasses import replace

        from fedtailor.local import Private

        names = {"clip": "dp_clip", "noise": "dp_noise", "target_epsilon": "target_epsilon", "delta": "dp_delta"}
        names |= {"seed": "dp_seed", "force": "dp_force"}
        options = {key: getattr(self, flag) for key, flag in {**names, "sampling": "dp_sampling"}.items()}
        options = {key: value for key, value in options.items() if value is not None}
        if not options:
            return algorithm
        if "noise" in options and "target_epsilon" in options:
            raise InvalidArgument("give --dp-noise or --target-epsilon, not both")
        if algorithm.opt.privacy is not None:
            raise InvalidArgument("privacy is set twice; give the flags (--dp-clip, ...) or a private opt, not both")
        return replace(algorithm, opt=Private(opt=algorithm.opt, **options))

    def options(self) -> Options:
        """Return what ``ft.run`` takes, beside the method, the data and the model."""
        return part(self, Options)


class AdviseSettings(AdviceOptions, DataSettings):
    """The settings of an advice: the data, the model, and how a method would be trained."""

    model: str = Field(
        "linear", description="A network by name (see: fedtailor list models), or a function that makes one: mine.py:net."
    )
    batch_size: int = Field(0, ge=0, le=LARGEST, description="Rows per step; 0 is all of a client's rows.")

    def options(self) -> AdviceOptions:
        """Return what ``ft.advise`` takes, beside the data and the model."""
        return part(self, AdviceOptions)


class SweepSettings(SweepOptions, DataSettings):
    """The settings of a sweep: the data, the model, the degrees of personalisation, and how long a run for one of them would
    be."""

    model: str = Field(
        "linear", description="A network by name (see: fedtailor list models), or a function that makes one: mine.py:net."
    )
    method: str = Field("fedclup", description="The method to sweep, by name or as mine.py:MyMethod; it needs a lam.")
    batch_size: int = Field(0, ge=0, le=LARGEST, description="Rows per step; 0 is all of a client's rows.")

    def options(self) -> SweepOptions:
        """Return what ``ft.sweep`` takes, beside the data and the model."""
        return part(self, SweepOptions)


class PretrainSettings(PretrainOptions, DataSettings):
    """A network trained on all clients' rows, to start from elsewhere."""

    model: str = Field(
        "resnet8", description="A network by name (see: fedtailor list models), or a function that makes one: mine.py:net."
    )

    def options(self) -> PretrainOptions:
        """Return what ``pretrain`` takes, beside the data and the model."""
        return part(self, PretrainOptions)


class RunSettings(Settings):
    method: str = Field("fedclup", description="The method (see: fedtailor list algorithms).")
    set_: dict[str, Any] = Field(default_factory=dict, alias="set", description="Settings of the method, as lam=0.5.")

    def algorithm(self) -> Algorithm:
        from fedtailor.algorithms.settings import make

        return self.private(make(self.method, self.set_))

    def _reading(self, source: Source) -> dict[str, Any]:
        from fedtailor.data.readers.shards import from_shards

        return {"read": False} if self.engine == "ray" and source is from_shards else {}

    def prepared(self) -> Prepared:
        """Everything the run needs, made from these settings alone: the same in any process that can read the data."""
        from fedtailor.engine.prepare import prepare

        return prepare(self.algorithm(), self.federation(), self.model, self.options())


class CompareSettings(Settings):
    methods: list[str] = Field(list(DEFAULT_METHODS), min_length=1, description="The methods, separated by commas.")
    set_: dict[str, Any] = Field(
        default_factory=dict, alias="set", description="Settings, for all that have them as lr=0.1, for one as fedclup.lam=0.5."
    )
    seeds: int = Field(1, ge=1, description="How many seeds of training.")
    splits: str | int = Field(
        1,
        description="Split every client's rows so many times (10 is good): mean and chance over which rows test. "
        "As 5-fold, every row tests once.",
    )
    yardsticks: list[str] = Field(
        ["majority", "pooled"], description="What scores are held against: boosting adds scikit-learn's; none leaves all out."
    )
    tune: bool = Field(False, description="Choose step size and penalty on validation, from a small grid per method.")
    grid: dict[str, list[float]] | None = Field(None, description="The grid to tune over, as lr=0.1,0.3.")

    @field_validator("splits")
    @classmethod
    def _count_or_folds(cls, value: Any) -> Any:
        try:
            count, folds = splits_of(value)
        except InvalidArgument:
            raise ValueError(SPLITS) from None
        return f"{count}-fold" if folds else count

    def algorithms(self) -> dict[str, Algorithm]:
        """Return the methods by label. A setting for all goes to the methods that have it; one that none has is refused."""
        import dataclasses

        from fedtailor.algorithms.settings import build, find, label_of

        by_method = {k: dict(v) for k, v in self.set_.items() if isinstance(v, dict) and "kind" not in v}
        common = {k: v for k, v in self.set_.items() if k not in by_method}
        if twice := [label for label in self.methods if self.methods.count(label) > 1]:
            raise InvalidArgument(f"{twice[0]} is given twice; name each method once")
        kinds = {label: find(str(by_method.get(label, {}).get("method", label))) for label in self.methods}
        fields = {label: {f.name for f in dataclasses.fields(kind)} for label, kind in kinds.items()}
        for key in common:
            if not any(key in names for names in fields.values()):
                every = sorted(set().union(*fields.values()))
                raise InvalidArgument(f"none of the methods has a setting {key!r}; {nearest(key, every, 'their settings are')}")
        for label in by_method:
            if label not in kinds and not any(kind is find(label) for kind in kinds.values()):
                raise InvalidArgument(f"settings are given for {label!r}, which is not among the methods {', '.join(kinds)}")
        out: dict[str, Algorithm] = {}
        for label, kind in kinds.items():
            alike = [values for name, values in by_method.items() if name not in kinds and find(name) is kind]
            mine = join(*alike, by_method.get(label, {}))
            values = {k: v for k, v in common.items() if k in fields[label]} | {k: v for k, v in mine.items() if k != "method"}
            shown = label if label in by_method and "method" in by_method[label] else label_of(kind)
            if shown in out:
                raise InvalidArgument(f"{label} is given twice; name each method once")
            out[shown] = self.private(build(kind, values))
        return out


def read(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file; ``Settings.of`` checks them."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"there is no file {path}; give a TOML file with the names of the flags") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as text ({error}); give a TOML file") from None
    except (ValueError, RecursionError) as error:  # also numbers with thousands of digits, and thousands of brackets
        raise InvalidArgument(f"{path} is not TOML: {' '.join(str(error).split())}") from None


def part(settings: Checked, kind: type[Part]) -> Part:
    """Return the settings that ``kind`` has; a file's ``batch_size = 0`` is Python's None: all of a client's rows."""
    values = {name: getattr(settings, name) for name in kind.model_fields}
    return kind.of({**values, "batch_size": values["batch_size"] or None})


def join(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all layers as one, of which the later win; tables (set, with, grid) are joined key by key."""
    out: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            earlier = out.get(key)
            out[key] = join(earlier, value) if isinstance(earlier, Mapping) and isinstance(value, Mapping) else value
    return out


def assignments(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """``["lam=0.5", "fedclup.lr=0.1"]`` as (nested) values."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        where, dot, last = name.strip().rpartition(".")
        if not equals or not last or (dot and not where):
            raise InvalidArgument(f"{flag} must look like NAME=VALUE, not {shown(pair)}")
        target, key = (out.setdefault(where, {}), last.replace("-", "_")) if where else (out, last.replace("-", "_"))
        if not isinstance(target, dict) or (not where and isinstance(out.get(key), dict)):
            raise InvalidArgument(f"{flag} gives {where or key} a value and settings of its own as well; leave one of them out")
        target[key] = value(text)
    return out


def value(text: str) -> Any:
    """Return a word of the command line as TOML would read it: number, truth value, list, table; otherwise the word itself."""
    plain = text.strip()
    try:
        parsed = tomllib.loads(f"v = {plain}")
        if len(parsed) == 1:
            return parsed["v"]
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
