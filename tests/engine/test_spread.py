"""A comparison whose runs and trials are tasks of a cluster; here the tasks are done in this process, from what would be sent."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.engine import nodes, parcel
from fedtailor.engine.options import Options
from fedtailor.engine.spread import serves

OPTIONS = {"rounds": 3, "batch_size": 4, "cohort": 0.5, "evaluate_every": 0, "yardsticks": ("none",)}


def federation() -> ft.Federation:
    draw = np.random.default_rng(3)
    pairs = [(draw.normal(size=(6 + i % 5, 4)), np.arange(6 + i % 5) % 3) for i in range(10)]
    return ft.Federation.from_arrays(pairs, [(x[::2], y[::2]) for x, y in pairs], [(x[1::2], y[1::2]) for x, y in pairs])


class Tasks:
    """In the place of ``Errands``: the bytes that a task would be sent, and what it does with them."""

    def __init__(self, session):
        self.count = 0

    def send(self, work, algorithm, federation, model, options):
        self.count += 1
        kind = type(algorithm)
        common, job = parcel.dumps((federation, model), kind)[0], parcel.dumps((work, algorithm, options), kind)[0]
        return nodes._errand(common, job)

    def result(self, errand):
        good, value = errand
        if not good:
            raise value
        return value

    def close(self):
        MADE.append(self.count)


MADE: list[int] = []


@pytest.fixture
def tasks(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(nodes, "connect", lambda options: nullcontext())
    monkeypatch.setattr(nodes, "Errands", Tasks)
    return MADE


def same(mine: ft.Comparison, other: ft.Comparison) -> None:
    assert list(mine) == list(other)
    assert {label: story["trials"] for label, story in mine.tuning.items()} == {
        label: story["trials"] for label, story in other.tuning.items()
    }
    for label in other:
        for one, two in zip(mine.all[label], other.all[label], strict=True):
            assert one.summary["engine"] == "ray"
            assert [{**r, "seconds": 0} for r in one.history] == [{**r, "seconds": 0} for r in two.history]
            for name, values in two.clients.items():
                np.testing.assert_array_equal(one.clients[name], values)
            x = one.federation.test.client(0)[0]
            np.testing.assert_array_equal(one.predict("0", x), two.predict("0", x))


METHODS = [ft.FedAvg(lr=0.1), ft.Ditto(lr=0.1, lam=0.2)]


@pytest.mark.parametrize("tune", [False, {"lr": [0.03, 0.3]}], ids=["as they are", "tuned"])
@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "on disk"])
def test_tasks_give_the_bits_of_one_machine(tasks, tmp_path, tune, kept):
    fed, more = federation(), {"seeds": 2, "tune": tune, "splits": 1}
    out = tmp_path / "a" if kept else None
    mine = ft.compare(METHODS, fed, engine="ray", on_nodes="loop", out=out, **more, **OPTIONS)
    assert tasks == [2 * 2 + (2 * 3 if tune else 0)]  # runs of two seeds; three step sizes, the method's own among them
    other = ft.compare(METHODS, fed, engine="loop", workers=1, **more, **OPTIONS)
    same(mine, other)
    if kept:
        tasks.clear()
        again = ft.compare(METHODS, fed, engine="ray", on_nodes="loop", out=out, resume=True, **more, **OPTIONS)
        assert tasks == []  # all of it is there
        same(again, other)


def test_a_method_that_diverges_on_a_node_fails_alone_and_callbacks_hear_of_every_round(tasks):
    told: list[tuple[str, int]] = []
    found = ft.compare(
        {"good": ft.FedAvg(lr=0.1), "bad": ft.FedAvg(lr=1e20, steps=50)},
        federation(),
        "mlp",
        engine="ray",
        on_nodes="loop",
        callback=lambda record: told.append((record["label"], record["round"])),
        **OPTIONS,
    )
    assert list(found) == ["good"]
    assert "diverged" in found.failed["bad"]
    assert told == [("good", 0), ("good", 1), ("good", 2)]


def test_private_runs_are_not_sent_as_a_whole():
    private = ft.FedAvg(steps=2, opt=ft.Private(clip=1.0, noise=1.0))
    assert serves(Options.of({"engine": "ray"}), METHODS)
    assert not serves(Options.of({"engine": "ray"}), [*METHODS, private])
    assert not serves(Options.of({"engine": "ray", "user_clip": 1.0, "user_noise": 1.0}), METHODS)
    assert not serves(Options.of({"engine": "loop"}), METHODS)
