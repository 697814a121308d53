"""A method of somebody else's, in a file of its own that can be given to sites."""

from __future__ import annotations

from dataclasses import dataclass

import fedtailor as ft
from fedtailor import tree
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class Halfway(ft.Algorithm):
    """A method of somebody else's: a personal model half way to the shared one."""

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        new = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(new, shared["model"])}, {"model": tree.mix(personal["model"], new, 0.5)}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.add(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
