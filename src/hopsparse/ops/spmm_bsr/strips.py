"""A block-sparse weight as the kernel reads it: strips of 64 or 128 rows, each a list of steps.

A step is 64 columns of a strip: one place of k where blocks are 64 wide, two or four places where
they are narrower. A strip has a place where any of its blocks keeps something there; what its
other blocks have there is zeros. So lower blocks cost more work than they hold: `Strips.filled`
says how much of what is multiplied was stored. A weight may be laid out in wider places, or in
higher strips, than its blocks need: where neighbouring blocks are mostly kept together, that costs
few zeros and saves copies.

Made once, on the device of the weight, and the same on every device: tests read it on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd

import torch
from torch import Tensor

from ...formats.bsr import BSR
from .kernel import PANEL, STEP, WIDTHS

_CHUNK_BYTES, _ATOM = (
    16,
    8,
)  # what the 128-byte swizzle permutes, and the rows after which it recurs


def width_of(block: tuple[int, int]) -> int | None:
    """Columns that are gathered together for blocks of these sides; None if no kernel can.

    Example:
        >>> width_of((128, 128)), width_of((16, 48)), width_of((8, 8))
        (64, 16, None)
    """
    for width in WIDTHS:  # A loop, which torch.compile follows everywhere.
        if block[1] % width == 0:
            return width
    return None


def panels_of(block: tuple[int, int]) -> int:
    """Panels of 64 rows that have their columns in common.

    Example:
        >>> panels_of((128, 128)), panels_of((64, 64)), panels_of((192, 64))
        (2, 1, 1)
    """
    return 2 if block[0] % (2 * PANEL) == 0 and block[1] % STEP == 0 else 1


@dataclass(frozen=True, eq=False)
class Strips:
    """Where the steps of a weight come from; nothing in it changes when values do.

    Attributes:
        panels: Panels of 64 rows of a strip.
        width: Columns of a place of k.
        columns: First column of each place, int32 [steps, places of a step].
        source: Which runs of `run` stored values each place of each row has, int32
            [steps, places, rows of a strip, width / run]; one past the last where it has none.
        table: Strip, its first step and its number of steps, 0: int32 [strips, 4], the longest
            first; equal ones in order.
        lengths: The third column of it, on the CPU.
        kept: Values of the places that were stored, padding left out.
        run: Columns of a place that lie side by side where they are stored: `width`, or less where
            blocks are narrower than places.
    """

    panels: int
    width: int
    columns: Tensor
    source: Tensor
    table: Tensor
    lengths: Tensor
    kept: int
    run: int

    @property
    def rows(self) -> int:
        """Rows of a strip."""
        return PANEL * self.panels

    @cached_property
    def steps(self) -> int:
        """Of all strips."""
        return int(self.lengths.sum())

    @property
    def filled(self) -> float:
        """Part of what is multiplied that was stored."""
        return self.kept / (self.steps * self.rows * STEP)

    def pack(self, values: Tensor) -> Tensor:
        """The weights of all steps, as wgmma reads them from shared memory.

        Args:
            values: As `BSR.values`, of 16 bits.

        Returns:
            [steps, rows of a strip, 64], each row's eight chunks of 16 bytes permuted: chunk c of
            row r is at c ^ (r % 8).
        """
        bits = values.detach().contiguous().view(torch.int16).view(-1, self.run)
        runs = torch.cat([bits, bits.new_zeros(1, self.run)])
        rows = runs[self.source.long().flatten()].view(*self.source.shape[:3], self.width)
        rows = rows.transpose(1, 2).reshape(-1, _ATOM, _ATOM, _CHUNK_BYTES // 2)
        place = torch.arange(_ATOM, device=bits.device)
        swizzled = rows[:, place[:, None], place[None, :] ^ place[:, None]]
        return swizzled.reshape(-1, self.rows, STEP).view(values.dtype)


def strips_of(w: BSR, panels: int | None = None, width: int | None = None) -> Strips:
    """Lay out a weight whose blocks are of a multiple of 16 columns.

    Reads counts back from the device of w.

    Args:
        w: [out, k], in any dtype.
        panels: Panels of 64 rows of a strip; None is what blocks have in common.
        width: Columns of a place, one of `WIDTHS`; None is what blocks have side by side.

    Example:
        >>> w = BSR.from_dense(torch.eye(128, dtype=torch.bfloat16), (64, 64))
        >>> strips_of(w).table.tolist()
        [[0, 0, 1, 0], [1, 1, 1, 0]]
        >>> strips_of(w, panels=2).table.tolist()
        [[0, 0, 2, 0]]
    """
    panels, width = panels or panels_of(w.block), width or width_of(w.block)
    assert width is not None  # `op.why_no_kernel` was asked.
    rows, places = PANEL * panels, STEP // width
    strip_count, place_count = ceil(w.shape[0] / rows), ceil(w.shape[1] / width)
    columns_of_run = gcd(width, w.block[1])
    parts = width // columns_of_run
    row, strip, column, run = _runs(w, rows, columns_of_run)
    place, part = column // parts, column % parts
    keys, of_run = torch.unique(strip * place_count + place, return_inverse=True)
    used = torch.bincount(keys // place_count, minlength=strip_count)
    lengths = steps_of(used, places)
    first = lengths.cumsum(0) - lengths
    rank = (
        torch.arange(keys.numel(), device=keys.device)
        - (used.cumsum(0) - used)[keys // place_count]
    )
    slot = first[keys // place_count] * places + rank
    steps = int(lengths.sum())
    columns = torch.zeros(steps * places, dtype=torch.int32, device=w.device)
    columns[slot] = (keys % place_count * width).to(torch.int32)
    nothing = w.values.numel() // columns_of_run
    source = torch.full((steps * places, rows, parts), nothing, dtype=torch.int32, device=w.device)
    source[slot[of_run], row, part] = run.to(torch.int32)
    order = lengths.argsort(descending=True, stable=True)
    table = torch.stack([order, first[order], lengths[order], torch.zeros_like(order)], 1)
    return Strips(
        panels,
        width,
        columns.view(steps, places),
        source.view(steps, places, rows, parts),
        table.to(torch.int32).contiguous(),
        lengths[order].cpu(),
        run.numel() * columns_of_run,
        columns_of_run,
    )


def steps_of(used: Tensor, places: int) -> Tensor:
    """Steps of strips that have so many places.

    One at least, of zeros: whoever stores a strip has multiplied something.

    Example:
        >>> steps_of(torch.tensor([0, 4, 5]), 4).tolist()
        [1, 1, 2]
    """
    return ((used + places - 1) // places).clamp_min(1)


def _runs(w: BSR, rows: int, run: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every run of stored values inside w: row of its strip, strip, column in runs, number."""
    (height, block_width), (out, k) = w.block, w.shape
    device, of_row = w.device, block_width // run
    kept = (w.indices >= 0).nonzero()[:, 0]
    block_row = torch.repeat_interleave(w.indptr.diff())[kept]
    inner = torch.arange(height, device=device)
    piece = torch.arange(of_row, device=device)
    row = (block_row[:, None] * height + inner)[:, :, None].expand(-1, -1, of_row)
    column = (w.indices[kept].long()[:, None] * of_row + piece)[:, None, :].expand(-1, height, -1)
    number = (kept[:, None] * height + inner)[:, :, None] * of_row + piece
    inside = (row < out) & (column * run < k)
    row, column, number = row[inside], column[inside], number[inside]
    return row % rows, row // rows, column, number
