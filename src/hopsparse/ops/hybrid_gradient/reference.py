"""What hybrid_gradient means, in torch, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .indices import encode_indices
from .remainder import CODERS, Coder
from .select import largest

# Values that are rounded at a time: what is made of them on the way stays in the L3 cache. Pieces
# that fit the L2 cache took twice as long, because each operation of torch costs 10 us of its own.
_AT_ONCE = 1 << 20


def hybrid_gradient(
    gradient: Tensor, residual: Tensor | None, k: int, remainder: str | None, every: int, phase: int
) -> list[Tensor]:
    """The results of the operator, of arguments that were checked.

    Args:
        gradient: [n], float32, bfloat16 or float16.
        residual: float32 [n], or None.
        k: How many values are taken exactly.
        remainder: One of `CODERS`, or None.
        every: Of how many blocks one is rounded.
        phase: The first of those.
    """
    coder = None if remainder is None else CODERS[remainder]
    n = gradient.numel()
    rest = torch.empty(padded(n, coder), device=gradient.device)
    vector = rest[:n]
    rest[n:] = 0
    torch.add(gradient, 0 if residual is None else residual, out=vector)
    finite = is_finite(rest)
    if not finite:
        rest.zero_()  # the flag says so; a message stays as long
    positions = largest(vector, k)
    values = vector[positions]
    vector[positions] = 0
    codes, scales = take_rounded(rest, coder, every, phase)
    counts, offsets = encode_indices(positions, n)
    flag = torch.tensor([finite], dtype=torch.uint8, device=gradient.device)
    return [values, counts, offsets, codes, scales, rest, flag]


def padded(n: int, coder: Coder | None) -> int:
    """Values of a vector in whole blocks.

    Example:
        >>> padded(130, CODERS["int4"]), padded(130, None)
        (256, 130)
    """
    block = 1 if coder is None else coder.block
    return -(-n // block) * block


def rows_of(n: int, coder: Coder | None, every: int, phase: int) -> int:
    """Blocks of a vector that are rounded.

    Example:
        >>> rows_of(1000, CODERS["int4"], every=3, phase=1)
        3
    """
    return 0 if coder is None else len(range(phase, padded(n, coder) // coder.block, every))


def is_finite(values: Tensor) -> bool:
    """Whether there is no Inf and no NaN in a tensor, without a second one.

    Example:
        >>> is_finite(torch.tensor([1.0, -torch.inf])), is_finite(torch.ones(2))
        (False, True)
    """
    if not values.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def take_rounded(
    whole: Tensor, coder: Coder | None, every: int, phase: int
) -> tuple[Tensor, Tensor]:
    """Round blocks of a vector in whole blocks; what was rounded away stays there.

    Returns:
        Codes uint8 [rows, code_bytes] and scales bfloat16 [rows].
    """
    if coder is None:
        return whole.new_empty((0, 0), dtype=torch.uint8), whole.new_empty(0, dtype=torch.bfloat16)
    blocks = whole.view(-1, coder.block)[phase::every]
    codes = whole.new_empty((len(blocks), coder.code_bytes), dtype=torch.uint8)
    scales = whole.new_empty(len(blocks), dtype=torch.bfloat16)
    for at in pieces(len(blocks), coder):
        codes[at], scales[at] = coder.encode(blocks[at])
        blocks[at] -= coder.decode(codes[at], scales[at])
    return codes, scales


def pieces(rows: int, coder: Coder) -> Iterator[slice]:
    """Slices of blocks that are worked on at a time."""
    most = _AT_ONCE // coder.block
    for first in range(0, rows, most):
        yield slice(first, min(first + most, rows))
