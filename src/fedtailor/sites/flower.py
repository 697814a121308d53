"""Flower: the apps that it starts at the server and at the sites, and its messages as a transport. Nothing else imports flwr."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedtailor.errors import FedtailorError, InvalidData
from fedtailor.runs import files
from fedtailor.sites.house import House
from fedtailor.sites.names import FAILED, FOLDER, nodes_of
from fedtailor.sites.project import Network, Place
from fedtailor.sites.server import Conductor
from fedtailor.sites.site import EVALUATE, FINISH, HELLO, TRAIN
from fedtailor.sites.wire import Parcel

TYPES = {
    TRAIN: MessageType.TRAIN,
    EVALUATE: MessageType.EVALUATE,
    HELLO: f"{MessageType.QUERY}.{HELLO}",
    FINISH: f"{MessageType.QUERY}.{FINISH}",
}
TEXT, TENSORS, PIECES = "text", "tensors", "pieces"
PAUSE = 0.3  # seconds between looks at the replies
GATHER = 60.0  # seconds in which sites may connect before the run begins


def to_records(parcel: Parcel) -> RecordDict:
    """Return a parcel as Flower's records: one array for each tensor, in its own type."""
    text, arrays = parcel.split()
    tensors = ArrayRecord({str(place): Array(array) for place, array in enumerate(arrays)})
    return RecordDict({TENSORS: tensors, PIECES: ConfigRecord({TEXT: text})})


def from_records(records: RecordDict) -> Parcel:
    """Return the parcel in Flower's records; others are refused."""
    try:
        tensors, text = records.array_records[TENSORS], records.config_records[PIECES][TEXT]
        arrays = [tensors[str(place)].numpy() for place in range(len(tensors))]
    except (KeyError, ValueError, TypeError, EOFError) as error:
        raise InvalidData(f"a message cannot be read ({error}); let both sides use the same version of fedtailor") from error
    return Parcel.joined(str(text), arrays)


@dataclass(frozen=True, eq=False)
class Flower:
    """A transport over Flower; ``nodes`` has the node of every client, which its key was registered for."""

    grid: Grid
    nodes: Mapping[str, int]
    name: str = "flower"

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
            for message in self.grid.pull_messages(list(waiting)):
                if message.metadata.reply_to_message_id in waiting:
                    name = waiting.pop(message.metadata.reply_to_message_id)
                    replies[name] = self._read(message, name)
            if waiting:
                time.sleep(PAUSE)
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
    out = network.folder / "runs" / str(context.run_config["out"])
    transport = Flower(grid, nodes_of(network.folder))
    transport.gather(min(GATHER, network.terms.deadline))
    try:
        conductor = Conductor(network.agreed, transport, out, network.terms, digest=network.digest)
        conductor.play(resume=bool(context.run_config["resume"]))
    except FedtailorError as error:
        files.write(out / FAILED, str(error) + "\n")
        raise


def _answer(message: Message, context: Context) -> Message:
    """Let the site answer; each message is a process of its own, so all that lasts is on disk."""
    settings: Mapping[str, Any] = context.node_config
    key = settings.get("key")
    house = House(Place(Path(str(settings["site"]))), Path(str(settings["data"])), Path(str(key)) if key else None)
    return Message(to_records(house.site().answer(from_records(message.content))), reply_to=message)


client.train()(_answer)
client.evaluate()(_answer)
client.query(HELLO)(_answer)
client.query(FINISH)(_answer)
