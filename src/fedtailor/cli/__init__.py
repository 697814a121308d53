"""The command line. Torch is imported by the commands that need it, never for ``--help``."""

from fedtailor.cli.app import app, main

__all__ = ["app", "main"]
