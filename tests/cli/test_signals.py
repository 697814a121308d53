"""A scheduler's stop: SIGTERM or SIGINT, to one process or to the group, ends every command cleanly, and it can go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.commands import Command, appears, group_ended

SLOWLY = {  # so long that nobody waits for the end
    "run": ("run", "digits", "ditto", "--clients", 6, "--rounds", 100_000, "--evaluate-every", 0, "--out", "cut"),
    "workers": (
        *("run", "digits", "ditto", "--clients", 6, "--model", "mlp", "--rounds", 100_000, "--evaluate-every", 0, "--out", "cut"),
        *("--engine", "loop", "--workers", 2),
    ),
    "tune": (
        *("compare", "digits", "--clients", 6, "--methods", "local,ditto", "--tune", "--rounds", 3000, "--out", "cut"),
        *("--grid", "lr=0.1,0.2"),
    ),
    "compare": ("compare", "digits", "--clients", 6, "--methods", "local,ditto", "--rounds", 100_000, "--out", "cut"),
    "sweep": ("sweep", "digits", "--clients", 6, "--model", "mlp", "--rounds", 100_000, "--out", "cut"),
    "advise": ("advise", "digits", "--clients", 6, "--model", "mlp", "--rounds", 100_000, "--out", "cut"),
    "pretrain": (
        "pretrain",
        "digits",
        "--with",
        "images=true",
        "--model",
        "resnet8",
        "--epochs",
        1000,
        "--out",
        "cut.safetensors",
    ),
}
RESUME = "go on with: fedtailor resume cut"
AGAIN = "give the same command again"
ADVICE = {"sweep": AGAIN, "advise": AGAIN, "pretrain": "the same command goes on from here"}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", CODES, ids=lambda n: n.name)
@pytest.mark.parametrize(("command", "whole_group"), [*((c, True) for c in SLOWLY), ("run", False), ("workers", False)])
def test_a_stop_is_clean_and_says_how_to_go_on(command, whole_group, number):
    process = Command(*SLOWLY[command], on_round=Path("playing").touch)
    assert appears("playing", process.alive)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    code, out, err = process.wait()
    assert code == CODES[number]
    assert out == ""
    assert err.splitlines()[-1] == f"fedtailor: stopped; {ADVICE.get(command, RESUME)}"
    assert "Traceback" not in err
    assert "memory" not in err
    assert group_ended(process.pid)
    assert not list(Path().rglob("*.part"))
    if command in ("run", "workers", "compare"):
        assert list(Path("cut").rglob("round-*.json"))
    if command == "tune":
        assert Path("cut/config.toml").exists()
    if command in ("sweep", "advise"):
        assert not Path("cut").exists()
    if command == "pretrain":
        assert not Path("cut.safetensors").exists()


@pytest.mark.parametrize("number", CODES, ids=lambda n: n.name)
@pytest.mark.parametrize("fate", ["another error", "lost", "lost in a finalizer"])
@pytest.mark.parametrize("command", ["advise", "tune"])
def test_a_stop_is_a_stop_whatever_others_make_of_what_it_raises(command, fate, number):
    """It is raised wherever the interpreter is: torch makes a RuntimeError of it on its way into ``vmap``, finalizers lose it."""

    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), number)

    def press():
        if Path("pressed").exists():
            return
        Path("pressed").touch()
        if fate == "lost in a finalizer":
            Finalized()
            return
        try:
            os.kill(os.getpid(), number)
        except BaseException:
            if fate == "another error":
                raise RuntimeError("vmapMode INTERNAL ASSERT FAILED") from None

    code, out, err = Command(*SLOWLY[command], on_round=press).wait()
    assert Path("pressed").exists()
    assert (code, out) == (CODES[number], "")
    assert err.splitlines()[-1] == f"fedtailor: stopped; {ADVICE.get(command, RESUME)}"
    assert "Traceback" not in err
    assert not list(Path().rglob("failed.json"))


@pytest.mark.parametrize("number", CODES, ids=lambda n: n.name)
def test_a_stop_after_the_last_round_of_a_method_stops_the_comparison(number):
    """The signal comes while the last round of the first method is played, and again while that method is being measured."""

    def press():
        if Path("cut/runs/local/seed-0/checkpoints/round-0000002.json").exists():  # this is the third round of three
            os.kill(os.getpid(), number)

    words = ("compare", "digits", "--clients", 4, "--methods", "local,ditto", "--rounds", 3, "--checkpoint-every", 1)
    code, _, err = Command(*words, "--out", "cut", on_round=press).wait()
    assert code == CODES[number]
    assert err.splitlines()[-1] == f"fedtailor: stopped; {RESUME}"
    assert Path("cut/runs/local/seed-0/checkpoints/round-0000003.json").exists()
    assert not Path("cut/runs/ditto").exists()
    assert Command("resume", "cut").wait()[::2] == (0, "")
    assert Command(*words, "--out", "whole").wait()[0] == 0
    for method in ("local", "ditto"):
        histories = [Path(folder, "runs", method, "seed-0", "history.jsonl").read_bytes() for folder in ("cut", "whole")]
        assert histories[0] == histories[1]


def test_workers_end_with_a_parent_that_is_killed():
    process = Command(*SLOWLY["workers"], on_round=Path("playing").touch)
    assert appears("playing", process.alive)
    process.kill()
    assert group_ended(process.pid)


def test_pretraining_that_was_stopped_goes_on_and_leaves_the_weights_alone():
    words = ("pretrain", "digits", "--with", "images=true", "--clients", 2, "--model", "resnet8", "--epochs", 3, "--out")
    process = Command(*words, "cut.safetensors", on_round=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert process.wait()[0] == 143
    assert Path("cut.safetensors.unfinished/config.toml").exists()
    assert not Path("cut.safetensors").exists()
    assert Command(*words, "cut.safetensors").wait()[::2] == (0, "")
    assert Command(*words, "whole.safetensors").wait()[0] == 0
    assert Path("cut.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()
    assert sorted(path.name for path in Path().iterdir()) == ["cut.safetensors", "stderr", "stdout", "whole.safetensors"]


def test_pretraining_with_other_settings_does_not_go_on_with_what_lies_there():
    words = ("pretrain", "digits", "--with", "images=true", "--clients", 2, "--epochs", 3, "--out", "cut.safetensors")
    assert Command(*words, on_round=lambda: os.kill(os.getpid(), signal.SIGTERM)).wait()[0] == 143
    code, _, err = Command(*words, "--batch-size", 32).wait()
    assert code == 2
    assert "remove cut.safetensors.unfinished to start anew" in err


def test_a_comparison_that_was_resumed_can_be_stopped_again():
    """Its first method is finished, so that whatever else breaks would be taken for a changed file."""
    words = ("compare", "digits", "--clients", 4, "--methods", "local,ditto", "--rounds", 3, "--checkpoint-every", 1)

    def press():
        if Path("cut/runs/ditto/seed-0/config.toml").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    for command in ((*words, "--out", "cut"), ("resume", "cut")):
        code, _, err = Command(*command, on_round=press).wait()
        assert code == 143
        assert err.splitlines()[-1] == f"fedtailor: stopped; {RESUME}"
    assert Path("cut/runs/local/seed-0/summary.json").exists()
    assert Command("resume", "cut").wait()[0] == 0
