"""Over Flower: real processes on loopback, with TLS and registered keys; the numbers are the loop engine's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.cli.sites_run import train
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidData, SiteRefused
from fedtailor.runs import checkpoint, models
from fedtailor.sites import keys
from fedtailor.sites.house import House, newest_run
from fedtailor.sites.listening import PLAIN, REFUSED, STRANGER, refusals
from fedtailor.sites.processes import Member, _free_port, start_server
from fedtailor.sites.project import Draft, Network, Place, create
from fedtailor.sites.wire import Parcel

pytest.importorskip("flwr", reason="flwr is not installed (fedtailor[flower])")

SITES = ("Aarhus", "Bern")
SCHEMA = {
    "label": "y",
    "classes": ["no", "yes"],
    "columns": [{"name": "a", "kind": "numeric", "range": [-4, 4]}, {"name": "b", "kind": "numeric", "range": [-4, 4]}],
}


@pytest.mark.filterwarnings("default")  # what another library deprecates inside is its own affair
def test_a_parcel_survives_flowers_records_with_its_types():
    from fedtailor.sites.flower import from_records, to_records

    sent = {"a": torch.tensor([True]), "b": {}, "c": torch.zeros((), dtype=torch.float64), "d": torch.arange(6).view(2, 3)}
    got = from_records(to_records(Parcel({"x": [1, "é"]}, sent)))
    assert got.facts == {"x": [1, "é"]}
    assert tree.shapes(got.tree) == tree.shapes(sent)
    assert (got.tree["d"] == sent["d"]).all()
    assert got.tree["b"] == {}
    records = to_records(Parcel({}, sent))
    assert sorted(records.array_records["tensors"]) == ["bool", "float64", "int64"]  # one array for each type
    del records.array_records["tensors"]["int64"]
    with pytest.raises(InvalidData, match="cannot be read"):
        from_records(records)


@pytest.mark.filterwarnings("default")
def test_replies_are_taken_from_the_node_that_was_asked_and_silence_has_a_reason(monkeypatch):
    from fedtailor.sites import flower

    def message(content, dst_node_id, **_):
        return SimpleNamespace(content=content, metadata=SimpleNamespace(dst_node_id=dst_node_id))

    def reply(number, content, reason=None):
        about = SimpleNamespace(reply_to_message_id=f"m{number}", src_node_id=number)
        return SimpleNamespace(
            content=content, metadata=about, has_error=lambda: reason is not None, error=SimpleNamespace(reason=reason)
        )

    class Grid:
        """Node 1 answers twice, 2 fails, 3 is silent, 4 sends what cannot be read; 5 is not connected."""

        def get_node_ids(self):
            return [1, 2, 3, 4]

        def push_messages(self, messages):
            return [f"m{message.metadata.dst_node_id}" for message in messages]

        def pull_messages(self, waiting):
            broken = flower.to_records(Parcel({}, {}))
            broken.config_records["pieces"]["text"] = "?"
            good = flower.to_records(Parcel({"said": 1}, {}))
            again = flower.to_records(Parcel({"said": 2}, {}))
            return [reply(1, good), reply(1, again), reply(2, None, "no\nroom"), reply(4, broken)]

    monkeypatch.setattr(flower, "Message", message)  # Flower's own belongs to a run
    names = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
    asked = {name: Parcel({"action": "train"}, {}) for name in names}
    replies = flower.Flower(Grid(), names).ask(asked, 1.0)
    assert replies["one"].facts == {"said": 1}
    assert replies["two"] == "failed: no room"
    assert replies["three"] == "did not answer within 1 seconds"
    assert "cannot be read" in replies["four"]
    assert replies["five"] == "is not connected"


@pytest.mark.filterwarnings("default")
def test_a_version_of_flower_that_loads_apps_in_another_way_is_not_answered_with(monkeypatch):
    from flwr.supernode import cli
    from flwr.supernode.runtime import run_clientapp as command

    from fedtailor.sites import answering, flower

    ran = []
    monkeypatch.setattr(cli, "flwr_clientapp", lambda: ran.append(command.get_load_client_app_fn(multi_app=True)("", "", "")))
    for name in ("install_from_fab", "get_load_client_app_fn", "run_clientapp"):
        monkeypatch.setattr(command, name, getattr(command, name))  # restored afterwards
    answering.answer_by_ours()
    assert ran == [flower.client]
    assert command.install_from_fab(b"not even an archive", skip_prompt=True) is None
    monkeypatch.setattr(command, "run_clientapp", lambda: None)
    with pytest.raises(SystemExit, match="does not know"):
        answering.answer_by_ours()
    assert len(ran) == 1


def test_a_sites_process_reports_to_flower_before_it_loads_torch():
    """Before: on a machine under load it was taken for dead while it still imported, and started again and again."""
    script = "import sys, fedtailor.sites.answering; sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def tables(folder, sites=SITES) -> dict[str, object]:
    draw, out = np.random.default_rng(3), {}
    for i, name in enumerate(sites):
        x = draw.uniform(-3, 3, (40 + i, 2))
        out[name] = folder / f"{name}.csv"
        pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": np.where(x.sum(1) > i - 1, "yes", "no")}).to_csv(out[name], index=False)
    return out


def wait_for(look, seconds) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        look()
        time.sleep(0.5)


@pytest.mark.slow
def test_a_deployment_on_loopback_gives_the_loop_engines_numbers_and_refuses_strangers(tmp_path):
    options = Options(rounds=2, batch_size=8, dtype="float64", evaluate_every=0)
    made = create(
        tmp_path / "net",
        Draft(sites=SITES, schema=SCHEMA, address=("127.0.0.1", _free_port()), algorithm=ft.Ditto(lam=0.2), options=options),
    )
    rooms = {name: House(Place(made.folder / "sites" / name), path) for name, path in tables(tmp_path).items()}
    with ExitStack() as stack:
        server = start_server(made, "127.0.0.1")
        stack.callback(server.stop)
        for house in rooms.values():
            stack.callback(Member(house).stop)
        out = made.folder / "runs" / "1"
        summary = train(made, out, False, lambda record: None)
        keys.make_pair(rooms["Bern"].place.folder / "key")  # a key that nobody registered
        stranger = Member(House(Place(rooms["Bern"].place.folder), rooms["Bern"].data), patience=0.0)
        stack.callback(stranger.stop)
        with pytest.raises(SiteRefused, match="does not let Bern in"):
            wait_for(stranger.look, 60)
        keys.make_certificates(tmp_path / "other", "other", ["127.0.0.1"])
        (rooms["Aarhus"].place.folder / keys.AUTHORITY).write_bytes((tmp_path / "other" / keys.AUTHORITY).read_bytes())
        with pytest.raises(SiteRefused, match="not the server of this network"):
            Member(rooms["Aarhus"])
        with socket.create_connection(made.address, 10) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(100)
        refused = refusals(server.said())
        assert refused[-2:] == [REFUSED + STRANGER, REFUSED + PLAIN]
        assert refused[0] == "refused a site whose key is not registered"
    own = [house.rows for house in rooms.values()]
    splits = {part: [getattr(rows, part).client(0) for rows in own] for part in ("train", "test", "val")}
    whole = ft.Federation.from_arrays(**splits, names=SITES, classes=["no", "yes"])
    one = ft.run(ft.Ditto(lam=0.2), whole, "linear", options.but(engine="loop", workers=1))
    assert summary["engine"] == "flower"
    assert summary["events"] == []
    assert summary["acc_personal"] == pytest.approx(one.summary["acc_personal"], abs=1e-12)
    assert summary["loss_personal"] == pytest.approx(one.summary["loss_personal"], abs=1e-12)
    shared = checkpoint.newest(out / "checkpoints").state["shared"]
    apart = zip(tree.leaves(shared), tree.leaves(one.shared), strict=True)
    assert max(float((a - b).abs().max()) for a, b in apart) <= 1e-12
    for name, house in rooms.items():
        run = newest_run(house.place.folder)
        assert json.loads((run / "summary.json").read_text())["engine"] == "sites"
        mine = models.read(run).predict(name, whole.test.client(one.federation.index(name))[0])
        theirs = one.predict(name, whole.test.client(one.federation.index(name))[0])
        assert float((mine - theirs).abs().max()) <= 1e-12


HOSTILE = """
import os, pathlib
from fedtailor.sites.flower import client, server

