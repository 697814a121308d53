"""The folders of a network: what a site gets, what it would send, and whom it trusts."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import tree
from fedtailor.cli.app import app
from fedtailor.engine.options import Options
from fedtailor.errors import BadRun, InvalidArgument, SiteRefused, TooFewSites
from fedtailor.local import Private
from fedtailor.runs import models
from fedtailor.runs.signature import make_keys
from fedtailor.sites import keys
from fedtailor.sites.house import House, newest_run
from fedtailor.sites.local import InProcess
from fedtailor.sites.memory import new_key
from fedtailor.sites.processes import check_connection
from fedtailor.sites.project import Draft, Network, Place, create
from fedtailor.sites.server import Conductor
from fedtailor.sites.wire import Parcel

SITES = ("Aarhus", "Bern", "Cork")
SCHEMA = {
    "label": "y",
    "classes": ["no", "yes"],
    "columns": [{"name": "a", "kind": "numeric", "range": [-4, 4]}, {"name": "b", "kind": "numeric", "range": [-4, 4]}],
}


def network(tmp_path, method=None, port=8443, secure=None, **options) -> Network:
    given = Options.of({"rounds": 3, "batch_size": 8, "evaluate_every": 0, **options})
    return create(
        tmp_path / "net",
        Draft(
            sites=SITES,
            schema=SCHEMA,
            address=("127.0.0.1", port),
            algorithm=method or ft.FedCLUP(lam=0.2),
            options=given,
            secure=secure,
        ),
    )


def houses(tmp_path, made: Network) -> dict[str, House]:
    draw = np.random.default_rng(3)
    out = {}
    for i, name in enumerate(SITES):
        x = draw.uniform(-3, 3, (40 + i, 2))
        frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": np.where(x.sum(1) > i - 1, "yes", "no")})
        path = tmp_path / f"{name}.csv"
        frame.to_csv(path, index=False)
        out[name] = House(Place(made.folder / "sites" / name), path)
    return out


def test_a_network_from_its_folders_ends_with_a_model_and_scores_at_every_site(tmp_path):
    made = network(tmp_path, weights="size")
    rooms = houses(tmp_path, made)
    transport = InProcess({name: house.site() for name, house in rooms.items()})
    summary = Conductor(made.agreed, transport, made.folder / "runs" / "1", digest=made.digest).play()
    assert summary["events"] == []
    assert newest_run(made.folder) == made.folder / "runs" / "1"
    mean = []
    for name, house in rooms.items():
        run = newest_run(house.place.folder)
        own = json.loads((run / "summary.json").read_text())
        mean.append(own["acc_personal"])
        assert own["clients"] == 1
        assert models.read(run).clients == [name]
        done = CliRunner().invoke(app, ["predict", str(run), str(house.data), "--client", name])
        assert done.exit_code == 0
        assert len(done.stdout.splitlines()) == len(pd.read_csv(house.data)) + 1
        assert CliRunner().invoke(app, ["sites", "report", str(house.place.folder)]).exit_code == 0
        assert name in (run / "report.html").read_text()
    assert summary["acc_personal"] == pytest.approx(np.mean(mean), abs=1e-12)


def test_under_pseudonyms_the_server_writes_down_no_sites_score_and_a_site_knows_its_own(tmp_path):
    made = network(tmp_path)
    rooms = houses(tmp_path, made)
    for folder in (made.folder, *(house.place.folder for house in rooms.values())):
        config = folder / "config.toml"
        config.write_text(config.read_text().replace("[network]", "[network]\npseudonyms = true"))
    made, out = Network(made.folder), tmp_path / "net" / "runs" / "1"
    rooms = {name: House(Place(house.place.folder), house.data) for name, house in rooms.items()}
    transport = InProcess({name: house.site() for name, house in rooms.items()})
    Conductor(made.agreed, transport, out, digest=made.digest, pseudonyms=made.pseudonyms).play()
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    shown = {line["client"]: line for line in lines if "client" in line}
    assert list(shown) == ["site 1", "site 2", "site 3"]
    for house in rooms.values():
        own = json.loads((newest_run(house.place.folder) / "summary.json").read_text())
        assert shown[own["pseudonym"]]["acc_personal"] == own["acc_personal"]
        assert shown[own["pseudonym"]]["loss_personal"] == pytest.approx(own["loss_personal"], abs=1e-6)
    assert CliRunner().invoke(app, ["sites", "report", str(made.folder)]).exit_code == 0
    page = (out / "report.html").read_text()
    assert "site 2" in page
    assert not [name for name in SITES if name in page]


def test_a_newcomer_gets_the_shared_model_and_is_told_whether_it_gains(tmp_path):
    made = network(tmp_path)
    transport = InProcess({name: house.site() for name, house in houses(tmp_path, made).items()})
    run = made.folder / "runs" / "1"
    Conductor(made.agreed, transport, run, digest=made.digest).play()
    draw, call = np.random.default_rng(5), CliRunner().invoke
    x = draw.uniform(-3, 3, (60, 2))
    new = tmp_path / "oslo.csv"
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": np.where(x[:, 0] > x[:, 1], "yes", "no")}).to_csv(new, index=False)
    shared = call(app, ["predict", str(run), str(new), "--json"])
    assert shared.exit_code == 0, shared.stderr
    assert call(app, ["sites", "invite", str(made.folder), "--to", str(tmp_path / "oslo")]).exit_code == 0
    given = {path.name for path in (tmp_path / "oslo").rglob("*") if path.is_file()}
    assert given == {"schema.toml", "config.toml", "manifest.json", "models.json", "shared.safetensors", "personal.safetensors"}
    done = call(app, ["sites", "join", str(tmp_path / "oslo"), "--data", str(new), "--name", "Oslo", "--rounds", "30", "--json"])
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["verdict"]["outcome"], record["rows"]) == ("helps", 60)  # its rule is not that of the others
    assert record["low"] > 0
    own = call(app, ["predict", str(tmp_path / "oslo" / "model"), str(new), "--client", "Oslo", "--json"])
    right = [np.mean([row["prediction"] == row["y"] for row in json.loads(text)]) for text in (own.stdout, shared.stdout)]
    assert right[0] > right[1] + 0.2
    again = call(app, ["sites", "invite", str(made.folder), "--to", str(tmp_path / "oslo")])
    assert (again.exit_code, "not empty" in again.stderr) == (2, True)
    bad = call(app, ["sites", "join", str(tmp_path), "--data", str(new), "--name", "Oslo"])
    assert (bad.exit_code, "is no invitation" in bad.stderr) == (2, True)
    new.write_text(new.read_text().replace("yes", "perhaps", 1))
    bad = call(app, ["sites", "join", str(tmp_path / "oslo"), "--data", str(new), "--name", "Oslo"])
    assert (bad.exit_code, "agreed on" in bad.stderr) == (2, True)


def test_a_site_refuses_a_server_with_other_terms(tmp_path):
    made = network(tmp_path)
    rooms = houses(tmp_path, made)
    config = made.folder / "config.toml"
    config.write_text(config.read_text().replace("lam = 0.2", "lam = 0.9"))
    other = Network(made.folder)
    transport = InProcess({name: house.site() for name, house in rooms.items()})
    conductor = Conductor(other.agreed, transport, made.folder / "runs" / "1", digest=other.digest)
    with pytest.raises(Exception, match="no site answered"):
        conductor.play()
    assert "not the one this site agreed to" in conductor.ledger.events[0]["what"]


def test_the_paper_lists_everything_that_would_leave(tmp_path):
    made = network(tmp_path, ft.FedAvg(opt=Private(clip=1.0, noise=2.0)), weights="size")
    house = houses(tmp_path, made)["Bern"]
    text = "\n".join(house.paper())
    assert "delta/weight, float32 of shape (2, 2), 16 bytes" in text
    assert "the number of its training rows" in text
    assert "epsilon = " in text
    assert "no bound" not in text


def test_noise_comes_from_the_same_secret_as_long_as_the_site_is_there(tmp_path):
    made = network(tmp_path, ft.FedAvg(opt=Private(clip=1.0, noise=2.0)))
    house = houses(tmp_path, made)["Bern"]
    again = House(house.place, house.data)
    assert house.ready.secret.hex() == again.ready.secret.hex()
    assert (house.place.folder / "state" / "noise.key").stat().st_mode & 0o077 == 0


def test_with_a_key_the_secret_of_the_noise_is_encrypted_too(tmp_path):
    made = network(tmp_path, ft.FedAvg(opt=Private(clip=1.0, noise=2.0)))
    plain = houses(tmp_path, made)["Bern"]
    key = tmp_path / "site.key"
    key.write_bytes(new_key())
    house = House(plain.place, plain.data, key)
    secret = house.ready.secret.hex()
    assert secret.encode() not in (house.place.folder / "state" / "noise.key").read_bytes()
    assert House(plain.place, plain.data, key).ready.secret.hex() == secret
    with pytest.raises(BadRun, match="is encrypted"):
        _ = House(plain.place, plain.data).ready


def test_houses_sum_in_secret_with_the_keys_of_their_folders(tmp_path):
    made = network(tmp_path, ft.FedAvg(), secure={"threshold": 3}, rounds=2)
    terms = replace(made.terms, pause=0.0)
    rooms = houses(tmp_path, made)
    transport = InProcess({name: house.site() for name, house in rooms.items()})
    summary = Conductor(made.agreed, transport, made.folder / "runs" / "1", terms, digest=made.digest).play()
    assert summary["events"] == []
    assert summary["bytes_up"] > 0
    stranger = tmp_path / "stranger.pem"
    public = make_keys(stranger)
    house = rooms["Bern"]
    (house.place.folder / "peers" / "Aarhus.pem").write_bytes(public.read_bytes())  # Bern knows another Aarhus
    transport = InProcess({name: room.site() for name, room in rooms.items()})
    conductor = Conductor(made.agreed, transport, made.folder / "runs" / "2", terms, digest=made.digest)
    with pytest.raises(TooFewSites):
        conductor.play()
    assert any("not signed by Aarhus" in event["what"] for event in conductor.ledger.events)


def test_two_runs_at_a_site_share_no_noise_but_a_question_asked_again_has_the_same_answer(tmp_path):
    made = network(tmp_path, ft.FedAvg(steps=1, opt=Private(clip=1.0, noise=2.0)), rounds=1)
    sites = {name: house.site() for name, house in houses(tmp_path, made).items()}
    asked = []

    class Overheard(InProcess):
        def ask(self, parcels, seconds):
            asked.append(dict(parcels))
            return super().ask(parcels, seconds)

    for number in ("1", "2"):
        Conductor(made.agreed, Overheard(sites), made.folder / "runs" / number, digest=made.digest).play()
    train = [parcels["Bern"] for parcels in asked if parcels["Bern"].facts["action"] == "train"]
    assert len(train) == 2
    assert all(torch.equal(train[0].tree["shared"]["model"][k], v) for k, v in train[1].tree["shared"]["model"].items())
    first, again, other = (sites["Bern"].answer(parcel).tree["delta"]["weight"] for parcel in (train[0], train[0], train[1]))
    assert torch.equal(first, again)
    assert float((first - other).abs().min()) > 0  # before: the same noise, and their difference none


def test_private_keys_are_for_their_owner_and_stay_apart(tmp_path):
    made = network(tmp_path)
    private = [made.folder / "sites" / name / "key" for name in SITES]
    private += [made.folder / "server" / name for name in (keys.AUTHORITY_KEY, keys.CERTIFICATE_KEY)]
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    assert len({path.read_bytes() for path in private}) == len(private)
    assert not list((made.folder / "sites").rglob("*.key"))


def test_a_folder_in_use_or_a_name_that_is_a_path_is_refused(tmp_path):
    network(tmp_path)
    with pytest.raises(InvalidArgument, match="not empty"):
        network(tmp_path)
    with pytest.raises(InvalidArgument, match="name of a site"):
        create(tmp_path / "n", Draft(sites=("a", "../b"), schema=SCHEMA, address=("h", 1), algorithm=ft.FedAvg()))
    with pytest.raises(InvalidArgument, match="two sites"):
        create(tmp_path / "n", Draft(sites=("a",), schema=SCHEMA, address=("h", 1), algorithm=ft.FedAvg()))
    assert not (tmp_path / "n").exists()


@contextmanager
def listening(certificates=None):
    """A server on loopback that shakes hands and no more; without certificates it speaks plainly."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                if certificates is None:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificates / keys.CERTIFICATE, certificates / keys.CERTIFICATE_KEY)
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except (ssl.SSLError, OSError):
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(5)


