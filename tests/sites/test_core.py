"""A run across sites is the run of the loop engine: same numbers, nothing lost, bad uploads refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.errors import InvalidArgument, InvalidData, TooFewSites
from fedtailor.runs import checkpoint, models
from fedtailor.sites.memory import BORN
from fedtailor.sites.replies import sentences
from fedtailor.sites.wire import Parcel, round_facts, round_of
from tests.sites.halfway import Halfway
from tests.sites.network import agree, conduct, federation, loop

METHODS = [
    (ft.FedAvg(epochs=2), "linear", 0),
    (ft.FedCLUP(lam=0.3, steps=3), "linear", 0),
    (ft.ScaffoldP(personal="head"), "mlp", 0),
    (ft.Ditto(lam=0.2), "linear", 0),
    (ft.FedRep(), "mlp", 0),
    (ft.PerAda(), "mlp", 12),
    (ft.HypCluster(k=2), "linear", 0),
    (ft.Flow(), "mlp", 0),
    (ft.FedAvgFT(), "linear", 0),
    (ft.PFedMe(), "linear", 0),
    (ft.FedDyn(alpha=0.1), "linear", 0),
    (ft.FedProto(), "mlp", 0),
    (ft.KNNPer(), "mlp", 0),
    (ft.FedFomo(), "mlp", 0),
    (ft.PFedHN(), "linear", 0),
    (ft.GIANT(), "linear", 0),
    (Halfway(), "linear", 0),
]


def difference(a, b) -> float:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs), default=0.0)


@pytest.mark.parametrize(("method", "model", "public"), METHODS, ids=lambda value: type(value).__name__)
def test_sites_give_the_numbers_of_the_loop_engine_at_partial_turnout(tmp_path, method, model, public):
    fed = federation(public=public)
    agreed = agree(method, fed, model, cohort=3)
    conductor = conduct(agreed, fed, tmp_path)
    summary = conductor.play()
    one = loop(agreed, fed)
    lines = [json.loads(line) for line in (tmp_path / "server" / "history.jsonl").read_text().splitlines()]
    for mine, theirs in zip([line for line in lines if "client" not in line], one.history, strict=True):
        assert mine == pytest.approx({key: value for key, value in theirs.items() if key != "seconds"}, abs=1e-12)
    last = {line["client"]: line for line in lines if "client" in line and line["round"] == 3}
    for name, measures in one.per_client():
        assert last[name] == pytest.approx({"round": 3, "client": name, **measures}, abs=1e-12)
    kept = checkpoint.newest(tmp_path / "server" / "checkpoints")
    assert difference(kept.state["shared"], one.shared) <= 1e-12
    assert difference(kept.state["server"], one.server) <= 1e-12
    for client, site in enumerate(conductor.transport.sites.values()):
        version, personal = site.memory.recall(conductor.ledger.run, 10**6)
        assert (version == BORN) == (not one.store.born[client])
        if version != BORN and tree.leaves(personal):
            mine = tree.map(lambda leaf: leaf[0], one.store.get(np.array([client])))
            assert difference(personal, mine) <= 1e-12
    assert summary["events"] == []


def test_weights_by_size_are_learnt_from_the_sites(tmp_path):
    fed = federation()
    agreed = agree(ft.FedProxPersonal(lam=0.1), fed, weights="size", cohort=3)
    conduct(agreed, fed, tmp_path).play()
    kept = checkpoint.newest(tmp_path / "server" / "checkpoints")
    assert difference(kept.state["shared"], loop(agreed, fed).shared) <= 1e-12


def test_a_run_in_single_precision_is_that_of_the_loop_engine_bit_for_bit(tmp_path):
    fed = federation()
    agreed = agree(ft.Ditto(lam=0.2), fed, dtype="float32")
    conduct(agreed, fed, tmp_path).play()
    assert difference(checkpoint.newest(tmp_path / "server" / "checkpoints").state["shared"], loop(agreed, fed).shared) == 0


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (ft.AL2SGD(), {}, "needs all clients in every round"),
        (ft.L2GD(), {}, "needs all clients in every round"),
        (ft.FedCLUP(steps="theory"), {}, "all clients' rows"),
        (ft.FedCLUP(lam="client"), {}, "all clients' rows"),
        (ft.FedAvg(opt=ft.Private(clip=1.0, target_epsilon=1.0)), {}, "give the noise itself"),
        (ft.FedAvg(), {"user_clip": 1.0, "user_noise": 1.0}, "user_clip"),
        (ft.FedAvg(), {"new_clients": 0.2}, "simulations"),
        (ft.FedAvg(), {"cohort": "who.csv"}, "simulations"),
        (ft.FedAvg(), {"patience": 2}, "patience and callbacks"),
        (ft.FedAvg(), {"class_weights": "balanced"}, "one number per class"),
    ],
)
def test_what_cannot_run_at_sites_says_why(method, options, words):
    with pytest.raises(InvalidArgument, match=words):
        agree(method, federation(), **options).at_server()


class Faulty:
    """A transport that spoils the replies of some clients in some rounds."""

    name = "sites"

    def __init__(self, inner, spoil):
        self.inner, self.spoil, self.sites = inner, spoil, inner.sites

    def ask(self, parcels, seconds):
        replies = dict(self.inner.ask(parcels, seconds))
        for name, asked in parcels.items():
            if asked.facts["action"] == "train":
                replies[name] = self.spoil(name, asked.facts["round"]["number"], replies[name])
        return replies


def spoiled(fed, folder, spoil, method=None, **terms):
    agreed = agree(method or ft.Ditto(lam=0.2), fed, rounds=5)
    conductor = conduct(agreed, fed, folder, **terms)
    conductor.transport = Faulty(conductor.transport, spoil)
    return conductor, conductor.play()


def without(fed, folder, client, numbers, method=None):
    """The same run, the client never asked in these rounds."""
    return spoiled(fed, folder, lambda name, number, reply: "away" if name == client and number in numbers else reply, method)


BAD = {
    "nan": (lambda t: tree.map(lambda leaf: leaf * float("nan"), t), "is not finite"),
    "infinite": (lambda t: tree.map(lambda leaf: leaf + float("inf"), t), "is not finite"),
    "a million times": (lambda t: tree.map(lambda leaf: leaf * 1e6, t), "far beyond"),
    "another shape": (lambda t: tree.map(lambda leaf: leaf[..., None], t), "has shape"),
    "another type": (lambda t: tree.map(lambda leaf: leaf.float(), t), "of type float32, not float64"),
    "another name": (lambda t: {"other": t}, "is missing"),
    "one more": (lambda t: {**t, "more": torch.zeros(2)}, "was not asked for"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_upload_changes_nothing_but_the_log(tmp_path, kind):
    make, words = BAD[kind]

    def spoil(name, number, reply):
        return Parcel(reply.facts, make(reply.tree)) if name == "Cork" and number == 2 else reply

    fed = federation()
    _, summary = spoiled(fed, tmp_path / "bad", spoil)
    _, reference = without(fed, tmp_path / "away", "Cork", {2})
    assert [(event["round"], event["client"]) for event in summary["events"]] == [(2, "Cork")]
    assert words in summary["events"][0]["what"]
    shared = [checkpoint.newest(tmp_path / run / "server" / "checkpoints").state["shared"] for run in ("bad", "away")]
    assert difference(*shared) == 0
    assert summary["acc_personal"] == reference["acc_personal"]


@pytest.mark.parametrize("field", ["run", "action", "client", "version"])
def test_a_reply_to_another_question_is_refused(tmp_path, field):
    def spoil(name, number, reply):
        wrong = {**reply.facts, field: 1 if field == "version" else "other"}
        return Parcel(wrong, reply.tree) if name == "Cork" and number == 2 else reply

    _, summary = spoiled(federation(), tmp_path, spoil)
    assert [(event["round"], event["client"]) for event in summary["events"]] == [(2, "Cork")]


def test_work_that_the_server_never_received_does_not_count_at_the_site_either(tmp_path):
    fed = federation()
    first, _ = without(fed, tmp_path / "late", "Delft", {2})  # it works, and its reply is lost
    calls = []
    agreed = agree(ft.Ditto(lam=0.2), fed, rounds=5)
    second = conduct(agreed, fed, tmp_path / "never")
    inner = second.transport

    class Absent:
        name, sites = "sites", inner.sites

        def ask(self, parcels, seconds):
            away = {n for n, p in parcels.items() if n == "Delft" and p.facts.get("round", {}).get("number") == 2}
            calls.extend(away)
            return inner.ask({n: p for n, p in parcels.items() if n not in away}, seconds)

    second.transport = Absent()
    second.play()
    assert calls == ["Delft"]
    for name in fed.names:
        states = [c.transport.sites[name].memory.recall(c.ledger.run, 10**6) for c in (first, second)]
        assert states[0][0] == states[1][0]
        assert difference(states[0][1], states[1][1]) == 0


def test_a_site_that_lost_its_state_goes_on_and_the_server_says_so(tmp_path):
    fed = federation()
    conductor = conduct(agree(ft.Ditto(lam=0.2), fed, rounds=5), fed, tmp_path)
    memory = conductor.transport.sites["Espoo"].memory

    def lose(record):
        if record["round"] == 2:
            for path in memory.folder.rglob("*.state"):
                path.unlink()

    conductor.callback = lose
    summary = conductor.play()
    assert [(event["round"], event["client"]) for event in summary["events"]] == [(3, "Espoo")]
    assert "lost its personal state" in summary["events"][0]["what"]
    assert any("Espoo" in note for note in summary["notes"])


def test_a_state_that_went_back_is_noticed(tmp_path):
    fed = federation()
    conductor = conduct(agree(ft.Ditto(lam=0.2), fed, rounds=5), fed, tmp_path)
    memory = conductor.transport.sites["Espoo"].memory

    def go_back(record):
        if record["round"] == 2:
            sorted(memory.folder.rglob("*.state"))[-1].unlink()

    conductor.callback = go_back
    summary = conductor.play()
    assert "older personal state (version 2, not 3)" in summary["events"][0]["what"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", [ft.Ditto(lam=0.2), ft.GIANT()], ids=lambda m: type(m).__name__)
def test_a_server_that_is_killed_resumes_and_ends_the_same(tmp_path, method):
    fed = federation()
    agreed = agree(method, fed, rounds=4, cohort=3)
    whole = conduct(agreed, fed, tmp_path / "whole")
    whole.play()
    stopped = conduct(agreed, fed, tmp_path / "stopped")
    inner, asked = stopped.transport, []

    class Dying:
        name, sites = "sites", inner.sites

        def ask(self, parcels, seconds):
            asked.append(1)
            replies = inner.ask(parcels, seconds)
            if len(asked) == 5:  # the sites have worked, nothing is written yet
                raise Killed
            return replies

    stopped.transport = Dying()
    with pytest.raises(Killed):
        stopped.play()
    again = conduct(agreed, fed, tmp_path / "stopped")
    summary = again.play(resume=True)
    assert summary["events"] == []
    states = [checkpoint.newest(tmp_path / run / "server" / "checkpoints").state for run in ("whole", "stopped")]
    assert difference(states[0]["shared"], states[1]["shared"]) == 0
    for name in fed.names:
        kept = [c.transport.sites[name].memory.recall(c.ledger.run, 10**6)[1] for c in (whole, again)]
        assert (kept[0] is None) == (kept[1] is None)
        assert kept[0] is None or difference(*kept) == 0


def test_too_few_uploads_stop_the_run_which_can_go_on(tmp_path):
    with pytest.raises(TooFewSites, match=r"round 1: 2 of 5 sites .* 3 are needed"):
        spoiled(federation(), tmp_path, lambda name, number, reply: reply if number < 1 or name < "Cork" else "away", least=3)


def test_the_server_predicts_for_newcomers_and_has_nobodys_model(tmp_path):
    fed = federation()
    agreed = agree(ft.FedCLUP(lam=0.2), fed)
    conduct(agreed, fed, tmp_path).play()
    saved = models.read(tmp_path / "server")
    assert saved.clients == []
    logits = saved.predict(None, fed.test.x[:3])
    assert difference(logits, loop(agreed, fed).predict_global(fed.test.x[:3])) <= 1e-6


def test_rows_that_are_not_as_agreed_are_refused(tmp_path):
    fed, other = federation(), federation(classes=2)
    with pytest.raises(InvalidData, match="labels"):
        agree(ft.FedAvg(), fed).at_site(other.take([0]))


def test_a_message_keeps_types_and_empty_branches():
    sent = {"a": torch.tensor([True, False]), "b": {}, "c": {"d": torch.zeros((), dtype=torch.float64)}, "e": torch.arange(3)}
    got = Parcel.joined(*Parcel({"x": 1}, sent).split())
    assert tree.shapes(got.tree) == tree.shapes(sent)
    assert got.tree["b"] == {}
    with pytest.raises(InvalidData, match="bfloat16"):
        Parcel({}, {"a": torch.zeros(2, dtype=torch.bfloat16)}).split()


@pytest.mark.parametrize(
    ("keys", "tensors", "arrays"),
    [
        ({"a": 1}, [["float64", [2]]], {"float64": np.zeros(2)}),  # another tensor than those that are there
        ({"a": 0}, [["float64", [2]]], {"float64": np.zeros(3)}),  # a number is left over
        ({"a": 0}, [["float64", [4]]], {"float64": np.zeros(3)}),
        ({"a": 0}, [["float64", [-1]]], {"float64": np.zeros(3)}),
        ({"a": 0}, [["float64", [1.0]]], {"float64": np.zeros(1)}),
        ({"a": 0}, [["float64", [1, 2]]], {"float64": np.zeros((1, 2))}),
        ({"a": 0}, [["float64", [2]]], {"float64": np.zeros(2, np.float32)}),  # another type than it says
        ({"a": 0}, [["complex128", [2]]], {"complex128": np.zeros(2, np.complex128)}),
        ({"a": 0}, [["float64", [2]]], {}),
        ({}, [], {"float64": np.zeros(2)}),
    ],
)
def test_a_message_that_does_not_fit_together_is_refused(keys, tensors, arrays):
    with pytest.raises(InvalidData, match="cannot be read"):
        Parcel.joined(json.dumps({"facts": {}, "keys": keys, "tensors": tensors}), arrays)


def test_words_count_rounds_from_one():
    def event(number, what):
        return {"round": number, "client": "Cork", "what": what}

    assert sentences([event(0, "is away")], 2) == ["Cork: once something went wrong, last in round 1: is away"]
    assert "2 times something went wrong, last after the last round: x" in sentences([event(0, "is away"), event(2, "x")], 2)[0]


def test_a_round_travels_to_the_bit_and_one_that_cannot_be_read_is_refused():
    weights = torch.tensor([0.1, 1 / 3, 1 - 0.1 - 1 / 3], dtype=torch.float64)
    sent = Round(3, 9, 5, 3, 1.0 + 2**-40, weights, torch.tensor([4, 0, 2]), 7, 0)
    facts = json.loads(json.dumps(round_facts(sent)))
    got = round_of(facts)
    assert torch.equal(got.weights, weights)
    assert torch.equal(got.ranks, sent.ranks)
    assert (got.mass, got.number, got.seed) == (sent.mass, 3, 7)
    for broken in ({**facts, "weights": ["x"]}, {**facts, "ranks": [0.5, None]}, {"number": 3}):
        with pytest.raises(InvalidData, match="a round cannot be read"):
            round_of(broken)


def test_a_robust_reduce_stands_for_the_mean_and_for_nothing_else(tmp_path):
    def lie(name, number, reply):
        return Parcel(reply.facts, tree.map(lambda leaf: leaf * -50, reply.tree)) if name == "Cork" else reply

    fed = federation()
    runs = {"honest": {}, "mean": {"factor": 1e9}, "geometric-median": {"factor": 1e9, "reduce": "geometric-median"}}
    for run, terms in runs.items():
        spoiled(fed, tmp_path / run, (lambda name, number, reply: reply) if run == "honest" else lie, ft.FedAvg(), **terms)
    shared = {run: checkpoint.newest(tmp_path / run / "server" / "checkpoints").state["shared"] for run in runs}
    apart = {run: difference(shared[run], shared["honest"]) for run in runs}
    assert apart["geometric-median"] < apart["mean"] / 20
    with pytest.raises(InvalidArgument, match="does not take the mean"):
        spoiled(fed, tmp_path / "hyp", lambda name, number, reply: reply, ft.PFedHN(), reduce="median")
    with pytest.raises(InvalidArgument, match="reduce must be one of"):
        conduct(agree(ft.FedAvg(), fed), fed, tmp_path / "x", reduce="worst")


def test_twenty_sites_with_random_failures_lose_nothing_and_all_is_reported(tmp_path):
    draw = np.random.default_rng(5)
    part = [(draw.normal(size=(12, 3)), draw.integers(0, 2, 12)) for _ in range(20)]
    fed = ft.Federation.from_arrays(part, part, names=[f"s{i:02d}" for i in range(20)], classes=["no", "yes"])
    agreed = agree(ft.Ditto(lam=0.2), fed, rounds=5, batch_size=None)
    conductor = conduct(agreed, fed, tmp_path)
    lost = []

    def fail(name, number, reply):
        if draw.random() < 0.1:
            lost.append((number, name))
            return "was cut off"
        return reply

    conductor.transport = Faulty(conductor.transport, fail)
    summary = conductor.play()
    assert lost
    assert [(event["round"], event["client"]) for event in summary["events"]] == lost
    lines = [json.loads(line) for line in (tmp_path / "server" / "history.jsonl").read_text().splitlines()]
    for record in (line for line in lines if "client" not in line):
        away = sorted(name for number, name in lost if number == record["round"])
        assert record.get("left_out", []) == away
        assert record["cohort"] == 20 - len(away)
    for name, site in conductor.transport.sites.items():
        accepted = [number + 1 for number in range(5) if (number, name) not in lost]
        assert accepted[-1] in site.memory.versions(conductor.ledger.run)
        assert conductor.ledger.versions[name] == accepted[-1]


def test_which_score_leads_does_not_depend_on_a_sites_rows(tmp_path):
    """Before: a site with a rare class took AUC, the server accuracy."""
    draw = np.random.default_rng(2)
    part = [(draw.normal(size=(40, 3)), (np.arange(40) < (3 if i == 0 else 20)).astype(int)) for i in range(3)]
    fed = ft.Federation.from_arrays(part, part, names=["a", "b", "c"], classes=["no", "yes"])
    agreed = agree(ft.FedAvg(), fed)
    assert {agreed.at_site(fed.take([i])).task.score.name for i in range(3)} == {agreed.at_server().task.score.name}
    assert conduct(agreed, fed, tmp_path).play()["score"] == "acc"
