"""Clients with networks of different widths: prototypes travel, models do not; methods that send models are refused."""

from made import clients
from torch import nn

import fedtailor as ft


def body(width):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5))


def main():
    federation = ft.Federation.from_arrays(clients(seed=0), clients(seed=100))
    of = {name: "phone" if int(name) % 2 else "server" for name in federation.names}
    network = ft.Mixed({"phone": body(3), "server": body(32)}, of, head=nn.Linear(5, 2))
    for method in (ft.Local(lr=0.3, epochs=2), ft.FedProto(lr=0.3, epochs=2, lam=0.1)):
        run = ft.run(method, federation, network, rounds=3, batch_size=16)
        print(run.summary["algorithm"], run.summary["acc_personal"], run.summary["bytes_up"], "bytes up")
    try:
        ft.run(ft.FedAvg(), federation, network, rounds=1)
    except ft.errors.FedtailorError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
