"""The walk of spmm_bsr's kernel over a laid-out weight, step by step, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hopsparse.ops.spmm_bsr.kernel import Config
from hopsparse.ops.spmm_bsr.schedule import blocks, items, raster_group, token_tiles
from hopsparse.ops.spmm_bsr.strips import Strips


def unswizzled(packed: Tensor) -> Tensor:
    """Steps as rows of 64 columns: the 16-byte chunk c of row r is read where wgmma looks for it.

    A 128-byte swizzle: bits 4 to 6 of an address are those of the chunk xor bits 7 to 9.
    """
    steps, rows, _ = packed.shape
    flat = packed.reshape(steps, -1)
    byte = torch.arange(rows)[:, None] * 128 + torch.arange(64)[None, :] * 2
    address = byte ^ (byte >> 7 & 7) << 4
    return flat[:, address.flatten() // 2].view(steps, rows, 64)


def walked(
    strips: Strips, packed: Tensor, x: Tensor, out: int, config: Config, grid: int
) -> Tensor:
    """y in float64, item by item as the blocks of a grid have them; NaN where nothing was stored.

    Args:
        strips: The layout.
        packed: Its weights.
        x: [tokens, k].
        out: Rows of the weight.
        config: The tile.
        grid: Blocks.
    """
    tokens, k = x.shape
    tiles = token_tiles(config, tokens)
    ranks, tile = items(strips.lengths.numel(), tiles, raster_group(config, tokens))
    owner, dense = blocks(ranks.numel(), grid), unswizzled(packed).double()
    # What the copy engine finds outside of x is zero.
    padded = torch.zeros(tokens, k + 64, dtype=torch.float64)
    padded[:, :k] = x.double()
    y = torch.full((tokens, out), float("nan"), dtype=torch.float64)
    for block in range(grid):
        for item in (owner == block).nonzero()[:, 0].tolist():
            strip, first, count, _ = strips.table[ranks[item]].tolist()
            token = min(int(tile[item]) * config.tokens, max(0, tokens - config.tokens))
            rows = slice(token, min(tokens, token + config.tokens))
            sums = torch.zeros(rows.stop - rows.start, strips.rows, dtype=torch.float64)
            for step in range(first, first + count):
                places = strips.columns[step].tolist()
                columns = [place + i for place in places for i in range(strips.width)]
                sums += padded[rows][:, columns] @ dense[step].T
            outs = slice(strip * strips.rows, min(out, (strip + 1) * strips.rows))
            y[rows, outs] = sums[:, : outs.stop - outs.start]
    return y
