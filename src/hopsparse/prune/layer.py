"""One layer: its statistics and the recipe in, new weights and a report out."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HopsparseError
from ..formats.pattern import Pattern
from ..formats.scheme import Form
from ..quant import round_weight, weight_scales
from .compensation import sparsegpt
from .mask import check_matrix
from .recipe import LayerReport, Recipe
from .refit import refit
from .scores import magnitude, wanda
from .statistics import Statistics

SAMPLED_STRIDE = 16  # methods that need no Hessian measure their error on every 16th token


def new_statistics(inputs: Tensor, recipe: Recipe) -> Statistics:
    """Empty statistics of what the recipe's method needs, for inputs like these."""
    stride = 1 if recipe.method == "sparsegpt" else SAMPLED_STRIDE
    return Statistics(inputs.shape[-1], inputs.device, stride)


def prune_layer(
    name: str,
    layer: nn.Module,
    statistics: Statistics | None,
    recipe: Recipe,
    *,
    store_dtype: torch.dtype | None = None,
    scales_out: dict[str, Tensor] | None = None,
) -> LayerReport:
    """Replace the weight of one nn.Linear in place.

    Without statistics (or tokens) every method falls back to magnitude, so that the pattern holds
    in every layer, and the note says so. A layer that `recipe.keep` names stays as it is.

    Args:
        name: Full name, for `recipe.keep`, the report and errors.
        layer: An nn.Linear; weight [out, k].
        statistics: Of its inputs.
        recipe: What to do.
        store_dtype: Round the new weight to what this dtype holds, unless a scheme has a grid.
        scales_out: Where the form has a scheme, its scales [out, groups] go to `scales_out[name]`.

    Raises:
        ArgumentError: Not an nn.Linear, or its weight is not finite.
        CalibrationError: Statistics that cannot be used.

    Example:
        >>> prune_layer("head", nn.Linear(8, 2), None, Recipe("2:4", method="magnitude")).density
        0.5
    """
    if not isinstance(layer, nn.Linear):
        raise ArgumentError(
            f"layer {name} is a {type(layer).__name__}", need="nn.Linear", hint="leave it out"
        )
    shape = (layer.out_features, layer.in_features)
    form = recipe.form_of(name)
    pattern, scheme = _words(form)
    if form == Form():
        return LayerReport(name, shape, pattern, "dense", 1.0, 0.0, 0, None, 0.0, "kept dense")
    begin = time.perf_counter()
    usable = statistics if statistics is not None and statistics.tokens else None
    old = layer.weight.detach()
    try:
        new, damping, scales = _compress(old, form, usable, recipe)
    except HopsparseError as error:
        raise type(error)(f"layer {name}: {error.got}", need=error.need, hint=error.hint) from None
    if scales is not None and scales_out is not None:
        scales_out[name] = scales
    if store_dtype is not None and scales is None:
        new = new.to(store_dtype).to(old.dtype)
    seconds = time.perf_counter() - begin
    error_part = output_error(old, new, usable) if usable else None
    layer.weight.data.copy_(new)
    method = recipe.method if usable else "magnitude"
    density = float((new != 0).float().mean(dtype=torch.float64))
    tokens = usable.tokens if usable else 0
    note = _note(recipe, usable, damping)
    return LayerReport(
        name, shape, pattern, method, density, error_part, tokens, damping, seconds, note, scheme
    )


def output_error(old: Tensor, new: Tensor, statistics: Statistics) -> float:
    """‖X (W - W')ᵀ‖_F / ‖X Wᵀ‖_F, from XᵀX alone; 0 where the layer's output is zero anyway.

    Args:
        old: [out, k] before.
        new: [out, k] after.
        statistics: Of the inputs.

    Example:
        >>> stats = Statistics(2)
        >>> stats.add(torch.tensor([[3.0, 4.0]]))
        >>> round(output_error(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]), stats), 4)
        0.5714
    """
    hessian = statistics.hessian()
    compute = torch.promote_types(old.dtype, torch.float32)
    before = old.to(compute)
    gap = before - new.to(compute)
    hessian = hessian.to(compute)
    lost = float(((gap @ hessian) * gap).sum(dtype=torch.float64))
    whole = float(((before @ hessian) * before).sum(dtype=torch.float64))
    return float((max(lost, 0.0) / whole) ** 0.5) if whole > 0 else 0.0


def _compress(
    weight: Tensor, form: Form, statistics: Statistics | None, recipe: Recipe
) -> tuple[Tensor, float | None, Tensor | None]:
    """The new weight, the damping that SparseGPT ended up with, and the scales of a scheme."""
    check_matrix(weight, "weight")
    new, damping, scales = weight, None, None
    if form.pattern is not None:
        new, damping = _prune(weight, form.pattern, statistics, recipe)
    if form.scheme is not None:
        importance = statistics.input_norm().square() if statistics is not None else None
        scales = weight_scales(new, form.scheme, importance)
        new = round_weight(new, form.scheme, scales)
    return new, damping, scales


def _prune(
    weight: Tensor, pattern: Pattern, statistics: Statistics | None, recipe: Recipe
) -> tuple[Tensor, float | None]:
    if statistics is None or recipe.method == "magnitude":
        return magnitude(weight, pattern), None
    if recipe.method == "wanda":
        return wanda(weight, pattern, statistics.input_norm()), None
    compute = torch.promote_types(weight.dtype, torch.float32)
    factor = statistics.factor(recipe.damping, compute)
    exact = weight.to(compute)
    new = sparsegpt(exact, pattern, factor, block_size=recipe.block_size)
    if recipe.refit:
        new = refit(exact, new, statistics.hessian(), damping=factor.damping, steps=recipe.refit)
    return new.to(weight.dtype), factor.damping


def _words(form: Form) -> tuple[str, str]:
    """Pattern and scheme as a report tells them."""
    pattern = "dense" if form.pattern is None else str(form.pattern)
    return pattern, "" if form.scheme is None else str(form.scheme)


def _note(recipe: Recipe, statistics: Statistics | None, damping: float | None) -> str:
    if statistics is None and recipe.method != "magnitude":
        return f"no calibration token reached it: magnitude instead of {recipe.method}"
    if damping is not None and damping > recipe.damping:
        return f"the Hessian needed damping {damping:g} instead of {recipe.damping:g}"
    if statistics is not None and statistics.stride > 1:
        return f"output error from every {statistics.stride}th token"
    return ""
