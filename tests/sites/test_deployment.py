"""A whole deployment in real processes on loopback: the numbers, and what is left after a kill -9 and random failures."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pandas as pd
import pytest
import tomli_w

import fedtailor as ft
from fedtailor import tree
from fedtailor.advisor.across import advise
from fedtailor.algorithms.settings import settings
from fedtailor.cli.sites_advise import ask, scores
from fedtailor.cli.sites_run import train
from fedtailor.engine.options import Options
from fedtailor.errors import TooFewSites
from fedtailor.runs import checkpoint
from fedtailor.sites.house import House, newest_run
from fedtailor.sites.local import InProcess
from fedtailor.sites.memory import Memory
from fedtailor.sites.processes import Member, _free_port, start_server
from fedtailor.sites.project import Draft, Network, Place, create
from fedtailor.sites.server import Conductor
from fedtailor.sites.trial import look
from tests.sites import halfway
from tests.sites.halfway import Halfway

pytest.importorskip("flwr", reason="flwr is not installed (fedtailor[flower])")
pytestmark = pytest.mark.slow

SITES = ("Aarhus", "Bern", "Cork")
SCHEMA = {
    "label": "y",
    "classes": ["no", "yes"],
    "columns": [{"name": name, "kind": "numeric", "range": [-4, 4]} for name in "abc"],
}
METHODS = {
    "fedavg": (ft.FedAvg(epochs=2), "linear"),
    "fedclup": (ft.FedCLUP(lam=0.3, steps=3), "linear"),
    "scaffoldp": (ft.ScaffoldP(personal="head"), "mlp"),
    "ditto": (ft.Ditto(lam=0.2), "linear"),
    "fedrep": (ft.FedRep(), "mlp"),
    "perada": (ft.PerAda(), "mlp"),
    "hypcluster": (ft.HypCluster(k=2), "linear"),
    "flow": (ft.Flow(), "mlp"),
    "halfway.py:Halfway": (Halfway(), "linear"),
}
GROUPS = (("fedavg", "fedclup", "scaffoldp"), ("ditto", "fedrep", "perada"), ("hypcluster", "flow", "halfway.py:Halfway"))


def tables(folder, names, rows=30):
    draw, out = np.random.default_rng(3), {}
    for i, name in enumerate(names):
        x = draw.uniform(-3, 3, (rows + i % 3, 3))
        out[name] = folder / f"{name}.csv"
        frame = pd.DataFrame(x, columns=list("abc"))
        frame.assign(y=np.where(x[:, 0] + x[:, 1] > i % 3 - 1, "yes", "no")).to_csv(out[name], index=False)
    return out


@contextmanager
def running(folder, names, data, options, method=None, public=None, advice=False):
    """A server and its sites in processes of their own; what is started here is ended here."""
    made = create(
        folder,
        Draft(
            sites=names,
            schema=SCHEMA,
            address=("127.0.0.1", _free_port()),
            algorithm=method or ft.Ditto(lam=0.2),
            options=options,
            public=public,
        ),
    )
    with ExitStack() as stack:
        started = {"server": start_server(made, "127.0.0.1")}
        stack.callback(lambda: [one.stop() for one in started.values()])
        for name in names:
            started[name] = Member(House(Place(folder / "sites" / name), data[name], None, advice))
        yield made, started


def rewritten(made, **run):
    """Change what is trained, in every folder; each message is answered by a process that reads it anew."""
    for folder in (made.folder, *(made.folder / "sites" / name for name in made.clients)):
        values = Network(folder).values
        (folder / "config.toml").write_text(tomli_w.dumps({**values, "run": run}))
    return Network(made.folder)


def in_one_place(made, data):
    rows = [House(Place(made.folder / "sites" / name), data[name]).rows for name in made.clients]
    splits = {part: [getattr(own, part).client(0) for own in rows] for part in ("train", "test", "val")}
    public = {} if rows[0].public is None else {"public": rows[0].public}
    return ft.Federation.from_arrays(**splits, **public, names=list(made.clients), classes=["no", "yes"])


def apart(a, b) -> float:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs), default=0.0)


def shared_of(out):
    return checkpoint.newest(out / "checkpoints").state["shared"]


def state_of(made, name, run):
    memory = Memory(made.folder / "sites" / name / "state")
    return memory.recall(run, 10**6)[1]


def test_the_groups_are_all_methods():
    assert [name for group in GROUPS for name in group] == list(METHODS)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_every_method_gives_the_loop_engines_numbers_at_partial_turnout(tmp_path, names, dtype, bound):
    data, common = tables(tmp_path, SITES), {"rounds": 2, "batch_size": 8, "evaluate_every": 0, "cohort": 2, "dtype": dtype}
    public = tmp_path / "public.csv"
    pd.DataFrame(np.random.default_rng(5).uniform(-3, 3, (12, 3)), columns=list("abc")).to_csv(public, index=False)
    with running(tmp_path / "net", SITES, data, Options(**common), public=public) as (made, _):
        for folder in (made.folder, *(made.folder / "sites" / name for name in SITES)):
            shutil.copy(halfway.__file__, folder / "halfway.py")
        for number, name in enumerate(names):
            method, model = METHODS[name]
            made = rewritten(made, method=name, model=model, **common, set=settings(method))
            out = made.folder / "runs" / str(number)
            summary = train(made, out, False, lambda record: None)
            agreed = made.agreed
            one = ft.run(agreed.algorithm, in_one_place(made, data), model, agreed.options.but(engine="loop", workers=1))
            assert summary["events"] == []
            assert apart(shared_of(out), one.shared) <= bound, name
            for measure in ("acc_personal", "loss_personal", "val_acc_personal"):
                assert summary[measure] == pytest.approx(one.summary[measure], abs=bound), (name, measure)
            for i, site in enumerate(SITES):
                own = json.loads((newest_run(made.folder / "sites" / site) / "summary.json").read_text())
                assert own["loss_personal"] == pytest.approx(one.clients["loss_personal"][i], abs=bound)


def test_a_site_that_is_killed_in_a_round_has_the_state_before_and_the_run_is_one_that_it_missed(tmp_path):
    rounds = 8
    data, options = tables(tmp_path, SITES), Options(rounds=rounds, batch_size=8, evaluate_every=0, dtype="float64")
    with running(tmp_path / "net", SITES, data, options) as (made, started):
        out = made.folder / "runs" / "1"

        def show(record):
            if record["round"] == 0:  # the second round is under way, or about to end
                started["Cork"].stop(hard=True)
                started["Cork"] = Member(House(Place(made.folder / "sites" / "Cork"), data["Cork"]))

        summary = train(made, out, False, show, lambda: started["Cork"].look())
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    away = [line["round"] for line in lines if "Cork" in line.get("left_out", [])]
    assert away
    assert max(away) < rounds - 1  # it came back
    assert {event["client"] for event in summary["events"]} == {"Cork"}
    assert not any("personal state" in event["what"] for event in summary["events"])  # neither lost nor rolled back
    there = [(number, name) for number in range(rounds) for name in SITES if name != "Cork" or number not in away]
    pd.DataFrame(there, columns=["round", "client"]).to_csv(tmp_path / "who.csv", index=False)
    cohort = str(tmp_path / "who.csv")
    one = ft.run(ft.Ditto(lam=0.2), in_one_place(made, data), "linear", options.but(engine="loop", workers=1, cohort=cohort))
    assert apart(shared_of(out), one.shared) <= 1e-12
    run = checkpoint.newest(out / "checkpoints").facts["run"]
    for i, name in enumerate(SITES):
        mine = tree.map(lambda leaf: leaf[0], one.store.get(np.array([i])))
        assert apart(state_of(made, name, run), mine) <= 1e-12


def test_a_server_that_is_killed_resumes_and_ends_as_if_it_had_not(tmp_path):
    data, options = tables(tmp_path, SITES), Options(rounds=4, batch_size=8, evaluate_every=0, dtype="float64")
    with running(tmp_path / "net", SITES, data, options) as (made, started):
        out = made.folder / "runs" / "1"

        def kill(record):
            if record["round"] == 1:
                started["server"].stop(hard=True)
                raise TooFewSites("the server is gone")

        with pytest.raises(TooFewSites, match="the server is gone"):
            train(made, out, False, kill)
        assert not (out / "summary.json").exists()
        started["server"] = start_server(made, "127.0.0.1")
        until = time.monotonic() + 240
        while True:  # sites need a while to notice that their server is back
            for name in SITES:
                started[name].look()
            try:
                summary = train(made, out, True, lambda record: None)
                break
            except TooFewSites:
                assert time.monotonic() < until
    one = ft.run(ft.Ditto(lam=0.2), in_one_place(made, data), "linear", options.but(engine="loop", workers=1))
    assert apart(shared_of(out), one.shared) <= 1e-12
    assert summary["loss_personal"] == pytest.approx(one.summary["loss_personal"], abs=1e-12)


def test_twenty_sites_in_processes_of_their_own_with_random_failures(tmp_path):
    names = [f"s{i:02d}" for i in range(20)]
    data, draw = tables(tmp_path, names), np.random.default_rng(1)
    options, failed = Options(rounds=5, batch_size=None, evaluate_every=0, dtype="float64"), []
    hidden = []

    def come_back():
        while hidden:
            path = hidden.pop()
            path.with_suffix(".away").rename(path)

    with running(tmp_path / "net", names, data, options, ft.Ditto(lam=0.2, steps=2)) as (made, _):
        out = made.folder / "runs" / "1"

        def show(record):  # a table that is gone is a site that fails, until the next round is over
            come_back()
            if record["round"] < 3:
                for name in draw.choice(names, 2, replace=False):
                    data[name].rename(data[name].with_suffix(".away"))
                    hidden.append(data[name])
                    failed.append(str(name))

        try:
            summary = train(made, out, False, show)
        finally:
            come_back()
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    rounds = [line for line in history if "client" not in line]
    left_out = {(line["round"], name) for line in rounds for name in line.get("left_out", [])}
    assert len(rounds) == 5
    assert left_out
    assert {name for _, name in left_out} <= set(failed)
    assert left_out <= {(event["round"], event["client"]) for event in summary["events"]}
    assert not any("lost its personal state" in event["what"] for event in summary["events"])
    for line in rounds:
        assert line["cohort"] == 20 - len(line.get("left_out", []))
    there = [(number, name) for number in range(5) for name in names if (number, name) not in left_out]
    pd.DataFrame(there, columns=["round", "client"]).to_csv(tmp_path / "who.csv", index=False)
    cohort = str(tmp_path / "who.csv")
    one = ft.run(
        ft.Ditto(lam=0.2, steps=2), in_one_place(made, data), "linear", options.but(engine="loop", workers=1, cohort=cohort)
    )
    assert apart(shared_of(out), one.shared) <= 1e-12
    run = checkpoint.newest(out / "checkpoints").facts["run"]
    for i, name in enumerate(names):
        mine = tree.map(lambda leaf: leaf[0], one.store.get(np.array([i])))
        assert apart(state_of(made, name, run), mine) <= 1e-12
        assert newest_run(made.folder / "sites" / name) is not None


def test_an_advice_over_flower_is_that_of_the_same_questions_in_one_process(tmp_path):
    data, options = tables(tmp_path, SITES), Options(rounds=5, batch_size=8, evaluate_every=0, dtype="float64")
    with running(tmp_path / "net", SITES, data, options, ft.FedCLUP(lam=0.3, steps=3), advice=True) as (made, _):
        got, written = ask(made, 1)
    assert json.loads(written.read_text()) == json.loads(json.dumps(got))
    houses = {name: House(Place(made.folder / "sites" / name), data[name], None, True) for name in SITES}
    transport = InProcess({name: house.site() for name, house in houses.items()})

    def play(label, trial):
        out = tmp_path / "here" / label.replace(" ", "-")
        Conductor(trial.agreed(made.agreed), transport, out, digest=made.digest, trial=trial.plain()).play()
        return scores(out)

    here = advise(made.agreed, lambda: look(made.agreed, lambda asked: transport.ask(asked, 1.0), made.digest), play, 1)
    assert got["r2"] == pytest.approx(here["r2"], rel=1e-9)
    assert [row["method"] for row in got["race"]] == [row["method"] for row in here["race"]]
    for one, other in zip(got["race"], here["race"], strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], abs=1e-12)
    assert (got["method"], got["text"]) == (here["method"], here["text"])
    assert got["gains"] == pytest.approx(here["gains"])
    assert set(got["gains"]) == set(SITES)
