"""Arrays of all clients joined at once, as they are joined one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtailor.data import arrays
from fedtailor.errors import InvalidData


def pairs(seed=0, clients=7, targets=(), dtype=np.float32, labels=np.int64):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, clients)
    return [(draw.normal(size=(n, 3)).astype(dtype), draw.integers(0, 2, (n, *targets)).astype(labels)) for n in sizes]


@pytest.mark.parametrize("targets", [(), (1,), (4,)])
@pytest.mark.parametrize(("dtype", "labels"), [(np.float32, np.int64), (np.float64, np.float32), (np.int32, np.uint16)])
def test_arrays_joined_at_once_are_those_joined_one_by_one(targets, dtype, labels):
    given = pairs(targets=targets, dtype=dtype, labels=labels)
    names = [str(i) for i in range(len(given))]
    quick, slow = arrays._at_once(given), arrays._one_by_one("train", given, names)
    assert quick is not None
    for mine, theirs in zip(quick[:2], slow[:2], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert (quick[2] == slow[2]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        (np.zeros((2, 3), np.float32), np.zeros(3, np.int64)),
        (np.zeros((0, 3), np.float32), np.zeros(0, np.int64)),
        (np.zeros((2, 4), np.float32), np.zeros(2, np.int64)),
        (np.zeros(2, np.float32), np.zeros(2, np.int64)),
        (np.zeros((2, 3), np.float32), np.array(["a", "b"])),
        (np.full((2, 3), np.nan, np.float32), np.zeros(2, np.int64)),
    ],
)
def test_what_is_wrong_with_one_of_many_clients_is_refused_by_its_name(wrong):
    given = [*pairs(), wrong]
    with pytest.raises(InvalidData, match="Zoe"):
        arrays.join("train", given, [*"abcdefg", "Zoe"], False)


def test_arrays_of_several_types_and_tensors_are_joined_one_by_one():
    given = pairs(clients=2) + pairs(1, clients=1, dtype=np.float64)
    assert arrays._at_once(given) is None
    assert arrays._at_once([(torch.zeros(1, 2), torch.zeros(1))]) is None
    assert arrays.join("train", given, list("abc"), False).x.dtype == torch.float64
