"""Numbers whose products and sums are exact, so that a kernel has no excuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar

import torch
from torch import Tensor

from ..formats import BlockPattern, NMPattern, Pattern

_Problem = TypeVar("_Problem")
# Of one kind of numbers, which the checks of all tiles take before those of the next kind.
_MOST_KEPT = 8


def made_once(make: Callable[..., _Problem]) -> Callable[..., _Problem]:
    """Keep the last problems: every tile takes the same, and making one takes longer than a tile.

    Its numbers follow from the arguments alone, whichever check asks first. What has it must not
    write into it.

    Args:
        make: Makes a problem of random numbers of the CPU; its arguments are hashable.

    Example:
        >>> problem = made_once(lambda size: torch.randn(size))
        >>> problem(3) is problem(3), problem(3).shape
        (True, torch.Size([3]))
    """

    @lru_cache(maxsize=_MOST_KEPT)
    def made(*facts: Hashable) -> _Problem:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(sum(repr(facts).encode()))
            return make(*facts)

    @wraps(make)
    def kept(*facts: Hashable) -> _Problem:
        return made(*facts)

    return kept


def small_integers(shape: tuple[int, ...], dtype: torch.dtype, largest: int = 2) -> Tensor:
    """Random integers of at most that magnitude, on the CPU.

    Example:
        >>> bool(small_integers((2, 3), torch.float16).abs().max() <= 2)
        True
    """
    return torch.randint(-largest, largest + 1, shape).to(dtype)


def dense_weight(
    shape: tuple[int, int], pattern: Pattern, dtype: torch.dtype, largest: int = 3
) -> Tensor:
    """Random small integers [out, k] with the zeros of a pattern, none of them always at one place.

    Example:
        >>> w = dense_weight((4, 8), NMPattern(2, 4), torch.float16)
        >>> bool(((w.view(4, 2, 4) != 0).sum(-1) <= 2).all())
        True
    """
    out, k = shape
    if isinstance(pattern, NMPattern):
        groups = -(-k // pattern.m)
        rank = torch.rand(out, groups, pattern.m).argsort(-1)
        kept = (rank < pattern.n).flatten(1)[:, :k]
    elif isinstance(pattern, BlockPattern):
        blocks = torch.rand(-(-out // pattern.rows), -(-k // pattern.cols)) > pattern.sparsity
        whole = blocks.repeat_interleave(pattern.rows, 0).repeat_interleave(pattern.cols, 1)
        kept = whole[:out, :k]
    else:
        kept = torch.rand(shape) > pattern.sparsity
    return (small_integers(shape, torch.int64, largest) * kept).to(dtype)


def wide_integers(x: Tensor, w: Tensor) -> Tensor:
    """The product x [tokens, k] by w [out, k] in float64, where float32 is exact in any order.

    Raises:
        AssertionError: It is not: the inputs are no small integers.

    Example:
        >>> wide_integers(torch.ones(1, 2), torch.ones(1, 2)).item()
        2.0
    """
    x, w = x.double(), w.double()
    size = x.abs() @ w.abs().T
    assert not size.numel() or float(size.max()) < 2**24, "sums that float32 may round"
    return x @ w.T