def test_a_site_talks_to_the_server_of_its_network_only(tmp_path):
    made = network(tmp_path)
    house = houses(tmp_path, made)["Cork"]

    def at(port):
        config = house.place.folder / "config.toml"
        lines = [f'address = "127.0.0.1:{port}"' if "address" in line else line for line in config.read_text().splitlines()]
        config.write_text("\n".join(lines) + "\n")
        return House(Place(house.place.folder), house.data)

    with listening(made.folder / "server") as port:
        check_connection(at(port))
    other = tmp_path / "other"
    keys.make_certificates(other, "other", ["127.0.0.1"])
    with listening(other) as port, pytest.raises(SiteRefused, match="not the server of this network"):
        check_connection(at(port))
    with listening() as port, pytest.raises(SiteRefused, match="does not speak TLS"):
        check_connection(at(port))
    with pytest.raises(SiteRefused, match="cannot be reached"):
        check_connection(at(port))


def test_a_method_of_ones_own_travels_with_the_folder(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from dataclasses import dataclass\nimport fedtailor as ft\n"
        "from fedtailor.algorithms.fedavg import FedAvg\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n    pass\n"
    )
    from fedtailor.algorithms.settings import make

    made = network(tmp_path, make(f"{source}:Mine", {"lr": 0.3}))
    source.unlink()
    place = Place(made.folder / "sites" / "Bern")
    assert type(place.agreed.algorithm).__name__ == "Mine"
    assert place.digest == made.digest


