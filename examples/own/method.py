"""A method of one's own: six pure functions, checked by the laws.

fedtailor run method.py:Halfway digits --rounds 5
fedtailor check method.py:Halfway
"""

from dataclasses import dataclass

from made import clients

import fedtailor as ft
from fedtailor import tree


@dataclass(frozen=True, kw_only=True)
class Halfway(ft.Algorithm):
    """A client trains a model of its own from where it is, and moves part of the way to the shared one."""

    share: float = ft.param(0.5, ge=0, le=1)

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        start = tree.map(lambda own, w: own + self.share * (w - own), personal["model"], shared["model"])
        model = ft.descend(task.risk, start, data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, {"model": model}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], 1.0)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)


def main():
    federation = ft.Federation.from_arrays(clients(seed=0), clients(seed=100))
    for method in (ft.Local(epochs=2), ft.FedAvg(epochs=2), Halfway(epochs=2)):
        print(method, ft.run(method, federation, rounds=10, batch_size=16).summary["acc_personal"])


if __name__ == "__main__":
    main()
