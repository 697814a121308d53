"""``python .ci/lock.py``: write requirements.lock, the exact files that `make` installs on Linux with Python 3.11, with hashes.

``--check`` compares it with pyproject.toml and constraints.txt without a network. torch is left out: it is another file for every
kind of machine, so its version is pinned in constraints.txt and its hash is not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
TOP = "# Written by `make lock`; do not edit it. Linux, x86_64, Python 3.11. torch is pinned in constraints.txt.\n"
BUILD = ["hatchling", "editables"]  # what builds the package itself
APART = {"torch"}  # not in the lock


def plain(name: str) -> str:
    """Return a package's name in the one way in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write() -> None:
    """Ask pip what it would install, and from which files."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run(
        [*command, "-c", "constraints.txt", "torch", *BUILD, ".[dev]"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    rows = {}
    for item in report["install"]:
        name, info = plain(item["metadata"]["name"]), item["download_info"]
        if name not in APART | {"fedtailor"}:
            rows[name] = f"{name}=={item['metadata']['version']} --hash=sha256:{info['archive_info']['hashes']['sha256']}"
    LOCK.write_text(TOP + "".join(f"{rows[name]}\n" for name in sorted(rows)))


def check() -> list[str]:
    """Return what of pyproject.toml and constraints.txt the lock does not hold."""
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", LOCK.read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *BUILD]
    for line in extras["dev"]:
        if (inner := re.fullmatch(r"fedtailor\[(.*)\]", line)) is not None:
            wanted += [needed for name in inner[1].split(",") for needed in extras[name.strip()]]
    names = {plain(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in wanted}  # type: ignore[index]
    missing = [f"{name} is not locked" for name in sorted(names - set(locked) - APART - {"fedtailor"})]
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    other = [f"{n} is {locked[plain(n)]}, not {v}" for n, v in pins if plain(n) in locked and locked[plain(n)] != v]
    return missing + other


if __name__ == "__main__":
    if "--check" in sys.argv:
        if wrong := check():
            sys.exit("requirements.lock is out of date (make lock): " + "; ".join(wrong))
    else:
        write()
