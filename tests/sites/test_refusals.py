"""Who is not let in is told so in one clear line, and so is the server's operator: the commands, in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import fedtailor as ft
from fedtailor.engine.options import Options
from fedtailor.sites import keys
from fedtailor.sites.processes import REJOIN, _free_port
from fedtailor.sites.project import Draft, create
from tests.sites.test_deployment import SCHEMA, SITES, tables

pytest.importorskip("flwr", reason="flwr is not installed (fedtailor[flower])")
pytestmark = pytest.mark.slow


@contextmanager
def command(*words):
    """One of our commands as a process, and the lines that it says while it runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedtailor", "sites", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
    reader.start()
    try:
        yield process, lines
    finally:
        process.terminate()  # our command ends what it has started
        process.wait(60)
        reader.join()
        process.stdout.close()


def wait_for(lines, words, seconds=120.0):
    until = time.monotonic() + seconds
    while not any(words in line for line in lines):
        assert time.monotonic() < until, (words, lines)
        time.sleep(0.2)


def test_a_stranger_a_wrong_authority_and_a_plain_connection_are_refused_in_a_line_on_both_sides(tmp_path):
    draft = Draft(
        sites=SITES, schema=SCHEMA, address=("127.0.0.1", _free_port()), algorithm=ft.Ditto(lam=0.2), options=Options(rounds=1)
    )
    made, data = create(tmp_path / "net", draft), tables(tmp_path, SITES)
    keys.make_pair(made.folder / "sites" / "Bern" / "key")  # a key that nobody registered
    keys.make_certificates(tmp_path / "other", "other", ["127.0.0.1"])
    authority = made.folder / "sites" / "Cork" / keys.AUTHORITY
    authority.write_bytes((tmp_path / "other" / keys.AUTHORITY).read_bytes())
    with command("server", made.folder) as (server, said_by_server):
        wait_for(said_by_server, "listening")
        with command("client", made.folder / "sites" / "Bern", "--data", data["Bern"]) as (stranger, said):
            wait_for(said, "does not let Bern in yet")
            wait_for(said_by_server, "refused a site whose key is not registered")
            assert stranger.wait(REJOIN + 90) == 2
            assert "the server does not let Bern in: it does not know this folder's key" in said[-1]
            assert not any("Traceback" in line for line in said)
        with command("client", made.folder / "sites" / "Cork", "--data", data["Cork"]) as (wrong, said):
            assert wrong.wait(60) == 2
            assert "is not the server of this network: its certificate is not from" in said[-1]
            wait_for(said_by_server, "the other side does not trust our certificate")
        with socket.create_connection(made.address, 10) as plain:
            plain.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: here\r\n\r\n")
            assert b"HTTP" not in plain.recv(1000)
            wait_for(said_by_server, "it is plain, and only TLS is spoken here")
        assert server.poll() is None
    with (
        socket.create_server(made.address) as door,
        command("client", made.folder / "sites" / "Aarhus", "--data", data["Aarhus"]) as (site, said),
    ):
        talking = threading.Thread(target=lambda: answer_plainly(door))
        talking.start()
        assert site.wait(60) == 2
        talking.join()
        assert "does not speak TLS; nothing is sent over a plain connection" in said[-1]


def answer_plainly(door):
    with door.accept()[0] as call:
        call.recv(1000)
        call.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
