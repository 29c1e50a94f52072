"""Orders of columns under which N:M keeps more."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.formats import NMPattern
from hopsparse.prune import kept_importance, spread_columns


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (6, 8), (4, 6), (1, 4)])
def test_an_order_is_a_permutation_and_keeps_no_less(n: int, m: int) -> None:
    pattern = NMPattern(n, m)
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        importance = torch.rand(7, 4 * m, generator=draw) ** 4
        importance[:, torch.randperm(4 * m, generator=draw)[:m]] *= 20
        order = spread_columns(importance, pattern)
        assert torch.equal(order.sort().values, torch.arange(4 * m))
        before, after = (kept_importance(i, pattern) for i in (importance, importance[:, order]))
        assert after >= before


def test_a_small_problem_is_solved_best() -> None:
    """Six columns in groups of two: all orders are tried."""
    pattern = NMPattern(1, 2)
    best = 0
    for seed in range(20):
        importance = torch.rand(3, 6, generator=torch.Generator().manual_seed(seed)) ** 3
        every = (kept_importance(importance[:, list(p)], pattern) for p in permutations(range(6)))
        found = kept_importance(importance[:, spread_columns(importance, pattern)], pattern)
        limit = max(every)
        assert found <= limit + 1e-9
        best += found > limit - 1e-6
    assert best >= 12


def test_what_is_spread_already_stays_as_it_is() -> None:
    importance = torch.tensor([[9.0, 0.0, 8.0, 0.0], [7.0, 0.0, 6.0, 0.0]])
    assert spread_columns(importance, NMPattern(1, 2)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad", [torch.ones(2, 6), -torch.ones(2, 8), torch.full((2, 8), torch.nan)]
)
def test_what_is_no_importance_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ArgumentError):
        spread_columns(bad, NMPattern(2, 4))


def test_nothing_to_keep_is_no_division_by_zero() -> None:
    zeros = torch.zeros(2, 8)
    assert kept_importance(zeros, NMPattern(2, 4)) == 0
    assert spread_columns(zeros, NMPattern(2, 4)).tolist() == list(range(8))
