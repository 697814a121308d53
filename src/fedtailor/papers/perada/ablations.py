"""One thing changed of PerAda on CIFAR-10: distillation's steps and images, lam, the start."""

from __future__ import annotations

from fedtailor.papers.adapters import CIFAR, SMALL, above, distilled, experiment
from fedtailor.papers.base import Settings
from fedtailor.papers.frozen_images import Way

AS_IS, FEW, MANY = "PerAda", "a quarter of the steps", "three times the steps"
TENTH, HALF = "a tenth of the public images", "half of the public images"
OWN, FAR, PROBABILITIES = "public images of CIFAR-10 that nobody has", "public images of PACS", "taught mean probabilities"
LOOSE, TIGHT = "lam 0.1", "lam 10"
STARTS = {
    "ResNet-8, pretrained on CIFAR-100": "pooled",
    "ResNet-8, by FedAvg of the clients": "fedavg",
    "ResNet-8, at random": "random",
}
POOLED, AVERAGED, RANDOM = STARTS


def ways(settings: Settings) -> dict[str, Way]:
    steps, rows, lr = settings["kd_steps"], settings["public"], settings["lr"]
    ours = distilled(settings, lr)
    return {
        FEW: Way(distilled(settings, lr, kd_steps=max(1, steps // 4))),
        AS_IS: Way(ours),
        MANY: Way(distilled(settings, lr, kd_steps=3 * steps)),
        TENTH: Way(ours, change={"public_rows": max(1, rows // 10)}),
        HALF: Way(ours, change={"public_rows": max(1, rows // 2)}),
        OWN: Way(ours, change={"public": "cifar10"}),
        FAR: Way(ours, change={"public": "pacs"}),
        PROBABILITIES: Way(distilled(settings, lr, teach="probabilities")),
        LOOSE: Way(distilled(settings, lr, lam=0.1)),
        TIGHT: Way(distilled(settings, lr, lam=10.0)),
        **{label: Way(ours, change={"network": SMALL, "start": how}) for label, how in STARTS.items()},
    }


EXPERIMENT = experiment(
    "Distillation, lam and the start",
    "Figures 4, 5 and 7",
    {**CIFAR, "shift": False, "lrs": {}, "start_images": 50_000, "start_epochs": 6},
    ways,
    (
        above("The steps of distillation are better than a quarter of them", "global", AS_IS, FEW),
        above("Three times as many are better still", "global", MANY, AS_IS),
        above("The public images are better than half of them", "global", AS_IS, HALF),
        above("Half of them are better than a tenth", "global", HALF, TENTH),
        above("Public images like the clients' are better", "global", OWN, AS_IS, theirs="comparable"),
        above("Those of PACS are worse", "global", AS_IS, FAR),
        above("lam = 1 is better on Global-test than 0.1", "global", AS_IS, LOOSE),
        above("lam = 10 costs Local-test", "local", AS_IS, TIGHT),
        above("A pretrained start is better than one by FedAvg", "global", POOLED, AVERAGED),
        above("One by FedAvg is better than one at random", "global", AVERAGED, RANDOM),
    ),
    full={"start_epochs": 20},
    means_of=3,
)
