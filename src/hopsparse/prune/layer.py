"""One layer: its statistics and the recipe in, new weights and a report out."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HopsparseError
from ..formats.scheme import Form
from .fit import Fitted, fit, output_error
from .recipe import LayerReport, Recipe
from .statistics import Statistics

HOLDOUT = 8  # every eighth token chooses the damping, where it is searched
SAMPLED_STRIDE = 16  # methods that need no Hessian measure their error on every 16th token


def new_statistics(inputs: Tensor, recipe: Recipe) -> Statistics:
    """Empty statistics of what the recipe's method needs, for inputs like these."""
    stride = 1 if recipe.method == "sparsegpt" else SAMPLED_STRIDE
    holdout = HOLDOUT if stride == 1 and recipe.damping == "search" else 0
    return Statistics(inputs.shape[-1], inputs.device, stride, holdout)


def prune_layer(
    name: str,
    layer: nn.Module,
    statistics: Statistics | None,
    recipe: Recipe,
    *,
    store_dtype: torch.dtype | None = None,
    scales_out: dict[str, Tensor] | None = None,
) -> LayerReport:
    """Replace the weight of one nn.Linear in place, and correct its bias if it has one.

    Without statistics (or tokens) every method falls back to magnitude, so that the pattern holds
    in every layer, and the note says so. A layer that `recipe.keep` names stays as it is.

    Args:
        name: Full name, for `recipe.keep`, the report and errors.
        layer: An nn.Linear; weight [out, k].
        statistics: Of its inputs.
        recipe: What to do.
        store_dtype: Round the new weight (unless a scheme has a grid) and bias to what this holds.
        scales_out: Where the form has a scheme, its scales [out, groups] go to `scales_out[name]`.

    Raises:
        ArgumentError: Not an nn.Linear, or its weight is not finite.
        CalibrationError: Statistics that cannot be used.

    Example:
        >>> prune_layer("head", nn.Linear(8, 2), None, Recipe("2:4", method="magnitude")).density
        0.5
    """
    if not isinstance(layer, nn.Linear):
        got = f"layer {name} is a {type(layer).__name__}"
        raise ArgumentError(got, need="nn.Linear", hint="leave it out")
    shape = (layer.out_features, layer.in_features)
    form = recipe.form_of(name)
    pattern, scheme = _words(form)
    if form == Form():
        return LayerReport(name, shape, pattern, "dense", 1.0, 0.0, 0, None, 0.0, "kept dense")
    begin = time.perf_counter()
    usable = statistics if statistics is not None and statistics.tokens else None
    fitted = _fit(name, layer, form, usable, recipe)
    if fitted.scales is not None and scales_out is not None:
        scales_out[name] = fitted.scales
    new = fitted.weight_in(store_dtype)
    seconds = time.perf_counter() - begin
    lost = output_error(layer.weight.detach(), new, usable, name) if usable else None
    fitted.put(layer, new, store_dtype)
    return LayerReport(
        name=name,
        shape=shape,
        pattern=pattern,
        method=recipe.method if usable else "magnitude",
        density=float((new != 0).float().mean(dtype=torch.float64)),
        output_error=lost,
        tokens=usable.tokens if usable else 0,
        damping=fitted.damping,
        seconds=seconds,
        note=_note(recipe, usable, fitted),
        scheme=scheme,
    )


def _fit(
    name: str, layer: nn.Linear, form: Form, statistics: Statistics | None, recipe: Recipe
) -> Fitted:
    """Give the weight of the layer its form; an error names the layer."""
    weight, biased = layer.weight.detach(), layer.bias is not None
    try:
        return fit(name, weight, form, statistics, recipe, biased=biased)
    except HopsparseError as error:
        raise type(error)(f"layer {name}: {error.got}", need=error.need, hint=error.hint) from None


def _words(form: Form) -> tuple[str, str]:
    """Pattern and scheme as a report tells them."""
    pattern = "dense" if form.pattern is None else str(form.pattern)
    return pattern, "" if form.scheme is None else str(form.scheme)


def _note(recipe: Recipe, statistics: Statistics | None, fitted: Fitted) -> str:
    if statistics is None and recipe.method != "magnitude":
        return f"no calibration token reached it: magnitude instead of {recipe.method}"
    if fitted.damping != fitted.asked:
        return f"the Hessian needed damping {fitted.damping:g} instead of {fitted.asked:g}"
    if statistics is not None and statistics.stride > 1:
        return f"output error from every {statistics.stride}th token"
    return ""
