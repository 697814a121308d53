"""Flower: its apps at the server and at the sites, its messages as a transport. Only ``answering`` imports flwr as well."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedtailor.algorithms import origin
from fedtailor.engine.base import Plan
from fedtailor.errors import FedtailorError, InvalidArgument, InvalidData, WorkerDied
from fedtailor.runs import files
from fedtailor.sites.house import House
from fedtailor.sites.names import FAILED, FOLDER, SUMMARIES, TRIAL, nodes_of
from fedtailor.sites.project import Network, Place
from fedtailor.sites.secure import STEPS
from fedtailor.sites.server import Conductor
from fedtailor.sites.site import EVALUATE, FINISH, HELLO, TRAIN
from fedtailor.sites.trial import SUMMARY, Trial, look
from fedtailor.sites.wire import Parcel

TYPES = {
    TRAIN: MessageType.TRAIN,
    EVALUATE: MessageType.EVALUATE,
    HELLO: f"{MessageType.QUERY}.{HELLO}",
    **{action: f"{MessageType.QUERY}.{action}" for action in (FINISH, SUMMARY, *STEPS)},
}
TEXT, TENSORS, PIECES = "text", "tensors", "pieces"
PAUSE = 0.3  # seconds between looks at the replies
SIMULATED_PAUSE = 0.02  # the same on one machine
ENDING = 60.0  # seconds in which a simulation must have ended
GATHER = 60.0  # seconds in which sites may connect before the run begins


def to_records(parcel: Parcel) -> RecordDict:
    """Return a parcel as Flower's records: one array for the tensors of each type."""
    text, arrays = parcel.split()
    tensors = ArrayRecord({kind: Array(array) for kind, array in arrays.items()})
    return RecordDict({TENSORS: tensors, PIECES: ConfigRecord({TEXT: text})})


def from_records(records: RecordDict) -> Parcel:
    """Return the parcel in Flower's records; others are refused."""
    try:
        tensors, text = records.array_records[TENSORS], records.config_records[PIECES][TEXT]
        arrays = {kind: array.numpy() for kind, array in tensors.items()}
    except (KeyError, ValueError, TypeError, EOFError) as error:
        raise InvalidData(f"a message cannot be read ({error}); let both sides use the same version of fedtailor") from error
    return Parcel.joined(str(text), arrays)


@dataclass(frozen=True, eq=False)
class Flower:
    """A transport over Flower; ``nodes`` has the node of every client, which its key was registered for."""

    grid: Grid
    nodes: Mapping[str, int]
    name: str = "flower"
    pause: float = PAUSE
    check: Callable[[], None] = lambda: None  # raises where waiting is in vain

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]:
        """Return every client's reply, or why there is none."""
        connected = set(self.grid.get_node_ids())
        replies: dict[str, Parcel | str] = {}
        messages: list[Message] = []
        names: list[str] = []
        for name, parcel in parcels.items():
            if self.nodes.get(name) not in connected:
                replies[name] = "is not connected"
                continue
            names.append(name)
            kind = TYPES[parcel.facts["action"]]
            messages.append(Message(to_records(parcel), dst_node_id=self.nodes[name], message_type=kind, ttl=seconds))
        waiting = dict(zip(self.grid.push_messages(messages), names, strict=True)) if messages else {}
        until = time.monotonic() + seconds
        while waiting and time.monotonic() < until:
            self.check()
            for message in self.grid.pull_messages(list(waiting)):
                if message.metadata.reply_to_message_id in waiting:
                    name = waiting.pop(message.metadata.reply_to_message_id)
                    replies[name] = self._read(message, name)
            if waiting:
                time.sleep(self.pause)
        return {**replies, **dict.fromkeys(waiting.values(), f"did not answer within {seconds:g} seconds")}

    def _read(self, message: Message, name: str) -> Parcel | str:
        if message.has_error():
            return f"failed: {' '.join(str(message.error.reason or 'it does not say why').split())[:300]}"
        if message.metadata.src_node_id != self.nodes[name]:
            return "was answered for by another node"
        try:
            return from_records(message.content)
        except FedtailorError as error:
            return str(error)

    def gather(self, seconds: float) -> None:
        """Wait until all are connected, but no longer than this."""
        until = time.monotonic() + seconds
        while not set(self.nodes.values()) <= set(self.grid.get_node_ids()) and time.monotonic() < until:
            time.sleep(PAUSE)


server = ServerApp()
client = ClientApp()


