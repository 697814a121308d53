"""The processes of a network: Flower's SuperLink at the server, a SuperNode at every site; who is let in, and what they say."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import tomli_w

from fedtailor.errors import InvalidArgument, SiteRefused
from fedtailor.runs import files
from fedtailor.sites import keys, knock
from fedtailor.sites.commanding import END
from fedtailor.sites.house import House
from fedtailor.sites.names import APP, FAILED, FOLDER, HOME, NODES, nodes_of
from fedtailor.sites.project import KEY, Network

COMMANDS = "bin"  # the folder of the only commands that a site's SuperNode finds
COMMANDING = "from fedtailor.sites.commanding import command_many; command_many()"
LISTENING = "from fedtailor.sites.listening import listen; listen()"
TASKS = "import sys; from fedtailor.sites.answering import start_tasks; start_tasks(sys.argv.pop(1))"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LINK = "network"  # the name of the connection in Flower's own configuration
NOT_LET_IN = "code: 2004"  # what a SuperNode says whose key nobody registered, or with whose key another one is connected
REJOIN = 150.0  # seconds in which a site that was killed must be let in again; Flower misses two heartbeats of 30 first
ANSWER = 120.0  # seconds in which Flower's command must have answered
STARTUP = 60.0  # seconds in which a process must be there
APP_FILE = "fedtailor_sites.py"
Ask = Callable[[Sequence[str]], dict[str, Any]]


def need_flower() -> None:
    """Refuse to go on without flwr, in one line that says how to get it."""
    if find_spec("flwr") is None:
        raise InvalidArgument('sites need the package flwr, which is not installed: pip install "fedtailor[flower]"')


@dataclass(eq=False)
class Started:
    """A process that was started here, with its log."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """Return all that it has written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def stop(self, hard: bool = False) -> None:
        """End it and what it started; ``hard`` without a warning, as a power cut would."""
        if not hard and self.alive:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                hard = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own: nobody else's processes are in it
        self.process.wait()


def tool(name: str) -> str:
    """Return the path of one of Flower's commands, that of our own environment first."""
    need_flower()
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise InvalidArgument(f'the command {name} is not there: pip install "fedtailor[flower]"')
    return path


def _environment(home: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(home.absolute()), **more}


def _start(command: Sequence[str], home: Path, log: Path, **more: str) -> Started:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.open_anew(log) as out:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(home, **more),
            start_new_session=True,
            umask=0o077,  # Flower keeps messages on their way in a database, which is nobody else's to read
        )
    return Started(started, log)


# -- the server ------------------------------------------------------------------------------------------------------
def start_server(network: Network, host: str) -> Started:
    """Start the SuperLink, let in the keys of this network's sites and nobody else, and return when it listens."""
    folder, (_, port) = network.folder.absolute(), network.address
    server, home = folder / "server", folder / HOME
    if _listens(host, port):
        raise InvalidArgument(f"port {port} of {host} is taken; end what uses it, or change address in config.toml everywhere")
    need_flower()
    command = [sys.executable, "-P", "-c", LISTENING, "--host", host, "--port", str(port), "--enable-supernode-auth"]
    command += ["--ssl-certfile", str(server / keys.CERTIFICATE), "--ssl-keyfile", str(server / keys.CERTIFICATE_KEY)]
    command += ["--ssl-ca-certfile", str(server / keys.AUTHORITY), "--database", str(home / "superlink.db")]
    started = _start(command, home, server / "superlink.log", **{FOLDER: str(folder)})
    try:
        until = time.monotonic() + STARTUP
        while not _listens(host, port):
            if not started.alive or time.monotonic() > until:
                raise InvalidArgument(f"the server did not start; read {started.log}")
            time.sleep(0.2)
        _write_app(network)
        _register(network, host, port)
    except BaseException:
        started.stop()
        raise
    return started


