"""What methods with a split model have in common: a shared part u that travels, a personal part v that stays.

``personal`` names the part that stays: a group (``"head"``, ``"norm"``, ...), a module, or a list of them, by exact name.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round, names_of
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, descend
from fedtailor.task import Task


@dataclass(frozen=True, kw_only=True)
class Partial(Algorithm, ABC):
    """What the server does, and how a client predicts; a method adds ``client_update``. u is averaged, v_i is kept."""

    personal: str | Sequence[str] = "head"
    family = "part of the model personal"
    needs_both: ClassVar[bool] = True  # False: may also be all shared or all personal

    def mine(self, task: Task) -> frozenset[str]:
        """Names of the personal parameters and buffers."""
        names = names_of(task, self.personal)
        if self.needs_both and (not names or names == frozenset(task.names)):
            missing = "personal" if not names else "shared"
            raise InvalidArgument(
                f"{type(self).__name__}: personal={self.personal!r} leaves no {missing} parameters; name a part of the model"
            )
        return names

    def init_server(self, task):
        return {"model": tree.drop(task.init(), self.mine(task))}, {}

    def init_client(self, task, shared, data):
        return {"model": tree.pick(task.init(), self.mine(task))}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.add(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(whole(task, shared["model"], personal["model"]), x)


def theory(method: Any, problem: Any) -> tuple[Any, int, dict[str, float]]:
    """Return (constants of the problem, number of local steps, noise of the gradients) for PARTIAL's step sizes; refused where
    these are not proved."""
    name, sizes = type(method).__name__, problem.federation.train.sizes
    if problem.weights == "size" and len(set(sizes.tolist())) > 1:
        raise InvalidArgument(f"{name}: lr='theory' is proved for plain means over clients; use weights='uniform'")
    if type(method.opt) is not SGD or method.opt.momentum or method.radius is not None:
        raise InvalidArgument(f"{name}: lr='theory' is proved for plain SGD; leave out momentum, Adam and radius")
    if method.personal_lr is not None or method.server_lr != 1.0 or method.personal_server_lr != 1.0:
        raise InvalidArgument(f"{name}: lr='theory' sets all step sizes; leave out personal_lr, server_lr and personal_server_lr")
    counts = method.work()["train"].count(sizes, problem.batch_size)
    if counts.min() != counts.max():
        raise InvalidArgument(f"{name}: lr='theory' needs the same number of local steps at every client; give steps=")
    split = problem.split(method.mine(problem.task), method.opt.weight_decay)
    noise = {"sigma_u2": split.sigma_u2, "sigma_v2": split.sigma_v2}
    if not all(map(math.isfinite, noise.values())):
        raise InvalidArgument(
            f"{name}: for lr='theory' the noise of mini-batches needs a bound, least squares has none; use batch_size=None"
        )
    return split, int(counts[0]), noise


def whole(task: Task, u: Any, v: Any) -> dict[str, Any]:
    """Return u and v as one model, in the model's order."""
    return {name: v[name] if name in v else u[name] for name in task.names}


def jointly(method: Partial, task: Task, shared: Any, personal: Any, data: Any, rnd: Round) -> tuple[Any, Any]:
    """Return (upload, personal) after simultaneous steps on (u, v)."""
    mine = method.mine(task)
    model = descend(task.risk, whole(task, shared["model"], personal["model"]), data, method.optimizer(rnd))
    return {"delta": tree.sub(tree.drop(model, mine), shared["model"])}, {"model": tree.pick(model, mine)}


def alternately(method: Any, task: Task, shared: Any, personal: Any, data: Any, rnd: Round) -> tuple[Any, Any]:
    """Return (upload, personal) after steps on v with u as received (phase ``personal``), then steps on u with the new v."""
    mine = method.mine(task)
    u, v = shared["model"], personal["model"]
    fixed_u, fixed_v = dict.fromkeys(u, 0.0), dict.fromkeys(mine, 0.0)
    opt = method.optimizer(rnd, method.personal_lr)
    v = tree.pick(descend(task.risk, whole(task, u, v), data["personal"], opt, rates=fixed_u), mine)
    new = descend(task.risk, whole(task, u, v), data, method.optimizer(rnd), rates=fixed_v)
    return {"delta": tree.sub(tree.drop(new, mine), u)}, {"model": v}
