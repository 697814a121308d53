"""Trees: the operations all methods are written in, against NumPy, and the bytes that travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtailor import tree

settings.register_profile("tree", deadline=None, max_examples=60, derandomize=True, database=None)
quick = settings(settings.get_profile("tree"))

NAMES = st.sampled_from(["weight", "bias", "buffer:mean", "a", "b", "layer.0.weight", "é", "buffer:"])
KEYS = st.one_of(
    NAMES, st.text(alphabet=st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=6)
)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])


@st.composite
def tensors(draw, dtypes=DTYPES):
    shape, dtype, seed = draw(SHAPES), draw(dtypes), draw(st.integers(0, 10**6))
    values = torch.from_numpy(np.random.default_rng(seed).normal(scale=5, size=shape))
    return values.bool() if dtype is torch.bool else values.to(dtype)


def trees(leaf, names=KEYS):
    return st.recursive(
        st.dictionaries(names, leaf, max_size=3), lambda inner: st.dictionaries(names, inner | leaf, max_size=3), max_leaves=6
    )


FLOATS = trees(tensors(st.just(torch.float64)))


@st.composite
def alike(draw, count):
    """``count`` trees with the same keys and shapes and different values."""
    first = draw(FLOATS)
    seeds = draw(st.lists(st.integers(0, 10**6), min_size=count - 1, max_size=count - 1))

    def again(node, rng):
        if isinstance(node, dict):
            return {k: again(v, rng) for k, v in node.items()}
        return torch.from_numpy(np.asarray(rng.normal(size=tuple(node.shape))))

    return [first, *(again(first, np.random.default_rng(s)) for s in seeds)]


def by_hand(node, path=()) -> dict[tuple[str, ...], np.ndarray]:
    """Leaves by their full path of keys, in NumPy; an empty branch is an entry of its own."""
    if not isinstance(node, dict):
        return {path: node.numpy()}
    if not node:
        return {(*path, "<empty>"): np.zeros(0)}
    return {place: value for key, child in node.items() for place, value in by_hand(child, (*path, key)).items()}


def flat(node) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(v.ravel() for v in by_hand(node).values())])


def assert_leaves(got, want: dict, tol=1e-13) -> None:
    have = by_hand(got)
    assert list(have) == list(want)
    for place in want:
        np.testing.assert_allclose(have[place], want[place], rtol=tol, atol=tol)


def shuffled(node, rng):
    """The same tree with its keys inserted in another order."""
    if not isinstance(node, dict):
        return node
    keys = list(node)
    rng.shuffle(keys)
    return {k: shuffled(node[k], rng) for k in keys}


@quick
@given(alike(2), st.floats(-3, 3))
def test_arithmetic_is_leaf_by_leaf(two, factor):
    a, b = two
    na, nb = by_hand(a), by_hand(b)
    assert_leaves(tree.add(a, b), {p: na[p] + nb[p] for p in na})
    assert_leaves(tree.add(a, b, factor), {p: na[p] + factor * nb[p] for p in na})
    assert_leaves(tree.sub(a, b), {p: na[p] - nb[p] for p in na})
    assert_leaves(tree.scale(a, factor), {p: factor * na[p] for p in na})
    assert_leaves(tree.mix(a, b, factor), {p: (1 - factor) * na[p] + factor * nb[p] for p in na})
    assert_leaves(tree.zeros(a), {p: 0 * na[p] for p in na})
    assert_leaves(tree.map(lambda x, y: x * y - x, a, b), {p: na[p] * nb[p] - na[p] for p in na})


@quick
@given(alike(2), st.floats(-3, 3))
def test_tensor_and_number_coefficients_agree(two, factor):
    a, b = two
    t = torch.tensor(factor, dtype=torch.float64)
    for got, want in (
        (tree.add(a, b, t), tree.add(a, b, factor)),
        (tree.scale(a, t), tree.scale(a, factor)),
        (tree.mix(a, b, t), tree.mix(a, b, factor)),
        (tree.move(a, b, t), tree.move(a, b, factor)),
    ):
        assert_leaves(got, by_hand(want))


@quick
@given(alike(2))
def test_no_operation_writes_to_its_arguments(two):
    before = [by_hand(tree.map(torch.clone, t)) for t in two]
    a, b = two
    for result in (
        tree.add(a, b),
        tree.add(a, b, 0.5),
        tree.sub(a, b),
        tree.mix(a, b, 0.3),
        tree.move(a, b, 0.3),
        tree.move(a, b, 1.0),
        tree.scale(a, 2.0),
        tree.clone(a),
        tree.zeros(a),
    ):
        for leaf in tree.leaves(result):
            leaf.fill_(7.0)
    for now, then in zip(two, before, strict=True):
        assert_leaves(now, then, 0)


@quick
@given(alike(2))
def test_ends_of_a_mix_are_the_trees(two):
    a, b = two
    assert_leaves(tree.mix(a, b, 0.0), by_hand(a), 0)
    assert_leaves(tree.mix(a, b, 1.0), by_hand(b), 0)


@quick
@given(alike(2))
def test_dot_and_dist2_are_those_of_the_long_vectors(two):
    a, b = flat(two[0]), flat(two[1])
    assert float(tree.dot(*two)) == pytest.approx(a @ b, rel=1e-12, abs=1e-12)
    assert float(tree.dist2(*two)) == pytest.approx(((a - b) ** 2).sum(), rel=1e-12, abs=1e-12)
    assert tree.size(two[0]) == len(a)


@quick
@given(alike(2), st.booleans())
def test_where_takes_one_tree_whole(two, choice):
    assert_leaves(tree.where(torch.tensor(choice), *two), by_hand(two[0] if choice else two[1]), 0)


def test_where_chooses_element_by_element_with_a_wide_condition():
    a, b = {"w": torch.arange(3.0)}, {"w": -torch.ones(3)}
    assert tree.where(torch.tensor([True, False, True]), a, b)["w"].tolist() == [0.0, -1.0, 2.0]


@quick
@given(alike(2), st.randoms(use_true_random=False))
def test_order_of_keys_is_nothing(two, rng):
    a, b = two
    other = shuffled(b, rng)
    assert_leaves(tree.add(a, other), by_hand(tree.add(a, b)))
    assert_leaves(tree.mix(a, other, 0.25), by_hand(tree.mix(a, b, 0.25)))
    assert_leaves(tree.move(a, other, 0.25), by_hand(tree.move(a, b, 0.25)))


@pytest.mark.parametrize("operation", [tree.dot, tree.dist2])
def test_products_and_distances_go_by_key_not_by_order(operation):
    a = {"u": torch.tensor([1.0, 2.0]), "v": torch.tensor([10.0, 20.0])}
    b = {"v": torch.tensor([3.0, 4.0]), "u": torch.tensor([5.0, 6.0])}
    by_key = {"dot": 1 * 5 + 2 * 6 + 10 * 3 + 20 * 4, "dist2": 4**2 + 4**2 + 7**2 + 16**2}
    assert float(operation(a, b)) == by_key[operation.__name__]


# -- models with buffers ---------------------------------------------------------------------------------------------

MODELS = st.dictionaries(NAMES, tensors(st.just(torch.float64)), max_size=5)


@quick
@given(MODELS, st.floats(-2, 2), st.booleans())
def test_move_takes_buffers_all_the_way_and_parameters_by_lr(model, lr, nested):
    delta = {k: torch.full_like(v, 3.0) + v for k, v in model.items()}
    got = tree.move({"model": model}, {"model": delta}, lr)["model"] if nested else tree.move(model, delta, lr)
    want = {(k,): (v + (delta[k] if k.startswith("buffer:") else lr * delta[k])).numpy() for k, v in model.items()}
    assert_leaves(got, want or {("<empty>",): np.zeros(0)})


@quick
@given(MODELS, st.floats(-2, 2))
def test_scaling_the_trainable_part_leaves_buffers(model, factor):
    got = tree.scale_trainable({"model": model, "rest": {}}, factor)
    assert got["rest"] == {}
    want = {(k,): (v if k.startswith("buffer:") else factor * v).numpy() for k, v in model.items()}
    assert_leaves(got["model"], want or {("<empty>",): np.zeros(0)})


@quick
@given(MODELS, st.sets(NAMES))
def test_pick_and_drop_part_a_model_in_two(model, names):
    picked, dropped = tree.pick(model, names), tree.drop(model, names)
    assert list(picked) == [k for k in model if k in names]
    assert list(dropped) == [k for k in model if k not in names]
    assert all(({**picked, **dropped})[k] is model[k] for k in model)


@quick
@given(MODELS)
def test_trainable_is_all_but_the_buffers(model):
    parameters = tree.trainable(model)
    assert list(parameters) == [k for k in model if not k.startswith("buffer:")]
    assert all(parameters[k] is model[k] for k in parameters)


@pytest.mark.parametrize(
    ("path", "answer"),
    [("buffer:m", True), ("a/buffer:m", True), ("weight", False), ("buffer:a/weight", False), ("a.buffer:m", False)],
)
def test_a_buffer_is_known_by_the_last_name_on_its_path(path, answer):
    assert tree.is_buffer(path) is answer


# -- trees that do not fit ---------------------------------------------------------------------------------------------

ONE, TWO = torch.ones(2), torch.ones(2)
UNLIKE = [
    ({"a": ONE}, {"b": TWO}),
    ({"a": ONE}, {"a": TWO, "b": TWO}),
    ({"a": ONE, "b": ONE}, {"a": TWO}),
    ({"a": {"b": ONE}}, {"a": {"c": TWO}}),
    ({"a": {}}, {"a": {"c": TWO}}),
    ({"a": {"b": ONE}}, {"a": TWO}),
]


@pytest.mark.parametrize(("a", "b"), UNLIKE)
@pytest.mark.parametrize("operation", [tree.add, tree.sub, lambda a, b: tree.mix(a, b, 0.5), lambda a, b: tree.move(a, b, 0.5)])
def test_trees_that_differ_are_refused(operation, a, b):
    with pytest.raises(ValueError, match="trees differ"):
        operation(a, b)


@pytest.mark.parametrize(("a", "b"), UNLIKE)
@pytest.mark.parametrize("operation", [tree.dot, tree.dist2])
def test_a_product_or_distance_of_trees_that_differ_is_refused(operation, a, b):
    with pytest.raises(ValueError):
        operation(a, b)


def test_a_leaf_against_a_branch_is_refused_from_either_side():
    with pytest.raises((ValueError, TypeError)):
        tree.add({"a": ONE}, {"a": {"b": TWO}})


# -- walking -----------------------------------------------------------------------------------------------------------


@quick
@given(FLOATS)
def test_leaves_items_and_refill_walk_in_the_same_order(a):
    leaves = tree.leaves(a)
    assert all(x is y for x, (_, y) in zip(leaves, tree.items(a), strict=True))
    again = tree.refill(a, iter(range(len(leaves))))
    assert tree.leaves(again) == list(range(len(leaves)))
    assert list(tree.shapes(a).values()) == [(tuple(x.shape), x.dtype) for x in leaves]


def test_items_name_leaves_by_their_path():
    assert [p for p, _ in tree.items({"m": {"w": ONE, "n": {"b": ONE}}, "s": ONE})] == ["m/w", "m/n/b", "s"]
    assert tree.shapes({"m": {"w": torch.zeros(2, 3)}}) == {"m/w": ((2, 3), torch.float32)}


# -- bytes -------------------------------------------------------------------------------------------------------------


def assert_same(got, want) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor)
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert torch.equal(got, want)
        return
    assert list(got) == list(want)
    for key in want:
        assert_same(got[key], want[key])


@settings(quick, max_examples=150)
@given(trees(tensors()))
def test_pack_then_unpack_is_the_same_tree(a):
    assert_same(tree.unpack(tree.pack(a)), a)


@pytest.mark.parametrize("a", [{}, {"a": {}}, {"a": {"b": {}, "c": {}}, "d": {}}, torch.arange(3), torch.tensor(2.5)])
def test_pack_keeps_empty_branches_and_bare_tensors(a):
    assert_same(tree.unpack(tree.pack(a)), a)


def test_pack_keeps_the_order_of_keys():
    a = {"z": ONE, "a": {"y": torch.zeros(1), "b": torch.zeros(2)}, "m": torch.zeros(3)}
    assert list(tree.unpack(tree.pack(a))) == ["z", "a", "m"]
    assert list(tree.unpack(tree.pack(a))["a"]) == ["y", "b"]


def test_pack_takes_views_and_tensors_that_require_grad():
    base = torch.arange(6.0).view(2, 3)
    assert_same(tree.unpack(tree.pack({"t": base.t()})), {"t": base.t().contiguous()})
    assert_same(tree.unpack(tree.pack({"t": torch.ones(2, requires_grad=True)})), {"t": torch.ones(2)})
    assert_same(tree.unpack(tree.pack({"t": torch.ones(()).expand(4)})), {"t": torch.ones(4)})


def test_pack_takes_two_leaves_that_share_memory():
    """A method may keep the shared model under two names: {"start": w, "model": w}."""
    w = torch.arange(4.0)
    assert_same(tree.unpack(tree.pack({"start": w, "model": w, "half": w[:2]})), {"start": w, "model": w, "half": w[:2]})


@pytest.mark.parametrize(
    "a", [{"a": {"b": torch.zeros(2)}, "a/b": torch.ones(2)}, {"": {"a": torch.zeros(2)}, "a": torch.ones(2)}]
)
def test_pack_never_mixes_up_two_leaves_whose_paths_read_alike(a):
    try:
        data = tree.pack(a)
    except ValueError:
        return  # refused is as good
    assert_same(tree.unpack(data), a)


@quick
@given(trees(tensors()))
def test_clone_shares_no_memory(a):
    copy = tree.clone(a)
    assert_same(copy, a)
    places = {leaf.data_ptr() for leaf in tree.leaves(a) if leaf.numel()}
    assert not places & {leaf.data_ptr() for leaf in tree.leaves(copy) if leaf.numel()}
