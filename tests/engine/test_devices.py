"""The tests on a pretend device, in a process of their own (``tests/conftest.py`` says why)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ON_DEVICES

HERE = Path(__file__).parents[1]


@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_runs_on_a_pretend_device_end_as_on_the_cpu(marker):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marker]
    environment = {**os.environ, "FEDTAILOR_TEST_DEVICE": "pretend"}
    files = [str(HERE / name) for name in ON_DEVICES]
    done = subprocess.run([*command, *files], cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stdout[-3000:]  # 5: no test of that kind
