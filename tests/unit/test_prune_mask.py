"""Masks and score-based pruning against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError, CalibrationError
from hopsparse.formats.pattern import BlockPattern, NMPattern, Pattern, Unstructured
from hopsparse.prune import keep_mask, magnitude, wanda

PATTERNS = [
    NMPattern(2, 4),
    NMPattern(1, 4),
    NMPattern(6, 8),
    NMPattern(4, 6),
    Unstructured(0.5),
    Unstructured(0.3),
    BlockPattern(2, 3),
    BlockPattern(4, 4, 0.25),
]


def best(entries: list[tuple[float, int]], keep: int) -> set[int]:
    """Positions of the `keep` largest scores; of equal ones the lowest positions."""
    return {position for _, position in sorted(entries, key=lambda e: (-e[0], e[1]))[:keep]}


def brute_force(scores: Tensor, pattern: Pattern, per_row: bool) -> Tensor:
    """The definition of keep_mask, an entry at a time."""
    out, k = scores.shape
    table = scores.tolist()
    mask = torch.zeros(out, k, dtype=torch.bool)
    if isinstance(pattern, NMPattern):
        for row in range(out):
            for first in range(0, k, pattern.m):
                group = range(first, min(first + pattern.m, k))
                for column in best([(table[row][c], c) for c in group], pattern.n):
                    mask[row, column] = True
    elif isinstance(pattern, Unstructured):
        pools = [[r] for r in range(out)] if per_row else [list(range(out))]
        for pool in pools:
            entries = [(table[r][c], r * k + c) for r in pool for c in range(k)]
            for position in best(entries, len(entries) - round(len(entries) * pattern.sparsity)):
                mask[position // k, position % k] = True
    else:
        wide = -(-k // pattern.cols)
        sums = [0.0] * (-(-out // pattern.rows) * wide)
        for row in range(out):
            for column in range(k):
                sums[row // pattern.rows * wide + column // pattern.cols] += table[row][column]
        kept = best(
            [(s, i) for i, s in enumerate(sums)], len(sums) - round(len(sums) * pattern.sparsity)
        )
        for row in range(out):
            for column in range(k):
                mask[row, column] = row // pattern.rows * wide + column // pattern.cols in kept
    return mask


@settings(max_examples=150, deadline=None)
@given(
    out=st.integers(1, 9),
    k=st.integers(1, 21),
    levels=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 2**20),
    pattern=st.sampled_from(PATTERNS),
    per_row=st.booleans(),
)
def test_mask_is_the_definition(
    out: int, k: int, levels: int, seed: int, pattern: Pattern, per_row: bool
) -> None:
    """Small integers, so that sums are exact and ties are common."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (out, k), generator=draw).float()
    expected = brute_force(scores, pattern, per_row)
    assert torch.equal(keep_mask(scores, pattern, per_row=per_row), expected)


def test_equal_scores_keep_the_first_columns() -> None:
    kept = keep_mask(torch.ones(2, 10), NMPattern(2, 4))
    assert kept.tolist() == [[True, True, False, False] * 2 + [True, True]] * 2
    half = keep_mask(torch.ones(2, 4), Unstructured(0.5))
    assert half.tolist() == [[True] * 4, [False] * 4]


def test_infinite_scores_rank_and_nan_is_refused() -> None:
    scores = torch.tensor([[float("inf"), 1.0, float("-inf"), 0.0, float("-inf")]])
    assert keep_mask(scores, NMPattern(2, 4)).tolist() == [[True, True, False, False, True]]
    with pytest.raises(ArgumentError, match="row 0, column 1"):
        keep_mask(torch.tensor([[1.0, float("nan")]]), NMPattern(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_weights_are_kept_or_positive_zero(dtype: torch.dtype, pattern: Pattern) -> None:
    weight = torch.randn(8, 24).to(dtype)
    weight[0, :3] = -0.0
    before = weight.clone()
    for new, mask in (
        (magnitude(weight, pattern), keep_mask(weight.abs(), pattern)),
        (wanda(weight, pattern, torch.ones(24)), keep_mask(weight.abs(), pattern, per_row=True)),
    ):
        assert new.dtype == dtype
        assert torch.equal(new[mask], weight[mask])
        assert not new[~mask].any()
        assert not torch.signbit(new[~mask]).any()
    assert torch.equal(weight, before)


def test_wanda_weighs_by_the_input_norm() -> None:
    weight, norm = torch.randn(16, 32), torch.rand(32) * 9
    for pattern in PATTERNS:
        mask = keep_mask(weight.abs() * norm, pattern, per_row=True)
        assert torch.equal(wanda(weight, pattern, norm), weight * mask)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_numbers_are_named_by_position(bad: float) -> None:
    weight = torch.randn(4, 8)
    weight[2, 5] = bad
    with pytest.raises(ArgumentError, match="row 2, column 5"):
        magnitude(weight, NMPattern(2, 4))
    with pytest.raises(ArgumentError, match="row 2, column 5"):
        wanda(weight, NMPattern(2, 4), torch.ones(8))
    norm = torch.ones(8)
    norm[3] = bad
    with pytest.raises(CalibrationError, match="column 3"):
        wanda(torch.randn(4, 8), NMPattern(2, 4), norm)


@pytest.mark.parametrize(
    "weight", [torch.randn(8), torch.empty(0, 4), torch.ones(4, 4, dtype=torch.int32)]
)
def test_what_is_no_weight_is_refused(weight: Tensor) -> None:
    with pytest.raises(ArgumentError, match="non-empty floating matrix"):
        magnitude(weight, NMPattern(2, 4))


def test_a_norm_of_another_length_is_refused() -> None:
    with pytest.raises(ArgumentError, match="k=8"):
        wanda(torch.randn(4, 8), NMPattern(2, 4), torch.ones(7))
