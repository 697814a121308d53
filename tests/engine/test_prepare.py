"""``prepare``: one door into a run, the same from Python, from a run directory and in another process."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

import fedtailor as ft
from fedtailor import tree
from fedtailor.config import RunSettings
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.runs.summary import Summary, documented, page
from tests.commands import Apart
from tests.make import federation
from tests.stored import make

PATIENTS = {"data": "examples/patients.csv", "client": "hospital", "label": "outcome"}


def digest(ready) -> str:
    """Of everything a client or a server would compute with."""
    shared, server = ready.algorithm.init_server(ready.plan.task)
    rows = [ready.plan.feed.rows(i, 2, "train") for i in range(len(ready.plan.federation))]
    parts = [tree.pack(shared), tree.pack(server), ready.plan.weights.tobytes(), repr(ready.algorithm).encode()]
    parts += [ready.plan.federation.train.x.numpy().tobytes(), *(r.tobytes() for client in rows for r in client)]
    parts += [repr((ready.size, ready.facts, ready.privacy, ready.every, ready.plan.federation.names)).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize(
    "more",
    [
        {"method": "fedclup", "cohort": 0.5, "new_clients": 0.25},
        {"method": "ditto", "target_epsilon": 4.0, "dp_clip": 1.0, "dp_seed": 2},
    ],
)
def test_another_process_prepares_the_same_run_from_the_settings_alone(more, tmp_path):
    settings = RunSettings.of({**PATIENTS, "rounds": 3, "seed": 4, "weights": "size", **more})
    path = tmp_path / "config.toml"
    path.write_text(settings.toml())
    there = tmp_path / "there"
    assert Apart(lambda: there.write_text(digest(read(str(path)).prepared()))).code() == 0
    assert there.read_text() == digest(settings.prepared())


def read(path: str) -> RunSettings:
    return RunSettings.of(tomllib.loads(Path(path).read_text()))


def test_a_run_directory_is_enough_to_prepare_its_run(tmp_path):
    fed = ft.Federation.load(PATIENTS["data"], client="hospital", label="outcome")
    ft.run(ft.FedCLUP(lam=0.3), fed, rounds=2, seed=1, cohort="1 client", out=tmp_path / "run")
    options = Options(rounds=2, seed=1, cohort="1 client")
    assert digest(read(str(tmp_path / "run" / "config.toml")).prepared()) == digest(
        prepare(ft.FedCLUP(lam=0.3), fed, "linear", options)
    )


def test_newcomers_and_learners_part_the_clients():
    ready = prepare(ft.FedAvg(), federation([4, 5, 6, 7]), "linear", Options(new_clients=0.5, seed=3))
    apart = {*ready.plan.federation.names}, {*ready.newcomers.federation.names}
    assert apart[0] | apart[1] == {*ready.federation.names}
    assert not apart[0] & apart[1]
    assert ready.size == len(apart[0]) == 2


def test_options_are_frozen_checked_and_changed_by_copies():
    options = Options(rounds=3)
    with pytest.raises(Exception, match="frozen"):
        options.rounds = 4
    assert options.but(seed=2) == Options(rounds=3, seed=2)
    assert options == Options(rounds=np.int64(3))
    with pytest.raises(ft.errors.InvalidArgument, match="rounds must be"):
        options.but(rounds=0)


def test_every_measure_of_a_summary_is_documented():
    known = set(get_type_hints(Summary))
    assert known == {name for section in documented().values() for name in section}
    for name, case in make.cases().items():
        if name.split()[0] in ("FedAvg", "FedCLUP", "L2GD") and "mlp" not in name and "vectorized" not in name:
            algorithm, kind, model, options = case
            assert set(ft.run(algorithm, make.federation(kind), model, **options).summary) <= known, name
    private = {"rounds": 1, "user_clip": 1.0, "user_noise": 2.0}
    assert set(ft.run(ft.FedAvg(opt=ft.Private()), make.federation("classification"), **private).summary) <= known


def test_the_page_about_the_summary_is_what_the_fields_say():
    assert (Path(__file__).parents[2] / "docs/summary.md").read_text() == page()