def test_without_flwr_one_line_names_the_extra(tmp_path):
    made = network(tmp_path)
    script = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'flwr' else find(name, *a)\n"
        "sys.modules['flwr'] = None\n"
        "from fedtailor.cli.app import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "sites", "server", str(made.folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip() == 'fedtailor: sites need the package flwr, which is not installed: pip install "fedtailor[flower]"'
    )


def overheard(tmp_path, method, rounds):
    """The network, its sites, and what Bern was asked to train on in a run."""
    made = network(tmp_path, method, rounds=rounds)
    sites = {name: house.site() for name, house in houses(tmp_path, made).items()}
    asked = []

    class Overheard(InProcess):
        def ask(self, parcels, seconds):
            asked.append(dict(parcels))
            return super().ask(parcels, seconds)

    Conductor(made.agreed, Overheard(sites), made.folder / "runs" / "1", digest=made.digest).play()
    return made, sites, [parcels["Bern"] for parcels in asked if parcels["Bern"].facts["action"] == "train"]


@pytest.mark.parametrize("changed", ["version", "round"])
def test_an_answer_from_another_state_or_about_another_round_has_other_noise(changed, tmp_path):
    """A server that asks the same with another version of the site's state, or another number of rounds, could subtract."""
    noise, lr = 1e4, 0.1
    method = ft.FedAvgP(steps=1, lr=lr, personal="bias", opt=Private(clip=1.0, noise=noise))
    _, sites, train = overheard(tmp_path, method, 2)
    bern, (_, second) = replace(sites["Bern"], visits=10), train
    other = {"version": 0} if changed == "version" else {"round": {**second.facts["round"], "rounds": 99}}
    answers = [bern.answer(parcel) for parcel in (second, Parcel({**second.facts, **other}, second.tree))]
    assert not any("error" in answer.facts for answer in answers)
    first, another = (torch.cat([leaf.flatten() for leaf in tree.leaves(answer.tree)]) for answer in answers)
    assert float((first - another).abs().max()) > 10 * lr  # before: two gradients of norm at most 1 apart, without any noise


