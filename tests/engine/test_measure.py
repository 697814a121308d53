"""Evaluation of many clients at once and of a sample of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine import loop
from fedtailor.engine.measure import evaluate
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.engine.rounds import play_on
from fedtailor.errors import InvalidArgument
from tests.make import federation, pairs

SETTINGS = {"rounds": 4, "engine": "loop", "workers": 1, "batch_size": 4, "evaluate_every": 1}


def uneven(seed=0):
    sizes = [3, 5, 2, 5, 3, 8, 5, 2]
    return ft.Federation.from_arrays(pairs(sizes, seed=seed), pairs([n + 1 for n in sizes], seed=seed + 1), pairs(sizes, seed=9))


def trained(fed, **settings):
    """(engine, state) after two rounds."""
    ready = prepare(ft.Ditto(lam=0.5, steps=2), fed, "linear", Options.of({**SETTINGS, **settings}))
    state = ready.start()
    engine, _ = ready.engine(state)
    for _ in play_on(engine, state, 2, len(fed)):
        pass
    return ready, engine, state


def test_clients_measured_together_get_the_numbers_they_get_alone(monkeypatch):
    ready, engine, state = trained(uneven())
    together, columns = evaluate(engine, state.shared, state.store)
    groups = [
        len(p.ids) for p in engine.predictions(state.shared, np.array([0, 4, 1, 3, 6, 5]), state.store, ready.federation.test)
    ]
    assert groups == [2, 3, 1]
    monkeypatch.setattr(loop, "TOGETHER", 0)
    alone, one_by_one = evaluate(engine, state.shared, state.store)
    assert together == alone
    for name, values in columns.items():
        assert np.array_equal(values, one_by_one[name], equal_nan=True), name


def test_a_sample_has_the_numbers_that_its_clients_have_among_all():
    ready, engine, state = trained(uneven(), evaluate_clients=3)
    _, columns = evaluate(engine, state.shared, state.store)
    measured, few = evaluate(engine, state.shared, state.store, sample=ready.sample)
    assert len(ready.sample) == 3
    for name, values in few.items():
        assert np.array_equal(values, columns[name][ready.sample], equal_nan=True), name
    assert measured["acc_personal"] == pytest.approx(columns["acc_personal"][ready.sample].mean(), abs=1e-12)


def test_a_sample_goes_by_name_and_by_the_seed():
    names = [f"client {i}" for i in range(40)]
    fed = federation([3] * 40, names=names)

    def drawn(fed, seed=0):
        ready = prepare(ft.FedAvg(), fed, "linear", Options.of({"evaluate_clients": 10, "seed": seed}))
        return {ready.plan.federation.names[i] for i in ready.sample}

    assert drawn(fed) == drawn(fed.take(np.arange(40)[::-1]))
    assert drawn(fed) != drawn(fed, seed=1)
    assert prepare(ft.FedAvg(), fed, "linear", Options.of({"evaluate_clients": 40})).sample is None


def test_between_the_rounds_a_sample_is_measured_and_at_the_end_everyone(tmp_path):
    fed = uneven()
    plain = ft.run(ft.Ditto(lam=0.5, steps=2), fed, out=tmp_path / "all", **SETTINGS)
    run = ft.run(ft.Ditto(lam=0.5, steps=2), fed, out=tmp_path / "few", evaluate_clients=3, **SETTINGS)
    assert [record.get("evaluated_clients") for record in run.history] == [3, 3, 3, None]
    assert run.history[-1]["acc_personal"] == plain.history[-1]["acc_personal"]
    assert run.summary["evaluated_clients"] == 3
    assert any("sample of 3 of 8 clients" in note for note in run.record().notes)
    assert torch.equal(run.shared["model"]["weight"], plain.shared["model"]["weight"])
    lines = [json.loads(line) for line in (tmp_path / "few" / "history.jsonl").read_text().splitlines()]
    assert [sum("client" in line and line["round"] == n for line in lines) for n in range(4)] == [3, 3, 3, 8]
    again = ft.run(ft.Ditto(lam=0.5, steps=2), fed, out=tmp_path / "few", evaluate_clients=3, resume=True, **SETTINGS)
    assert dict(again.per_client()) == dict(run.per_client()) == dict(plain.per_client())


def test_a_sample_and_what_may_end_with_any_round_are_refused_together():
    with pytest.raises(InvalidArgument, match=r"patience.*evaluate_clients"):
        ft.run(ft.FedAvg(), uneven(), evaluate_clients=3, patience=2, **SETTINGS)
    with pytest.raises(InvalidArgument, match="evaluate_clients"):
        ft.run(ft.FedAvg(), uneven(), evaluate_clients=0, **SETTINGS)
