"""What a site's processes do for a message. Flower starts one for each, and to import torch takes longer than most answers.

So one process imports everything once and stands by; the one that Flower starts (``knock``) asks it for a fork, which reads
config, table and state anew. Where none stands by, a message's process first tells Flower that it lives, and only then imports:
one that has not reported within Flower's patience is taken for dead and started once more.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from fedtailor.sites.knock import DOOR, PATIENCE, address

NEEDED = ("flwr.supernode.cli", "fedtailor.sites.flower")
WAITING = 64  # messages' processes that may wait to be taken


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


def start_tasks(folder: str) -> None:
    """Do what Flower's own command does that starts a site's processes, beside one that stands by in ``folder``."""
    from flwr.supercore.cli import flower_superexec

    if sys.platform.startswith("linux"):
        with suppress(OSError):  # a disk without sockets, a system without /proc: every message imports anew
            _stand_by(Path(folder))
    flower_superexec()


def _stand_by(folder: Path) -> None:
    """Leave a process behind that has everything imported and is forked for every message; it ends with this one."""
    for name in NEEDED:
        import_module(name)

    if len(os.listdir("/proc/self/task")) > 1:
        return  # a thread would be missing in a fork
    (folder / DOOR).unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(address(str(folder)))
    door.listen(WAITING)
    ended, _alive = os.pipe()  # the second end is closed when this process ends, however it does
    gc.freeze()
    if os.fork() == 0:
        os.close(_alive)
        _open_to_all(door, ended)
    door.close()
    os.close(ended)


def _open_to_all(door: socket.socket, ended: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while ended not in select.select([door.fileno(), ended], [], [])[0]:
        with suppress(OSError, ValueError), door.accept()[0] as call:  # who gets no answer does it alone
            call.settimeout(PATIENCE)
            words = json.loads(b"".join(iter(lambda: call.recv(1 << 16), b"")))
            if os.fork() == 0:
                for unused in (door.detach(), call.detach(), ended):
                    os.close(unused)
                _answer(words)
            call.sendall(b"!")
    os._exit(0)


def _answer(words: list[str]) -> NoReturn:
    """Be the process of one message."""
    import numpy as np

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()  # a method of somebody else's may draw from it, and forks would all draw the same
    sys.argv[1:] = words
    code: Any = 1
    try:
        answer_by_ours()
        code = 0
    except SystemExit as leave:
        code = leave.code
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
