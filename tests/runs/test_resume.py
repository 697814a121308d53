"""A run that is stopped, however rudely, goes on to the same bits; a directory that cannot be trusted is refused by name."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import warnings

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.runs import checkpoint
from fedtailor.runs.contents import open_contents
from fedtailor.runs.record import read
from tests.commands import Apart

CASES = {
    "loop": (ft.Ditto(lam=0.3, epochs=1), {"engine": "loop", "workers": 1, "model": "linear"}),
    "workers": (ft.Ditto(lam=0.3, epochs=1), {"engine": "loop", "workers": 2, "model": "mlp"}),
    "vectorized": (ft.Scaffold(epochs=1), {"engine": "vectorized", "model": "mlp", "cohort": 0.5}),
    "dynamic": (ft.FedCLUPDynamic(epochs=1), {"engine": "vectorized", "model": "linear"}),
    "roll call": (ft.ScaffoldP(epochs=1, personal="head"), {"engine": "loop", "workers": 1, "model": "mlp", "cohort": 3}),
}


def equal(a, b):
    return tree.shapes(a) == tree.shapes(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


@pytest.fixture(scope="module")
def digits():
    return ft.Federation.load("digits", clients=6, partition="dirichlet:0.5")


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """Every case, run once from beginning to end: (run, its directory)."""
    done = {}

    def run(case):
        if case not in done:
            out = tmp_path_factory.mktemp("whole") / "a"
            done[case] = go(case, digits, out), out
        return done[case]

    return run


def go(case, digits, out, resume=False, callback=None, **more):
    algorithm, options = CASES[case]
    options = {"rounds": 8, "batch_size": 16, "seed": 3, "evaluate_every": 2, "checkpoint_every": 1, **options, **more}
    return ft.run(algorithm, digits, out=out, resume=resume, callback=callback, **options)


def assert_same(one, other, a, b):
    """Parameters, history and summary (all but the time), bit for bit."""
    assert equal(one.shared, other.shared)
    assert equal(one.server, other.server)
    assert all(equal(one.personal[i], other.personal[i]) for i in range(len(one.federation)))
    assert (a / "history.jsonl").read_bytes() == (b / "history.jsonl").read_bytes()
    assert {**one.summary, "seconds": 0} == {**other.summary, "seconds": 0}
    for name in ("shared.safetensors", "personal.safetensors"):
        assert (a / "models" / name).read_bytes() == (b / "models" / name).read_bytes()


class Stop(Exception):
    pass


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(case, at, digits, whole, tmp_path):
    def stop(record):
        if record["round"] == at:
            raise Stop

    run, out = whole(case)
    with pytest.raises(Stop):
        go(case, digits, tmp_path / "b", callback=stop, new_clients=0.0)
    assert_same(run, go(case, digits, tmp_path / "b", resume=True), out, tmp_path / "b")


def torment(case, digits, tmp_path, kills, draw, rounds):
    """Kill runs at random moments, resume each (perhaps killing the resumed one too), compare. Returns how many were hit."""

    def played(out):
        return go(case, digits, out, rounds=rounds, resume=True, new_clients=0.2)

    whole = played(tmp_path / "whole")
    first = Apart(lambda: played(tmp_path / "first"))  # where workers are started anew, as they are in those that are killed
    began = time.perf_counter()
    assert first.code() == 0
    length = time.perf_counter() - began
    hit = 0
    for i in range(kills):
        out = tmp_path / str(i)
        for _ in range(2 if i % 3 == 0 else 1):
            hit += Apart(lambda: played(out)).killed(draw.uniform(0, length))  # noqa: B023
        assert_same(whole, played(out), tmp_path / "whole", out)
    return hit


@pytest.mark.parametrize("case", ["loop", "workers", "vectorized"])
def test_killed_at_random_moments_it_resumes_to_the_same_bits(case, digits, tmp_path):
    assert torment(case, digits, tmp_path, 3, np.random.default_rng(0), rounds=12) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["loop", "workers", "vectorized"])
def test_fifty_kills(case, digits, tmp_path):
    assert torment(case, digits, tmp_path, 50, np.random.default_rng(1), rounds=40) >= 35


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(path.read_bytes()[:-5] + b"12345"),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text(path.with_suffix(".json").read_text().replace("loop", "pool")),
    ],
    ids=["cut short", "altered", "gone", "facts cut short", "facts altered"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(harm, digits, whole, tmp_path):
    def stop(record):
        if record["round"] == 5:
            raise Stop

    run, out = whole("loop")
    with pytest.raises(Stop):
        go("loop", digits, tmp_path / "b", callback=stop)
    harm(tmp_path / "b" / "checkpoints" / "round-0000005.safetensors")
    seen = []
    with pytest.warns(UserWarning, match="round-0000005 is damaged"):
        again = go("loop", digits, tmp_path / "b", resume=True, callback=lambda r: seen.append(r["round"]))
    assert seen[0] == 4  # the checkpoint before it was after four rounds
    assert_same(run, again, out, tmp_path / "b")


def test_with_every_checkpoint_damaged_it_begins_anew_and_says_so(digits, whole, tmp_path):
    def stop(record):
        if record["round"] == 5:
            raise Stop

    run, out = whole("loop")
    with pytest.raises(Stop):
        go("loop", digits, tmp_path / "b", callback=stop)
    for path in (tmp_path / "b" / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = go("loop", digits, tmp_path / "b", resume=True)
    assert "begins anew" in str(said[-1].message)
    assert_same(run, again, out, tmp_path / "b")


def test_two_checkpoints_are_kept(digits, tmp_path):
    go("loop", digits, tmp_path / "a")
    names = sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir())
    assert names == ["identity.json", *(f"round-000000{n}.{end}" for n in (7, 8) for end in ("json", "safetensors"))]


def test_a_finished_run_is_read_back_without_training(digits, tmp_path):
    whole = go("loop", digits, tmp_path / "a", new_clients=0.2)
    rounds = []
    again = go("loop", digits, tmp_path / "a", resume=True, new_clients=0.2, callback=rounds.append)
    assert not rounds
    assert again.summary == whole.summary
    assert again.history == whole.history
    assert all(np.array_equal(again.clients[k], whole.clients[k], equal_nan=True) for k in whole.clients)
    x = digits.test.client(0)[0]
    assert all(torch.equal(again.predict(i, x), whole.predict(i, x)) for i in range(6))


def test_the_record_on_disk_says_what_the_run_says(digits, tmp_path):
    run = go("loop", digits, tmp_path / "a")
    live, kept = run.record(), read(open_contents(tmp_path / "a"))
    assert kept.summary == live.summary
    assert list(kept.names) == list(live.names)
    assert kept.settings == live.settings == "Ditto(epochs=1, lam=0.3)"
    assert all(np.array_equal(kept.clients[k], live.clients[k], equal_nan=True) for k in live.clients)
    assert [{**r, "seconds": 0} for r in kept.rounds] == [{**r, "seconds": 0} for r in live.rounds]


def test_excess_risks_where_the_truth_is_known_survive(tmp_path):
    fed = ft.Federation.load("clup-regression", clients=4)
    options = {"rounds": 3, "bias": False, "out": tmp_path / "a"}
    whole = ft.run(ft.Local(lr=0.01), fed, **options)
    again = ft.run(ft.Local(lr=0.01), fed, resume=True, **options)
    assert np.array_equal(whole.clients["ier"], again.clients["ier"])
    assert read(open_contents(tmp_path / "a")).summary["aer"] == whole.summary["aer"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 4}, "seed=3, not 4"),
        ({"rounds": 7}, "rounds=8, not 7"),
        ({"model": "mlp"}, "model='linear', not 'mlp'"),
        ({"algorithm": ft.Ditto(lam=0.2, epochs=1)}, "lam=0.3, not 0.2"),
        ({"algorithm": ft.FedAvg(epochs=1)}, "method='Ditto', not 'FedAvg'"),
        ({"data": True}, "other data"),
    ],
)
def test_another_run_is_not_continued(change, says, digits, tmp_path):
    options = {"model": "linear", "rounds": 8, "batch_size": 16, "seed": 3, "out": tmp_path / "a"}
    algorithm = CASES["loop"][0]
    ft.run(algorithm, digits, **options)
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    if change.pop("data", False):
        digits = ft.Federation.load("digits", clients=6, partition="dirichlet:0.4")
    algorithm = change.pop("algorithm", algorithm)
    with pytest.raises(ft.errors.BadRun, match=says):
        ft.run(algorithm, digits, resume=True, **{**options, **change})
    assert {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()} == before


def test_a_directory_of_a_newer_version_is_refused(digits, tmp_path):
    go("loop", digits, tmp_path / "a")
    path = tmp_path / "a" / "config.toml"
    path.write_text(path.read_text().replace("format = 3", "format = 4").replace('version = "0.1.0"', 'version = "9.0"'))
    with pytest.raises(ft.errors.BadRun, match=r"fedtailor 9\.0"):
        go("loop", digits, tmp_path / "a", resume=True)
    with pytest.raises(ft.errors.BadRun, match="upgrade"):
        read(open_contents(tmp_path / "a"))


def test_ctrl_c_finishes_the_round_and_keeps_it(digits, tmp_path):
    def press(record):
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    whole = go("loop", digits, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        go("loop", digits, tmp_path / "b", callback=press, checkpoint_every=100)
    assert checkpoint.newest(tmp_path / "b" / "checkpoints").number in (3, 4)  # the signal is seen after a whole round
    assert signal.getsignal(signal.SIGINT) is before
    assert_same(whole, go("loop", digits, tmp_path / "b", resume=True), tmp_path / "a", tmp_path / "b")


def full_disk(out, digits):
    """Files may not grow beyond a size that a few rounds reach."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        go("loop", digits, out, rounds=30, evaluate_every=1)
    except ft.errors.CannotWrite as error:
        (out / "said").write_text(str(error))


