"""scikit-learn's interface: ``fit(X, y, groups=...)`` trains a method with a client per group, ``predict`` uses their models.

Groups come as an argument, by row, or as a column of X (``group_column``), which needs no metadata routing in a ``Pipeline`` or a
``GridSearchCV``. Without groups all rows are one client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from fedtailor import tree
from fedtailor.algorithms.base import RECEIVED, Algorithm, opened
from fedtailor.algorithms.settings import make
from fedtailor.data.columns import is_frame
from fedtailor.data.federation import Federation
from fedtailor.engine.run import run
from fedtailor.engine.setup import DTYPES, build_task
from fedtailor.errors import InvalidArgument
from fedtailor.runs.nearest import nearest
from fedtailor.task import Task
from fedtailor.theory.constants import constants

try:
    from sklearn.utils.validation import validate_data
except ImportError as error:
    raise InvalidArgument("FederatedClassifier and FederatedRegressor need scikit-learn 1.6 or newer") from error

ONE = "all rows"  # the client's name where there are no groups
DTYPE = "float64"

Floats = NDArray[np.float64]


@dataclass(eq=False)
class Trained:
    """The models that predictions are made with: trees by client, and the scale of the features and the target."""

    algorithm: Algorithm
    task: Task | None  # left out of pickles; made again from ``model``
    model: Any
    shared: Any
    personal: dict[str, Any]
    newcomer: Any  # what a client that was not there predicts with
    middles: Mapping[str, Any]  # of the clients' scaled rows
    mean: Floats
    scale: Floats
    like: Federation  # two rows that tell shape and kind

    def logits(self, client: str | None, rows: Floats) -> torch.Tensor:
        """Return the outputs of a client's model on rows; None is the shared model or, where there is none, that of the client
        whose rows are most like these."""
        assert self.task is not None
        x = torch.tensor((rows - self.mean) / self.scale, dtype=DTYPES[DTYPE])
        if client is None and not (tree.leaves(self.shared) or RECEIVED in self.newcomer):
            client = nearest(self.middles, list(self.personal), x)
        own = self.newcomer if client is None else self.personal[client]
        with torch.no_grad():
            return self.algorithm.predict(self.task, *opened(self.shared, own), x)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "task": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.task = build_task(self.model, self.like, 0, DTYPES[DTYPE], True)


class _Federated(BaseEstimator):
    """The base of classifier and regressor."""

    def __init__(
        self,
        method: str | Algorithm = "ditto",
        *,
        model: Any = "linear",
        rounds: int = 30,
        steps: int | None = 10,
        lr: float | None = None,
        lam: float | None = None,
        settings: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        group_column: str | int | None = None,
        random_state: int = 0,
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.steps = steps
        self.lr = lr
        self.lam = lam
        self.settings = settings
        self.batch_size = batch_size
        self.group_column = group_column
        self.random_state = random_state

    def _fit(self, X: Any, y: Any, targets: NDArray[Any], names: NDArray[Any]) -> None:
        """Train on checked features, by client; ``X`` is not looked at again."""
        self.groups_ = np.unique(names)
        mean, scale = X.mean(0), X.std(0)
        scale = np.where(scale <= 1e-13 * np.abs(mean), 1.0, scale)
        scaled = (X - mean) / scale
        pairs = [(scaled[names == name], targets[names == name]) for name in self.groups_]
        kind = self._kind
        classes = [str(i) for i in range(len(self.classes_))] if kind == "classification" else []
        federation = Federation.from_arrays(
            pairs, pairs, names=[str(name) for name in self.groups_], task=kind, classes=classes, name="estimator"
        )
        algorithm = self._algorithm(federation)
        options: dict[str, Any] = {
            "rounds": self.rounds,
            "batch_size": self.batch_size,
            "seed": self.random_state,
            "dtype": DTYPE,
        }
        self.run_ = run(algorithm, federation, self.model, evaluate_every=0, workers=1, **options)
        trees = {name: self.run_.personal[name] for name in federation.names}
        newcomer = self.run_.engine.newborn(self.run_.sent) if tree.leaves(self.run_.sent.newcomer) else {}
        middles = {"means": [x.mean(0) for x, _ in pairs], "spread": np.ones(X.shape[1])}  # all rows together have deviation 1
        tiny = self.run_.federation.take([0])
        few = [(tiny.train.x[:2], tiny.train.y[:2])]
        like = Federation.from_arrays(few, few, task=kind, classes=classes)
        how = (self.run_.algorithm, self.run_.task, self.model)
        self._trained = Trained(*how, self.run_.shared, trees, newcomer, middles, mean, scale, like)

    def _algorithm(self, federation: Federation) -> Algorithm:
        """Return the method with its settings; unless it is given, the step size of a linear model is 1 / (smoothness + lam)."""
        if isinstance(self.method, Algorithm):
            if any(value is not None for value in (self.lr, self.lam, self.settings)):
                raise InvalidArgument(
                    "a method that is an object has its settings: give lr, lam and settings with a name, or none"
                )
            return self.method
        values = {"lam": self.lam, "lr": self.lr, "steps": self.steps if self.batch_size is None else None}
        asked = {**{name: value for name, value in values.items() if value is not None}, **(self.settings or {})}
        method = make(self.method, asked)
        step = None if "lr" in asked else self._step(federation, getattr(method, "lam", 0.0))
        return method if step is None else replace(method, lr=step)

    def _step(self, federation: Federation, lam: Any) -> float | None:
        whole = federation.to(DTYPES[DTYPE])
        task = build_task(self.model, whole, self.random_state, DTYPES[DTYPE], True)
        if task.gradient is None:
            return None
        return 1 / (constants(task, whole, 1e-3).smoothness + (float(lam) if isinstance(lam, Real) else 0.0))

    def _rows(self, X: Any, groups: Any, reset: bool = False, **check: Any) -> tuple[Any, NDArray[Any] | None]:
        """Return the features, checked, and the name of every row's client (None: nobody said)."""
        if self.group_column is not None:
            if groups is not None:
                raise InvalidArgument("groups are given twice, as a column and as an argument; give one of them")
            X, groups = self._without_groups(X)
        X = validate_data(self, X, reset=reset, dtype=np.float64, **check)
        rows = X[0] if isinstance(X, tuple) else X
        if groups is None:
            return X, None
        names = np.array([str(name) for name in np.asarray(groups, object).ravel()])
        check_consistent_length(rows, names)
        return X, names

    def _without_groups(self, X: Any) -> tuple[Any, Any]:
        if is_frame(X):
            if self.group_column not in X.columns:
                raise InvalidArgument(f"X has no column {self.group_column!r} that says whose a row is; check group_column")
            return X.drop(columns=self.group_column), X[self.group_column].to_numpy()
        if isinstance(self.group_column, str):
            raise InvalidArgument(
                f"X has no names, so {self.group_column!r} is none of its columns; give a number, or a DataFrame"
            )
        assert self.group_column is not None
        rows = np.asarray(X)
        return np.delete(rows, self.group_column, axis=1), rows[:, self.group_column]

    def _outputs(self, X: Any, groups: Any) -> torch.Tensor:
        """Return the outputs of every row by its client's model; of a client that is not known by the shared one, or the
        nearest client's where the method has none (the rule of ``fedtailor predict``)."""
        check_is_fitted(self)
        rows, names = self._rows(X, groups)
        if names is None:
            return self._trained.logits(ONE if ONE in self._trained.personal else None, rows)
        out: torch.Tensor | None = None
        for name in np.unique(names):
            mine = np.flatnonzero(names == name)
            part = self._trained.logits(str(name) if name in self._trained.personal else None, rows[mine])
            out = part.new_zeros(len(rows), *part.shape[1:]) if out is None else out
            out[torch.from_numpy(mine)] = part
        assert out is not None
        return out

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "run_"}  # it has worker processes and files


