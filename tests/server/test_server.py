"""The server: whom it invites, and how uploads become one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtailor import errors
from fedtailor.engine.options import Options
from fedtailor.server.cohort import cohort_size, sample
from fedtailor.server.reduce import Trimmed, mean, median, stack

quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)


# -- cohort ------------------------------------------------------------------------------------------------------------


@quick
@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**6))
def test_a_share_is_the_nearest_number_of_clients_and_at_least_one(share, clients):
    size = cohort_size(share, clients)
    assert isinstance(size, int)
    assert 1 <= size <= clients
    assert size == 1 or abs(size - share * clients) <= 0.5


@quick
@given(st.integers(2, 1000), st.integers(0, 1000))
def test_a_number_of_clients_is_taken_as_it_is(size, more):
    assert cohort_size(size, size + more) == size


def test_everyone_is_a_share_of_one():
    assert cohort_size(1.0, 37) == 37


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, -3, 1.5, float("nan"), float("inf"), "half", None, True])
def test_a_cohort_out_of_range_is_refused(bad):
    with pytest.raises(errors.InvalidArgument, match="cohort"):
        Options.of({"cohort": bad}).size(10)


def test_more_than_there_are_clients_is_refused_with_the_number():
    with pytest.raises(errors.InvalidArgument, match=r"cohort=11 .* at most 10"):
        cohort_size(11, 10)


@quick
@given(st.integers(1, 200), st.data(), st.integers(0, 99), st.integers(0, 99))
def test_a_cohort_is_sorted_distinct_in_range_and_repeatable(clients, data, seed, round):
    size = data.draw(st.integers(1, clients))
    ids = sample(clients, size, seed, round)
    assert len(ids) == size
    assert (np.diff(ids) > 0).all()
    assert ids[0] >= 0
    assert ids[-1] < clients
    assert ids.dtype == np.int64
    assert np.array_equal(ids, sample(clients, size, seed, round))


def test_cohorts_differ_between_rounds_and_seeds():
    by_round = {tuple(sample(100, 10, 0, r)) for r in range(50)}
    by_seed = {tuple(sample(100, 10, s, 0)) for s in range(50)}
    assert len(by_round) == len(by_seed) == 50


def test_sampling_leaves_the_global_random_state_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    sample(100, 10, 0, 0)
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize(("clients", "size"), [(20, 5), (20, 13), (3, 1)])
def test_every_client_and_every_pair_turns_out_equally_often(clients, size):
    rounds = 4000
    seen, together = np.zeros(clients), np.zeros((clients, clients))
    for r in range(rounds):
        ids = sample(clients, size, 3, r)
        seen[ids] += 1
        together[np.ix_(ids, ids)] += 1
    share = size / clients
    # the counts of one round sum to `size`, which takes the factor n/(n-1)
    chi2 = ((seen - rounds * share) ** 2).sum() / (rounds * share * (1 - share)) * (clients - 1) / clients
    assert 1e-4 < stats.chi2.sf(chi2, clients - 1) < 1 - 1e-4
    pair = share * (size - 1) / (clients - 1)
    off = together[np.triu_indices(clients, 1)]
    assert np.abs(off - rounds * pair).max() <= 5 * np.sqrt(rounds * pair * (1 - pair)) + 1e-9


def test_a_small_cohort_of_very_many_clients_is_quick():
    ids = sample(10**12, 5, 0, 0)
    assert len(set(ids.tolist())) == 5


# -- reduce ------------------------------------------------------------------------------------------------------------


def uploads(clients: int, seed: int = 0) -> dict:
    draw = np.random.default_rng(seed)
    return {
        "model": {
            "w": torch.from_numpy(draw.normal(size=(clients, 3, 2))),
            "buffer:m": torch.from_numpy(draw.normal(size=(clients, 4))),
        },
        "count": torch.from_numpy(draw.normal(size=clients)),
        "nothing": {},
    }


def fold(reduce, tree_, weights, chunks):
    """Feed the clients chunk by chunk; a chunk is a list of places in the cohort."""

    def part(node, rows):
        return {k: part(v, rows) for k, v in node.items()} if isinstance(node, dict) else node[rows]

    state = reduce.start()
    for chunk in chunks:
        rows = torch.tensor(chunk)
        state = reduce.add(state, part(tree_, rows), weights[rows], rows)
    return reduce.finish(state)


@st.composite
def chunkings(draw):
    """Cohort size and the cohort cut into chunks, in any order."""
    n = draw(st.integers(1, 9))
    order = draw(st.permutations(range(n)))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return n, [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


def paths(got):
    return {"w": got["model"]["w"], "m": got["model"]["buffer:m"], "count": got["count"]}


@quick
@given(chunkings(), st.integers(0, 99))
def test_the_mean_is_the_weighted_average_in_any_chunking(cut, seed):
    n, chunks = cut
    every = uploads(n, seed)
    weights = torch.from_numpy(np.random.default_rng(seed).uniform(0.1, 3, n))
    for got in (fold(mean, every, weights, chunks), fold(mean, every, weights, [list(range(n))])):
        assert got["nothing"] == {}
        for name, leaf in paths(got).items():
            want = np.average(paths(every)[name].numpy(), axis=0, weights=weights.numpy())
            np.testing.assert_allclose(leaf.numpy(), want, rtol=1e-12, atol=1e-13)


def test_the_mean_keeps_the_type_of_the_uploads():
    every = {"w": torch.rand(3, 2)}
    assert fold(mean, every, torch.ones(3, dtype=torch.float64), [[0, 1], [2]])["w"].dtype == torch.float32


def test_the_mean_does_not_write_to_the_uploads():
    every = {"w": torch.arange(6.0).view(3, 2)}
    before = every["w"].clone()
    fold(mean, every, torch.ones(3), [[0], [1, 2]])
    assert torch.equal(every["w"], before)


def test_a_reduction_can_be_used_again():
    every = {"w": torch.arange(6.0).view(3, 2)}
    first = fold(mean, every, torch.ones(3), [[0, 1, 2]])["w"]
    assert torch.equal(fold(mean, every, torch.ones(3), [[0, 1, 2]])["w"], first)
    assert torch.equal(first, torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_the_mean_refuses_whole_numbers_and_names_the_upload(dtype):
    with pytest.raises(errors.InvalidArgument, match=r"'model/n'.*upload floats"):
        mean.add(mean.start(), {"model": {"n": torch.ones(2, 3).to(dtype)}}, torch.ones(2), torch.arange(2))


@quick
@given(chunkings(), st.integers(0, 99))
def test_a_stack_stands_in_the_cohorts_order_whatever_came_first(cut, seed):
    n, chunks = cut
    every = uploads(n, seed)
    got = fold(stack, every, torch.ones(n), chunks)
    for name, leaf in paths(got).items():
        assert torch.equal(leaf, paths(every)[name])


@quick
@given(chunkings(), st.integers(0, 99))
def test_the_median_is_numpys_whatever_the_weights(cut, seed):
    n, chunks = cut
    every = uploads(n, seed)
    weights = torch.from_numpy(np.random.default_rng(seed).uniform(0.1, 3, n))
    for name, leaf in paths(fold(median, every, weights, chunks)).items():
        np.testing.assert_allclose(leaf.numpy(), np.median(paths(every)[name].numpy(), axis=0), rtol=1e-12, atol=1e-13)


@quick
@given(chunkings(), st.floats(0, 0.49), st.integers(0, 99))
def test_the_trimmed_mean_is_scipys(cut, share, seed):
    n, chunks = cut
    every = uploads(n, seed)
    for name, leaf in paths(fold(Trimmed(share), every, torch.ones(n), chunks)).items():
        values = np.sort(paths(every)[name].numpy(), axis=0)
        drop = int(share * n)
        np.testing.assert_allclose(leaf.numpy(), values[drop : n - drop].mean(0), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(leaf.numpy(), stats.trim_mean(values, share, axis=0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("reduce", [median, Trimmed(0.2)])
def test_a_lying_minority_moves_a_robust_reduction_no_further_than_the_honest(reduce):
    honest = torch.linspace(-1, 1, 8, dtype=torch.float64).view(8, 1).expand(8, 3)
    every = {"w": torch.cat([honest, torch.full((2, 3), 1e12, dtype=torch.float64)])}
    got = fold(reduce, every, torch.ones(10), [list(range(10))])["w"]
    assert (got.abs() <= 1).all()
