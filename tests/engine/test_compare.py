"""``compare``: the same ground for every method, settings chosen on validation alone, a directory to go on with."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine import tune
from fedtailor.errors import BadRun, Diverged, InvalidArgument
from tests import make

METHODS = {"Local": ft.Local(lr=0.2), "FedAvg": ft.FedAvg(lr=0.2), "Ditto": ft.Ditto(lr=0.2, lam=0.3)}
LRS = [0.003, 0.3, 3.0]


@pytest.fixture(scope="module")
def clients():
    """Five clients whose labels follow a line each of its own, with validation rows."""
    draw = np.random.default_rng(5)
    splits = {}
    slopes = draw.normal(size=4) + 0.7 * draw.normal(size=(5, 4))
    for name, rows in (("train", 30), ("test", 20), ("val", 20)):
        x = draw.normal(size=(5, rows, 4))
        y = (np.einsum("crd,cd->cr", x, slopes) + 0.5 * draw.normal(size=(5, rows)) > 0).astype(int)
        splits[name] = list(zip(x, y, strict=True))
    return ft.Federation.from_arrays(**splits)


def history(run):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.history]


def timeless(summary):
    return {key: value for key, value in summary.items() if key != "seconds"}


def test_every_method_and_seed_is_the_run_it_would_be_alone(clients):
    options = {"rounds": 4, "batch_size": 8, "cohort": 0.6}
    found = ft.compare(METHODS, clients, seed=3, seeds=2, **options)
    assert list(found) == list(METHODS)
    for label, algorithm in METHODS.items():
        for number, run in zip((3, 4), found.all[label], strict=True):
            alone = ft.run(algorithm, clients, seed=number, **options)
            assert history(run) == history(alone)
            assert timeless(run.summary) == timeless(alone.summary)
        assert found[label] is found.all[label][0]


def test_the_same_clients_take_part_under_every_method(clients):
    found = ft.compare(METHODS, clients, rounds=3, cohort=2, seed=1)
    born = [run.store.born.tolist() for run in found.values() if run.personal[0] and run.store.born.any()]
    assert len(born) >= 2
    assert all(one == born[0] for one in born)


def test_the_table_averages_numbers_over_seeds_and_keeps_words(clients):
    found = ft.compare([ft.FedAvg()], clients, rounds=2, seeds=3, batch_size=4)
    row = found.table()[0]
    for key in ("loss_personal", "acc_personal", "seconds"):
        assert row[key] == pytest.approx(sum(r.summary[key] for r in found.all["FedAvg"]) / 3)
    assert row["algorithm"] == "FedAvg"
    assert found.table("loss_personal") == [{"method": "FedAvg", "loss_personal": row["loss_personal"]}]


def test_a_method_given_twice_is_numbered():
    assert list(ft.compare([ft.Local(), ft.Local(lr=0.2), ft.FedAvg()], make.federation([4, 5]), rounds=1)) == [
        "Local",
        "Local 2",
        "FedAvg",
    ]


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("A b", "a-B"), "two labels read alike"),
        (("ä", "ö"), "two labels read alike"),
        (("", "method"), "two labels read alike"),
        ((1, 2), "labels must be text, not 1"),
    ],
)
def test_labels_that_would_share_a_directory_are_refused(labels, says, tmp_path):
    with pytest.raises(InvalidArgument, match=says):
        ft.compare({label: ft.Local() for label in labels}, make.federation([4, 5]), rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("methods", "options", "says"),
    [
        ([], {}, "nothing to compare"),
        ([ft.Local(), ft.FedPer()], {}, "leaves no shared parameters"),
        ([ft.Local(), ft.FedDF()], {}, "needs public rows"),
        ([ft.Local(), ft.AL2SGD()], {}, "give mu and smoothness"),
        ([ft.Local(), ft.L2GD()], {"cohort": 0.5}, "needs all clients"),
        ([ft.Local(), ft.FedCLUPDynamic()], {}, "validation rows"),
        ([ft.Local(), ft.FedAvg], {}, "create it first"),
        ([ft.Local()], {"model": "linaer"}, "did you mean 'linear'"),
        ([ft.Local()], {"cohort": 9}, "cohort"),
        ([ft.Local()], {"rounds": 0}, "rounds must be"),
        ([ft.Local()], {"seeds": 0}, "seeds must be"),
        ([ft.Local()], {"seeds": True}, "seeds must be"),
        ([ft.Local()], {"tune": True}, "tuning needs validation rows"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained_or_written(methods, options, says, tmp_path):
    seen = []
    with pytest.raises(InvalidArgument, match=says):
        ft.compare(methods, make.federation([4, 5]), **{"rounds": 2, **options}, out=tmp_path / "out", callback=seen.append)
    assert not seen
    assert not (tmp_path / "out").exists()


def test_an_option_that_run_does_not_have_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="batchsize"):
        ft.compare([ft.Local()], make.federation([4, 5]), batchsize=3, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- tuning --------------------------------------------------------------------------------------------------------------


def by_hand(algorithm, clients, choices, rounds, **options):
    """(accuracy, loss) on validation of every choice, from a federation that has validation rows in the place of test rows;
    the worst there is where it diverges."""

    def pairs(split):
        return [tuple(part.numpy() for part in split.client(i)) for i in range(len(clients))]

    judged = ft.Federation.from_arrays(pairs(clients.train), pairs(clients.val), names=clients.names)
    out = {}
    for choice in choices:
        try:
            summary = ft.run(dataclasses.replace(algorithm, **dict(choice)), judged, rounds=rounds, **options).summary
            out[choice] = (summary["acc_personal"], summary["loss_personal"])
        except Diverged:
            out[choice] = (-np.inf, np.inf)
    return out


def best_first(scores):
    return sorted(scores, key=lambda choice: (-scores[choice][0], scores[choice][1]))


@pytest.mark.parametrize("method", [ft.FedAvg(lr=0.03), ft.Local(lr=0.03)])
def test_the_choice_is_the_best_on_validation(method, clients):
    options = {"batch_size": 8, "seed": 2}
    found = ft.compare([method], clients, rounds=5, tune={"lr": [0.3, 3.0]}, **options)
    label = type(method).__name__
    scores = by_hand(method, clients, [(("lr", lr),) for lr in (0.03, 0.3, 3.0)], 5, **options)
    story = found.tuning[label]
    assert {t["settings"]["lr"]: (t["score"], t["loss"]) for t in story["trials"]} == {k[0][1]: v for k, v in scores.items()}
    assert story["chosen"] == dict(best_first(scores)[0])
    alone = ft.run(dataclasses.replace(method, **story["chosen"]), clients, rounds=5, **options)
    assert history(found[label]) == history(alone)


def test_the_last_rung_is_played_in_full_by_the_best_third_of_the_one_before(clients):
    method, options = ft.Ditto(lr=0.1, lam=0.1), {"batch_size": 8}
    grid = {"lr": [0.01, 0.1, 1.0], "lam": [0.1, 10.0]}
    choices = [(("lr", lr), ("lam", lam)) for lr in (0.01, 0.1, 1.0) for lam in (0.1, 10.0)]
    first = by_hand(method, clients, choices, 2, **options)  # six settings: two rungs, a third of the six rounds and all of them
    last = by_hand(method, clients, best_first(first)[:2], 6, **options)
    story = ft.compare([method], clients, rounds=6, tune=grid, **options).tuning["Ditto"]
    assert len(story["trials"]) == 8
    assert story["chosen"] == dict(best_first(last)[0])


def test_test_rows_never_influence_the_choice(clients):
    spoiled = dataclasses.replace(clients, test=dataclasses.replace(clients.test, x=-clients.test.x, y=1 - clients.test.y))
    one, other = (ft.compare(METHODS, fed, rounds=3, tune={"lr": LRS}, batch_size=8) for fed in (clients, spoiled))
    assert one.tuning == other.tuning
    assert any(one[label].summary["loss_personal"] != other[label].summary["loss_personal"] for label in METHODS)
    assert all(
        torch.equal(one[label].personal[0]["model"][k], v)
        for label in ("Local",)
        for k, v in other[label].personal[0]["model"].items()
    )


def test_validation_rows_do_influence_the_choice(clients):
    spoiled = dataclasses.replace(clients, val=dataclasses.replace(clients.val, y=1 - clients.val.y))
    one, other = (ft.compare([ft.Local(lr=0.3)], fed, rounds=3, tune={"lr": LRS}) for fed in (clients, spoiled))
    assert one.tuning["Local"]["chosen"] != other.tuning["Local"]["chosen"]


def test_a_step_size_that_diverges_is_not_chosen():
    draw = np.random.default_rng(0)
    parts = [[(x, 3 * x[:, 0]) for x in draw.normal(size=(3, rows, 2))] for rows in (20, 9, 9)]
    federation = ft.Federation.from_arrays(parts[0], parts[1], parts[2], task="regression")
    story = ft.compare([ft.Local(lr=0.1)], federation, rounds=40, tune={"lr": [1e30]}).tuning["Local"]
    assert story["chosen"] == {"lr": 0.1}
    assert {t["settings"]["lr"]: t["score"] for t in story["trials"]}[1e30] is None


def test_settings_a_method_does_not_take_together_are_left_out_of_the_default_grid(clients):
    """L2GD needs lr * lam / p of at most 1, which the largest step sizes and penalties of the grid break."""
    method = ft.L2GD(p=0.2)
    story = ft.compare([method], clients, rounds=2, tune=True).tuning["L2GD"]
    tried = [t["settings"] for t in story["trials"]]
    assert tried
    assert all(s["lr"] * s["lam"] <= 0.2 for s in tried)


def test_steps_and_epochs_are_tuned_as_whole_numbers(clients):
    story = ft.compare([ft.FedAvg(epochs=1)], clients, rounds=2, tune={"epochs": [2, 3]}).tuning["FedAvg"]
    assert story["grid"] == {"epochs": [1, 2, 3]}
    assert all(isinstance(t["settings"]["epochs"], int) for t in story["trials"])


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"lr": [-1.0]}, "lr must be greater than 0"),
        ({"lr": [float("nan")]}, "lr must be a number"),
        ({"lr": ["fast"]}, "lists of numbers"),
        ({"lr": 0.1}, "lists of numbers"),
        ({"lrr": [0.1]}, "none of the methods has the grid's 'lrr'; did you mean 'lr'"),
        ({"epochs": [1, 2]}, "has a number for the grid's 'epochs'"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_before_anything_is_written(grid, says, clients, tmp_path):
    with pytest.raises(InvalidArgument, match=says):
        ft.compare([ft.Local(), ft.FedAvg()], clients, rounds=2, tune=grid, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_rounds_announced_are_the_rounds_played(clients):
    from fedtailor.engine.compare import total

    for tuned in (False, True, {"lr": LRS}):
        seen = []
        ft.compare(METHODS, clients, rounds=3, seeds=2, tune=tuned, callback=seen.append)
        assert len(seen) == total(METHODS, 3, 2, tuned)
        assert {r["stage"] for r in seen} == ({"tune", "train"} if tuned else {"train"})


def test_as_many_rounds_as_thirds_of_the_settings():
    assert tune.rungs(1, 9) == [(1, 9)]
    assert tune.rungs(3, 9) == [(3, 9)]
    assert tune.rungs(9, 9) == [(9, 3), (3, 9)]
    assert tune.rungs(15, 90) == [(15, 10), (5, 30), (2, 90)]


# -- the directory -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def kept(folder):
    out = {
        path.relative_to(folder): path.read_bytes()
        for pattern in ("**/history.jsonl", "tuning/*")
        for path in folder.glob(pattern)
    }
    return out | {
        path.relative_to(folder): path.read_bytes() for path in folder.glob("runs/**/*.safetensors") if "models" in path.parts
    }


def whole(clients, out, **more):
    options = {"rounds": 4, "seeds": 2, "tune": {"lr": LRS}, "batch_size": 8, "checkpoint_every": 3}
    return ft.compare(METHODS, clients, out=out, **options, **more)


@pytest.fixture(scope="module")
def uninterrupted(clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "a"
    return whole(clients, folder), folder


@pytest.mark.parametrize("at", [5, 15, 38])
def test_stopped_in_tuning_or_training_it_goes_on_to_the_same_bits(at, clients, uninterrupted, tmp_path):
    rounds = []

    def stop(record):
        rounds.append(record)
        if len(rounds) > at:
            raise Stop

    one, folder = uninterrupted
    with pytest.raises(Stop):
        whole(clients, tmp_path / "b", callback=stop)
    left = []
    other = whole(clients, tmp_path / "b", resume=True, callback=left.append)
    assert kept(folder) == kept(tmp_path / "b")
    assert one.tuning == other.tuning
    for label in METHODS:
        assert [timeless(r.summary) for r in one.all[label]] == [timeless(r.summary) for r in other.all[label]]
    assert (
        len(rounds) + len(left) <= 60 + 4
    )  # a method is tuned in 4 trials of 1 round and 2 of 4, and trained twice; one trial is played again


def test_a_finished_comparison_is_read_back_without_training(clients, uninterrupted):
    one, folder = uninterrupted
    seen = []
    other = whole(clients, folder, resume=True, callback=seen.append)
    assert not seen
    assert one.table() == other.table()
    assert one.tuning == other.tuning


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rounds": 5}, "another rounds"),
        ({"seeds": 1}, "another seeds"),
        ({"tune": False}, "another tune"),
        ({"cohort": 2}, "cohort"),
    ],
)
def test_another_comparison_is_not_continued(change, says, clients, tmp_path):
    options = {"rounds": 2, "seeds": 2, "tune": {"lr": LRS}, "out": tmp_path / "a"}
    ft.compare([ft.Local()], clients, **options)
    before = kept(tmp_path / "a")
    with pytest.raises(BadRun, match=says):
        ft.compare([ft.Local()], clients, resume=True, **{**options, **change})
    with pytest.raises(BadRun, match="another methods"):
        ft.compare([ft.FedAvg()], clients, resume=True, **options)
    with pytest.raises(InvalidArgument, match="holds another run"):
        ft.compare([ft.Local()], clients, **options)
    assert kept(tmp_path / "a") == before


def test_workers_and_checkpoints_may_differ_when_it_goes_on(clients, tmp_path):
    options = {"rounds": 2, "out": tmp_path / "a", "engine": "loop"}
    one = ft.compare([ft.Local()], clients, workers=1, checkpoint_every=1, **options)
    (tmp_path / "a" / "manifest.json").unlink()
    other = ft.compare([ft.Local()], clients, resume=True, **options)
    assert one.table() == other.table()


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"trials": [{}]}', '{"trials": 3}', '{"trials": [3]}', "\x00"])
def test_a_damaged_story_of_the_tuning_is_refused(text, clients, tmp_path):
    options = {"rounds": 2, "tune": {"lr": LRS}, "out": tmp_path / "a"}
    ft.compare([ft.Local()], clients, **options)
    (tmp_path / "a" / "tuning" / "local.json").write_text(text)
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(BadRun) as caught:
        ft.compare([ft.Local()], clients, resume=True, **options)
    assert "\n" not in str(caught.value)


def test_the_summary_on_disk_has_the_table(clients, tmp_path):
    found = ft.compare(METHODS, clients, rounds=2, out=tmp_path / "a")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["table"] == json.loads(json.dumps(found.table()))
    assert summary["methods"] == {"Local": "local", "FedAvg": "fedavg", "Ditto": "ditto"}
