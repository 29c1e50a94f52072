"""SparseGPT against the definition: explicit inverses of what is left of the Hessian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, CalibrationError
from hopsparse.formats.pattern import BlockPattern, NMPattern, Pattern, Unstructured
from hopsparse.prune import factor_hessian, keep_mask, magnitude, sparsegpt

PATTERNS = [
    NMPattern(2, 4),
    NMPattern(4, 8),
    NMPattern(4, 6),
    Unstructured(0.5),
    Unstructured(0.3),
    BlockPattern(2, 4),
    BlockPattern(3, 5, 0.4),
]
DAMPING = 0.1


def problem(out: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the XᵀX of correlated inputs, float64."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * k, k, generator=draw, dtype=torch.float64)
    inputs = inputs @ torch.randn(k, k, generator=draw, dtype=torch.float64)
    return torch.randn(out, k, generator=draw, dtype=torch.float64), inputs.T @ inputs / (4 * k)


def damped(hessian: Tensor) -> Tensor:
    mean = hessian.diagonal().mean()
    return hessian + DAMPING * mean * torch.eye(len(hessian), dtype=hessian.dtype)


def oracle(weight: Tensor, pattern: Pattern, hessian: Tensor, block_size: int) -> Tensor:
    """Removing w_j from a row costs w_j² / C_jj and moves the rest by -w_j / C_jj * C_j, where C is
    the inverse of the Hessian of the columns not visited yet (optimal brain surgeon)."""
    hessian, weight = damped(hessian), weight.clone()
    out, k = weight.shape
    step = {NMPattern: "m", BlockPattern: "cols"}.get(type(pattern), "")
    width = getattr(pattern, step) if step else block_size
    for first in range(0, k, width):
        last = min(first + width, k)
        keep = chosen(weight, pattern, hessian, first, last)
        for j in range(first, last):
            inverse = torch.linalg.inv(hessian[j:, j:])
            for row in range(out):
                if not keep[row, j - first]:
                    weight[row, j:] -= weight[row, j].clone() / inverse[0, 0] * inverse[0]
                    weight[row, j] = 0
    return weight


def chosen(weight: Tensor, pattern: Pattern, hessian: Tensor, first: int, last: int) -> Tensor:
    """The mask of columns [first, last), from the scores at the time they are reached."""
    out = len(weight)
    part = weight[:, first:last]
    if isinstance(pattern, BlockPattern):
        joint = torch.linalg.inv(
            torch.linalg.inv(hessian[first:, first:])[: last - first, : last - first]
        )
        cost = torch.stack(
            [
                sum((w @ joint @ w for w in rows), torch.tensor(0.0))
                for rows in part.split(pattern.rows)
            ]
        )
        share, done = len(cost) * pattern.sparsity, first // pattern.cols
        zeros = round((done + 1) * share) - round(done * share)
        keep = torch.ones(len(cost), dtype=torch.bool)
        keep[cost.argsort()[:zeros]] = False
        return keep.repeat_interleave(pattern.rows)[:out, None].expand(out, last - first)
    diagonal = [torch.linalg.inv(hessian[j:, j:])[0, 0] for j in range(first, last)]
    scores = part**2 / torch.stack(diagonal)
    if isinstance(pattern, NMPattern):
        return keep_mask(scores, pattern)
    share = out * pattern.sparsity
    zeros = round(last * share) - round(first * share)
    keep = torch.ones(scores.numel(), dtype=torch.bool)
    keep[scores.flatten().argsort()[:zeros]] = False
    return keep.view_as(scores)


def bound(weight: Tensor, hessian: Tensor, eps: float) -> float:
    """Each of k steps solves with a matrix of size up to k: relative error k * eps * condition.

    (Higham, Accuracy and Stability of Numerical Algorithms, theorem 10.4.) The k steps add up, and
    no weight of the path is larger than the largest of a row times the condition's root.
    """
    k = weight.shape[1]
    condition = float(torch.linalg.cond(damped(hessian)))
    return k * k * eps * condition * float(weight.abs().max()) * condition**0.5


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(("out", "k", "block_size"), [(6, 24, 8), (5, 22, 12), (7, 30, 128)])
def test_equals_the_definition(pattern: Pattern, out: int, k: int, block_size: int) -> None:
    weight, hessian = problem(out, k)
    expected = oracle(weight, pattern, hessian, block_size)
    exact = sparsegpt(weight, pattern, hessian, damping=DAMPING, block_size=block_size)
    assert torch.equal(exact != 0, expected != 0)
    assert float((exact - expected).abs().max()) <= bound(
        weight, hessian, torch.finfo(torch.float64).eps
    )
    single = sparsegpt(
        weight.float(), pattern, hessian.float(), damping=DAMPING, block_size=block_size
    )
    assert single.dtype == torch.float32
    assert torch.equal(single != 0, expected != 0)
    assert float((single - expected).abs().max()) <= bound(
        weight, hessian, torch.finfo(torch.float32).eps
    )


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_loses_less_than_magnitude(pattern: Pattern) -> None:
    weight, hessian = problem(32, 64)
    hessian = damped(hessian)

    def lost(new: Tensor) -> float:
        return float((((weight - new) @ hessian) * (weight - new)).sum())

    assert lost(sparsegpt(weight, pattern, hessian)) < lost(magnitude(weight, pattern))


@pytest.mark.parametrize(("out", "k"), [(1, 1), (1, 7), (16, 64), (9, 130), (3, 257)])
def test_counts_are_exact_for_any_shape(out: int, k: int) -> None:
    weight, hessian = problem(out, k)
    sparse = sparsegpt(weight, NMPattern(2, 4), hessian)
    for row in sparse.split(1):
        assert all(int((group != 0).sum()) == min(2, group.shape[1]) for group in row.split(4, 1))
    for sparsity in (0.1, 0.5, 0.77):
        sparse = sparsegpt(weight, Unstructured(sparsity), hessian, block_size=32)
        assert int((sparse == 0).sum()) == round(out * k * sparsity)
    sparse = sparsegpt(weight, BlockPattern(2, 3), hessian)
    blocks = [b for rows in sparse.split(2) for b in rows.split(3, 1)]
    assert sum(not b.any() for b in blocks) == round(len(blocks) * 0.5)
    assert all(b.all() or not b.any() for b in blocks)


def test_dtype_stays_and_arguments_are_not_changed() -> None:
    weight, hessian = problem(8, 16)
    half, kept = weight.bfloat16(), hessian.float()
    copies = half.clone(), kept.clone()
    new = sparsegpt(half, NMPattern(2, 4), kept)
    assert new.dtype == torch.bfloat16
    assert torch.equal(half, copies[0])
    assert torch.equal(kept, copies[1])
    assert torch.equal(new, sparsegpt(half, NMPattern(2, 4), factor_hessian(kept)))
    assert torch.equal(new, sparsegpt(half.t().contiguous().t(), NMPattern(2, 4), kept))
    one = torch.randn(1, 8)
    before = one.clone()
    sparsegpt(one, NMPattern(2, 4), torch.eye(8))
    assert torch.equal(one, before)


def test_inputs_that_are_always_zero() -> None:
    weight, hessian = problem(8, 16)
    hessian[3] = 0
    hessian[:, 3] = 0
    new = sparsegpt(weight, NMPattern(2, 4), hessian)
    assert not new[:, 3].any()
    assert new.isfinite().all()
    assert not sparsegpt(weight, NMPattern(2, 4), torch.zeros(16, 16)).any()


def test_damping_grows_until_the_hessian_factors() -> None:
    hessian = torch.ones(4, 4)
    hessian[0, 1] = hessian[1, 0] = 1.5  # eigenvalue below zero: 0.01 cannot be enough
    factor = factor_hessian(hessian, damping=0.01)
    assert factor.damping == pytest.approx(1.0)
    assert factor.upper.isfinite().all()
    with pytest.raises(CalibrationError, match="even with damping 100"):
        factor_hessian(torch.ones(4, 4) - 500 * (1 - torch.eye(4)), damping=0.01)


def test_the_factor_is_the_cholesky_factor_of_the_inverse() -> None:
    _, hessian = problem(1, 20)
    upper = factor_hessian(hessian, damping=DAMPING, dtype=torch.float64).upper
    expected = torch.linalg.cholesky(torch.linalg.inv(damped(hessian)), upper=True)
    condition = float(torch.linalg.cond(damped(hessian)))
    eps = torch.finfo(torch.float64).eps
    assert torch.equal(upper, upper.triu())
    assert float((upper - expected).norm() / expected.norm()) <= 20 * eps * condition


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_are_named_by_position(bad: float) -> None:
    weight, hessian = torch.randn(4, 8), torch.eye(8)
    hessian[5, 2] = bad
    with pytest.raises(CalibrationError, match="row 5, column 2"):
        sparsegpt(weight, NMPattern(2, 4), hessian)
    weight[1, 7] = bad
    with pytest.raises(ArgumentError, match="row 1, column 7"):
        sparsegpt(weight, NMPattern(2, 4), torch.eye(8))


def test_wrong_hessians_are_refused() -> None:
    weight = torch.randn(4, 8)
    with pytest.raises(ArgumentError, match="size 7"):
        sparsegpt(weight, NMPattern(2, 4), torch.eye(7))
    with pytest.raises(ArgumentError, match="square"):
        sparsegpt(weight, NMPattern(2, 4), torch.ones(8, 4))
    with pytest.raises(CalibrationError, match="diagonal"):
        sparsegpt(weight, NMPattern(2, 4), -torch.eye(8))
