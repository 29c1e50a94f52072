"""The kernel of sampled products, in Triton: a block, or a part of one, a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST, _DEPTH = 64, 32
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit  # type: ignore[untyped-decorator]
def _sampled(  # type: ignore[no-untyped-def]
    values, rows, indices, a, b, sizes, strides, TILE: tl.constexpr
):
    m, n, depth = sizes
    a_row, a_depth, b_row, b_depth = strides
    HEIGHT: tl.constexpr = TILE[0]
    WIDTH: tl.constexpr = TILE[1]
    ROWS: tl.constexpr = TILE[2]
    COLUMNS: tl.constexpr = TILE[3]
    DEPTH: tl.constexpr = TILE[4]
    across: tl.constexpr = WIDTH // COLUMNS
    block = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) // across * ROWS + tl.arange(0, ROWS)
    beside = tl.program_id(1) % across * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.load(indices + block)
    row = tl.load(rows + block).to(tl.int64) * HEIGHT + inner
    column = tl.maximum(place, 0).to(tl.int64) * WIDTH + beside
    # A free block is zeros, and so is what lies outside of the matrix.
    has_row = row < m
    has_column = (column < n) & (place >= 0)
    step = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        at = (start + step).to(tl.int64)
        inside = at < depth
        left = tl.load(
            a + row[:, None] * a_row + at[None, :] * a_depth,
            mask=has_row[:, None] & inside[None, :],
            other=0,
        )
        right = tl.load(
            b + column[None, :] * b_row + at[:, None] * b_depth,
            mask=inside[:, None] & has_column[None, :],
            other=0,
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    to = values + block * HEIGHT * WIDTH + inner[:, None] * WIDTH + beside[None, :]
    tl.store(to, sums.to(values.dtype.element_ty))


def run(
    values: Tensor, rows: Tensor, indices: Tensor, a: Tensor, b: Tensor, shape: tuple[int, int]
) -> None:
    """values[block] = a @ b.T at the rows and columns of each block.

    Args:
        values: [blocks, rows of a block, columns], contiguous, sides 16 or a multiple; written.
        rows: Block row of each block, int32 [blocks].
        indices: Block column of each, int32 [blocks]; -1 makes zeros.
        a: [m, depth], dtype of values, any strides.
        b: [n, depth], the same.
        shape: m and n.
    """
    if not values.numel():
        return
    tile = tile_of((values.shape[1], values.shape[2]))
    grid = (values.shape[0], (tile[0] // tile[2]) * (tile[1] // tile[3]))
    sizes, strides = (*shape, a.shape[1]), (*a.stride(), *b.stride())
    _sampled[grid](values, rows, indices, a, b, sizes, strides, TILE=tile)


def tile_of(block: tuple[int, int]) -> tuple[int, int, int, int, int]:
    """Sides of a block, and rows, columns and depth that are multiplied at a time.

    Example:
        >>> tile_of((128, 128)), tile_of((16, 48))
        ((128, 128, 64, 64, 32), (16, 48, 16, 16, 32))
    """
    rows, columns = (min(_MOST, side & -side) for side in block)
    return (*block, rows, columns, _DEPTH)


def compiled_for(
    backend: str, arch: str | int, warp: int, dtype: torch.dtype, block: tuple[int, int]
) -> bytes:
    """The code of one kernel for a GPU that need not be here.

    Args:
        backend: `hip` or `cuda`, as Triton calls them.
        arch: `gfx942`, or a compute capability such as 90.
        warp: Threads of a warp there.
        dtype: Of a and b.
        block: Rows and columns of a block.

    Returns:
        An ELF file.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number, whole = f"*{_DTYPES[dtype]}", "*i32"
    kinds = (number, whole, whole, number, number, ("i32",) * 3, ("i32",) * 4, "constexpr")
    signature = dict(zip(_sampled.arg_names, kinds, strict=True))
    source = ASTSource(_sampled, signature, {(7,): tile_of(block)})
    made = triton.compile(source, target=GPUTarget(backend, arch, warp))
    code: bytes = made.asm["hsaco" if backend == "hip" else "cubin"]
    return code
