"""One weight under one form: its target, its zeros, its values, its grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..formats.pattern import BlockPattern, NMPattern, Pattern, Unstructured
from ..formats.scheme import Form
from ..quant import round_weight, weight_scales
from .admm import admm
from .compensation import HessianFactor, sparsegpt
from .mask import check_matrix
from .recipe import Recipe
from .refit import refit
from .rounding import descend_on_grid
from .scores import magnitude, wanda
from .statistics import Statistics

# What `damping="search"` tries; it matters little on large calibration sets, much on small ones.
DAMPINGS = (0.001, 0.01, 0.1)
# Ridge of the step towards a target, times inputs a token: what few tokens say of many weights is
# mostly about those tokens. Chosen on held-out text with 16, 64 and 128 windows (docs/quality.md).
TARGET_RIDGE, MOST_RIDGE = 5.0, 10.0


@dataclass(frozen=True)
class Fitted:
    """A weight that has its form.

    Attributes:
        weight: [out, k], in the dtype of the old one.
        damping: What the Hessian was damped with; None where it was not used.
        scales: [out, groups] of the scheme's grid, or None.
        shift: [out], what the bias must gain; None where there is no bias to correct.
        asked: The damping that was asked for; `damping` is larger where that was not enough.
    """

    weight: Tensor
    damping: float | None = None
    scales: Tensor | None = None
    shift: Tensor | None = None
    asked: float | None = None

    def weight_in(self, dtype: torch.dtype | None) -> Tensor:
        """The weight rounded to what `dtype` holds, unless it is on the grid of a scheme."""
        if dtype is None or self.scales is not None:
            return self.weight
        return self.weight.to(dtype).to(self.weight.dtype)

    def put(self, layer: nn.Linear, weight: Tensor, dtype: torch.dtype | None) -> None:
        """Give the layer its new weight, and a bias that what is stored in `dtype` can hold."""
        layer.weight.data.copy_(weight)
        if layer.bias is None:
            return
        if self.shift is not None:
            layer.bias.data.add_(self.shift)
        if dtype is not None:
            layer.bias.data.copy_(layer.bias.detach().to(dtype))


def output_error(old: Tensor, new: Tensor, statistics: Statistics, name: str = "") -> float:
    """‖Y - X W'ᵀ‖_F / ‖Y‖_F, from sums alone; 0 where the target is zero anyway.

    Y is the target that `statistics` hold for the layer, or X Wᵀ.

    Args:
        old: [out, k] before.
        new: [out, k] after.
        statistics: Of the inputs.
        name: Of the layer, as `statistics` know it.

    Example:
        >>> stats = Statistics(2)
        >>> stats.add(torch.tensor([[3.0, 4.0]]))
        >>> round(output_error(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]), stats), 4)
        0.5714
    """
    compute = torch.promote_types(old.dtype, torch.float32)
    hessian = statistics.hessian().to(compute)
    before, after = old.to(compute), new.to(compute)
    product = statistics.target_product(name, before)
    if product is None:
        whole, lost = _energy(before, hessian), _energy(before - after, hessian)
    else:
        # ‖Y - XW'ᵀ‖² = ‖Y‖² + <W' XᵀX - 2 YᵀX, W'>
        whole = statistics.target_energy(name, before)
        gap = (after @ hessian).sub_(product, alpha=2)
        lost = whole + float((gap * after).sum(dtype=torch.float64))
    return float((max(lost, 0.0) / whole) ** 0.5) if whole > 0 else 0.0


def _energy(weight: Tensor, hessian: Tensor) -> float:
    """‖X Wᵀ‖² per token."""
    return float(((weight @ hessian) * weight).sum(dtype=torch.float64))


def fit(
    name: str,
    weight: Tensor,
    form: Form,
    statistics: Statistics | None,
    recipe: Recipe,
    *,
    biased: bool = False,
) -> Fitted:
    """Give `weight` its form.

    Args:
        name: Of the layer, as `statistics` knows it.
        weight: [out, k].
        form: Pattern and scheme.
        statistics: Of the layer's inputs; without them every method is magnitude and rounding.
        recipe: Method and options.
        biased: The layer has a bias that can take up the mean of the error.

    Raises:
        ArgumentError: A weight that is not finite.
        CalibrationError: Statistics that cannot be used.
    """
    check_matrix(weight, "weight")
    if statistics is None or recipe.method != "sparsegpt":
        return _fit_simply(weight, form, statistics, recipe)
    compute = torch.promote_types(weight.dtype, torch.float32)
    exact, centered = weight.to(compute), biased and recipe.bias
    dampings = DAMPINGS if recipe.damping == "search" else (float(recipe.damping),)
    problems = (_Problem.of(name, exact, statistics, d, centered=centered) for d in dampings)
    found = [_fit_to(problem, form, recipe, weight.dtype) for problem in problems]
    fitted = found[0]
    if len(found) > 1:
        kept_out = statistics.held_out
        assert kept_out is not None, "new_statistics keeps tokens out for a search"
        fitted = min(found, key=lambda f: output_error(weight, f.weight, kept_out, name))
    if not centered:
        return fitted
    made = fitted.weight.to(compute) @ statistics.mean()
    shift = statistics.mean_target(name, exact) - made
    return replace(fitted, shift=shift)


@dataclass(frozen=True)
class _Problem:
    """Least squares: the weight that would be best without a form, and what a gap to it costs."""

    weight: Tensor
    hessian: Tensor
    factor: HessianFactor
    asked: float

    @classmethod
    def of(
        cls, name: str, weight: Tensor, statistics: Statistics, damping: float, *, centered: bool
    ) -> _Problem:
        hessian = statistics.hessian(centered=centered)
        factor = statistics.factor(damping, weight.dtype, centered=centered)
        product = statistics.target_product(name, weight, centered=centered)
        if product is not None:
            # Towards the old weight: w + (YᵀX - w XᵀX) (XᵀX + λ)⁻¹.
            ridge = damping + TARGET_RIDGE * len(hessian) / max(statistics.gram_tokens, 1)
            drawn = statistics.factor(min(ridge, MOST_RIDGE), weight.dtype, centered=centered).upper
            pull = product - weight @ hessian
            weight = weight + (pull @ drawn.t()) @ drawn
        return cls(weight, hessian, factor, damping)


def _fit_to(problem: _Problem, form: Form, recipe: Recipe, dtype: torch.dtype) -> Fitted:
    new, damping = problem.weight, problem.factor.damping
    if form.pattern is not None:
        new = _remove(problem, form.pattern, recipe)
    if form.scheme is None:
        return Fitted(new.to(dtype), damping, asked=problem.asked)
    scales = weight_scales(new, form.scheme, problem.hessian.diagonal())
    # Entries that were kept and are rounded to zero may come back; others never do.
    keep = new != 0 if form.pattern is not None else torch.ones_like(new, dtype=torch.bool)
    rounded = round_weight(new.float(), form.scheme, scales)
    if recipe.refit:
        rounded = descend_on_grid(
            problem.weight,
            rounded,
            problem.hessian,
            scales,
            form.scheme,
            keep=keep,
            damping=damping,
        )
    return Fitted(rounded.to(dtype), damping, scales, asked=problem.asked)


def _remove(problem: _Problem, pattern: Pattern, recipe: Recipe) -> Tensor:
    """Choose the zeros, and refit what stays."""
    weight, hessian, factor = problem.weight, problem.hessian, problem.factor
    if recipe.search == "admm" and not isinstance(pattern, BlockPattern):
        new = admm(weight, pattern, hessian, damping=factor.damping)
    elif recipe.order == "activation" and not isinstance(pattern, BlockPattern):
        new = _in_order_of_activation(problem, pattern, recipe)
    else:
        new = sparsegpt(weight, pattern, factor, block_size=recipe.block_size)
    if not recipe.refit:
        return new
    return refit(weight, new, hessian, damping=factor.damping, steps=recipe.refit)


def _in_order_of_activation(
    problem: _Problem, pattern: NMPattern | Unstructured, recipe: Recipe
) -> Tensor:
    """SparseGPT from the strongest inputs to the weakest, in whole groups."""
    diagonal = problem.hessian.diagonal()
    k = len(diagonal)
    step = pattern.m if isinstance(pattern, NMPattern) else 1
    if k % step:
        return sparsegpt(problem.weight, pattern, problem.factor, block_size=recipe.block_size)
    groups = diagonal.view(-1, step).sum(1).argsort(descending=True, stable=True)
    order = (groups.unsqueeze(1) * step + torch.arange(step, device=groups.device)).flatten()
    new = sparsegpt(
        problem.weight[:, order],
        pattern,
        problem.hessian[order][:, order].contiguous(),
        damping=problem.factor.damping,
        block_size=recipe.block_size,
    )
    return new[:, order.argsort()].contiguous()


def _fit_simply(
    weight: Tensor, form: Form, statistics: Statistics | None, recipe: Recipe
) -> Fitted:
    new = weight
    if form.pattern is not None:
        if statistics is None or recipe.method == "magnitude":
            new = magnitude(weight, form.pattern)
        else:
            new = wanda(weight, form.pattern, statistics.input_norm())
    if form.scheme is None:
        return Fitted(new)
    importance = statistics.input_norm().square() if statistics is not None else None
    scales = weight_scales(new, form.scheme, importance)
    return Fitted(round_weight(new, form.scheme, scales), None, scales)
