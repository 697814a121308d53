"""Secure sums: the server learns the mean, and nothing of one upload; lost sites are made up for, as long as enough are there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import fedtailor as ft
from fedtailor import tree
from fedtailor.errors import InvalidArgument, TooFewSites
from fedtailor.runs import checkpoint
from fedtailor.sites import masks
from fedtailor.sites.memory import Memory
from fedtailor.sites.pact import Pact, pact_of
from fedtailor.sites.secure import Seat, pair_mask, transcript
from fedtailor.sites.sums import Exchange
from fedtailor.sites.wire import Parcel
from tests.sites.network import agree, conduct, federation, loop


def secured(method, fed, threshold=3, bits=64, largest=2.0**20, **options):
    return replace(agree(method, fed, **options), pact=Pact(len(fed), threshold, bits, largest))


def shared_of(folder):
    return checkpoint.newest(folder / "server" / "checkpoints").state["shared"]


def apart(a, b) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


METHODS = [
    (ft.FedAvg(epochs=2), "linear", "uniform"),
    (ft.FedAvg(epochs=2), "linear", "size"),
    (ft.Ditto(lam=0.2), "linear", "uniform"),
    (ft.FedCLUP(lam=0.3, steps=3), "linear", "size"),
    (ft.ScaffoldP(personal="head"), "mlp", "uniform"),
    (ft.GIANT(), "linear", "uniform"),
    (ft.FedProto(), "mlp", "uniform"),
]


@pytest.mark.parametrize(("method", "model", "weights"), METHODS, ids=lambda value: getattr(value, "__name__", str(value))[:12])
def test_the_mean_is_the_plain_one_up_to_the_stated_error(tmp_path, method, model, weights):
    fed = federation()
    agreed = secured(method, fed, model=model, weights=weights, cohort=4, rounds=2)
    summary = conduct(agreed, fed, tmp_path).play()
    assert summary["events"] == []
    assert agreed.pact.error < 1e-12
    assert apart(shared_of(tmp_path), loop(agreed, fed).shared) < 1e-9  # two rounds, and what a method makes of the error


def test_thirty_two_bits_are_enough_for_single_precision(tmp_path):
    fed = federation()
    agreed = secured(ft.FedAvg(), fed, bits=32, largest=16.0, dtype="float32", rounds=1)
    conduct(agreed, fed, tmp_path).play()
    gap = apart(shared_of(tmp_path), loop(agreed, fed).shared)
    assert gap <= agreed.pact.error + np.finfo(np.float32).eps


# -- one sum, step by step ---------------------------------------------------------------------------------------------
SITES = ("A", "B", "C", "D", "E")


class Table:
    """Sites around a table and a server that writes down all it sees; ``lost`` says who is silent from which step on."""

    def __init__(self, folder, uploads, pact, lost=()):
        self.uploads, self.pact, self.lost = uploads, pact, dict(lost)
        signers = {name: masks.new_signer() for name in uploads}
        peers = {name: public for name, (_, public) in signers.items()}
        self.seats = {name: Seat(name, pact, Memory(folder / name), signers[name][0], peers) for name in uploads}
        self.seen, self.notes = [], []

    def trained(self, session="s", number=0):
        facts = {"run": "run", "session": session, "next": number + 1, "round": {"number": number, "exchange": 0}}
        return {
            name: Parcel(self.seats[name].enter(facts, {"w": torch.from_numpy(upload)}, None), {})
            for name, upload in self.uploads.items()
        }

    def ask(self, parcels):
        replies = {}
        for name, asked in parcels.items():
            if self.lost.get(name) in ("share", "mask", "reveal")[: 1 + ("share", "mask", "reveal").index(asked.facts["action"])]:
                continue
            replies[name] = Parcel(*getattr(self.seats[name], asked.facts["action"])(asked))
        self.seen.append(replies)
        return replies

    def exchange(self, session="s", number=0):
        head = lambda action, name: {"action": action, "run": "run", "client": name}  # noqa: E731
        note = lambda name, text: self.notes.append((name, text))  # noqa: E731
        return Exchange(self.pact, None, "run", [session, number, 0, number + 1], self.ask, head, note)

    def total(self, session="s", number=0):
        length = len(next(iter(self.uploads.values())))
        return self.exchange(session, number).total(self.trained(session, number), length)


def values(count=5, length=40, seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=length) for name in SITES[:count]}


def encoded(pact, uploads):
    return np.sum([pact.encode(upload) for upload in uploads], axis=0, dtype=masks.WORDS[pact.bits])


@pytest.mark.parametrize(
    ("lost", "counted"),
    [
        ({}, "ABCDE"),
        ({"B": "share"}, "ACDE"),
        ({"B": "mask"}, "ACDE"),
        ({"A": "mask", "E": "mask"}, "BCD"),
        ({"B": "mask", "D": "reveal"}, "ACDE"),
        ({"B": "reveal", "D": "reveal"}, "ABCDE"),
        ({"A": "share", "C": "mask"}, "BDE"),
    ],
)
@pytest.mark.parametrize("bits", [32, 64])
def test_lost_sites_are_made_up_for_exactly(tmp_path, lost, counted, bits):
    uploads = values()
    pact = Pact(5, 3, bits, 16.0)
    there, total = Table(tmp_path, uploads, pact, lost).total()
    assert "".join(there) == counted
    assert (total == encoded(pact, [uploads[name] for name in counted])).all()  # to the bit


@pytest.mark.parametrize("lost", [{"A": "mask", "B": "mask", "C": "mask"}, {"A": "share", "B": "mask", "C": "reveal"}])
def test_with_too_few_left_nothing_is_opened(tmp_path, lost):
    table = Table(tmp_path, values(), Pact(5, 3, 64, 16.0), lost)
    assert table.total() is None
    if "reveal" not in lost.values():
        assert not any("seeds" in reply.facts for replies in table.seen for reply in replies.values())
        assert table.total("again") is None  # and the sites take part once more


def uniform(words) -> float:
    """The probability of bytes as uneven as these, were they uniform."""
    return stats.chisquare(np.bincount(np.ascontiguousarray(words).view(np.uint8), minlength=256)).pvalue


def masked(table, name):
    return table.seen[1][name].tree["masked"].numpy()


@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_upload_is_uniform_whatever_is_in_it(tmp_path, bits):
    pact, length = Pact(3, 2, bits, 16.0), 50_000
    assert uniform(pact.encode(np.random.default_rng(0).normal(size=length))) < 1e-9  # the test would see it
    for number, fill in enumerate((0.0, 1.0, -16.0)):
        uploads = {"A": np.full(length, fill), **{name: np.zeros(length) for name in "BC"}}
        table = Table(tmp_path / str(number), uploads, pact)
        table.total()
        for name in uploads:
            assert uniform(masked(table, name)) > 1e-6


def test_all_that_the_server_sees_fits_any_uploads_of_the_same_sum(tmp_path):
    """What is left of an upload when its own mask is taken away is uniform too: the masks of pairs, which the server has not,
    hide it. For other uploads of the same sum there are masks that give the same messages."""
    pact, length = Pact(3, 2, 64, 16.0), 50_000
    uploads = {name: np.full(length, float(place)) for place, name in enumerate("ABC")}
    table = Table(tmp_path, uploads, pact)
    there, total = table.total()
    assert there == ["A", "B", "C"]
    left = {}
    for name in there:
        shares = {place + 1: bytes.fromhex(table.seen[2][who].facts["seeds"][name]) for place, who in enumerate(there)}
        seed = masks.join(shares)
        left[name] = masked(table, name).view("<u8") - masks.stream(seed, length, 64)
        assert uniform(left[name]) > 1e-6
    assert (sum(left.values()) == total).all()
    others = {"A": uploads["A"] + 5, "B": uploads["B"] - 5, "C": uploads["C"]}
    pair = {name: left[name] - pact.encode(others[name]) for name in "ABC"}  # the masks that would explain them
    assert (sum(pair.values()) == 0).all()
    assert all(uniform(mask) > 1e-6 for mask in pair.values())
    said = json.dumps([reply.facts for replies in table.seen for reply in replies.values()])
    assert not any(reply.facts.get("keys") for reply in table.seen[2].values())  # nobody was lost: no key is opened
    for seat in table.seats.values():
        assert seat.key.hex() not in said


def test_the_key_of_a_lost_site_opens_its_masks_but_not_its_upload(tmp_path):
    """A site whose masked upload comes too late: its key is known by then, and its own mask still hides it."""
    pact, length = Pact(3, 2, 64, 16.0), 50_000
    uploads = {name: np.full(length, 3.0) for name in "ABC"}
    table = Table(tmp_path, uploads, pact)
    late = {}
    ask = table.ask

    def slow(parcels):
        replies = ask(parcels)
        if "B" in replies and "masked" in replies["B"].tree:
            late.update(replies.pop("B").tree)
        return replies

    table.ask = slow
    there, _ = table.total()
    assert there == ["A", "C"]
    keys = {1: table.seen[2]["A"].facts["keys"]["B"], 3: table.seen[2]["C"].facts["keys"]["B"]}
    private = masks.join({place: bytes.fromhex(text) for place, text in keys.items()})
    members = json.loads(bytes(table.seats["A"].desk.recall("run", 0)[1]["session"].numpy()))["members"]
    about = transcript(None, "run", ["s", 0, 0, 1], pact, members)
    rest = late["masked"].numpy().view("<u8").copy()
    for other in there:
        rest -= pair_mask(private, members, "B", other, about, length, 64)
    assert uniform(rest) > 1e-6


# -- what a site refuses -----------------------------------------------------------------------------------------------
def asked(action, **facts):
    return Parcel({"action": action, "run": "run", "session": "s", **facts}, {})


def begun(tmp_path, threshold=3):
    """Sites that have entered a sum, and the keys that the server has of them."""
    table = Table(tmp_path, values(), Pact(5, threshold, 64, 16.0))
    return table, {name: dict(reply.facts["keys"]) for name, reply in table.trained().items()}


def test_a_site_refuses_a_sum_that_would_not_hide_it(tmp_path):
    table, members = begun(tmp_path)
    seat = table.seats["A"]
    refuses(seat.share, asked("share", members={name: members[name] for name in "AB"}), "none is of fewer than 3")
    shares = {name: table.seats[name].share(asked("share", members=members))[0]["shares"] for name in SITES}
    refuses(seat.mask, asked("mask", shares={"B": shares["B"]["A"]}), "not enough to hide one")
    seat.mask(asked("mask", shares={name: shares[name]["A"] for name in "BCD"}))
    refuses(seat.reveal, asked("reveal", there=["A", "B"]), "would not hide one")
    refuses(seat.reveal, asked("reveal", there=["B", "C", "D"]), "others than it asked")
    refuses(seat.reveal, asked("reveal", there=["A", "B", "E"]), "others than it asked")
    first = seat.reveal(asked("reveal", there=["A", "B", "C"]))[0]
    assert set(first["seeds"]) == {"A", "B", "C"}
    assert set(first["keys"]) == {"D"}  # and of nobody both
    assert seat.reveal(asked("reveal", there=["A", "B", "C"]))[0] == first
    refuses(seat.reveal, asked("reveal", there=["A", "B", "C", "D"]), "whose difference would show one")


def test_a_site_takes_every_step_once_and_in_order(tmp_path):
    table, members = begun(tmp_path)
    seat = table.seats["A"]
    refuses(seat.mask, asked("mask", shares={}), "every step is taken once")
    refuses(seat.share, Parcel({"action": "share", "run": "run", "session": "other", "members": members}, {}), "not in")
    seat.share(asked("share", members=members))
    refuses(seat.share, asked("share", members=members), "every step is taken once")
    refuses(seat.reveal, asked("reveal", there=list(SITES)), "every step is taken once")


def test_keys_that_their_owner_did_not_sign_are_refused(tmp_path):
    table, members = begun(tmp_path)
    forged = {**members["C"], "mask": masks.public_of(masks.fresh()).hex()}  # the server's own, to read C's shares
    seat = table.seats["A"]
    refuses(seat.share, asked("share", members={**members, "C": forged}), "not signed by C")
    refuses(seat.share, asked("share", members={**members, "X": members["C"]}), "not signed by X")
    refuses(seat.share, asked("share", members={**members, "A": members["B"]}), "does not have this site's keys")
    old = Table(tmp_path / "old", values(), table.pact)
    old.seats = {name: replace(seat, desk=Memory(tmp_path / "older" / name)) for name, seat in table.seats.items()}
    earlier = old.trained("earlier")["C"].facts["keys"]
    refuses(seat.share, asked("share", members={**members, "C": earlier}), "not signed by C")  # of another session


def test_a_site_opens_few_sums_of_one_exchange_and_one_if_that_costs_privacy(tmp_path):
    for repeats, pact in ((3, Pact(3, 2, 64, 16.0)), (1, Pact(3, 2, 64, 1e4, clip=1.0, noise=1.0, delta=1e-3))):
        table = Table(tmp_path / str(repeats), values(3), pact)
        for time in range(repeats):
            assert table.total(str(time)) is not None
        with pytest.raises(ft.errors.InvalidData, match=rf"open {repeats} sum"):
            table.trained("more")
        assert table.total("next", number=1) is not None


def test_what_the_server_says_differently_to_two_sites_makes_the_sum_noise(tmp_path):
    table, members = begun(tmp_path, threshold=2)
    fewer = {name: members[name] for name in "ABCD"}
    own = {
        name: table.seats[name].share(asked("share", members=fewer if name == "A" else members))[0]["shares"] for name in "ABCD"
    }
    with pytest.raises(ft.errors.InvalidData, match="changed on its way"):
        table.seats["A"].mask(asked("mask", shares={name: own[name]["A"] for name in "BCD"}))


def test_shares_that_do_not_fit_are_noticed(tmp_path):
    table = Table(tmp_path, values(), Pact(5, 3, 64, 16.0), {"E": "mask"})
    ask = table.ask

    def lie(parcels):
        replies = ask(parcels)
        if "A" in replies and "seeds" in replies["A"].facts:
            replies["A"].facts["seeds"]["B"] = masks.split(masks.fresh(), 5, 3)[0].hex()
        return replies

    table.ask = lie
    assert table.total() is None
    assert "cannot be opened" in table.notes[0][1]


def refuses(step, parcel, words):
    with pytest.raises(ft.errors.InvalidData, match=words):
        step(parcel)


# -- noise in shares ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lost", [{}, {"B": "mask", "D": "mask"}])
def test_the_noise_of_any_sum_less_one_sites_own_is_what_was_agreed(tmp_path, lost):
    clip, noise, length = 2.0, 1.5, 40_000
    pact = Pact(5, 3, 64, 1e4, clip=clip, noise=noise, delta=1e-3)
    there, total = Table(tmp_path, {name: np.zeros(length) for name in SITES}, pact, lost).total()
    spread = masks.decode(total, 64, pact.scale).std()
    expected = noise * clip * np.sqrt(len(there) / (pact.threshold - 1))
    assert spread == pytest.approx(expected, rel=5 / np.sqrt(2 * length))
    assert expected * np.sqrt((len(there) - 1) / len(there)) >= noise * clip * (
        1 - 1e-12
    )  # without one site's, which that site knows


def test_uploads_are_clipped_before_they_are_summed():
    pact = Pact(3, 2, 64, 1e4, clip=1.0, noise=1.0, delta=1e-3)
    long, short = {"a": torch.full((4,), 3.0), "b": torch.zeros(2)}, {"a": torch.full((4,), 0.1), "b": torch.zeros(2)}
    assert np.linalg.norm(pact.flat(long, None)) == pytest.approx(1.0)
    assert pact.flat(short, None) == pytest.approx([0.1] * 4 + [0, 0])


def test_a_run_hides_whole_sites_and_says_what_it_costs(tmp_path):
    fed = federation()
    given = {"user_clip": 0.5, "user_noise": 2.0, "rounds": 3, "evaluate_every": 0}
    plain = agree(ft.FedAvg(), fed, rounds=3)
    agreed = replace(plain, options=plain.options.but(**given), pact=pact_of({}, plain.options.but(**given), 5))
    summary = conduct(agreed, fed, tmp_path).play()
    from fedtailor.privacy.accountant import Spend, epsilon

    assert summary["user_epsilon"] == epsilon([Spend(1.0, 3)], 2.0, 1e-5)  # three Gaussian releases, nothing amplified
    assert (summary["user_clip"], summary["user_noise"], summary["user_noise_secret"]) == (0.5, 2.0, True)
    assert apart(shared_of(tmp_path), loop(plain, fed).shared) > 0.01


# -- a run -------------------------------------------------------------------------------------------------------------
class Losing:
    """A transport that does not bring the replies of some clients to some steps."""

    name = "sites"

    def __init__(self, inner, lose):
        self.inner, self.lose, self.sites, self.seen, self.asked = inner, lose, inner.sites, [], []

    def ask(self, parcels, seconds):
        self.asked.append(parcels)
        replies = dict(self.inner.ask(parcels, seconds))
        self.seen.append({name: reply for name, reply in replies.items() if not isinstance(reply, str)})
        for name, parcel in parcels.items():
            if self.lose(name, parcel.facts["action"], len(self.seen)):
                replies[name] = "was cut off"
        return replies


def test_a_site_that_is_lost_after_training_counts_as_absent(tmp_path):
    fed = federation()
    agreed = secured(ft.Ditto(lam=0.2), fed, rounds=3)
    conductor = conduct(agreed, fed, tmp_path / "lost")
    conductor.transport = Losing(conductor.transport, lambda name, action, _: name == "Cork" and action == "mask")
    summary = conductor.play()
    assert {(event["client"], event["what"]) for event in summary["events"]} == {("Cork", "was cut off")}
    never = conduct(agreed, fed, tmp_path / "never")
    never.transport = Losing(never.transport, lambda name, action, _: name == "Cork" and action == "train")
    never.play()
    assert apart(shared_of(tmp_path / "lost"), shared_of(tmp_path / "never")) == 0
    assert conductor.ledger.versions["Cork"] == 0
    lines = [json.loads(line) for line in (tmp_path / "lost" / "server" / "history.jsonl").read_text().splitlines()]
    assert all(line["left_out"] == ["Cork"] for line in lines if "client" not in line)


def test_a_void_round_is_repeated_and_ends_the_same(tmp_path):
    fed = federation()
    agreed = secured(ft.Ditto(lam=0.2), fed, rounds=2)
    conduct(agreed, fed, tmp_path / "whole").play()
    for step, first in (("mask", 4), ("reveal", 5)):
        conductor = conduct(agreed, fed, tmp_path / step)
        dark = range(first, first + 2) if step == "reveal" else (first,)  # shares are asked for twice
        conductor.transport = Losing(
            conductor.transport,
            lambda name, action, time, step=step, dark=dark: action == step and name > "Bergen" and time in dark,
        )
        summary = conductor.play()
        assert len(summary["events"]) == 3 * len(dark)
        assert apart(shared_of(tmp_path / step), shared_of(tmp_path / "whole")) == 0


def test_too_few_sites_for_a_sum_stop_the_run(tmp_path):
    fed = federation()
    conductor = conduct(secured(ft.FedAvg(), fed, threshold=4), fed, tmp_path)
    conductor.transport = Losing(conductor.transport, lambda name, action, _: action == "train" and name < "Cork")
    with pytest.raises(TooFewSites, match=r"3 of 5 sites .* 4 are needed"):
        conductor.play()


def test_a_server_that_does_not_ask_for_masks_gets_no_upload(tmp_path):
    fed = federation()
    conductor = conduct(secured(ft.FedAvg(), fed), fed, tmp_path)
    conductor.transport = Losing(conductor.transport, lambda *_: False)
    conductor.play()
    trained = [reply for replies in conductor.transport.seen for reply in replies.values() if reply.facts["action"] == "train"]
    assert trained
    assert all(reply.tree == {} for reply in trained)


def test_a_round_that_was_not_agreed_on_is_not_trained_for(tmp_path):
    """Or a server could give an old round a new number, and have its sum opened again with one site less."""
    fed = federation()
    conductor = conduct(secured(ft.FedAvg(), fed, rounds=1), fed, tmp_path)
    conductor.transport = Losing(conductor.transport, lambda *_: False)
    conductor.play()
    first = next(parcels["Cork"] for parcels in conductor.transport.asked if parcels["Cork"].facts["action"] == "train")
    for field, value in (("number", 1), ("exchange", 1), ("number", -1)):
        about = {**first.facts["round"], field: value}
        reply = conductor.transport.sites["Cork"].answer(Parcel({**first.facts, "round": about}, first.tree))
        assert "not agreed on" in reply.facts["error"]


def test_a_poisoned_sum_is_refused_though_nobody_can_be_named(tmp_path):
    fed = federation()
    conductor = conduct(secured(ft.FedAvg(), fed, rounds=6), fed, tmp_path, factor=20.0)
    site = conductor.transport.sites["Cork"]
    enter = Seat.enter
    poisoned = []

    def poison(self, facts, upload, weight):
        if self is site.seat and facts["round"]["number"] == 4 and not poisoned:
            poisoned.append(1)
            upload = tree.map(lambda leaf: leaf * 1e4, upload)
        return enter(self, facts, upload, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seat, "enter", poison)
        summary = conductor.play()
    assert [event["round"] for event in summary["events"]] == [4]
    assert "whose it is nobody knows" in summary["events"][0]["what"]
    conduct(secured(ft.FedAvg(), fed, rounds=6), fed, tmp_path / "clean").play()
    assert apart(shared_of(tmp_path), shared_of(tmp_path / "clean")) == 0


def test_an_upload_that_does_not_fit_is_refused_at_the_site(tmp_path):
    fed = federation()
    conductor = conduct(secured(ft.FedAvg(lr=5.0), fed, threshold=2, largest=0.01, rounds=1), fed, tmp_path)
    with pytest.raises(TooFewSites):
        conductor.play()
    assert "agreed for numbers up to 0.01" in conductor.ledger.events[0]["what"]


@pytest.mark.parametrize(
    ("method", "options", "terms", "words"),
    [
        (ft.HypCluster(k=2), {}, {}, "HypCluster cannot run with secure sums"),
        (ft.PFedHN(), {}, {}, "PFedHN cannot run with secure sums"),
        (ft.FedFomo(), {}, {}, "FedFomo cannot run with secure sums"),
        (ft.FedAvg(), {}, {"threshold": 1}, "a sum of one is an upload"),
        (ft.FedAvg(), {"cohort": 3}, {"threshold": 4}, "only 3 sites take part"),
        (ft.FedAvg(), {}, {"bits": 16}, "32 or 64"),
        (ft.FedAvg(), {}, {"bits": 32, "largest": 1e12}, "do not fit into 32 bits"),
        (ft.FedAvg(), {"user_noise": 1.0}, {}, "user_clip as well"),
        (ft.FedAvg(), {"user_clip": 1.0}, {}, "one of them"),
        (ft.FedAvg(), {"user_clip": 1.0, "user_noise": 1.0, "user_seed": 1}, {}, "leave user_seed out"),
        (ft.FedAvg(), {"user_clip": 1.0, "user_noise": 1.0, "weights": "size"}, {}, "large site away"),
    ],
)
def test_what_secure_sums_cannot_do_is_refused_by_name(method, options, terms, words):
    fed = federation()
    plain = agree(method, fed)
    given = plain.options.but(**options)

    def prepared():
        return replace(plain, options=given, pact=pact_of(terms, given, len(fed))).at_server()

    with pytest.raises(InvalidArgument, match=words):
        prepared()


def test_robust_reducers_are_refused():
    from fedtailor.sites.terms import Terms

    with pytest.raises(InvalidArgument, match="single uploads, which secure sums hide"):
        Terms(secure=True, reduce="median")


def test_nothing_of_a_session_is_readable_with_a_key_and_secrets_go_when_they_are_used(tmp_path):
    from fedtailor.sites.memory import new_key

    table = Table(tmp_path, values(3), Pact(3, 2, 64, 16.0))
    table.seats = {name: replace(seat, desk=replace(seat.desk, key=new_key())) for name, seat in table.seats.items()}
    table.total()
    for path in Path(tmp_path).rglob("*.state"):
        assert path.read_bytes().startswith(b"gAAAAA")
        assert path.stat().st_mode & 0o077 == 0
    session = json.loads(bytes(table.seats["A"].desk.recall("run", 0)[1]["session"].numpy()))
    assert session["private"] == {}
    assert session["seed"] == ""
