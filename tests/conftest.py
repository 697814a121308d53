"""One torch thread: small models run fastest on it, and tests share the machine's cores."""

import gc
import os
from functools import cache

import torch
from typer import testing
from typer.main import get_command

from tests import fuzz

torch.set_num_threads(1)
testing._get_command = cache(get_command)  # else all commands are built from their functions anew for every line that is tried
os.fsync = lambda descriptor: None  # no test pulls the plug: waiting for the disk is half of what writing a run takes


def pytest_configure(config):
    """The random inputs of a run without slow tests are few."""
    if config.option.markexpr == "not slow":
        fuzz.share = 0.2


def pytest_collection_finish():
    """Let the garbage collector leave alone what lives as long as the tests: looking through it is a tenth of their time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


# a second device is put into torch for as long as the process lives: these files have one of their own
ON_DEVICES = ["engine/test_device.py", "engine/test_own_device.py"]
collect_ignore = [] if os.environ.get("FEDTAILOR_TEST_DEVICE") else ON_DEVICES
