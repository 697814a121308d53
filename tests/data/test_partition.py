"""How one data set becomes many clients."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedtailor as ft
from fedtailor.data.partition import domains, natural, partition, split
from fedtailor.data.pool import PooledData, dealt
from fedtailor.errors import InvalidArgument

labels = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(lambda values: np.array(values, np.int64))
alphas = st.floats(1e-12, 1e9, allow_nan=False)
rules = st.one_of(st.just("iid"), alphas.map("dirichlet:{}".format), alphas.map("quantity:{}".format))


def refused(*words: str):
    return pytest.raises(InvalidArgument, match="(?s)" + ".*".join(map(re.escape, words)))


@settings(max_examples=150, deadline=None)
@given(y=labels, rule=rules, data=st.data(), seed=st.integers(0, 1000))
def test_every_row_is_dealt_exactly_once_and_nobody_has_fewer_than_asked(y, rule, data, seed):
    least = data.draw(st.integers(1, len(y)))
    clients = data.draw(st.integers(1, len(y) // least))
    parts = partition(rule, y, clients, seed, least)
    assert len(parts) == clients
    assert min(map(len, parts)) >= least
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))


@settings(max_examples=50, deadline=None)
@given(y=labels, rule=rules, seed=st.integers(0, 1000))
def test_the_same_seed_gives_the_same_clients(y, rule, seed):
    once, again = (partition(rule, y, max(1, len(y) // 3), seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


def test_another_seed_gives_other_clients():
    y = np.arange(60) % 3
    for rule in ("iid", "dirichlet:1", "classes:2", "quantity:1"):
        one, other = (np.concatenate(partition(rule, y, 6, seed)) for seed in (0, 1))
        assert not np.array_equal(one, other)


@settings(max_examples=100, deadline=None)
@given(classes=st.integers(1, 8), clients=st.integers(1, 20), k=st.integers(1, 8), seed=st.integers(0, 99))
def test_with_classes_k_every_client_holds_exactly_k_and_the_classes_have_equally_many_holders(classes, clients, k, seed):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), np.arange(40, 40 + classes)))
    if k > classes or clients * k < classes:
        with pytest.raises(InvalidArgument, match="class"):
            partition(f"classes:{k}", y, clients, seed)
        return
    parts = partition(f"classes:{k}", y, clients, seed)
    classes_by_client = [set(y[part].tolist()) for part in parts]
    assert all(len(own) == k for own in classes_by_client)
    holders = [sum(c in own for own in classes_by_client) for c in range(classes)]
    assert max(holders) - min(holders) <= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    for c in range(classes):  # a class is dealt evenly among its holders
        mine = [int((y[part] == c).sum()) for part in parts if c in y[part]]
        assert max(mine) - min(mine) <= 1


@settings(max_examples=150, deadline=None)
@given(y=labels.filter(lambda y: len(y) >= 3), shares=st.tuples(*[st.floats(0.1, 1.0)] * 3), seed=st.integers(0, 99))
def test_label_shares_in_train_and_test_agree_within_rounding(y, shares, seed):
    parts = split(y, shares, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    counts, n = np.bincount(y), len(y)
    classes = np.count_nonzero(counts)
    for part, share in zip(parts, np.array(shares) / sum(shares), strict=True):
        assert len(part) >= 1
        # each class is off by less than one row per cut, and a cut moves by as much as all classes' roundings together
        slack = 2 + 2 * counts * (classes + 1.5) / n
        assert (np.abs(np.bincount(y[part], minlength=len(counts)) - share * counts) <= slack).all()


def test_a_part_whose_cuts_round_to_the_same_row_is_not_left_empty():
    assert sorted(len(part) for part in split(np.zeros(4, np.int64), (1.0, 0.5, 1.0), np.random.default_rng(0))) == [1, 1, 2]


def test_large_classes_keep_their_shares_closely():
    y = np.repeat([0, 1, 2], [500, 300, 200])
    for part, share in zip(split(y, (0.6, 0.25, 0.15), np.random.default_rng(0)), (0.6, 0.25, 0.15), strict=True):
        assert np.abs(np.bincount(y[part]) - share * np.array([500, 300, 200])).max() <= 2


def test_a_small_alpha_gives_skewed_clients_and_a_large_one_even_ones():
    y = np.arange(4000) % 10
    skewed, even = (partition(f"dirichlet:{alpha}", y, 8, 0) for alpha in (0.05, 1000))

    def largest_share(parts):
        return np.mean([np.bincount(y[part], minlength=10).max() / len(part) for part in parts])

    assert largest_share(skewed) > 0.4
    assert largest_share(even) < 0.13
    sizes = [len(part) for part in partition("quantity:0.3", y, 8, 0)]
    assert max(sizes) > 3 * min(sizes)
    assert all(np.bincount(y[p], minlength=10).max() / len(p) < 0.25 for p in partition("quantity:5", y, 8, 0))


def test_filling_up_many_poor_clients_is_quick():
    start = time.process_time()
    parts = partition("dirichlet:0.001", np.arange(60_000) % 10, 5000, 0, 6)
    assert min(map(len, parts)) == 6
    assert time.process_time() - start < 5


def test_more_clients_than_rows_is_one_clear_line():
    with refused("5000 clients", "1797", "at most 299") as caught:
        ft.Federation.load("digits", clients=5000)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rule", ["classes", "classes:0", "classes:x", "quantity", "quantity:0", "quantity:inf", "dirichlet:1e400"]
)
def test_a_rule_that_cannot_be_read_is_quoted_with_an_example(rule):
    with refused("cannot read", repr(rule), "write for instance"):
        partition(rule, np.arange(20) % 2, 2, 0)


def test_what_cannot_be_dealt_by_classes_says_why():
    y = np.arange(100) % 10
    with refused("cannot hold 11 classes of 10"):
        partition("classes:11", y, 10, 0)
    with refused("leave 4 classes to nobody", "at least 5 clients", "classes:4"):
        partition("classes:2", y, 3, 0)
    with refused("class 9 has 1 rows for the 2 clients"):
        partition("classes:10", np.append(np.arange(90) % 9, 9), 2, 0)
    with refused("smallest of 10 clients has 10 rows, fewer than 11"):
        partition("classes:1", np.append(y, np.zeros(50, np.int64)), 10, 0, 11)


@pytest.mark.parametrize("clients", [0, -3, 2.5, True, "four"])
def test_a_number_of_clients_that_is_none(clients):
    with refused("clients must be a whole number from 1", repr(clients)):
        partition("iid", np.arange(10), clients, 0)


def test_natural_clients_are_the_owners_or_some_of_them_drawn_with_the_seed():
    owner = np.array(["ann", "bob", "cid", "dan", "eve"] * 4 + ["tim"])
    everyone = natural(owner, None, 0)
    assert list(everyone) == ["ann", "bob", "cid", "dan", "eve", "tim"]
    assert everyone["bob"].tolist() == [1, 6, 11, 16]
    assert "tim" not in natural(owner, None, 0, least=2)
    draws = {tuple(natural(owner, 2, seed, 2)) for seed in range(20)}
    assert len(draws) > 1
    assert all(len(names) == 2 and list(names) == sorted(names) for names in draws)
    with refused("5 clients with at least 2 rows, not 6", "at most 5"):
        natural(owner, 6, 0, 2)
    with refused("no client has 9 rows", "largest has 4"):
        natural(owner, None, 0, 9)


def test_domains_become_one_client_each_or_equally_many():
    domain = np.array(["photo"] * 10 + ["sketch"] * 7)
    assert {name: rows.tolist() for name, rows in domains(domain, None, 0).items()} == {
        "photo": list(range(10)),
        "sketch": list(range(10, 17)),
    }
    four = domains(domain, 4, 0)
    assert {name: len(rows) for name, rows in four.items()} == {"photo-0": 5, "photo-1": 5, "sketch-0": 4, "sketch-1": 3}
    assert np.array_equal(np.sort(np.concatenate(list(four.values()))), np.arange(17))
    with refused("3 clients do not spread evenly over 2 domains", "2, 4, 6"):
        domains(domain, 3, 0)
    with refused("domain sketch has 7 rows", "4 clients with at least 2", "at most 6 clients"):
        domains(domain, 8, 0, 2)


def pool(**more) -> PooledData:
    y = np.arange(120) % 3
    return PooledData("toy", np.arange(240, dtype=np.uint8).reshape(120, 1, 2), y, ("a", "b", "c"), **more)


def test_a_pool_is_dealt_with_its_classes_and_bytes_become_shares_of_255():
    fed = dealt(pool(), clients=4, flat=True)
    rows = sorted(tuple(row) for s in (fed.train, fed.test, fed.val) for row in (s.x * 255).round().int().tolist())
    assert rows == [(2 * i, 2 * i + 1) for i in range(120)]
    assert fed.classes == ("a", "b", "c")
    assert (fed.train.sizes == 18).all()
    assert set(fed.test.sizes.tolist()) <= {7, 8}  # a quarter of 30


def test_a_client_keeps_its_split_whoever_else_is_there():
    owner = np.repeat(["ann", "bob", "cid", "dan"], 30)
    whole = dealt(pool(owner=owner), partition="natural")
    some = dealt(pool(owner=owner), partition="natural", clients=2)
    for name in some.names:
        a, b = whole.train.client(whole.index(name)), some.train.client(some.index(name))
        assert all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def test_clients_that_lack_a_class_of_the_set_are_no_reason_to_warn():
    owner = np.where(np.arange(120) % 3 == 2, "small", np.repeat(["ann", "bob"], 60))
    fed = dealt(pool(owner=owner), partition="natural", min_samples=39)
    assert fed.names == ("ann", "bob", "small")
    few = dealt(
        pool(owner=np.where(np.arange(120) % 3 == 1, "x" + np.arange(120).astype(str).astype(object), "ann").astype(str)),
        partition="natural",
    )
    assert few.names == ("ann",)
    assert few.labels == 3
    assert "40 clients are left out" in few.notes[-1]


def test_a_set_without_owners_or_domains_says_what_to_use():
    with refused("toy has no clients of its own", "iid"):
        dealt(pool(), partition="natural")
    with refused("toy comes from one domain", "iid"):
        dealt(pool(), partition="domain")


def test_min_samples_holds_for_every_client():
    fed = dealt(pool(), clients=8, partition="dirichlet:0.05", min_samples=12)
    assert min(np.sum([s.sizes for s in (fed.train, fed.test, fed.val)], 0)) >= 12
    with refused("min_samples must be a whole number from 1, not 0"):
        dealt(pool(), min_samples=0)
    with refused("8 clients with at least 20 rows each need 160 rows and there are 120", "at most 6"):
        dealt(pool(), clients=8, min_samples=20)


@pytest.mark.parametrize("seed", [-1, 0.5, "one"])
def test_a_seed_that_is_none(seed):
    with refused("seed must be a whole number from 0"):
        dealt(pool(), seed=seed)