@server.main()
def lead(grid: Grid, context: Context) -> None:
    """Play the run that was asked for, in the network's folder."""
    network = Network(Path(os.environ[FOLDER]))
    out = network.folder / str(context.run_config["out"])
    transport = Flower(grid, nodes_of(network.folder))
    transport.gather(min(GATHER, network.terms.deadline))
    asked = out.with_name(out.name + TRIAL)
    trial = json.loads(files.read(asked)) if asked.exists() else None  # None: the run agreed on; {}: an exchange of summaries
    try:
        if trial == {}:
            heard = look(network.agreed, lambda parcels: transport.ask(parcels, network.terms.deadline), network.digest)
            files.write_json(out / SUMMARIES, heard)
            return
        agreed = network.agreed if trial is None else Trial.of(trial).agreed(network.agreed)
        conductor = Conductor(agreed, transport, out, network.terms, digest=network.digest, trial=trial)
        conductor.pseudonyms = network.pseudonyms
        conductor.play(resume=bool(context.run_config["resume"]))
    except FedtailorError as error:
        files.write(out / FAILED, str(error) + "\n")
        raise


def _answer(message: Message, context: Context) -> Message:
    """Let the site answer; each message is a process of its own, so all that lasts is on disk."""
    settings: Mapping[str, Any] = context.node_config
    key = settings.get("key")
    place, advice = Place(Path(str(settings["site"]))), bool(settings.get("advice"))
    house = House(place, Path(str(settings["data"])), Path(str(key)) if key else None, advice)
    return Message(to_records(house.site().answer(from_records(message.content))), reply_to=message)


client.train()(_answer)
client.evaluate()(_answer)
client.query(HELLO)(_answer)
for _action in (FINISH, SUMMARY, *STEPS):
    client.query(_action)(_answer)


# -- a simulation on one machine ---------------------------------------------------------------------------------------
class Simulated(Protocol):
    """The clients of a plan, which answer messages."""

    @property
    def plan(self) -> Plan: ...

    def answer(self, asked: Parcel) -> Parcel: ...


@lru_cache(maxsize=1)
def _clients(path: Path) -> Simulated:
    """Return the clients that ``Simulation`` wrote, once in every process of Flower's."""
    import cloudpickle

    needed, content = cloudpickle.loads(path.read_bytes())
    origin.import_files(needed)
    return cloudpickle.loads(content)


def _simulated(path: Path) -> ClientApp:
    """Return the app of every simulated client."""
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        return Message(to_records(_clients(path).answer(from_records(message.content))), reply_to=message)

    app.train()(reply)
    app.evaluate()(reply)
    return app


class Simulation:
    """A transport to clients that Flower simulates, a node for each, in ``workers`` processes; runs until it is closed."""

    def __init__(self, clients: Simulated, folder: Path, workers: int) -> None:
        import cloudpickle

        path = folder / "plan"
        content = cloudpickle.dumps((origin.files_loaded(), cloudpickle.dumps(clients)))
        files.write(path, content, files.PRIVATE)
        self._closed = threading.Event()
        came: queue.Queue[Grid | BaseException] = queue.Queue()
        leader = ServerApp()

        @leader.main()
        def lead(grid: Grid, context: Context) -> None:
            came.put(grid)
            self._closed.wait()

        def run() -> None:
            from flwr.simulation import run_simulation

            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
            config: Any = {"init_args": {"num_cpus": workers, **quiet}, "client_resources": {"num_cpus": 1}}
            try:
                run_simulation(leader, _simulated(path), len(clients.plan.federation), backend_config=config)
            except BaseException as error:  # Flower leaves by SystemExit as well
                came.put(error)

        logging.getLogger("flwr").setLevel(logging.ERROR)
        self._thread = threading.Thread(target=run, name="flower", daemon=True)
        self._thread.start()
        grid = came.get()
        if isinstance(grid, BaseException):
            raise InvalidArgument(f"Flower's simulation does not start: {grid}")
        nodes = self._gather(grid, len(clients.plan.federation))
        named = dict(zip(clients.plan.federation.names, nodes, strict=True))
        self._inner = Flower(grid, named, pause=SIMULATED_PAUSE, check=self._check)

    def _gather(self, grid: Grid, count: int) -> list[int]:
        """Return the nodes, once all are there."""
        while len(nodes := sorted(grid.get_node_ids())) < count:
            self._check()
            time.sleep(SIMULATED_PAUSE)
        return nodes

    def _check(self) -> None:
        if not self._thread.is_alive():
            raise WorkerDied("Flower's simulation ended by itself; run it once more, or use engine='loop'")

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]:
        """Return every client's reply, or why there is none."""
        return self._inner.ask(parcels, seconds)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(ENDING)