class FederatedClassifier(ClassifierMixin, _Federated):
    """A classifier that learns across clients and gives each a model of its own.

    ``method`` is a method's name or an ``Algorithm``; ``lr``, ``lam`` and ``settings`` are its settings (a linear model's step
    size is found from the data). Features are standardised by all training rows. A group that was not there is predicted by the
    shared model or, of a method that has none, by that of the client whose mean row is nearest to the group's (its rows count
    together). After ``fit``: ``run_`` (the run itself; it is not pickled), ``classes_``, ``groups_``.
    """

    _kind = "classification"

    def fit(self, X: Any, y: Any, groups: Any = None) -> FederatedClassifier:
        """Train with a client per distinct entry of ``groups`` [rows]; without, all rows are one client's."""
        (X, y), names = self._rows(X, groups, reset=True, y=y)
        check_classification_targets(y)
        self.classes_, targets = np.unique(y, return_inverse=True)
        names = np.full(len(X), ONE) if names is None else names
        if len(self.classes_) < 2:
            raise ValueError(f"there is one class only, {self.classes_[0]!r}; a classifier needs two classes or more")
        self._fit(X, y, targets.astype(np.int64), names)
        return self

    def predict_proba(self, X: Any, groups: Any = None) -> Floats:
        """Return the classes' probabilities [rows, classes]: by each row's client's model; without groups, by the shared one."""
        return torch.softmax(self._outputs(X, groups), 1).numpy()

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """Return the likeliest class of every row."""
        best = self.predict_proba(X, groups).argmax(1)
        return self.classes_[best]

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return the accuracy."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class FederatedRegressor(RegressorMixin, _Federated):
    """A regressor that learns across clients and gives each a model of its own.

    As ``FederatedClassifier``; the target is standardised too, and predictions are in its units.
    """

    _kind = "regression"

    def fit(self, X: Any, y: Any, groups: Any = None) -> FederatedRegressor:
        """Train with a client per distinct entry of ``groups`` [rows]; without, all rows are one client's."""
        (X, y), names = self._rows(X, groups, reset=True, y=y, y_numeric=True)
        y = column_or_1d(y, warn=True).astype(np.float64)
        self._center, spread = float(y.mean()), float(y.std())
        self._spread = spread if spread > 1e-13 * abs(self._center) else 1.0
        names = np.full(len(X), ONE) if names is None else names
        self._fit(X, y, (y - self._center) / self._spread, names)
        return self

    def predict(self, X: Any, groups: Any = None) -> Floats:
        """Return a number for every row: by its client's model; without groups, by the shared one."""
        return self._outputs(X, groups).reshape(-1).numpy() * self._spread + self._center

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return the coefficient of determination."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))
