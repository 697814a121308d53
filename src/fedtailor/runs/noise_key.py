"""The secret behind the noise of a private run, kept beside its checkpoints so that the run can go on: for its owner only.

It is in no other file: whoever has it can take the noise off everything that the run released.
"""

from __future__ import annotations

from pathlib import Path

from fedtailor.data.secret import Secret
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.layout import CHECKPOINTS

NAME = f"{CHECKPOINTS}/noise.key"


def read(folder: Path | None) -> Secret | None:
    """Return the secret of the run in a directory, or None where there is none."""
    path = None if folder is None else folder / NAME
    if path is None or not path.exists():
        return None
    try:
        return Secret.from_hex(files.read(path).decode("ascii"))
    except ValueError as error:
        raise BadRun(f"{path} cannot be read ({error}); restore it, or begin the run anew in another directory") from None


def keep(folder: Path, secret: Secret, begun: bool) -> None:
    """Write the secret of a run that begins. One that was ``begun`` must have it: other noise on its rounds would cost twice."""
    path = folder / NAME
    if path.exists():
        return
    if begun:
        raise BadRun(f"{path} is missing, without which the private run cannot go on; restore it, or begin anew elsewhere")
    files.write(path, secret.hex() + "\n", files.PRIVATE)
