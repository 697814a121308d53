"""What methods with a split model have in common: a shared part u that travels, a personal part v that stays.

``personal`` names the part that stays: a group (``"head"``, ``"norm"``, ...), a module, or a list of them, by exact name.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round, names_of
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend
from fedtailor.task import Task


@dataclass(frozen=True, kw_only=True)
class Partial(Algorithm, ABC):
    """The server's half and predicting; a method adds ``client_update``. u is averaged, v_i is kept."""

    personal: str | Sequence[str] = "head"
    needs_both: ClassVar[bool] = True  # False: may also be all shared or all personal

    def mine(self, task: Task) -> frozenset[str]:
        """Names of the personal part."""
        names = names_of(task, self.personal)
        if self.needs_both and (not names or names == frozenset(task.names)):
            none = "personal" if not names else "shared"
            raise InvalidArgument(
                f"{type(self).__name__}: personal={self.personal!r} leaves no {none} parameters; name a part of the model"
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


def whole(task: Task, u: Any, v: Any) -> dict[str, Any]:
    """u and v as one model, in the model's order."""
    return {name: v[name] if name in v else u[name] for name in task.names}


def jointly(method: Partial, task: Task, shared: Any, personal: Any, data: Any, rnd: Round) -> tuple[Any, Any]:
    """Simultaneous steps on (u, v): (upload, personal)."""
    mine = method.mine(task)
    model = descend(task.risk, whole(task, shared["model"], personal["model"]), data, method.optimizer(rnd))
    return {"delta": tree.sub(tree.drop(model, mine), shared["model"])}, {"model": tree.pick(model, mine)}


def alternately(method: Any, task: Task, shared: Any, personal: Any, data: Any, rnd: Round) -> tuple[Any, Any]:
    """v steps with u as received (phase ``personal``), then u steps with the new v: (upload, personal)."""
    mine = method.mine(task)
    u, v = shared["model"], personal["model"]
    hold_u, hold_v = dict.fromkeys(u, 0.0), dict.fromkeys(mine, 0.0)
    opt = method.optimizer(rnd, method.personal_lr)
    v = tree.pick(descend(task.risk, whole(task, u, v), data["personal"], opt, rates=hold_u), mine)
    new = descend(task.risk, whole(task, u, v), data, method.optimizer(rnd), rates=hold_v)
    return {"delta": tree.sub(tree.drop(new, mine), u)}, {"model": v}
