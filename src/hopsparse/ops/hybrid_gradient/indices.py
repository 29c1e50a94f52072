"""Ascending positions as two bytes each: the low 16 bits, and how many each 65,536 values have."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import VerificationError

_BITS = 16
_HALF = 1 << (_BITS - 1)  # torch has little arithmetic for uint16; offsets are stored around 0


def chunk_count(n: int) -> int:
    """Numbers that `encode_indices` counts in.

    Example:
        >>> chunk_count(65536), chunk_count(65537)
        (1, 2)
    """
    return -(-n >> _BITS)


def encode_indices(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Code ascending positions below `n`.

    Args:
        indices: int64 [k], ascending, distinct.
        n: Values that they are positions of; more than 2^31 are fine.

    Returns:
        Counts int32 [chunk_count(n)] and offsets int16 [k].

    Example:
        >>> encode_indices(torch.tensor([5, 65536]), 70000)
        (tensor([1, 1], dtype=torch.int32), tensor([-32763, -32768], dtype=torch.int16))
    """
    counts = torch.bincount(indices >> _BITS, minlength=chunk_count(n)).to(torch.int32)
    return counts, ((indices & (2 * _HALF - 1)) - _HALF).to(torch.int16)


def decode_indices(counts: Tensor, offsets: Tensor) -> Tensor:
    """The positions that `encode_indices` was given, int64 [k].

    Raises:
        VerificationError: The counts are not of these offsets; what came is damaged.

    Example:
        >>> decode_indices(*encode_indices(torch.tensor([5, 65536]), 70000))
        tensor([    5, 65536])
    """
    if counts.is_cuda:
        # The host does not wait to look. Of damaged counts some place comes out.
        places = torch.arange(offsets.numel(), device=counts.device)
        chunk = torch.searchsorted(counts.cumsum(0), places, right=True)
        return (chunk.clamp_(max=max(counts.numel() - 1, 0)) << _BITS) + offsets.long() + _HALF
    if int(counts.sum()) != offsets.numel() or bool((counts < 0).any()):
        raise VerificationError(
            f"counts of {int(counts.sum())} positions with {offsets.numel()} offsets",
            need="what encode_indices made",
            hint="run all ranks with one version of hopsparse",
        )
    chunks = torch.arange(counts.numel(), device=counts.device)
    starts = torch.repeat_interleave(chunks << _BITS, counts.long())
    return starts + offsets.long() + _HALF
