"""The k values of largest magnitude, exactly, in little more than one pass over the data.

The k-th largest of the maxima of blocks is at most the k-th largest value, because those maxima are
k values themselves. It is a threshold that nothing chosen lies below, and only blocks whose
maximum reaches it are looked at again: k of them, and ties. A quantile of a random sample would be
as quick, but may lie too high; this one cannot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError

# Blocks of 64 read 1.6 values again for each that is skipped at k = 0.1 %; longer ones save little,
# because by then the pass over the data is what costs.
_BLOCK = 64
# With fewer blocks for each chosen value the second look costs as much as a look at everything.
_BLOCKS_EACH = 4
_LEAST_BLOCK = 8


def largest(values: Tensor, k: int) -> Tensor:
    """Where the `k` values of largest magnitude are; of equal ones the first.

    Args:
        values: [n], finite, floating-point.
        k: How many, 0 to n.

    Returns:
        int64 [k], ascending.

    Raises:
        ArgumentError: `values` is no vector, or k is more than it has.

    Example:
        >>> largest(torch.tensor([1.0, -3.0, 2.0, 3.0, -3.0]), 2)
        tensor([1, 3])
    """
    _check(values, k)
    n = values.numel()
    if k in (0, n):
        return torch.arange(k, device=values.device)
    block = _block_of(n, k)
    if block < _LEAST_BLOCK:
        return _exactly(values.abs(), k).nonzero().flatten()
    positions = _candidates(values, k, block)
    return positions[_exactly(values[positions].abs(), k)]


def _check(values: Tensor, k: int) -> None:
    if values.ndim != 1 or not values.is_floating_point():
        raise ArgumentError(
            f"values of shape {list(values.shape)}, {values.dtype}",
            need="a vector of floating-point numbers",
            hint="values.flatten()",
        )
    if not 0 <= k <= values.numel():
        raise ArgumentError(
            f"k = {k} of {values.numel()} values",
            need="0 to the number of values",
            hint=f"k = {max(0, min(k, values.numel()))}",
        )


def _block_of(n: int, k: int) -> int:
    """Values of a block: a power of two that leaves `_BLOCKS_EACH` blocks for each chosen value."""
    most = n // (_BLOCKS_EACH * k)
    return min(_BLOCK, 1 << (most.bit_length() - 1)) if most else 0


def _candidates(values: Tensor, k: int, block: int) -> Tensor:
    """Where values may be chosen, ascending: all of those that reach the threshold are there."""
    whole = values.numel() // block * block
    maxima = values[:whole].view(-1, block).abs().amax(1)
    threshold = torch.topk(maxima, k, sorted=False).values.min()
    blocks = (maxima >= threshold).nonzero()
    inside = torch.arange(block, device=values.device)
    tail = torch.arange(whole, values.numel(), device=values.device)
    positions = torch.cat([(blocks * block + inside).flatten(), tail])
    return positions[values[positions].abs() >= threshold]


def _exactly(magnitudes: Tensor, k: int) -> Tensor:
    """A mask of the k largest; of those equal to the smallest of them, the first."""
    least = torch.topk(magnitudes, k, sorted=False).values.min()
    chosen = magnitudes > least
    missing = k - int(chosen.sum())
    chosen[(magnitudes == least).nonzero().flatten()[:missing]] = True
    return chosen
