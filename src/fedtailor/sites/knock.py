"""What Flower starts at a site for every message: it asks the process that stands by (``answering``) for a fork of itself.

Run as a file, by a Python without packages, so that it is there in hundredths of a second. Where nobody opens, it becomes the
process that answers, and imports everything itself.
"""

import json
import os
import socket
import sys

DOOR = "standby"  # the socket, in the folder of the site's commands
ALONE = "from fedtailor.sites.answering import answer_by_ours; answer_by_ours()"
PATIENCE = 5.0  # seconds


def address(folder: str) -> str:
    """Return the socket's address, which may not be as long as the path of a folder may be."""
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}/{DOOR}"


def opened(folder: str, words: list[str]) -> bool:
    """Return whether a process that stands by has taken these words of a command."""
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(PATIENCE)
            door.connect(address(folder))
            door.sendall(json.dumps(words).encode())
            door.shutdown(socket.SHUT_WR)
            return door.recv(1) != b""
    except OSError:
        return False


if __name__ == "__main__" and not opened(sys.argv[1], sys.argv[2:]):
    os.execv(sys.executable, [sys.executable, "-P", "-c", ALONE, *sys.argv[2:]])
