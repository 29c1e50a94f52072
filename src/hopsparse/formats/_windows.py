"""N:M groups as overlapping 2:4 windows.

A group of m columns (m even, at most m - 2 kept) is covered by m/2 - 1 windows of 4 columns that
start 2 columns apart; each window holds at most 2 of the kept entries. Filling the windows from
the left with the leftmost entries still open always succeeds: a window that is not full has taken
everything up to its end, and the windows after it have two slots for every two columns left.
2:4 itself is the case of one window. The idea of sliding windows is from SlideSparse
(arXiv:2603.05232).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import FormatError
from .pattern import NMPattern

_MAX_M = 16


@dataclass(frozen=True, eq=False)
class WindowTable:
    """How each of the 2^m masks of a group is spread over its windows.

    Attributes:
        count: Non-zeros of a mask, uint8 [2^m].
        column: Column inside the group of each slot, int64 [2^m, 2 * windows].
        live: Whether the slot holds a kept entry, bool [2^m, 2 * windows].
        nibble: Index nibble of each window, int32 [2^m, windows].
    """

    count: Tensor
    column: Tensor
    live: Tensor
    nibble: Tensor


def windows_of(pattern: NMPattern) -> int:
    """Number of 2:4 windows a group.

    Raises:
        FormatError: The pattern cannot be covered by 2:4 windows.
    """
    if pattern.m % 2 or pattern.m < 4 or pattern.m > _MAX_M or pattern.n > pattern.m - 2:
        raise FormatError(
            f"pattern {pattern} for the packed 2:4 layout",
            need=f"N:M with M even, 4 <= M <= {_MAX_M} and N <= M - 2",
            hint='2:4, 4:6 or 6:8, or format "bitmask", which stores any pattern',
        )
    return pattern.m // 2 - 1


@lru_cache(maxsize=16)
def window_table(m: int, device: torch.device) -> WindowTable:
    """The table of groups of `m` columns."""
    column4, live4, taken4 = _nibble_table()
    # On the CPU by name: inside `with torch.device(...)` the default is another device, and the
    # table outlives the block.
    masks = torch.arange(1 << m, device="cpu")
    count = sum(((masks >> bit) & 1 for bit in range(m)), torch.zeros_like(masks))
    open_bits, columns, lives, nibbles = masks, [], [], []
    for start in range(0, m - 3, 2):
        inside = (open_bits >> start) & 0xF
        columns.append(column4[inside] + start)
        lives.append(live4[inside])
        nibbles.append(column4[inside, 0] | column4[inside, 1] << 2)
        open_bits = open_bits & ~(taken4[inside] << start)
    return WindowTable(
        count=count.to(torch.uint8).to(device),
        column=torch.cat(columns, dim=1).to(device),
        live=torch.cat(lives, dim=1).to(device),
        nibble=torch.stack(nibbles, dim=1).to(torch.int32).to(device),
    )


def group_masks(live: Tensor, m: int) -> Tensor:
    """Bool [rows, groups * m] -> which of the m columns are live, int64 [rows * groups]."""
    # Two columns at once: the bytes 0 and 1 of a 16-bit word become its bits 0 and 1.
    pairs = live.view(torch.int16).view(-1, m // 2)
    pairs = (pairs | pairs >> 7) & 3
    mask = pairs[:, 0].to(torch.int64)
    for pair in range(1, m // 2):
        mask |= pairs[:, pair].to(torch.int64) << (2 * pair)
    return mask


def _nibble_table() -> tuple[Tensor, ...]:
    """For each 4-bit mask: two columns in rising order, which of them are live, bits taken.

    Missing entries take the lowest free columns: the canonical form. An empty window is (0, 1).
    """
    columns, lives, taken = [], [], []
    for mask in range(16):
        chosen = [bit for bit in range(4) if mask >> bit & 1][:2]
        fill = [bit for bit in range(4) if bit not in chosen][: 2 - len(chosen)]
        pair = sorted(chosen + fill)
        columns.append(pair)
        lives.append([bit in chosen for bit in pair])
        taken.append(sum(1 << bit for bit in chosen))
    return tuple(torch.tensor(part, device="cpu") for part in (columns, lives, taken))