__all__ = ["client", "server"]
if "FEDTAILOR_NETWORK" not in os.environ:  # not at the server: at a site
    pathlib.Path({path!r}).write_text("this came from the server")
"""


@pytest.mark.slow
def test_a_secure_sum_over_flower_and_an_app_that_the_server_sends_is_not_run(tmp_path):
    """Three sites, one of them lost: the numbers are those of a run without it, the server has seen no upload, and the code that
    it sent along was not run."""
    names = ("Aarhus", "Bern", "Cork")
    options = Options(rounds=1, batch_size=8, dtype="float64", evaluate_every=0)
    address, lost = ("127.0.0.1", _free_port()), "Cork"
    made = create(
        tmp_path / "net",
        Draft(sites=names, schema=SCHEMA, address=address, algorithm=ft.FedAvg(), options=options, secure={"threshold": 2}),
    )
    rooms = {name: House(Place(made.folder / "sites" / name), path) for name, path in tables(tmp_path, names).items()}
    marker, run = tmp_path / "marker", made.folder / "runs" / "1"
    with ExitStack() as stack:
        server = start_server(made, "127.0.0.1")
        stack.callback(server.stop)
        (made.folder / "server" / "app" / "fedtailor_sites.py").write_text(HOSTILE.format(path=str(marker)))
        members = {name: Member(house) for name, house in rooms.items()}
        for member in members.values():
            stack.callback(member.stop)
        sums = made.folder / "sites" / lost / "state" / "sums"

        def kill() -> None:
            if any(sums.glob("*/*.state")) and members[lost].started.alive:  # it has trained: its keys are on their way
                members[lost].stop(hard=True)

        network = replace_deadline(made, 30.0)
        summary = train(network, run, False, lambda record: None, kill)
    assert not marker.exists()
    assert summary["events"]
    assert {event["client"] for event in summary["events"]} == {lost}
    assert any("single one" in note for note in summary["notes"])
    own = {name: house.rows for name, house in rooms.items() if name != lost}
    splits = {part: [getattr(rows, part).client(0) for rows in own.values()] for part in ("train", "test", "val")}
    whole = ft.Federation.from_arrays(**splits, names=tuple(own), classes=["no", "yes"])
    one = ft.run(ft.FedAvg(), whole, "linear", options.but(engine="loop", workers=1))
    shared = checkpoint.newest(run / "checkpoints").state["shared"]
    apart = zip(tree.leaves(shared), tree.leaves(one.shared), strict=True)
    assert max(float((a - b).abs().max()) for a, b in apart) <= 1e-11


def replace_deadline(network, seconds):
    path = network.folder / "config.toml"
    path.write_text(path.read_text().replace("deadline = 600.0", f"deadline = {seconds}"))
    return Network(network.folder)
