"""The kernel of tiles in Python: the same words, counts, fragments and sums, warp by warp.

It follows tiles.cuh, with the layouts of mma.m16n8k16 as the PTX manual gives them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopsparse.ops.spmm_csr.packed import Packed, rows_for_lanes
from hopsparse.ops.spmm_csr.tiles import PIECE, UNIT, WARPS, token_tiles

_LANE = np.arange(32)
_G, _T = _LANE // 4, _LANE % 4
# Rows and columns of a lane's eight numbers in A [16, 16], four in B [16, 8] and in C [16, 8].
A_AT = [(_G + i // 2 % 2 * 8, 2 * _T + i // 4 * 8 + i % 2) for i in range(8)]
B_AT = [(2 * _T + i // 2 * 8 + i % 2, _G) for i in range(4)]
C_AT = [(_G + i // 2 * 8, 2 * _T + i % 2) for i in range(4)]


def walk(w: Packed, x: Tensor) -> Tensor:
    """The product x @ w.T in float32; NaN where nothing is stored."""
    tokens, tiles = x.shape[0], token_tiles(x.shape[0])
    laid = rows_for_lanes(x)
    assert laid.stride(0) % 4 == 0
    assert laid.shape[1] % 4 == 0
    y = np.full((tokens, w.shape[0]), np.nan, np.float32)
    for panel in range(-(-w.shape[0] // UNIT)):
        for token in range(0, tokens, 8 * tiles):
            _block(w, laid.float().numpy(), y, panel, (token, tiles))
    return torch.from_numpy(y)


def _block(w: Packed, x: np.ndarray, y: np.ndarray, panel: int, has: tuple[int, int]) -> None:
    units, (token, tiles) = w.units, has
    shared = np.full((WARPS, tiles * 8, UNIT), np.nan, np.float32)
    for warp in range(WARPS):
        first, last = (panel * units + (warp + i) * units // WARPS for i in (0, 1))
        sums = np.zeros((4, tiles, 16, 8), np.float32)
        for unit in range(first, last):
            _unit(w, sums, x[token:], unit, unit - panel * units)
        for strip in range(4):
            for tile in range(tiles):
                for row, col in C_AT:
                    at = (warp, tile * 8 + col, strip * 16 + row)
                    assert np.isnan(shared[at]).all()
                    shared[at] = sums[strip, tile][row, col]
    for of_block in range(min(tiles * 8, len(y) - token)):
        rows = slice(panel * UNIT, min(panel * UNIT + UNIT, y.shape[1]))
        assert np.isnan(y[token + of_block, rows]).all()
        y[token + of_block, rows] = shared[:, of_block].sum(0)[: rows.stop - rows.start]


def _unit(w: Packed, sums: np.ndarray, x: np.ndarray, unit: int, of_panel: int) -> None:
    words, prefixes = w.words[unit].numpy(), w.prefixes[unit].numpy()
    start, end = (int(w.starts[unit + i]) * PIECE for i in (0, 1))
    values = w.values[start:end].float().numpy()
    assert end - start <= w.room
    for column in range(4):
        for strip in range(4):
            a = np.zeros((16, 16), np.float32)
            for lane in range(32):
                word = int(words[column, lane // 4, strip]) & 0xFFFFFFFF
                shift = lane % 4 * 8
                at = int(prefixes[column, lane // 4, strip])
                at += (word & ((1 << shift) - 1)).bit_count()
                for i, (row, col) in enumerate(A_AT):
                    if word >> shift & 1 << i:
                        a[row[lane], col[lane]] = values[at]
                        at += 1
            for tile in range(sums.shape[1]):
                sums[strip, tile] += a @ _tokens(x, of_panel * 64 + column * 16, tile * 8)


def _tokens(x: np.ndarray, column: int, token: int) -> np.ndarray:
    b = np.zeros((16, 8), np.float32)
    for lane in range(32):
        own, first = token + _G[lane], column + _T[lane] * 4
        if own < len(x) and first < x.shape[1]:
            for i, (row, col) in enumerate(B_AT):
                b[row[lane], col[lane]] = x[own, first + i]
    return b
