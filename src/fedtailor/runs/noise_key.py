"""The secret behind the noise of a private run, kept beside its checkpoints so that the run can go on: for its owner only.

It is in no other file: whoever has it can take the noise off everything that the run released.
"""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

from fedtailor.data.secret import Secret
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.layout import CHECKPOINTS, CONFIG

NAME = f"{CHECKPOINTS}/noise.key"
OTHERS = 0o077  # what nobody but the owner of a secret may do with it


def read(folder: Path | None) -> Secret | None:
    """Return the secret of the run that was begun in a directory, or None where there is none."""
    if folder is None or not (folder / CONFIG).exists() or not (folder / NAME).exists():
        return None
    path = folder / NAME
    try:
        secret = Secret.from_hex(files.read(path).decode("ascii"))
    except ValueError as error:
        raise BadRun(f"{path} cannot be read ({error}); restore it, or begin the run anew in another directory") from None
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & OTHERS:  # elsewhere a mode says nothing about others
        warnings.warn(f"others may read {path}, and take the noise off with it; keep it to yourself (chmod 600)", stacklevel=3)
    return secret


def keep(folder: Path, secret: Secret, begun: bool) -> None:
    """Write the secret of a run that begins. One that was ``begun`` must have it: other noise on its rounds would cost twice."""
    path = folder / NAME
    if not begun:  # whatever lies there is not of this run
        files.write(path, secret.hex() + "\n", files.PRIVATE)
    elif not path.exists():
        raise BadRun(f"{path} is missing, without which the private run cannot go on; restore it, or begin anew elsewhere")
