"""Which rows a client uses in which step: exact counts, no other client's rows, the same on every engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtailor import Work
from fedtailor.data import Batches, rng
from fedtailor.data.batches import indices, permutations, step_keys
from fedtailor.data.feed import Feed
from tests.make import numbered

quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)

SIZES = st.lists(st.integers(1, 23), min_size=1, max_size=6)
BATCH = st.one_of(st.none(), st.integers(1, 30))
WORK = st.one_of(
    st.integers(1, 9).map(lambda k: Work(steps=k)),
    st.integers(1, 3).map(lambda k: Work(epochs=k)),
    st.integers(1, 9).map(lambda k: Work(steps=k, same_batch=True)),
)


def keys_of(clients: int, seed: int = 0) -> np.ndarray:
    return rng.mix(seed, np.arange(clients))


def plain(index: np.ndarray) -> list[list[int]]:
    """Rows of every step of one client, padding and empty steps left out."""
    rows = [[int(r) for r in step if r >= 0] for step in index]
    return [r for r in rows if r]


def draw_indices(sizes, work, batch_size, seed=0):
    return indices(keys_of(len(sizes), seed), np.array(sizes, np.int64), work, batch_size)


# -- how much ------------------------------------------------------------------------------------------------------------


@quick
@given(SIZES, st.integers(1, 4), BATCH, st.integers(0, 99))
def test_every_epoch_uses_each_row_exactly_once(sizes, epochs, batch_size, seed):
    index, counts = draw_indices(sizes, Work(epochs=epochs), batch_size, seed)
    for i, n in enumerate(sizes):
        per_epoch = 1 if batch_size is None else -(-n // batch_size)
        steps = plain(index[i])
        assert len(steps) == counts[i] == epochs * per_epoch
        for e in range(epochs):
            used = [r for step in steps[e * per_epoch : (e + 1) * per_epoch] for r in step]
            assert sorted(used) == list(range(n))


@quick
@given(SIZES, WORK, st.integers(1, 30), st.integers(0, 99))
def test_batches_are_full_but_for_the_last_of_an_epoch(sizes, work, batch_size, seed):
    index, _ = draw_indices(sizes, work, batch_size, seed)
    for i, n in enumerate(sizes):
        whole, rest = divmod(n, batch_size)
        cycle = [batch_size] * whole + ([rest] if rest else [])
        if work.same_batch:
            cycle = cycle[:1]
        widths = [len(step) for step in plain(index[i])]
        assert widths == [cycle[k % len(cycle)] for k in range(len(widths))]


@quick
@given(SIZES, st.integers(1, 12), BATCH, st.booleans())
def test_steps_are_as_many_as_asked_for_whatever_the_size(sizes, steps, batch_size, same):
    index, counts = draw_indices(sizes, Work(steps=steps, same_batch=same), batch_size)
    assert index.shape[1] == steps
    assert counts.tolist() == [steps] * len(sizes)
    assert all(len(plain(mine)) == steps for mine in index)


@quick
@given(SIZES, st.integers(1, 9), st.integers(1, 30), st.integers(0, 99))
def test_steps_walk_through_epochs_without_repeating_a_row(sizes, steps, batch_size, seed):
    index, _ = draw_indices(sizes, Work(steps=steps), batch_size, seed)
    for i, n in enumerate(sizes):
        per_epoch = -(-n // batch_size)
        mine = plain(index[i])
        for start in range(0, steps, per_epoch):
            used = [r for step in mine[start : start + per_epoch] for r in step]
            assert len(set(used)) == len(used)
            if start + per_epoch <= steps:
                assert sorted(used) == list(range(n))


@quick
@given(SIZES, st.integers(2, 9), BATCH, st.integers(0, 99))
def test_same_batch_takes_every_step_on_one_batch(sizes, steps, batch_size, seed):
    index, _ = draw_indices(sizes, Work(steps=steps, same_batch=True), batch_size, seed)
    for i, n in enumerate(sizes):
        mine = plain(index[i])
        assert all(step == mine[0] for step in mine)
        assert len(set(mine[0])) == len(mine[0]) == min(n, batch_size or n)


@quick
@given(SIZES, WORK)
def test_a_full_batch_keeps_the_natural_order(sizes, work):
    index, _ = draw_indices(sizes, work, None)
    for i, n in enumerate(sizes):
        assert all(step == list(range(n)) for step in plain(index[i]))


def test_two_epochs_have_different_orders():
    index, _ = draw_indices([20], Work(epochs=2), 5)
    order = index[0].reshape(2, 20)
    assert not np.array_equal(order[0], order[1])


@pytest.mark.parametrize("arguments", [{}, {"steps": 2, "epochs": 2}, {"epochs": 2, "same_batch": True}])
def test_work_is_given_in_exactly_one_unit(arguments):
    with pytest.raises(ValueError, match="give"):
        Work(**arguments)


# -- what it depends on --------------------------------------------------------------------------------------------------


@settings(quick, max_examples=150)
@given(SIZES, WORK, BATCH, st.integers(0, 99))
def test_rows_of_a_client_are_the_same_alone_and_among_others(sizes, work, batch_size, seed):
    """In the same order too: what is random by place in the batch (dropout) must hit the same rows."""
    together, counts = draw_indices(sizes, work, batch_size, seed)
    keys = keys_of(len(sizes), seed)
    for i, n in enumerate(sizes):
        by_itself, count = indices(keys[i : i + 1], np.array([n]), work, batch_size)
        assert count[0] == counts[i]
        assert plain(together[i]) == plain(by_itself[0])


@quick
@given(SIZES, WORK, BATCH)
def test_padding_stands_after_the_rows(sizes, work, batch_size):
    index, counts = draw_indices(sizes, work, batch_size)
    for i, n in enumerate(sizes):
        assert index[i].max() < n
        real = index[i] >= 0
        assert (np.diff(real.astype(int), axis=1) <= 0).all()
        assert real[: counts[i], 0].all()
        assert not real[counts[i] :].any()


def feed(sizes, names=None, work=None, batch_size=3, seed=0, val=False):
    phases = {"train": work or Work(epochs=2), "personalize": Work(steps=2), "extra": Work(steps=3)}
    return Feed(numbered(sizes, names, val), phases, batch_size, seed)


def test_rows_depend_on_seed_round_name_and_phase():
    base = feed([12, 12], ["ann", "bob"])
    same = [r.tolist() for r in base.rows(0, 4, "train")]
    assert same == [r.tolist() for r in feed([12, 12], ["ann", "bob"]).rows(0, 4, "train")]
    others = [
        feed([12, 12], ["ann", "bob"], seed=1).rows(0, 4, "train"),
        base.rows(0, 5, "train"),
        base.rows(1, 4, "train"),
        Feed(base.federation, {"other": Work(epochs=2)}, 3, 0).rows(0, 4, "other"),
    ]
    for other in others:
        assert same != [r.tolist() for r in other]


@quick
@given(st.permutations(range(5)), st.integers(0, 9), st.integers(0, 9))
def test_rows_do_not_depend_on_where_or_among_whom_a_client_is_listed(order, round, seed):
    sizes, names = [7, 12, 5, 9, 3], ["ann", "bob", "cyd", "dan", "eve"]
    base = feed(sizes, names, seed=seed)
    moved = feed([sizes[i] for i in order], [names[i] for i in order], seed=seed)
    for place, i in enumerate(order):
        want = [r.tolist() for r in base.rows(i, round, "train")]
        assert [r.tolist() for r in moved.rows(place, round, "train")] == want
        one_client = feed([sizes[i]], [names[i]], seed=seed)
        assert [r.tolist() for r in one_client.rows(0, round, "train")] == want


def test_rows_of_a_phase_do_not_depend_on_the_other_phases():
    with_more = feed([12])
    only = Feed(with_more.federation, {"train": Work(epochs=2)}, 3, 0)
    assert [r.tolist() for r in with_more.rows(0, 3, "train")] == [r.tolist() for r in only.rows(0, 3, "train")]


def test_random_words_are_the_same_on_every_machine():
    """SplitMix64's finaliser, in Python integers."""

    def finalise(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    word = 0
    for part in (5, 2**64 - 1, 123456789):
        word = finalise(((word ^ part) + 0x9E3779B97F4A7C15) % 2**64)
    assert int(rng.mix(5, np.int64(-1), 123456789)) == word
    assert rng.mix(np.arange(3), 7).tolist() == [int(rng.mix(i, 7)) for i in range(3)]


# -- one client and many -------------------------------------------------------------------------------------------------


@quick
@given(SIZES, WORK, BATCH, st.integers(0, 50), st.integers(0, 5))
def test_one_and_many_give_the_same_rows_in_the_same_order(sizes, work, batch_size, round, seed):
    source = feed(sizes, work=work, batch_size=batch_size, seed=seed)
    many = source.many(np.arange(len(sizes)), round)
    for i in range(len(sizes)):
        one = source.one(i, round)
        singles = list(one.batches())
        for s, batch in enumerate(singles):
            real = many["mask"][s, i] > 0
            assert torch.equal(many["x"][s, i][real], batch["x"])
            assert torch.equal(many["y"][s, i][real], batch["y"])
            assert many["key"][s, i] == batch["key"]
        assert not many["mask"][len(singles) :, i].any()


@quick
@given(SIZES, WORK, BATCH, st.integers(0, 50))
def test_padding_never_holds_another_clients_row(sizes, work, batch_size, round):
    source = feed(sizes, work=work, batch_size=batch_size, val=True)
    clients = np.arange(len(sizes))
    many = source.many(clients, round)
    for part, axes in ((many, (1, -1, 1)), (many["extra"], (1, -1, 1)), (many["val"], (1, -1))):  # the client axis is second
        owner = torch.as_tensor(clients, dtype=torch.float64).view(axes)
        assert (part["x"][..., 0] == owner).all()
        assert (part["y"] == 1000 * part["x"][..., 0] + part["x"][..., 1]).all()


@quick
@given(SIZES, WORK, BATCH, st.integers(0, 9))
def test_batches_as_a_mapping_show_what_iterating_gives(sizes, work, batch_size, round):
    source = feed(sizes, work=work, batch_size=batch_size)
    for i in range(len(sizes)):
        one = source.one(i, round)
        assert set(one) >= {"x", "y", "mask", "key", "extra"}
        assert len(one) == len(list(one))
        assert one.steps == len(one["key"]) == len(list(one.batches()))
        assert (one["x"][..., 0] == i).all()
        for s, batch in enumerate(one.batches()):
            real = one["mask"][s] > 0
            assert torch.equal(one["x"][s][real], batch["x"])
            assert torch.equal(one["y"][s][real], batch["y"])
            assert one["key"][s] == batch["key"]


def test_further_phases_and_validation_are_handed_on_alike():
    source = feed([5, 8, 2], val=True)
    many = source.many(np.array([2, 0]), 4)
    for place, i in enumerate((2, 0)):
        one = source.one(i, 4)
        assert set(one) == set(many)
        for s, batch in enumerate(one["extra"].batches()):
            assert torch.equal(many["extra"]["x"][s, place][many["extra"]["mask"][s, place] > 0], batch["x"])
        real = many["val"]["mask"][:, place].bool()
        assert torch.equal(many["val"]["x"][:, place][real], one["val"]["x"][one["val"]["mask"].bool()])
        assert torch.equal(many["val"]["y"][:, place][real], one["val"]["y"][one["val"]["mask"].bool()])


def test_validation_has_the_same_axes_on_both_engines():
    """A method that chooses on data["val"] is one text for both: under vmap the client axis (1) is gone."""
    source = feed([5, 8], val=True)
    one, many = source.one(1, 0)["val"], source.many(np.array([0, 1]), 0)["val"]
    for name in ("x", "y", "mask"):
        assert many[name].select(1, 1).dim() == one[name].dim(), name


def test_a_phase_that_is_not_declared_is_the_training_phase():
    federation = numbered([9, 4])
    source = Feed(federation, {"train": Work(epochs=1)}, 2, 0)
    again = [b["y"].tolist() for b in source.one(0, -1, "personalize").batches()]
    assert again == [b["y"].tolist() for b in source.one(0, -1, "train").batches()]


def test_whole_gives_all_rows_of_each_client():
    federation = numbered([3, 1, 5])
    x, y, mask = Feed.whole(federation.train, np.array([2, 1]))
    assert mask.sum(1).tolist() == [5, 1]
    assert y[0][mask[0]].tolist() == [2000, 2001, 2002, 2003, 2004]
    assert (x[..., 0] == torch.tensor([[2.0], [1.0]])).all()


def test_batches_follow_the_index_they_are_given():
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    data = Batches(x, y, np.array([[3, 1], [0, -1]]), np.array([5, 6]))
    assert [b["y"].tolist() for b in data.batches()] == [[3, 1], [0]]
    assert data["mask"].tolist() == [[1, 1], [1, 0]]
    with pytest.raises(KeyError):
        data["nothing"]


@pytest.mark.parametrize("row", [[3, 1, 2, 0], [2, 2, 2, 2]])
def test_batches_follow_an_index_of_one_step(row):
    """A single step over as many rows as the client has is not always the natural order."""
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    data = Batches(x, y, np.array(row)[None], np.array([5]))
    assert [b["y"].tolist() for b in data.batches()] == [row]


def test_step_keys_differ_between_steps_and_clients():
    keys = step_keys(keys_of(50), 40)
    assert keys.shape == (50, 40)
    assert len(np.unique(keys)) == 50 * 40
    assert np.array_equal(step_keys(keys_of(50), 7), keys[:, :7])


# -- uniform ---------------------------------------------------------------------------------------------------------------


def test_permutations_put_every_row_in_every_place_equally_often():
    clients, n = 4000, 7
    order = permutations(keys_of(clients, 11), np.full(clients, n), 1)[:, 0]
    table = np.zeros((n, n))
    for place in range(n):
        table[place] = np.bincount(order[:, place], minlength=n)
    chi2 = ((table - clients / n) ** 2 / (clients / n)).sum()
    assert stats.chi2.sf(chi2, (n - 1) ** 2) > 1e-4
    assert stats.chi2.cdf(chi2, (n - 1) ** 2) > 1e-4  # nor too even to be random


def test_permutations_of_successive_rounds_and_epochs_are_unrelated():
    """All 24 orders of 4 rows, over rounds and epochs of one client."""
    rounds, epochs, n = 1500, 4, 4
    keys = rng.mix(0, rng.purpose("train"), np.arange(rounds), np.uint64(rng.purpose("ann")))
    order = permutations(keys, np.full(rounds, n), epochs)
    codes = (order * n ** np.arange(n)).sum(-1)
    _, seen = np.unique(codes, return_counts=True)
    assert len(seen) == 24
    assert stats.chisquare(seen).pvalue > 1e-4
    pairs = codes[:, :-1].ravel() * 1000 + codes[:, 1:].ravel()
    _, seen = np.unique(pairs, return_counts=True)
    assert len(seen) == 24 * 24
    assert stats.chisquare(seen).pvalue > 1e-4


def test_ragged_permutations_are_those_of_the_clients_alone():
    sizes = np.array([3, 9, 1, 6])
    keys = keys_of(4, 2)
    order = permutations(keys, sizes, 2)
    for i, n in enumerate(sizes):
        assert np.array_equal(order[i, :, :n], permutations(keys[i : i + 1], sizes[i : i + 1], 2)[0])
        assert (order[i, :, n:] == -1).all()
