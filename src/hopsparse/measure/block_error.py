"""How far scores of blocks in float32 may be from each other: derived, like all of `measure.error`.

The kernel of score_blocks rounds less than its slack allows for: twice a centre once, a reach
three times; 16 fused products of a lane; sums over at most 32 lanes; one addition more. The
reference sums in float64, and rounds products, their sum and the slack: six times. Where the tensor
cores sum, what they cut comes on top, 2.5 units a dimension (`reference.slack_factor` of
score_blocks derives it); their kernel rounds less otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .error import gamma, unit_roundoff

_ROUNDINGS = 3 + 16 + 5 + 1 + 6 + 1  # and one for 1 + slack, which is below 1 + 1/32
_OF_MASS = 16  # units that the kernel of "mass" adds, since it may have lost as many


def score_error(size: Tensor, tensor_dim: int = 0) -> Tensor:
    """Largest difference of two scores of a block, of its bound, its range or its mean.

    Args:
        size: float64: sum over dimensions of |scale q| times the largest magnitude of a key.
        tensor_dim: Dimensions that the tensor cores sum; 0: they do not.

    Example:
        >>> bool(score_error(torch.ones(1).double()) < 4e-6)
        True
    """
    tiny = torch.finfo(torch.float32).tiny
    return gamma(_ROUNDINGS + -(-5 * tensor_dim // 2), torch.float32) * size.double() + tiny


def mass_error(low: Tensor, high: Tensor, counts: Tensor) -> Tensor:
    """How far the log of a mass may be above what its range and mean say.

    Quotients, exp, log and their sums lose less than 16 units of each number that goes in; the
    kernel adds as many. Then it is rounded to float32.

    Args:
        low: float64, the least score of a key.
        high: The largest.
        counts: Keys of the block.

    Example:
        >>> zero = torch.zeros(1).double()
        >>> bool(mass_error(zero, zero, zero + 1) < 3e-6)
        True
    """
    unit = unit_roundoff(torch.float32)
    size = 1 + low.abs() + high.abs() + counts.clamp(min=1).double().log()
    return (2 * _OF_MASS + 2) * unit * size


def shared_error(scores: Tensor, whole: Tensor) -> Tensor:
    """Largest error of scores less the log of the sum of exp of all of them.

    An exp is off by 4 units and 2 for each unit of its exponent x, which weighs x exp(-x); sums of
    n terms add n, twice where parts are merged; log, sum and difference round once more.

    Args:
        scores: float64 [..., n].
        whole: float64 [..., 1].

    Example:
        >>> scores = torch.zeros(4).double()
        >>> bool((shared_error(scores, scores.logsumexp(-1, True)) < 1e-5).all())
        True
    """
    unit = unit_roundoff(torch.float32)
    terms = gamma(2 * scores.shape[-1] + 64, torch.float32)
    return terms + 4 * unit * (whole.abs() + scores.abs())
