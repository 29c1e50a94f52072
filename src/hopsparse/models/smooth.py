"""Take outliers out of inputs that will be rounded, at no cost when the model runs.

A channel that is large in every token makes the step of its token's grid coarse for all others. It
is divided by a number where it is made, and the weights that take it are multiplied by the same
(SmoothQuant, Xiao et al., arXiv:2211.10438). The numbers here are powers of two, so the model
computes the same to the last bit before anything is rounded, short of what float16 cannot hold.
How much of the range moves is chosen for each input: what rounds it and its weights to the least
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from ..formats import Scheme
from ..prune import Activations, Recipe
from ..quant import InputPeak, round_inputs, round_weight
from ._family import Family
from ._watch import watch_inputs

# How much of the range moves into the weights; the paper takes 0.5 for most models.
STRENGTHS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
# Tokens on which strengths are compared: an error that is a mean over all entries needs few.
TOKENS = 256
# E4M3 keeps its relative precision over 18 binades, so only grids of equal steps gain.
_EQUAL_STEPS = ("int8", "int4")


@torch.no_grad()
def smooth_block(
    block: nn.Module, path: str, activations: Activations, recipe: Recipe, family: Family
) -> None:
    """Rescale inner channels of a dense block in place; what it computes stays the same.

    Args:
        block: A decoder block of `family`, dense.
        path: Its path in the model, for `recipe.form_of`.
        activations: Its inputs.
        recipe: Says whose inputs are rounded.
        family: Which modules make the inputs of which layers.
    """
    wanted = []
    for maker, takers in family.scales:
        schemes = [recipe.form_of(f"{path}.{taker}").scheme for taker in takers]
        if any(scheme and scheme.activations in _EQUAL_STEPS for scheme in schemes):
            wanted.append((maker, takers, schemes))
    # The takers of one maker share their input.
    seen = {takers[0]: Inputs(-(-TOKENS // len(activations))) for _, takers, _ in wanted}
    watch_inputs(block, list(seen), activations, lambda name, rows: seen[name].add(rows))
    for maker, takers, schemes in wanted:
        inputs = seen[takers[0]]
        if inputs.rows:
            layers = [cast(nn.Linear, block.get_submodule(taker)) for taker in takers]
            factors = best_factors(inputs, layers, schemes)
            if bool((factors != 1).any()):
                _divide(block.get_submodule(maker), layers, factors)


@dataclass
class Inputs:
    """What a layer gets: the largest magnitude of each channel, and some of the tokens.

    Attributes:
        each: Rows that are kept of every call, evenly spread.
        rows: [n, k] float32 each.
        peaks: [k], over all tokens; None before the first.
    """

    each: int
    rows: list[Tensor] = field(default_factory=list)
    peaks: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Look at more tokens, [n, k]."""
        if not len(rows):
            return
        peaks = rows.abs().amax(0).float()
        self.peaks = peaks if self.peaks is None else torch.maximum(self.peaks, peaks)
        self.rows.append(rows[:: -(-len(rows) // self.each)].float())


def best_factors(
    inputs: Inputs, takers: Sequence[nn.Linear], schemes: Sequence[Scheme | None]
) -> Tensor:
    """[k] float32, powers of two: what to divide each channel by so that least is lost.

    Args:
        inputs: Of all takers.
        takers: The layers.
        schemes: How each is rounded; None: it is not.

    Returns:
        Factors; all 1 if no strength loses less.
    """
    assert inputs.peaks is not None
    x = torch.cat(inputs.rows)
    candidates = [powers_of_two(inputs.peaks, takers, strength) for strength in STRENGTHS]
    candidates.insert(0, torch.ones_like(inputs.peaks))
    lost = [0.0] * len(candidates)
    for layer, scheme in zip(takers, schemes, strict=True):
        if scheme is not None:
            weight = layer.weight.float()
            exact = x @ weight.t()
            for index, factors in enumerate(candidates):
                scale = _static_scale(inputs.peaks / factors, scheme)
                moved = round_inputs(x / factors, scheme, scale)
                made = moved @ round_weight(weight * factors, scheme).t()
                lost[index] += _relative_error(made, exact)
    return candidates[lost.index(min(lost))]


def _static_scale(peaks: Tensor, scheme: Scheme) -> Tensor | None:
    """What a static scheme would measure; None: every token has its own scale."""
    if not scheme.static:
        return None
    peak = InputPeak()
    peak.add(peaks)
    return peak.scale(scheme)


def _relative_error(made: Tensor, exact: Tensor) -> float:
    """Squared error relative to the size of the output, summed over tokens.

    Relative in every token: a few tokens are a hundred times as large as all others, and would
    choose alone.
    """
    error, size = (made - exact).square().sum(-1), exact.square().sum(-1)
    return float((error / size.clamp_min(torch.finfo(torch.float32).tiny)).sum())


def powers_of_two(peaks: Tensor, takers: Sequence[nn.Linear], strength: float) -> Tensor:
    """[k] float32: what to divide each channel by, given its largest magnitude.

    `peak ** strength / weight ** (1 - strength)`, with the mean exponent taken out, rounded to a
    power of two.
    """
    weights = torch.stack([taker.weight.float().abs().amax(0) for taker in takers]).amax(0)
    live = (peaks > 0) & (weights > 0)
    exponents = strength * peaks.log2() - (1 - strength) * weights.log2()
    exponents = torch.where(live, exponents, torch.zeros_like(exponents))
    exponents -= exponents.sum() / live.sum().clamp_min(1)
    return torch.where(live, exponents.round().clamp_(-16, 16), torch.zeros_like(exponents)).exp2()


def _divide(maker: nn.Module, takers: list[nn.Linear], by: Tensor) -> None:
    """Divide what `maker` makes, and multiply what takes it."""
    weight = cast(nn.Parameter, maker.weight)
    weight.div_(by.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)))
    bias = getattr(maker, "bias", None)
    if isinstance(bias, Tensor):
        bias.div_(by.to(bias.dtype))
    for taker in takers:
        taker.weight.mul_(by.to(taker.weight.dtype))
