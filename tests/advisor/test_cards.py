"""Cards against what is known by hand, the command line, and the table of methods."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import cli
from fedtailor.advisor import card, cards
from fedtailor.advisor.table import fixed_point, in_words, oracle, reference
from fedtailor.algorithms import METHODS
from fedtailor.cli import laws
from fedtailor.errors import InvalidArgument
from fedtailor.laws.ground import federation, network
from fedtailor.metrics.cost import wire_bytes
from fedtailor.task import Task

ROOT = Path(__file__).parents[2]
NAMES = [method.__name__ for method in METHODS]
# the laws' network by hand: 4x6+6, batch norm 6+6 and 6+6 statistics, 6x3+3
BODY, NORM, STATISTICS, HEAD = 30, 12, 12, 21
TRAINED = BODY + NORM + HEAD
MODEL = TRAINED + STATISTICS


@pytest.fixture(scope="module")
def deck():
    return {found.name: found for found in cards()}


@pytest.fixture
def runner():
    return CliRunner()


def test_there_is_a_card_for_every_registered_method(deck):
    assert list(deck) == NAMES
    assert {(c.model_parameters, c.model_bytes) for c in deck.values()} == {
        (TRAINED, wire_bytes({"model": Task.from_module(network()).init()}))
    }


def test_stateless_methods_are_those_whose_clients_keep_nothing(deck):
    forgetful = {"FedAvg", "FedAvgFT", "FedProx", "FedDF", "FedAvgM", "FedAdam", "FedYogi", "PerFedAvg", "KNNPer", "HypCluster"}
    forgetful |= {"Flow", "FlowGate", "GIANT"}
    forgetful |= {"FedPAC", "PFedHN"}  # the server keeps a head, or an embedding, of each
    assert {name for name, c in deck.items() if not c.stateful} == forgetful
    assert all((c.kept.bytes, c.kept.parameters, c.kept.branches) == (0, 0, ()) for c in deck.values() if not c.stateful)


def test_everyone_predicts_with_what_all_receive_where_nothing_is_kept_prepared_or_sent_to_one_alone():
    """Not FedPAC and PFedHN, whose server sends each client something else; what Compressed remembers is not predicted with."""
    alike = {"FedAvg", "FedProx", "FedDF", "FedAvgM", "FedAdam", "FedYogi", "GIANT", "Compressed"}
    assert {method.__name__ for method in METHODS if method.example().stateless} == alike
    assert not ft.Compressed(method=ft.Ditto()).stateless


def test_fedavg_sends_one_model_each_way(deck):
    found = deck["FedAvg"]
    assert (found.sent_down.branches, found.sent_up.branches) == (("model",), ("delta",))
    assert (found.sent_down.parameters, found.sent_down.models, found.sent_up.models) == (MODEL, 1.0, 1.0)
    assert found.sent_down.bytes == found.model_bytes
    assert found.trained_parameters == TRAINED
    assert (found.trains_at_end, found.works_for_new_client, found.mean_only) == (False, True, True)
    assert found.needs() == ()


def test_local_sends_nothing_and_keeps_a_model(deck):
    found = deck["Local"]
    assert (found.sent_down.bytes, found.sent_up.bytes, found.sent_down.models, found.sent_up.branches) == (0, 0, 0.0, ())
    assert (found.kept.parameters, found.kept.models) == (MODEL, 1.0)


def test_ditto_trains_two_models_and_sends_one(deck):
    assert deck["Ditto"].trained_parameters == 2 * TRAINED
    assert (deck["Ditto"].sent_down.models, deck["Ditto"].sent_up.models, deck["Ditto"].kept.models) == (1.0, 1.0, 1.0)


def test_scaffold_sends_two_models_each_way_and_keeps_one(deck):
    """A control variate has no batch-norm statistics: on a linear model it is exactly a second model."""
    plain = card(ft.Scaffold(), "linear")
    assert (plain.sent_down.models, plain.sent_up.models, plain.kept.models) == (2.0, 2.0, 1.0)
    found = deck["Scaffold"]
    assert (found.sent_down.branches, found.sent_up.branches) == (("model", "control"), ("delta", "control"))
    assert (found.sent_down.parameters, found.kept.parameters) == (MODEL + TRAINED, TRAINED)


@pytest.mark.parametrize("k", [2, 5])
def test_hypcluster_sends_k_models_down(k):
    found = card(ft.HypCluster(k=k))
    assert (found.sent_down.models, found.sent_down.parameters) == (float(k), k * MODEL)
    assert found.sent_up.parameters == k * MODEL + k
    assert (found.trained_parameters, found.trains_at_end, found.trained_at_end) == (TRAINED, True, 0)


def test_split_methods_send_the_shared_part_and_keep_the_other(deck):
    for name in ("FedPer", "FedSim", "FedAlt", "FedRep", "FedAvgP", "FedBABU"):
        assert (deck[name].sent_down.parameters, deck[name].kept.parameters) == (MODEL - HEAD, HEAD), name
    assert (deck["LGFedAvg"].sent_down.parameters, deck["LGFedAvg"].kept.parameters) == (HEAD, MODEL - HEAD)
    assert (deck["FedBN"].sent_down.parameters, deck["FedBN"].kept.parameters) == (BODY + HEAD, NORM + STATISTICS)


def test_what_methods_that_speak_of_classes_send(deck):
    """Three classes, six features: a table of 18 numbers, and three that say of how many rows, or whether there are any."""
    table, counts = 18, 3
    found = deck["FedProto"]
    assert (found.sent_down.parameters, found.sent_up.parameters) == (table + counts, table + counts)
    assert found.kept.parameters == MODEL
    found = deck["FedROD"]
    assert (found.sent_down.parameters, found.sent_up.parameters, found.kept.parameters) == (MODEL, MODEL, HEAD)
    assert found.trained_parameters == TRAINED + HEAD
    found = deck["FedPAC"]  # down with the client's head, up with the statistics h and v
    assert (found.sent_down.parameters, found.sent_up.parameters) == (MODEL + table + counts, MODEL + 2 * table + counts + 1)


def test_what_methods_that_make_a_model_for_each_client_send(deck):
    assert (deck["PFedHN"].sent_down.parameters, deck["PFedHN"].sent_up.parameters) == (MODEL, MODEL)
    found = deck["FedFomo"]  # of three clients, so two models; beside each whether there is one, and back its weight
    assert (found.sent_down.parameters, found.sent_up.parameters) == (2 * (MODEL + 1), MODEL + 2)
    assert found.kept.parameters == MODEL


def test_giant_sends_model_and_gradient_in_every_exchange(deck):
    assert (deck["GIANT"].sent_down.models, deck["GIANT"].sent_up.models) == (4.0, 2.0)
    searched = card(ft.GIANT(line_search=True))  # with the direction; the third answer is the objective at eleven points
    assert (searched.sent_down.parameters, searched.sent_up.parameters) == (9 * MODEL, 2 * MODEL + 11)
    assert deck["GIANT"].trained_parameters == searched.trained_parameters == TRAINED


def test_compressed_uploads_are_a_tenth_of_each_tensor_and_the_rest_is_remembered(deck):
    found = deck["Compressed"]
    sent = {(6, 4): 2, (6,): 1, (3, 6): 2, (3,): 1}  # as many places, and the shape; the norm has two more of six
    numbers = {shape: 2 * count + len(shape) for shape, count in sent.items()}
    assert found.sent_up.parameters == sum(numbers.values()) + 2 * numbers[6,] + STATISTICS
    assert (found.sent_down.parameters, found.kept.parameters) == (MODEL, TRAINED)


def test_what_methods_need(deck):
    assert {name for name, c in deck.items() if c.needs_public} == {"FedDF", "PerAda"}
    # teachers one by one; uploads decoded one by one; each client's head, embedding or model; the first changes, to part them
    assert {name for name, c in deck.items() if not c.mean_only} == {
        "FedDF",
        "PerAda",
        "Compressed",
        "FedPAC",
        "PFedHN",
        "FedFomo",
        "HypCluster",
    }
    assert {name for name, c in deck.items() if c.needs_features} == {"KNNPer", "FedROD", "FedProto", "FedPAC"}
    assert {name for name, c in deck.items() if c.needs_validation} == {"FedCLUPDynamic"}
    assert {name for name, c in deck.items() if c.needs_everyone} == {"L2GD", "AL2SGD"}
    assert {name for name, c in deck.items() if c.roll_call} == {"ScaffoldP"}
    assert not card(ft.ScaffoldP(first="zeros")).roll_call
    assert not any(c.loop_only for c in deck.values())
    # what they do with rows beside descents: gradients of their own, a choice by loss or by validation rows, a store of rows
    bare = {"ScaffoldP", "APFL", "PerFedAvg", "AL2SGD", "HypCluster", "FedCLUPDynamic", "KNNPer"}
    # and numbers of rows per class, means of features, losses of others' models, Newton directions
    bare |= {"FedROD", "FedProto", "FedPAC", "FedFomo", "GIANT"}
    bare |= {"FlowGate"}  # and a gate that is fitted to validation rows
    assert {name for name, c in deck.items() if not c.private} == bare
    apart = {name: c.not_at_sites for name, c in deck.items() if c.not_at_sites is not None}
    assert set(apart) == {"AL2SGD", "L2GD"}
    assert all("it needs all clients in every round" in why for why in apart.values())
    assert not card(ft.FedAvg(), network()).private  # batch norm
    assert all(c.works_for_new_client for c in deck.values())


def test_the_roll_call_does_not_hide_what_scaffold_p_trains(deck):
    assert deck["ScaffoldP"].trained_parameters == TRAINED


def test_who_does_something_at_the_end(deck):
    trains = {name for name, c in deck.items() if c.trained_at_end}
    assert trains == {"FedAvgFT", "FedProxPersonal", "FedBABU", "PerFedAvg", "Flow", "FlowGate"}
    assert {name for name, c in deck.items() if c.trains_at_end} == trains | {"KNNPer", "HypCluster"}
    assert not card(ft.FedProxPersonal(final_steps=0)).trains_at_end
    assert card(ft.FedBABU(finetune_steps=0)).trained_at_end == 0


def test_partialfed_trains_and_keeps_two_logits_per_layer_beside_the_model(deck):
    found = deck["PartialFed"]
    assert (found.kept.branches, found.kept.parameters) == (("model", "logits"), MODEL + 2 * 3)
    assert found.trained_parameters == TRAINED + 2 * 3
    assert card(ft.PartialFed(personal=())).trains_at_end  # the shared layers are put in before predicting
    assert (found.sent_down.parameters, found.sent_up.parameters) == (MODEL, MODEL)


def test_apfl_trains_two_models_in_a_loop_of_its_own(deck):
    assert deck["APFL"].trained_parameters == 2 * TRAINED


@pytest.mark.parametrize(
    "method", [ft.FedAvg(), ft.Scaffold(), ft.HypCluster(k=3), ft.FedDF(), ft.Ditto()], ids=lambda m: type(m).__name__
)
def test_bytes_are_those_of_a_run(method):
    data = federation()
    found = card(method, "linear")
    summary = ft.run(method, data, "linear", rounds=2, evaluate_every=0).summary
    assert summary["bytes_down"] == 2 * len(data) * found.sent_down.bytes
    assert summary["bytes_up"] == 2 * len(data) * found.sent_up.bytes


def test_a_card_is_made_for_the_given_model_and_data():
    fed = ft.Federation.load("digits", clients=4)
    found = card(ft.FedDF(), "mlp:8", fed)  # no public rows in these data: training rows stand in
    assert found.model_parameters == 64 * 8 + 8 + 8 * 10 + 10
    assert found.needs_public
    assert card(ft.FedCLUP(steps="theory", opt=ft.SGD(weight_decay=0.05)), "linear", fed).kept.models == 1.0


def test_a_method_that_fails_where_others_work_is_told_apart():
    class Stubborn(ft.FedAvg):
        def client_update(self, task, shared, personal, data, rnd):
            upload, personal = super().client_update(task, shared, personal, data, rnd)
            return upload, {"seen": torch.tensor(float(len(data["y"].tolist())))}

        def init_client(self, task, shared, data):
            return {}

        def predict(self, task, shared, personal, x):
            return task.apply(shared["model"], x) + 0 * personal["seen"]

    found = card(Stubborn())
    assert (found.loop_only, found.works_for_new_client, found.stateful) == (True, False, True)
    assert found.needs() == ("loop engine",)


def test_cards_refuse_a_class_and_a_model_that_does_not_fit():
    with pytest.raises(InvalidArgument, match=r"ft\.FedAvg\(\)"):
        card(ft.FedAvg)
    with pytest.raises(InvalidArgument, match="leaves no shared"):
        card(ft.FedPer(), "linear")


def test_a_row_is_plain_json(deck):
    for found in deck.values():
        assert json.loads(json.dumps(found.row())) == found.row()
    assert deck["FedAvg"].row()["sent_down"]["branches"] == ["model"]


# -- the command line -------------------------------------------------------------------------------------------------
def test_the_list_of_algorithms_as_json_has_a_row_per_method(runner, deck):
    result = runner.invoke(cli.app, ["list", "algorithms", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [deck[name].row() for name in NAMES]


def test_the_table_of_algorithms_fits_100_columns(runner, deck, monkeypatch):
    monkeypatch.setattr("fedtailor.advisor.cards", lambda: list(deck.values()))
    result = runner.invoke(cli.app, ["list", "algorithms"])
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert [word for line in lines for word in line.split()[:1] if word in NAMES] == NAMES
    assert "…" not in result.stdout


def test_models_and_data_are_listed(runner):
    models = json.loads(runner.invoke(cli.app, ["list", "models", "--json"]).stdout)
    assert [row["name"] for row in models] == list(ft.models.names())
    assert next(row["parameters"] for row in models if row["name"] == "linear") == 64 * 10 + 10
    assert next(row["parameters"] for row in models if row["name"] == "split-linear") == 64  # 32 shared, 32 personal
    data = json.loads(runner.invoke(cli.app, ["list", "data", "--json"]).stdout)
    assert "digits" in [row["name"] for row in data]
    assert next(row["options"]["clients"] for row in data if row["name"] == "digits") == 10
    for what, names in (("models", models), ("data", data)):
        result = runner.invoke(cli.app, ["list", what])
        assert result.exit_code == 0
        assert all(row["name"] in result.stdout for row in names)
        assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize("kind", ["algorithms", "models", "data"])
def test_the_table_of_a_list_cuts_nothing(runner, kind):
    shown, rows = (runner.invoke(cli.app, ["list", kind, *more], catch_exceptions=False).stdout for more in ((), ("--json",)))
    rows = json.loads(rows)
    assert "…" not in shown
    lines = shown.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line.strip()) == {"─"})
    assert "newcomers" in shown or kind != "algorithms"  # no word of a heading is broken
    assert [row.get("name") or row["method"] for row in rows] == [
        line.split()[0] for line in lines[rule + 1 :] if line[1:2].strip()
    ]
    words = set(shown.split())
    texts = [value for row in rows for key, value in row.items() if isinstance(value, str) and key != "not_at_sites"]  # a reason
    assert all(set(text.split()) <= words for text in texts)


def test_help_is_quick_and_does_not_import_torch():
    code = "import sys; sys.argv = ['fedtailor', '--help']\nfrom fedtailor.cli import main\ntry: main()\n"
    code += "finally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - began < 2.0
    assert "list" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_version(runner):
    assert runner.invoke(cli.app, ["--version"]).stdout == f"fedtailor {ft.__version__}\n"


METHOD = """
from __future__ import annotations
from dataclasses import dataclass
from fedtailor.algorithms.base import Algorithm