def _write_app(network: Network) -> None:
    """Write the app that Flower starts at both ends (it only imports ours), and how its command finds the server."""
    folder = network.folder.absolute()
    app = {
        "project": {"name": "fedtailor-sites", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "fedtailor",
                    "components": {"serverapp": "fedtailor_sites:server", "clientapp": "fedtailor_sites:client"},
                    "config": {"out": "", "resume": False},
                }
            },
        },
    }
    files.write(folder / APP / "pyproject.toml", tomli_w.dumps(app))
    files.write(folder / APP / APP_FILE, "from fedtailor.sites.flower import client, server\n\n__all__ = ['client', 'server']\n")


def _register(network: Network, host: str, port: int) -> None:
    """Tell the SuperLink the public keys of the sites; those it knows from before stay."""
    folder = network.folder.absolute()
    ours = {"default": LINK, LINK: {"address": f"{host}:{port}", "root-certificates": str(folder / "server" / keys.AUTHORITY)}}
    files.write(folder / HOME / "config.toml", tomli_w.dumps({"superlink": ours}))
    known = nodes_of(folder) if (folder / NODES).exists() else {}
    with commands(network) as ask:
        for name in network.clients:
            if name not in known:
                public = folder / "server" / "keys" / f"{name}{keys.PUBLIC}"
                known[name] = int(ask(["supernode", "register", str(public), LINK])["node-id"])
                files.write_json(folder / NODES, known)


@contextmanager
def commands(network: Network) -> Iterator[Ask]:
    """Give a function that returns what Flower's command answers to its words; all are answered by one process."""
    need_flower()
    home = network.folder.absolute() / HOME
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-c", COMMANDING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(home),
            cwd=home,
        ) as process,
    ):
        try:
            yield lambda words: _understood(_said(process, words), errors)
        finally:
            process.kill()


def _said(process: subprocess.Popen[str], words: Sequence[str]) -> str:
    """Return what Flower's command writes in answer to its words; "" where it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    out = process.stdout
    too_long = threading.Timer(ANSWER, process.kill)
    too_long.start()
    try:
        process.stdin.write(json.dumps([*words, "--format", "json"]) + "\n")
        process.stdin.flush()
        return "".join(iter(lambda: _before(END, out.readline()), ""))
    except OSError:
        return ""
    finally:
        too_long.cancel()


def _before(end: str, line: str) -> str:
    return "" if line.strip() == end else line


def _understood(said: str, errors: IO[str]) -> dict[str, Any]:
    """Return an answer of Flower's, unless it is that something went wrong."""
    start = said.find("{")
    try:
        answer = json.loads(said[start:]) if start >= 0 else {}
    except json.JSONDecodeError:
        answer = {}
    if not answer.get("success"):
        errors.seek(0)
        why = " ".join((answer.get("error-message") or errors.read() or said).split())[:400]
        raise InvalidArgument(f"the server does not answer as it should ({why}); is it running (fedtailor sites server)?")
    return answer


def _flwr(network: Network, words: Sequence[str]) -> dict[str, Any]:
    """Return what Flower's command answers."""
    with commands(network) as ask:
        return ask(words)


def start_run(network: Network, out: str, resume: bool) -> str:
    """Submit the run and return its number."""
    words = ["run", str(network.folder.absolute() / APP), LINK]
    settings = f'out="{out}" resume={"true" if resume else "false"}'
    return str(_flwr(network, [*words, "--run-config", settings])["run-id"])


def runs_of(network: Network, ask: Ask | None = None) -> list[dict[str, Any]]:
    """Return what the server knows of its runs, newest first; ``ask`` (of ``commands``) spares whoever looks often a process."""
    words = ["list", LINK]
    return list((_flwr(network, words) if ask is None else ask(words))["runs"])


def stop_run(network: Network, number: str) -> None:
    """Ask the server to end a run; it can be gone on with."""
    _flwr(network, ["stop", number, LINK])


def nodes_online(network: Network) -> dict[str, str]:
    """Return by site whether it is connected, as the server sees it."""
    nodes: Mapping[int, str] = {node: name for name, node in nodes_of(network.folder).items()}
    listed = _flwr(network, ["supernode", "list", LINK]).get("nodes", [])
    states = {nodes.get(int(entry["node-id"])): str(entry.get("status", "unknown")) for entry in listed}
    return {name: states.get(name, "unknown") for name in nodes.values()}


