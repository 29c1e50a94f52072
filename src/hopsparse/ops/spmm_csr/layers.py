"""Tiles in a layer, which could multiply by a decoded weight: where they are the faster way."""

from __future__ import annotations

from functools import cache
from math import ceil

import torch
from torch import Tensor

from ...formats.csr import CSR
from ...launch import device_facts
from . import dispatch
from .packed import Packed, fullest_unit
from .pattern import check_indices
from .tiles import ROOMS, UNIT, WARPS, tile_spec, token_tiles

#: What was measured on an H200 (docs/ops/spmm_csr.md), in microseconds: 16 tokens by 16384 x 4096
#: with 20 % kept, in tiles and dense. Fewer tokens, and fewer values, take the tiles no longer.
MOST_TOKENS, ROWS, COLUMNS, TILES_US, DENSE_US = 16, 16_384, 4096, 30.4, 34.1
#: A random weight of 80 % zeros lies on either side of 0.2.
MOST_KEPT = 0.21
# Of every H100 and H200 but the PCIe card and slices, where panels would divide otherwise.
_SMS = 132
# Times dense, for shapes that were not measured: the one that was has 1.12.
_LEAST_WIN = 1.1


@cache
def wins(rows: int, cols: int) -> bool:
    """Whether tiles beat dense for a weight of this shape, as far as the measured one tells.

    A panel of 64 rows is a block of threads, and three blocks share an SM. Measured were two on
    each. Three take at most 1.5 times as long, one at most as long as two; the longest eighth of
    the units of a panel decides.

    Example:
        >>> wins(16384, 4096), wins(18432, 4096), wins(152064, 4096), wins(4096, 16384)
        (True, False, True, False)
    """
    full, left = divmod(ceil(rows / UNIT), 3 * _SMS)
    rounds = 1.5 * full
    if left:
        rounds += 1.0 if left <= 2 * _SMS else 1.5
    eighth = ceil(cols / (UNIT * WARPS))
    tiles_us = TILES_US * rounds * eighth / (COLUMNS // UNIT // WARPS)
    dense_us = DENSE_US * (rows / ROWS) * (cols / COLUMNS)
    return rows >= ROWS and cols >= COLUMNS and tiles_us * _LEAST_WIN <= dense_us


def suits(shape: tuple[int, int], x: Tensor) -> bool:
    """Whether a layer of this shape shall multiply x in tiles, if its weight may be packed."""
    if x.numel() > MOST_TOKENS * shape[1] or not wins(*shape):
        return False
    on_gpu = dispatch.runs_kernel(x) and x.dtype in dispatch.TILE_DTYPES
    return on_gpu and device_facts(x.get_device()).sm_count == _SMS


def packed_for(w: CSR) -> Packed | None:
    """The weight of a layer in tiles, with kernels for all counts of tokens loaded; it waits.

    Returns:
        None where dense may be faster: too much is kept, in all or in a unit, or it cannot be
        packed.

    Raises:
        FormatError: Indices form no matrix.
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured, and the weight is not packed yet.
    """
    parts, cols = (w.indptr, w.indices, w.values), w.shape[1]
    if not _may_win(w):
        return None
    tried, _ = dispatch.known_packed(*parts, cols)
    if not tried:
        dispatch.refuse_in_capture(w.indices)
        if not _fits_room(w):
            return None
    packed = dispatch.packed_of(*parts, cols)
    if packed is None or packed.room != ROOMS[0]:
        return None
    if w.values.is_cuda:
        from .device import load_tiles

        # All: a graph may be captured of any of them next.
        load_tiles(w.values, sorted({token_tiles(each + 1) for each in range(MOST_TOKENS)}))
    return packed


def multiply(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a weight that `packed_for` gave with a 2-D x that `suits`."""
    from .device import multiply_tiles

    return multiply_tiles(packed, x, bias)


def told(w: CSR, x: Tensor) -> str | None:
    """What a layer runs in tiles for x, as a clause; None where it multiplies dense."""
    if not suits(w.shape, x) or not _may_win(w) or w.values.requires_grad:
        return None
    tried, packed = dispatch.known_packed(w.indptr, w.indices, w.values, w.shape[1])
    if tried and (packed is None or packed.room != ROOMS[0]):
        return None
    if not tried and (dispatch.is_captured(x) or not _fits_room(w)):
        return None
    dtype = str(x.dtype).removeprefix("torch.")
    name = tile_spec(dtype, token_tiles(x.numel() // w.shape[1]), ROOMS[0]).name
    faster = f"measured to be faster than dense up to {MOST_TOKENS} tokens; gradients run dense"
    if packed is None:
        return f"{name}; {faster}; w is packed at the first call"
    return f"{name}; {faster}; w is packed once and kept, {packed.nbytes} bytes"


def _may_win(w: CSR) -> bool:
    few = w.indices.numel() <= MOST_KEPT * w.shape[0] * w.shape[1]
    return few and dispatch.may_pack(w.indptr, w.indices, w.values)


def _fits_room(w: CSR) -> bool:
    """Whether no unit has more values than those that were measured; more rooms idle an SM."""
    check_indices(w.indptr, w.indices, w.shape[1])
    with torch.no_grad():
        return fullest_unit(w.indptr, w.indices, w.shape[1]) <= ROOMS[0]
