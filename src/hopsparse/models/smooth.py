"""Take outliers out of inputs that will be rounded, at no cost when the model runs.

A channel that is large in every token makes the step of its token's grid coarse for all others. It
is divided by a number where it is made, and the weights that take it are multiplied by the same
(SmoothQuant, Xiao et al., arXiv:2211.10438). The numbers here are powers of two, so the model
computes the same to the last bit, in any floating dtype, before anything is rounded.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..prune import Activations, Recipe
from ._family import Family
from ._watch import watch_inputs

# How much of the range moves into the weights; 0.5 is the paper's. E4M3 keeps its relative
# precision over 18 binades, so only grids of equal steps gain.
STRENGTH = 0.5
_EQUAL_STEPS = ("int8", "int4")


@torch.no_grad()
def smooth_block(
    block: nn.Module, path: str, activations: Activations, recipe: Recipe, family: Family
) -> list[str]:
    """Rescale inner channels of a dense block in place; what it computes stays the same.

    Args:
        block: A decoder block of `family`, dense.
        path: Its path in the model, for `recipe.form_of`.
        activations: Its inputs.
        recipe: Says whose inputs are rounded.
        family: Which modules make the inputs of which layers.

    Returns:
        Full names of the layers whose inputs are smoother now.
    """
    wanted = {}
    for maker, takers in family.scales:
        schemes = [recipe.form_of(f"{path}.{taker}").scheme for taker in takers]
        if any(scheme and scheme.activations in _EQUAL_STEPS for scheme in schemes):
            wanted[maker] = takers
    peaks: dict[str, Tensor] = {}

    def look(name: str, rows: Tensor) -> None:
        peak = rows.float().abs().amax(0)
        peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

    # The takers of one maker share their input.
    watch_inputs(block, [takers[0] for takers in wanted.values()], activations, look)
    done = []
    for maker, takers in wanted.items():
        if takers[0] in peaks:
            layers = [cast(nn.Linear, block.get_submodule(taker)) for taker in takers]
            _divide(block.get_submodule(maker), layers, powers_of_two(peaks[takers[0]], layers))
            done += [f"{path}.{taker}" for taker in takers]
    return done


def powers_of_two(peaks: Tensor, takers: list[nn.Linear]) -> Tensor:
    """[k] float32: what to divide each channel by, given its largest magnitude.

    `peak ** STRENGTH / weight ** (1 - STRENGTH)`, with the mean exponent taken out, rounded to a
    power of two.
    """
    weights = torch.stack([taker.weight.float().abs().amax(0) for taker in takers]).amax(0)
    live = (peaks > 0) & (weights > 0)
    exponents = STRENGTH * peaks.log2() - (1 - STRENGTH) * weights.log2()
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
