"""The commands that need no network: init, the paper a site shows, reports; and what they refuse."""

from __future__ import annotations

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedtailor.cli.app import app
from fedtailor.cli.sites_run import next_run
from fedtailor.errors import InvalidArgument
from fedtailor.sites.project import Network, Place


def command(*words):
    return CliRunner().invoke(app, ["sites", *map(str, words)])


@pytest.fixture
def table(tmp_path):
    frame = pd.DataFrame({"h": ["A", "B"] * 12, "x": range(24), "sex": ["f", "f", "m", "m"] * 6, "y": ["no", "yes", "yes"] * 8})
    path = tmp_path / "all.csv"
    frame.to_csv(path, index=False)
    return path


def made(tmp_path, table, *more):
    words = ("init", tmp_path / "net", "--sites", "A, B", "--like", table, "--label", "y", "--client", "h")
    return command(*words, "--method", "ditto", "--set", "lam=0.5", "--rounds", 4, *more)


def test_init_writes_a_network_that_can_be_read_back(tmp_path, table):
    done = made(tmp_path, table)
    assert done.exit_code == 0, done.stderr
    assert "look them over" in done.stderr
    network = Network(tmp_path / "net")
    assert network.clients == ("A", "B")
    assert network.agreed.algorithm.lam == 0.5
    assert network.agreed.options.rounds == 4
    assert network.agreed.options.batch_size == 32
    assert Place(tmp_path / "net" / "sites" / "B").digest == network.digest
    assert "Firewall" in (tmp_path / "net" / "CHECKLIST.md").read_text()


def test_a_dry_run_shows_what_would_leave_and_starts_nothing(tmp_path, table):
    made(tmp_path, table)
    done = command("client", tmp_path / "net" / "sites" / "A", "--data", table, "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "delta/weight, float32 of shape (2, 3), 24 bytes" in done.stdout
    assert "every row" in done.stdout
    assert not (tmp_path / "net" / "sites" / "A" / "site.log").exists()


def test_a_secure_network_has_signatures_and_says_what_the_server_can_open(tmp_path, table):
    done = made(tmp_path, table, "--secure")
    assert done.exit_code == 0, done.stderr
    network = Network(tmp_path / "net")
    assert network.terms.secure
    assert network.agreed.pact.threshold == 2
    for site in ("A", "B"):
        folder = tmp_path / "net" / "sites" / site
        assert Place(folder).digest == network.digest
        assert sorted(path.name for path in (folder / "peers").iterdir()) == ["A.pem", "B.pem"]
        assert (folder / "sums.pem").stat().st_mode & 0o077 == 0
    said = command("client", tmp_path / "net" / "sites" / "A", "--data", table, "--dry-run").stdout
    assert "under masks (8 integers of 64 bits)" in said
    assert "a sum of 2 sites' or more and no single one" in said
    config = tmp_path / "net" / "sites" / "A" / "config.toml"
    config.write_text(config.read_text().replace("threshold = 2", "threshold = 1"))
    assert Place(config.parent).digest != network.digest


def test_init_takes_from_a_file_what_no_flag_says(tmp_path, table):
    file = tmp_path / "mine.toml"
    file.write_text('method = "ditto"\nmodel = "mlp:3"\nrounds = 7\n[set]\nlam = 0.25\n')
    words = ("init", tmp_path / "net", "--sites", "A, B", "--like", table, "--label", "y", "--client", "h")
    done = command(*words, "--config", file, "--rounds", 9)
    assert done.exit_code == 0, done.stderr
    agreed = Network(tmp_path / "net").agreed
    assert (type(agreed.algorithm).__name__, agreed.algorithm.lam, agreed.model) == ("Ditto", 0.25, "mlp:3")
    assert agreed.options.rounds == 9


def test_runs_are_numbered_and_the_last_one_is_gone_on_with(tmp_path, table):
    made(tmp_path, table)
    network = Network(tmp_path / "net")
    with pytest.raises(InvalidArgument, match="leave out --resume"):
        next_run(network, resume=True)
    assert next_run(network, resume=False).name == "1"
    for number in ("2", "10"):
        (tmp_path / "net" / "runs" / number).mkdir(parents=True)
    assert next_run(network, resume=False).name == "11"
    assert next_run(network, resume=True).name == "10"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("client", "net/sites/A", "--data", "all.csv"), "cannot be reached"),
        (("client", "net", "--data", "all.csv"), "not the folder of a site"),
        (("client", "net/sites/A", "--data", "other.csv"), "has no column"),
        (("client", "net/sites/A", "--data", "all.csv", "--key", "none"), "there is no key"),
        (("server", "nowhere"), "give the folder that sites init made"),
        (("start", "net"), "start it with: fedtailor sites server"),
        (("status", "net"), "start it with: fedtailor sites server"),
        (("report", "net"), "no finished run"),
        (("init", "new", "--sites", "A,B"), "--schema FILE"),
        (("init", "new", "--sites", "A,B", "--like", "all.csv"), "--label"),
        (("init", "new", "--sites", "A,B", "--like", "all.csv", "--label", "y", "--address", "here"), "host:port"),
        (("init", "new", "--sites", "A,B", "--like", "all.csv", "--label", "y", "--method", "l2gd"), "cannot run at sites"),
        (("init", "new", "--sites", "A,B", "--like", "all.csv", "--label", "y", "--threshold", "2"), "give --secure"),
        (
            ("init", "new", "--sites", "A,B", "--like", "all.csv", "--label", "y", "--method", "pfedhn", "--secure"),
            "cannot run with secure sums",
        ),
        (("demo", "--data", "nowhere.csv"), "there is no nowhere.csv"),
    ],
)
def test_a_refusal_is_one_line(tmp_path, table, monkeypatch, words, said):
    made(tmp_path, table, "--address", "127.0.0.1:9")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