def why_failed(out: Path) -> str | None:
    """Return why a run stopped, where it said so."""
    path = out / FAILED
    return path.read_text().strip() if path.exists() else None


# -- a site ----------------------------------------------------------------------------------------------------------
def check_connection(house: House) -> None:
    """Refuse a server that is not there, does not speak TLS, or whose certificate our authority did not sign."""
    host, port = house.place.address
    authority = house.place.folder / keys.AUTHORITY
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError):
        raise InvalidArgument(f"{authority} is not there or no certificate; copy the site's folder again") from None
    try:
        with socket.create_connection((host, port), 10) as plain, context.wrap_socket(plain, server_hostname=host):
            return
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message or "it cannot be verified"
        raise SiteRefused(
            f"{host}:{port} is not the server of this network: its certificate is not from {authority} ({why})"
        ) from None
    except ssl.SSLError:
        raise SiteRefused(f"{host}:{port} does not speak TLS; nothing is sent over a plain connection") from None
    except OSError as error:
        raise SiteRefused(f"{host}:{port} cannot be reached ({error.strerror or error}); is the server running?") from None


def start_site(house: House) -> Started:
    """Start the SuperNode of a site, whose table and connection are checked first."""
    check_connection(house)
    folder, (host, port) = house.place.folder.absolute(), house.place.address
    settings = {"site": str(folder), "data": str(house.data.absolute())}
    if house.key is not None:
        settings["key"] = str(house.key.absolute())
    if house.allows_advice:
        settings["advice"] = "yes"
    command = [tool("flower-supernode"), "--superlink", f"{host}:{port}", "--root-certificates", str(folder / keys.AUTHORITY)]
    command += ["--auth-supernode-private-key", str(folder / KEY), "--host", "127.0.0.1", "--port", str(_free_port())]
    command += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())]
    commands = _write_commands(folder / "flower" / COMMANDS)
    return _start(command, folder / "flower", folder / "site.log", PATH=str(commands), **ONE_THREAD)


def _write_commands(folder: Path) -> Path:
    """Write the commands that a SuperNode may start, and return their folder.

    For every message Flower starts ``flwr-clientapp``, which installs the app that came from the server and runs it. Ours takes
    its place and runs what is installed at the site (``answering``); commands for other kinds of work are not there at all.
    """
    ours = {
        "flwr-clientapp": [sys.executable, "-I", "-S", knock.__file__, str(folder)],
        "flower-superexec": [sys.executable, "-P", "-c", TASKS, str(folder)],
    }
    for name, words in ours.items():
        files.write(folder / name, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', 0o700)
    return folder


@dataclass(eq=False)
class Member:
    """A site that takes part.

    After a kill the server believes for a minute that the site is still there, and does not let it in: it is started again for
    ``patience`` seconds, and only then refused.
    """

    house: House
    patience: float = REJOIN

    def __post_init__(self) -> None:
        self.refused_since: float | None = None
        self._start()

    def _start(self) -> None:
        self.started, self.began = start_site(self.house), time.monotonic()

    @property
    def waits(self) -> bool:
        """Return whether the server did not let it in when it last tried."""
        return self.refused_since is not None

    def look(self) -> None:
        """Start the site again where it was not let in; raise ``SiteRefused`` if that has lasted too long, or if it ended."""
        now = time.monotonic()
        refused = NOT_LET_IN in self.started.said()
        if not refused and self.started.alive:
            if now - self.began > STARTUP:
                self.refused_since = None  # it was let in
            return
        self.started.stop()
        if not refused:
            raise SiteRefused(f"the site ended by itself; read {self.started.log}")
        self.refused_since = now if self.refused_since is None else self.refused_since
        if now - self.refused_since >= self.patience:
            raise SiteRefused(
                f"the server does not let {self.house.place.client} in: it does not know this folder's key, "
                "or another process is connected with it; ask its operator"
            )
        self._start()

    def stop(self, hard: bool = False) -> None:
        self.started.stop(hard)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, port), 1):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
