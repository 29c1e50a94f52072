"""spmm_bsr for any GPU that Triton compiles for: blocks read in place, nothing laid out.

A program computes some rows of a block row for some tokens, and walks the blocks of that row in
order: what each keeps, and the tokens of its columns. Blocks that are 2:4 inside are written out in
registers as they are loaded: 9/16 of the bytes of 16-bit values, and as many products. Blocks of 16
are 16 columns to an instruction here, where the kernel of sm_90a gathers four of them; on a Hopper
GPU `spmm_bsr` runs that one. No plan chooses this kernel: on an H200 it is slower than kernel.cuh
or fragments.cuh in all rows but one, and on an AMD GPU it was not measured. Nor were 2:4 blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...formats.bsr import BSR
from ...formats.bsr24 import BSR24

try:
    import triton
    import triton.language as tl
except ImportError:  # `run` says so.
    triton = None

_MOST_ROWS, _MOST_COLUMNS, _LEAST = 128, 64, 16
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_product: Any = None

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _activate(v, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
        if ACTIVATION == "relu":
            v = tl.where(v < 0, 0.0, v)  # NaN stays NaN
        elif ACTIVATION == "gelu":
            v = 0.5 * v * (1 + tl.math.erf(v * 0.7071067811865476))
        elif ACTIVATION == "gelu_tanh":
            v = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        elif ACTIVATION == "silu":
            v = v * tl.sigmoid(v)
        return v

    @triton.jit  # type: ignore[untyped-decorator]
    def _written_out(values, nibbles, inner, start, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Rows `inner` of a 2:4 block, columns from `start`: two values and a nibble a group."""
        WIDTH: tl.constexpr = TILE[1]
        ROWS: tl.constexpr = TILE[2]
        COLUMNS: tl.constexpr = TILE[3]
        half: tl.constexpr = COLUMNS // 2
        eighth: tl.constexpr = COLUMNS // 8
        at = start // 2 + tl.arange(0, half)
        kept = tl.load(values + inner[:, None] * (WIDTH // 2) + at[None, :])
        first, second = tl.split(tl.reshape(kept, (ROWS, COLUMNS // 4, 2)))
        at = start // 8 + tl.arange(0, eighth)
        both = tl.load(nibbles + inner[:, None] * (WIDTH // 8) + at[None, :]).to(tl.int32)
        nibble = tl.reshape(tl.join(both & 15, both >> 4), (ROWS, COLUMNS // 4, 1))
        column = tl.arange(0, 4)[None, None, :]
        found = tl.where(column == nibble >> 2, second[:, :, None], 0.0)
        found = tl.where(column == (nibble & 3), first[:, :, None], found)
        return tl.reshape(found, (ROWS, COLUMNS))

    @triton.jit  # type: ignore[untyped-decorator]
    def _product(  # type: ignore[no-untyped-def]
        weight,  # values, indices, indptr; nibbles, of 2:4 blocks
        x,
        added,  # bias, residual
        y,
        sizes,  # tokens, out, k, elements from one token of x to the next
        alpha,
        TILE: tl.constexpr,  # as `Tile`
        EPILOGUE: tl.constexpr,  # whether there is a bias, and a residual; activation
    ):
        values, indices, indptr, nibbles = weight
        bias, residual = added
        tokens, out, k, pitch = sizes
        HEIGHT: tl.constexpr = TILE[0]
        WIDTH: tl.constexpr = TILE[1]
        ROWS: tl.constexpr = TILE[2]
        COLUMNS: tl.constexpr = TILE[3]
        TOKENS: tl.constexpr = TILE[4]
        HALVED: tl.constexpr = TILE[5]
        HAS_BIAS: tl.constexpr = EPILOGUE[0]
        HAS_RESIDUAL: tl.constexpr = EPILOGUE[1]
        ACTIVATION: tl.constexpr = EPILOGUE[2]
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        pieces: tl.constexpr = HEIGHT // ROWS
        block_row = tl.program_id(1) // pieces
        inner = tl.program_id(1) % pieces * ROWS + tl.arange(0, ROWS)
        row = block_row * HEIGHT + inner
        column = tl.arange(0, COLUMNS)
        sums = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
        begin = tl.load(indptr + block_row)
        size: tl.constexpr = HEIGHT * WIDTH
        kept = values + begin.to(tl.int64) * (size // 2 if HALVED else size)
        codes = nibbles + begin.to(tl.int64) * (size // 8)
        place_of = indices + begin
        for _ in range(tl.load(indptr + block_row + 1) - begin):
            # A free block is zeros: any columns will do.
            first = tl.maximum(tl.load(place_of), 0) * WIDTH
            for start in tl.static_range(0, WIDTH, COLUMNS):
                if HALVED:
                    weights = _written_out(kept, codes, inner, start, TILE)
                else:
                    weights = tl.load(kept + inner[:, None] * WIDTH + start + column[None, :])
                at = first + start + column
                inside = (token < tokens)[:, None] & (at < k)[None, :]
                rows_of_x = tl.load(x + token[:, None] * pitch + at[None, :], mask=inside, other=0)
                sums = tl.dot(rows_of_x, tl.trans(weights), sums, input_precision="ieee")
            kept += size // 2 if HALVED else size
            codes += size // 8
            place_of += 1
        exists = (token < tokens)[:, None] & (row < out)[None, :]
        place = token[:, None] * out + row[None, :]
        v = sums * alpha
        if HAS_BIAS:
            v += tl.load(bias + row, mask=row < out, other=0.0).to(tl.float32)[None, :]
        v = _activate(v, ACTIVATION)
        if HAS_RESIDUAL:
            v += tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        tl.store(y + place, v.to(y.dtype.element_ty), mask=exists)


class Tile(NamedTuple):
    """What one program multiplies at a time.

    Attributes:
        height: Rows of a block.
        width: Columns of a block.
        rows: Out-features.
        columns: Of a block.
        tokens: Rows of x.
        halved: Whether blocks are 2:4 inside, and hold half of their values.
    """

    height: int
    width: int
    rows: int
    columns: int
    tokens: int
    halved: bool


def why_not(w: BSR | BSR24) -> str | None:
    """What keeps this kernel from multiplying by a weight, as a clause; None if nothing does.

    Example:
        >>> why_not(BSR.from_dense(torch.eye(48), (16, 24)))
        'blocks are 16 x 24, and sides of 16 or a multiple are needed'
    """
    if any(side % _LEAST for side in w.block):
        sides = f"{w.block[0]} x {w.block[1]}"
        return f"blocks are {sides}, and sides of {_LEAST} or a multiple are needed"
    if w.dtype not in _DTYPES:
        return f"values are {str(w.dtype).removeprefix('torch.')}"
    return "Triton is not installed" if triton is None else None


def run(
    w: BSR | BSR24,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 1.0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product y = act(alpha * x @ w^T + bias) + residual, of arguments that were checked.

    Args:
        w: [out, k], sides of blocks 16 or a multiple.
        x: [..., k], any strides, dtype and device of w.
        bias: [out] or None.
        activation: One of `_call.ACTIVATIONS`.
        alpha: What the sums are multiplied by.
        residual: As y, or None.
        out_dtype: Of y; None is that of x.

    Returns:
        [..., out], contiguous.

    Raises:
        UnsupportedError: No Triton, or blocks that it cannot multiply.
    """
    if (reason := why_not(w)) is not None:
        raise UnsupportedError(
            f"spmm_bsr by Triton: {reason}",
            need="Triton, and a weight of 16 or 32 bits in blocks of 16 or a multiple",
            hint="spmm_bsr(w, x), which runs whatever there is",
        )
    out, k = w.shape
    y = x.new_empty((*x.shape[:-1], out), dtype=out_dtype or x.dtype)
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    tokens = rows.shape[0]
    if tokens == 0:
        return y
    halved = isinstance(w, BSR24)
    tile = tile_of(w.block, tokens, halved=halved)
    # Along tokens first: what is in flight shares the blocks of few rows.
    grid = (-(-tokens // tile.tokens), -(-out // tile.height) * (tile.height // tile.rows))
    nibbles = w.nibbles if isinstance(w, BSR24) else w.indices
    _product[grid](
        tuple(part.contiguous() for part in (w.values, w.indices, w.indptr, nibbles)),
        rows,
        tuple(y if each is None else each.contiguous() for each in (bias, residual)),
        y,
        (tokens, out, k, rows.stride(0)),
        float(alpha),
        TILE=tuple(tile),
        EPILOGUE=(bias is not None, residual is not None, activation),
    )
    return y


def tile_of(block: tuple[int, int], tokens: int, *, halved: bool = False) -> Tile:
    """What a program multiplies at a time.

    Args:
        block: Rows and columns of a block.
        tokens: Rows of x.
        halved: Whether blocks are 2:4 inside.

    Example:
        >>> tile_of((128, 128), 2048)
        Tile(height=128, width=128, rows=128, columns=64, tokens=128, halved=False)
    """
    at_a_time = min(128, max(_LEAST, 1 << (tokens - 1).bit_length()))
    rows, columns = _divisor(block[0], _MOST_ROWS), _divisor(block[1], _MOST_COLUMNS)
    return Tile(block[0], block[1], rows, columns, at_a_time, halved)


def compiled_for(
    backend: str,
    arch: str | int,
    warp: int,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    halved: bool = False,
) -> bytes:
    """The code of one kernel for a GPU that need not be here.

    Args:
        backend: `hip` or `cuda`, as Triton calls them.
        arch: `gfx942`, or a compute capability such as 90.
        warp: Threads of a warp there.
        dtype: Of x, w and y.
        block: Rows and columns of a block.
        halved: Whether blocks are 2:4 inside.

    Returns:
        An ELF file.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number, whole, codes = f"*{_DTYPES[dtype]}", "*i32", "*u8" if halved else "*i32"
    kinds = ((number, whole, whole, codes), number, (number, number), number, ("i32",) * 4, "fp32")
    names = _product.arg_names
    signature = dict(zip(names, (*kinds, "constexpr", "constexpr"), strict=True))
    constants = {(6,): tuple(tile_of(block, 2048, halved=halved)), (7,): (True, False, "silu")}
    source = ASTSource(_product, signature, constants)
    made = triton.compile(source, target=GPUTarget(backend, arch, warp))
    code: bytes = made.asm["hsaco" if backend == "hip" else "cubin"]
    return code


def _divisor(side: int, most: int) -> int:
    """The largest power of two that divides a side, `most` at most."""
    return min(most, side & -side)
