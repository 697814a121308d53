"""Flower's command, many times in one process: to start one for every site takes seconds for each."""

from __future__ import annotations

import json
import sys

END = "-- end of answer --"


def command_many() -> None:
    """Read lists of words, one in a line; Flower's command writes its answers, and a line after each says that it is whole."""
    from flwr.cli.app import app

    for line in sys.stdin:
        try:
            app(json.loads(line), standalone_mode=False)
        except SystemExit:
            pass  # it has said why
        except Exception as error:  # Flower's errors have no type in common
            sys.stderr.write(f"{error}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout.write(f"\n{END}\n")
        sys.stdout.flush()
