"""What a site's process does for one message: it tells Flower that it lives, and only then loads fedtailor.

A process that has not reported within Flower's patience is taken for dead and started once more; to import torch first would take
too long on a slow machine.
"""

from __future__ import annotations

from typing import Any


def answer_by_ours() -> None:
    """Do what Flower's own command does at a site for one message, but let our app answer, whichever the server has sent.

    The one that came is neither installed nor imported. Where Flower does this in another way than the one known here, nothing is
    answered at all.
    """
    from flwr.supernode import cli
    from flwr.supernode.runtime import run_clientapp as command

    if not {"install_from_fab", "get_load_client_app_fn"} <= set(command.run_clientapp.__code__.co_names):
        raise SystemExit("this version of flwr loads apps in a way that fedtailor does not know; install the one it names")
    command.install_from_fab = lambda *_, **__: None  # type: ignore[assignment]
    command.get_load_client_app_fn = lambda **_: _our_app
    cli.flwr_clientapp()


def _our_app(*_: Any) -> Any:
    from fedtailor.sites.flower import client

    return client
