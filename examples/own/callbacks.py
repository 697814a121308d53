"""A callback with a state: it is told of every round, keeps the best one, and ends the run.

fedtailor run ditto digits --callbacks callbacks.py:Steady --rounds 30
"""

from made import clients

import fedtailor as ft


class Steady:
    """Ends the run once validation loss has been within a hair of its best for three evaluations; keeps the best round.

    A class is made anew for every run. A run that goes on tells it of the earlier rounds again, so its state need not be stored.
    """

    def __init__(self):
        self.best, self.flat = None, 0

    def __call__(self, now):
        loss = now.record.get("val_loss_personal")
        if loss is None:
            return None
        self.flat = 0 if self.best is None or loss < self.best - 1e-3 else self.flat + 1
        if self.best is None or loss < self.best:
            self.best = loss
            now.keep()  # whenever the run ends, it is with this round, unless a later one is kept
        return "validation is flat" if self.flat == 3 else None


def main():
    federation = ft.Federation.from_arrays(clients(seed=0), clients(seed=100), clients(seed=200))
    run = ft.run(ft.Ditto(lam=0.1, lr=0.5, epochs=2), federation, rounds=60, evaluate_every=1, callbacks=[Steady])
    print(len(run.history), "rounds of 60:", run.history[-1].get("stopped"))
    early = ft.run(ft.Ditto(lam=0.1, lr=0.5, epochs=2), federation, rounds=60, evaluate_every=1, patience=3)
    print("with patience=3:", len(early.history), "rounds")


if __name__ == "__main__":
    main()