def test_a_full_disk_is_said_and_the_last_checkpoint_is_intact(digits, tmp_path):
    assert Apart(lambda: full_disk(tmp_path / "b", digits)).code(120) == 0
    said = (tmp_path / "b" / "said").read_text()
    assert "the disk is full" in said
    assert "\n" not in said
    assert not list((tmp_path / "b").rglob("*.part"))
    assert checkpoint.newest(tmp_path / "b" / "checkpoints").number > 0
    whole = go("loop", digits, tmp_path / "a", rounds=30, evaluate_every=1)
    again = go("loop", digits, tmp_path / "b", rounds=30, evaluate_every=1, resume=True)
    assert_same(whole, again, tmp_path / "a", tmp_path / "b")


def test_two_processes_do_not_share_a_directory(digits, tmp_path):
    def refused():
        with pytest.raises(ft.errors.BadRun, match="another process"):
            go("loop", digits, tmp_path / "a", resume=True)

    def meanwhile(record):
        assert Apart(refused).code() == 0

    go("loop", digits, tmp_path / "a", rounds=1, callback=meanwhile)


def test_the_last_clients_lines_are_whole_json(digits, tmp_path):
    go("vectorized", digits, tmp_path / "a")
    lines = [json.loads(line) for line in (tmp_path / "a" / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "client" not in line] == list(range(8))
    assert sum("client" in line for line in lines) == 4 * 6
    assert not any("seconds" in line for line in lines)


def test_trees_with_empty_branches_survive_a_checkpoint(tmp_path):
    state = {
        "shared": {},
        "server": {"a": {"b": torch.zeros(0, 3)}, "n": torch.tensor(3)},
        "store": {"ids": torch.zeros(0)},
    }
    checkpoint.save(tmp_path, checkpoint.Checkpoint(5, state, {"engine": "loop"}))
    found = checkpoint.newest(tmp_path)
    assert found.number == 5
    assert tree.shapes(found.state) == tree.shapes(state)
    assert found.state["shared"] == {}
