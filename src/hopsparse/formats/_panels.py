"""Order of kept values and 2:4 indices for wgmma.sp: the packed layout of docs/formats.md.

A panel is 64 rows, the M of one instruction. Inside it, k advances in steps of one instruction
(32 logical columns for 16-bit values, 64 for 8-bit); a step holds 32 bytes of kept values a row.

Values: [panels, steps, 8, 2, 8, chunk]. A step is 8 x 2 core matrices of 8 rows x 16 bytes, each
128 bytes in one piece: an unswizzled shared-memory descriptor reads them as they are, and
lane l of a warp finds its register fragment in word l of a core matrix.

Indices: [panels, units, 128] int32. A unit is 64 logical columns; word t belongs to thread t of
the warpgroup, so one coalesced 4-byte load feeds two 16-bit steps (selectors 0 and 1) or one
8-bit step. Where an instruction finds its bits (PTX ISA, sparse wgmma metadata), with
w = t / 32, r = t % 32 / 4, q = t % 4:
    16-bit: rows 16w + r (low half) and 16w + r + 8 (high half), columns 16q .. 16q + 15
     8-bit: row 16w + r + 8 (q & 1), columns 32 (q >> 1) .. 32 (q >> 1) + 31
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

PANEL_ROWS = 64
UNIT_COLS = 64
_WARPS, _ROWS = 4, 8


def chunk_elements(itemsize: int) -> int:
    """Kept values of one row of a core matrix: 16 bytes of 8-bit or 16-bit values.

    32-bit values, which no sparse kernel reads, keep the order of the 16-bit ones.
    """
    return 16 if itemsize == 1 else 8


def value_shape(panels: int, units: int, itemsize: int) -> tuple[int, ...]:
    """Shape of the values of `panels` x `units` (64 x 64 logical) tiles."""
    chunk = chunk_elements(itemsize)
    return (panels, units * UNIT_COLS // (4 * chunk), _ROWS, 2, 8, chunk)


def tile_values(kept: Tensor) -> Tensor:
    """[64 P, 32 U] kept values, row-major -> `value_shape` order."""
    panels, chunk = kept.shape[0] // PANEL_ROWS, chunk_elements(kept.element_size())
    return kept.view(panels, _ROWS, 8, -1, 2, chunk).permute(0, 3, 1, 4, 2, 5)


def untile_values(values: Tensor) -> Tensor:
    """The inverse of `tile_values`."""
    panels, steps, _, _, _, chunk = values.shape
    kept = values.permute(0, 2, 4, 1, 3, 5)
    return kept.reshape(panels * PANEL_ROWS, steps * 2 * chunk)


def tile_nibbles(nibbles: Tensor, itemsize: int) -> Tensor:
    """[64 P, 16 U] index nibbles, one a group of 4 columns -> [P, U, 128] words."""
    panels, units = nibbles.shape[0] // PANEL_ROWS, nibbles.shape[1] * 4 // UNIT_COLS
    if itemsize == 1:
        # panel, warp, row + 8, row, unit, half of the columns, nibble
        fields = nibbles.view(panels, _WARPS, 2, _ROWS, units, 2, 8)
        words = _or_shifted([fields[..., i] for i in range(8)], step=4)
        words = words.permute(0, 4, 1, 3, 5, 2)
    else:
        # panel, warp, row + 8, row, unit, quarter of the columns, nibble
        fields = nibbles.view(panels, _WARPS, 2, _ROWS, units, 4, 4)
        halves = _or_shifted([fields[..., i] for i in range(4)], step=4)
        words = _or_shifted([halves[:, :, 0], halves[:, :, 1]], step=16)
        words = words.permute(0, 3, 1, 2, 4)
    return words.reshape(panels, units, 128)


def untile_nibbles(meta: Tensor, itemsize: int) -> Tensor:
    """The inverse of `tile_nibbles`."""
    panels, units, _ = meta.shape
    if itemsize == 1:
        words = meta.view(panels, units, _WARPS, _ROWS, 2, 2).permute(0, 2, 5, 3, 1, 4)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=meta.device)
        nibbles = (words[..., None] >> shifts) & 0xF
    else:
        words = meta.view(panels, units, _WARPS, _ROWS, 4).permute(0, 2, 3, 1, 4)
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=meta.device)
        halves = torch.stack((words, words >> 16), dim=2)
        nibbles = (halves[..., None] >> shifts) & 0xF
    return nibbles.reshape(panels * PANEL_ROWS, units * UNIT_COLS // 4)


def _or_shifted(fields: list[Tensor], step: int) -> Tensor:
    return reduce(
        torch.bitwise_or, (field << (step * i) for i, field in enumerate(fields[1:], 1)), fields[0]
    )