def test_a_server_that_asks_for_more_than_was_agreed_is_refused(tmp_path):
    made, sites, (only,) = overheard(tmp_path, ft.FedAvg(steps=1, opt=Private(clip=1.0, noise=2.0)), 1)
    again = sites["Bern"].answer(only)
    assert "error" not in again.facts  # the same question costs nothing
    more = Parcel(only.facts, {**only.tree, "shared": tree.map(lambda leaf: leaf + 1, only.tree["shared"])})
    assert "more than the 1 answers" in sites["Bern"].answer(more).facts["error"]
    house = houses(tmp_path, made)["Bern"]
    assert "more than the 1 answers" in house.site().answer(more).facts["error"]  # after a restart too
    Conductor(made.agreed, InProcess(sites), made.folder / "runs" / "2", digest=made.digest).play()
    newest = json.loads((newest_run(house.place.folder) / "summary.json").read_text())
    assert newest["epsilon_composed"] > newest["epsilon_max"]  # two runs
    (house.place.folder / "state" / only.facts["run"] / "questions.json").write_text("{}")
    assert "nobody knows what this site has released" in house.site().answer(more).facts["error"]


@pytest.mark.parametrize("name", ["state", "runs"])
def test_a_site_whose_folder_leads_elsewhere_does_not_start(name, tmp_path):
    house = houses(tmp_path, network(tmp_path))["Bern"]
    (tmp_path / "elsewhere").mkdir()
    (house.place.folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRun, match="is a link, which leads elsewhere"):
        house.site()
