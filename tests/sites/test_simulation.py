"""``engine="flower"``: clients visited by messages give the loop engine's numbers, whatever carries the messages."""

from __future__ import annotations

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.errors import WorkerDied
from fedtailor.sites import simulation
from fedtailor.sites.simulation import Clients, Direct, MessageEngine
from tests.sites.network import federation
from tests.sites.test_core import METHODS, difference

OPTIONS = {"rounds": 3, "batch_size": 8, "evaluate_every": 2, "cohort": 3}
NAMED = ("FedAvg", "FedCLUP", "ScaffoldP", "Ditto", "FedRep", "PerAda", "HypCluster", "Flow", "Halfway")


@pytest.fixture
def direct(tmp_path, monkeypatch):
    """The engine without Flower: messages go nowhere."""
    made = []

    def engine(plan, options):
        clients = Clients(plan, tmp_path / str(len(made)) / "clients")
        made.append(MessageEngine(plan, clients, Direct(clients)))
        return made[-1]

    monkeypatch.setattr(simulation, "engine", engine)
    return made


def same(mine: ft.Run, other: ft.Run, bound: float) -> None:
    """Compare two runs: trees, personal states, history, every client's scores."""
    assert mine.summary["engine"] == "flower"
    assert difference(mine.shared, other.shared) <= bound
    assert difference(mine.server, other.server) <= bound
    assert (mine.store.born == other.store.born).all()
    born = np.flatnonzero(other.store.born)
    assert difference(mine.store.get(born), other.store.get(born)) <= bound
    for one, two in zip(mine.history, other.history, strict=True):
        assert {**one, "seconds": 0} == pytest.approx({**two, "seconds": 0}, abs=bound)
    for name, values in other.clients.items():
        assert mine.clients[name] == pytest.approx(values, abs=bound, nan_ok=True)
    numbers = {key for key, value in other.summary.items() if isinstance(value, float)} - {"seconds"}
    assert {key: mine.summary[key] for key in numbers} == pytest.approx({key: other.summary[key] for key in numbers}, abs=bound)


def cases(*names: str) -> list[object]:
    return [pytest.param(*case, id=type(case[0]).__name__) for case in METHODS if type(case[0]).__name__ in names]


@pytest.mark.parametrize(("method", "model", "public"), cases(*NAMED, "PFedHN"))  # the last sends each client its own
def test_messages_give_the_numbers_of_the_loop_engine_at_partial_turnout(direct, method, model, public):
    fed, options = federation(public=public), {**OPTIONS, "dtype": "float64"}
    same(
        ft.run(method, fed, model, engine="flower", **options), ft.run(method, fed, model, engine="loop", workers=1, **options), 0
    )


def test_methods_that_no_real_site_could_run_can_be_simulated(direct):
    fed, options, decay = federation(), {**OPTIONS, "cohort": 1.0}, ft.SGD(weight_decay=0.01)
    for method in (ft.AL2SGD(steps="theory", opt=decay), ft.FedCLUP(steps="theory", lam=0.3, opt=decay)):
        same(ft.run(method, fed, engine="flower", **options), ft.run(method, fed, engine="loop", workers=1, **options), 0)


def test_a_simulation_goes_on_where_it_was_stopped(direct, tmp_path):
    fed, method = federation(), ft.Ditto(lam=0.2)

    def stop(record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run(method, fed, engine="flower", out=tmp_path / "run", callback=stop, checkpoint_every=1, **OPTIONS)
    again = ft.run(method, fed, engine="flower", out=tmp_path / "run", resume=True, **OPTIONS)
    same(again, ft.run(method, fed, engine="loop", workers=1, **OPTIONS), 0)
    assert len(direct) == 2


def test_what_goes_wrong_at_a_client_ends_the_run_with_its_name(direct, monkeypatch):
    answer = Direct.ask

    def spoiled(self, parcels, seconds):
        return {**answer(self, parcels, seconds), "Cork": "did not answer"}

    monkeypatch.setattr(Direct, "ask", spoiled)
    with pytest.raises(WorkerDied, match="client Cork of the simulation: did not answer"):
        ft.run(ft.FedAvg(), federation(), engine="flower", rounds=1)


def test_a_client_whose_state_is_gone_is_noticed(direct):
    def lose(record):
        for path in direct[0].clients.memory(2).folder.rglob("*.state"):
            path.unlink()

    with pytest.raises(WorkerDied, match="version 0 of its state, not 1"):
        ft.run(ft.Ditto(), federation(), engine="flower", rounds=2, evaluate_every=0, callback=lose)


def test_divergence_names_the_clients(direct):
    with pytest.raises(ft.errors.Diverged, match=r"Aarhus|Bergen|Cork|Delft|Espoo"):
        ft.run(ft.FedAvg(lr=1e30, steps=50), federation(), "mlp", engine="flower", rounds=3)


def test_without_ray_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr(simulation, "need_flower", lambda: None)
    monkeypatch.setattr(simulation, "find_spec", lambda name: None)
    with pytest.raises(ft.errors.InvalidArgument, match=r"needs the package ray: pip install"):
        ft.run(ft.FedAvg(), federation(), engine="flower", rounds=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what other libraries warn of inside is their own affair
@pytest.mark.parametrize(("method", "model", "public"), cases(*NAMED))
def test_flowers_simulation_gives_the_numbers_of_the_loop_engine_at_partial_turnout(method, model, public):
    pytest.importorskip("ray", reason="ray is not installed (fedtailor[flower])")
    fed = federation(public=public)
    for dtype, bound in (("float64", 1e-12), ("float32", 1e-6)):
        options = {**OPTIONS, "dtype": dtype}
        loop = ft.run(method, fed, model, engine="loop", workers=1, **options)
        same(ft.run(method, fed, model, engine="flower", workers=2, **options), loop, bound)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_method_in_a_file_of_its_own_is_found_by_flowers_processes(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed (fedtailor[flower])")
    from fedtailor.algorithms.settings import make

    source = tmp_path / "mine.py"
    source.write_text(
        "from dataclasses import dataclass\nfrom fedtailor.algorithms.ditto import Ditto\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Ditto):\n    pass\n"
    )
    method, fed = make(f"{source}:Mine", {"lam": 0.3}), federation()
    same(ft.run(method, fed, engine="flower", **OPTIONS), ft.run(method, fed, engine="loop", workers=1, **OPTIONS), 1e-6)
