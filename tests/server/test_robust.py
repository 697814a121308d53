"""Robust ways to combine uploads: up to their breakdown point nothing that is uploaded moves them far, beyond it it does."""

from __future__ import annotations

import pytest
import torch

from fedtailor.errors import InvalidArgument
from fedtailor.server.guard import absurd, fault, norm
from fedtailor.server.reduce import GeometricMedian, Krum, Trimmed, mean, median

FAR = 1e9


def fold(reduce, rows, weights=None):
    state = reduce.start()
    weights = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
    for place in range(len(rows)):
        one = {"a": rows[place : place + 1, :2], "b": {"c": rows[place : place + 1, 2:]}}
        state = reduce.add(state, one, weights[place : place + 1], torch.tensor([place]))
    out = reduce.finish(state)
    return torch.cat([out["a"], out["b"]["c"]])


def honest(count: int) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("direction", [torch.ones(5), torch.tensor([1.0, -1.0, 0.0, 3.0, 0.0])])
@pytest.mark.parametrize(
    ("reduce", "count", "most"),
    [(median, 9, 4), (GeometricMedian(), 9, 4), (Trimmed(0.25), 8, 2)],
    ids=["median", "geometric median", "trimmed"],
)
def test_uploads_up_to_the_breakdown_point_cannot_move_it_and_one_more_can(reduce, count, most, direction):
    rows = honest(count)
    size = float(rows.norm(dim=1).max())

    def with_wrong(wrong: int) -> torch.Tensor:
        spoiled = rows.clone()
        spoiled[:wrong] = FAR * direction
        return fold(reduce, spoiled)

    assert float(with_wrong(most).norm()) <= 3 * size
    assert float(with_wrong(most + 1).norm()) > 100 * size
    assert float(fold(mean, torch.cat([rows[1:], FAR * direction.double()[None]])).norm()) > 100 * size


def test_krum_is_an_upload_and_breaks_when_its_bound_does():
    rows = honest(9)
    assert any(torch.equal(fold(Krum(), rows), row) for row in rows)
    spoiled = rows.clone()
    spoiled[:3] = FAR
    assert any(torch.equal(fold(Krum(), spoiled), row) for row in rows[3:])
    spoiled[:6] = FAR
    assert float(fold(Krum(3), spoiled).norm()) > 100 * float(rows.norm(dim=1).max())
    with pytest.raises(InvalidArgument, match="needs more than 10"):
        fold(Krum(4), rows)


def test_the_geometric_median_is_stationary_and_heeds_the_weights():
    rows, weights = honest(7), torch.arange(1.0, 8.0, dtype=torch.float64)
    point = fold(GeometricMedian(), rows, weights)
    away = rows - point
    force = (weights[:, None] * away / away.norm(dim=1, keepdim=True)).sum(0)
    assert float(force.norm()) < 1e-6
    heavy = torch.tensor([100.0, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(fold(GeometricMedian(), rows, heavy), rows[0], atol=1e-4, rtol=0)


def test_uploads_that_are_all_the_same_are_what_comes_out():
    rows = honest(1).expand(5, 5).clone()
    for reduce in (Krum(), GeometricMedian()):
        torch.testing.assert_close(fold(reduce, rows), rows[0])


def test_the_guard_names_what_is_wrong():
    like = {"a": ((2,), torch.float32)}
    good = {"a": torch.zeros(2)}
    assert fault(good, like) is None
    assert fault({}, like) == "'a' is missing"
    assert fault({**good, "b": torch.zeros(1)}, like) == "'b' was not asked for"
    assert fault({"a": torch.zeros(3)}, like) == "'a' has shape (3,), not (2,)"
    assert fault({"a": torch.zeros(2).double()}, like) == "'a' is of type float64, not float32"
    assert fault({"a": torch.tensor([0.0, float("nan")])}, like) == "'a' is not finite"
    assert norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": torch.tensor([9])}) == 5
    assert absurd([1, 1, 200], [], 100) == [False, False, True]
    assert absurd([1, 200], [], 100) == [False, False]
    assert absurd([1, 200], [1.0, 1.2], 100) == [False, True]
    assert absurd([0, 0, 5], [], 100) == [False, False, False]
