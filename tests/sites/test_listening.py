"""A connection that TLS refuses leaves a line at the server: a plain one, and one with another network's certificate."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from importlib.util import find_spec

import pytest

from fedtailor.sites import keys
from fedtailor.sites.listening import PLAIN, REFUSED, STRANGER, ReportingSocket, refusals

LOOPS = ["asyncio", pytest.param("uvloop", marks=pytest.mark.skipif(find_spec("uvloop") is None, reason="no uvloop"))]


def new_loop(kind):
    if kind == "asyncio":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


@pytest.fixture(params=LOOPS)
def port(request, tmp_path):
    """The port of a server that speaks TLS with the certificate in the folder ``ours``."""
    keys.make_certificates(tmp_path / "ours", "ours", ["127.0.0.1"])
    keys.make_certificates(tmp_path / "theirs", "theirs", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ours" / keys.CERTIFICATE, tmp_path / "ours" / keys.CERTIFICATE_KEY)
    context.sslobject_class = ReportingSocket
    loop = new_loop(request.param)
    server = loop.run_until_complete(asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def connect(port, authority):
    context = ssl.create_default_context(cafile=str(authority))
    with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1"):
        pass


def talk_plainly(port):
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        while plain.recv(100):
            pass


def test_what_tls_refuses_is_said_at_the_server_and_nothing_else(port, tmp_path, capfd):
    connect(port, tmp_path / "ours" / keys.AUTHORITY)
    socket.create_connection(("127.0.0.1", port), 10).close()  # somebody who looks whether the port is open
    assert refusals(capfd.readouterr().err) == []
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(port, tmp_path / "theirs" / keys.AUTHORITY)
    talk_plainly(port)
    connect(port, tmp_path / "ours" / keys.AUTHORITY)
    assert refusals(capfd.readouterr().err) == [REFUSED + STRANGER, REFUSED + PLAIN]


def test_a_key_that_nobody_registered_is_a_refusal_too():
    log = "INFO : hello\nERROR: No SuperNode found with the given public key\nrefused a connection: it is plain\n"
    assert refusals(log) == ["refused a site whose key is not registered", "refused a connection: it is plain"]