@dataclass(frozen=True, kw_only=True)
class Nothing(Algorithm):
    def init_server(self, task):
        return {"model": task.init()}, {}
    def client_update(self, task, shared, personal, data, rnd):
        return {}, personal
    def server_update(self, task, shared, server, upload, rnd):
        return shared, server
    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)

class Grows(Nothing):
    def server_update(self, task, shared, server, upload, rnd):
        return {**shared, f"round {rnd.number}": shared["model"]}, server
"""


def test_where_no_descent_was_seen_no_number_is_given(mine):
    found = card(laws.example_of(f"{mine}:Nothing"))
    assert found.trained_parameters is None
    assert found.cells()["trained"] == "not seen"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine_to_check.py"
    path.write_text(METHOD)
    yield path
    sys.modules.pop("mine_to_check", None)


def test_check_tries_the_laws_on_a_class_in_a_file(runner, mine):
    result = runner.invoke(cli.app, ["check", f"{mine}:Nothing", "--json"])
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)) == 20


@pytest.mark.parametrize(
    ("name", "words"), [("Grows", "law 2 (stable trees)"), ("Absent", "has no class 'Absent'"), ("no class", "mine.py:MyMethod")]
)
def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(runner, mine, name, words):
    result = runner.invoke(cli.app, ["check", f"{mine}:{name}"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr
    assert isinstance(runner.invoke(cli.app, ["--debug", "check", f"{mine}:{name}"]).exception, ft.errors.FedtailorError)


# -- docs/methods.md --------------------------------------------------------------------------------------------------
def test_the_table_of_methods_lists_exactly_the_registered_ones():
    """If this fails, run ``make docs``."""
    tables = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").split("## What it takes")
    for text in tables:
        rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
        assert [name for name in rows if name not in ("method", "---")] == NAMES


def test_marks_come_from_what_the_tests_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert oracle(ft.FedRep) == "fedrep, in 3 settings"
    assert oracle(ft.KNNPer) == "knnper"  # tests of its own
    assert fixed_point(ft.Scaffold) == "the pooled minimiser, to 1e-08"
    assert fixed_point(ft.L2GD) == "Problem (2), to 0.03"
    assert fixed_point(ft.FedAvg) == "none"  # a test says that it does not reach the pooled minimiser
    stranger = type("Stranger", (), {"__module__": "fedtailor.algorithms.stranger"})
    assert oracle(stranger) == fixed_point(stranger) == "none"


def test_limits_and_references_in_words():
    assert in_words(ft.FedProx.limits[0]) == "with mu = 0 it predicts as FedAvg, bit for bit"
    assert in_words(ft.Ditto.limits[1]) == "its shared state is that of FedAvg, bit for bit"
    assert in_words(ft.HypCluster.limits[0]) == "with k = 1 it predicts as FedAvg, to 1e-09"
    assert reference(ft.Ditto) == "Li et al. 2021 (Ditto), Algorithm 1."
    assert all(isinstance(method.example(), method) and reference(method) for method in METHODS)
