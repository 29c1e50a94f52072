"""Refitting kept weights against the normal equations of each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats.pattern import NMPattern
from hopsparse.prune import Recipe, Statistics, magnitude, prune_layer, refit, sparsegpt

DAMPING = 0.05


def problem(out: int = 6, k: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, the XᵀX of correlated inputs and that with damping, float64."""
    inputs = torch.randn(4 * k, k, dtype=torch.float64) @ torch.randn(k, k, dtype=torch.float64)
    hessian = inputs.T @ inputs / (4 * k)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    return torch.randn(out, k, dtype=torch.float64), hessian, damped


def lost(gap: Tensor, hessian: Tensor) -> float:
    return float(((gap @ hessian) * gap).sum())


@pytest.mark.parametrize("start", [magnitude, sparsegpt])
def test_reaches_the_least_squares_solution_of_each_row(start: object) -> None:
    weight, hessian, damped = problem()
    pattern = NMPattern(2, 4)
    if start is magnitude:
        pruned = magnitude(weight, pattern)
    else:
        pruned = sparsegpt(weight, pattern, hessian, damping=DAMPING)
    # Conjugate gradients end after as many steps as unknowns; rounding costs a few more.
    new = refit(weight, pruned, hessian, damping=DAMPING, steps=48)
    condition = float(torch.linalg.cond(damped))
    eps = torch.finfo(torch.float64).eps
    for row, (dense, kept) in enumerate(zip(weight, pruned != 0, strict=True)):
        system = damped[kept][:, kept]
        expected = torch.linalg.solve(system, (damped @ dense)[kept])
        # Higham, theorem 10.4: relative error n * eps * condition for each of the two solutions.
        allowed = 2 * len(kept) * eps * condition * float(expected.norm())
        assert float((new[row, kept] - expected).norm()) <= allowed
        assert not new[row, ~kept].any()


def test_every_step_lowers_the_damped_error() -> None:
    weight, hessian, damped = problem(32, 64)
    pruned = sparsegpt(weight, NMPattern(2, 4), hessian, damping=DAMPING)
    errors = [
        lost(weight - refit(weight, pruned, hessian, damping=DAMPING, steps=n), damped)
        for n in range(8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] == lost(weight - pruned, damped)


def test_a_solved_row_stays() -> None:
    weight, hessian, _ = problem()
    assert torch.equal(refit(weight, weight, hessian), weight)
    zero = torch.zeros_like(weight)
    assert not refit(weight, zero, hessian).any()
    assert refit(weight, weight * 0.5, torch.zeros_like(hessian)).isfinite().all()


def test_dtype_and_arguments_stay() -> None:
    weight, hessian, _ = problem()
    pruned = magnitude(weight.bfloat16(), NMPattern(2, 4))
    copies = weight.clone(), pruned.clone(), hessian.clone()
    assert refit(weight, pruned, hessian).dtype == torch.bfloat16
    for now, before in zip((weight, pruned, hessian), copies, strict=True):
        assert torch.equal(now, before)


def test_the_recipe_refits_and_zero_steps_is_the_paper() -> None:
    weight, _, _ = problem(16, 32)
    statistics = Statistics(32)
    statistics.add(torch.randn(200, 32) @ torch.randn(32, 32))
    errors = []
    for steps in (0, 10):
        layer = torch.nn.Linear(32, 16, bias=False)
        layer.weight.data.copy_(weight)
        report = prune_layer("x", layer, statistics, Recipe("2:4", refit=steps))
        errors.append(report.output_error)
        assert report.density == 0.5
        if not steps:
            expected = sparsegpt(weight.float(), NMPattern(2, 4), statistics.hessian())
            assert torch.equal(layer.weight.data, expected)
    assert errors[1] < errors[0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight, hessian, _ = problem()
    with pytest.raises(ArgumentError, match=r"\(6, 24\), \(5, 24\)"):
        refit(weight, weight[:5], hessian)
    hessian[1, 2] = float("nan")
    with pytest.raises(ArgumentError, match="Hessian holds nan at row 1, column 2"):
        refit(weight, weight, hessian)
