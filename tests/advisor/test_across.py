"""Advice across sites: what a federation in one place would be told, from summaries and validation scores alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedtailor as ft
from fedtailor.advisor.across import advise
from fedtailor.cli.sites_advise import scores
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.sites.house import House
from fedtailor.sites.local import InProcess
from fedtailor.sites.server import Conductor, Terms
from fedtailor.sites.trial import Trial, look, summary_of
from fedtailor.theory import heterogeneity
from tests.sites.test_project import SITES, houses, network

ROUNDS = 10


@pytest.fixture
def room(tmp_path):
    """A network of three sites that allow advice, in this process."""
    made = network(tmp_path, ft.FedCLUP(lam=0.2, lr=0.3, steps=5), rounds=ROUNDS, dtype="float64")
    rooms = {name: House(house.place, house.data, None, True) for name, house in houses(tmp_path, made).items()}
    return made, rooms


def questions(made, rooms, folder):
    transport = InProcess({name: house.site() for name, house in rooms.items()})

    def play(label, trial):
        out = folder / label.replace(" ", "-")
        Conductor(trial.agreed(made.agreed), transport, out, Terms(pause=0.0), digest=made.digest, trial=trial.plain()).play()
        return scores(out)

    return (lambda: look(made.agreed, lambda parcels: transport.ask(parcels, 1.0), made.digest)), play


def whole(rooms) -> ft.Federation:
    own = [house.rows for house in rooms.values()]
    parts = {"train": "train", "test": "val", "val": "val"}
    splits = {part: [getattr(rows, source).client(0) for rows in own] for part, source in parts.items()}
    return ft.Federation.from_arrays(**splits, names=SITES, classes=["no", "yes"])


def test_the_spread_and_the_race_are_those_of_the_rows_in_one_place(room, tmp_path):
    made, rooms = room
    advice = advise(made.agreed, *questions(made, rooms, tmp_path / "advice"))
    fed = whole(rooms)
    ready = ft.engine.prepare.prepare(ft.FedAvg(), fed, "linear", Options(dtype="float64"))
    expected = heterogeneity.measure(ready.task, ready.federation)
    assert advice["r2"] == pytest.approx(expected.r2, rel=1e-9)
    assert advice["r2_interval"] == pytest.approx(list(expected.interval), rel=1e-6)
    methods = {"Local": ft.Local(lr=0.3, steps=5), "FedAvg": ft.FedAvg(lr=0.3, steps=5)}
    for row in advice["race"]:
        if row["method"] in methods:
            options = made.agreed.options.but(rounds=2, engine="loop", workers=1, evaluate_every=0)
            one = ft.run(methods[row["method"]], fed, "linear", options)
            assert row["val_loss"] == pytest.approx(one.summary["loss_personal"], abs=1e-12)
            assert row["rounds"] == 2
    assert advice["verdict"]["sentence"] in advice["text"]
    assert (advice["verdict"]["rows"], advice["verdict"]["tuned"]) == ("validation", False)
    assert advice["method"] in advice["text"].lower()
    assert set(advice["gains"]) == set(SITES)


def test_an_advice_needs_no_test_row(room, tmp_path):
    made, rooms = room
    first = advise(made.agreed, *questions(made, rooms, tmp_path / "one"))
    for house in rooms.values():
        rows = house.rows
        house.__dict__["rows"] = replace(rows, test=replace(rows.test, x=rows.test.x * float("nan")))
    assert advise(made.agreed, *questions(made, rooms, tmp_path / "two")) == first


def test_a_site_answers_only_if_its_owner_allows_it(room, tmp_path):
    made, rooms = room
    rooms["Bern"] = House(rooms["Bern"].place, rooms["Bern"].data)
    advice = advise(made.agreed, *questions(made, rooms, tmp_path / "advice"))
    assert any("Bern says nothing of its fit" in note and "--allow-advice" in note for note in advice["notes"])
    assert set(advice["gains"]) == {"Aarhus", "Cork"}
    assert "summary" not in "\n".join(rooms["Bern"].paper())
    assert "short trials" in "\n".join(rooms["Cork"].paper())


def test_a_server_may_try_no_method_of_its_own_choice(room):
    made, _ = room
    with pytest.raises(InvalidData, match="sites try local"):
        Trial.of({"method": "mine.py:Mine", "set": {}, "rounds": 1})
    with pytest.raises(InvalidData, match="longer than the run"):
        Trial("fedavg", {}, ROUNDS + 1).agreed(made.agreed)


def test_private_networks_get_no_advice(tmp_path):
    made = network(tmp_path, ft.FedAvg(opt=ft.Private(clip=1.0, noise=2.0)))
    with pytest.raises(InvalidArgument, match="would spend more"):
        advise(made.agreed, dict, lambda label, trial: {})


def test_a_summary_that_is_no_fit_is_refused(room, tmp_path):
    made, rooms = room
    said = questions(made, rooms, tmp_path)[0]()["Bern"]
    assert summary_of(said["fit"], said["arrays"])[0].n == len(rooms["Bern"].rows.train.y)
    with pytest.raises(InvalidData, match="cannot be read"):
        summary_of(said["fit"], {**said["arrays"], "covariance": [[1.0]]})
    with pytest.raises(InvalidData, match="cannot be read"):
        summary_of(said["fit"], {**said["arrays"], "parameters": [float("nan")] * len(said["arrays"]["parameters"])})
