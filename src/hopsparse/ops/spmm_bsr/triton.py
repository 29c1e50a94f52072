"""spmm_bsr for any GPU that Triton compiles for: blocks read in place, nothing laid out.

A program computes some rows of a block row for some tokens, and walks the blocks of that row in
order: what each keeps, and the tokens of its columns. Blocks of 16 are 16 columns to an
instruction here, where the kernel of sm_90a gathers four of them; on a Hopper GPU `spmm_bsr` runs
that one. No plan chooses this kernel: on an H200 it is slower than kernel.cuh
or fragments.cuh in all rows but one, and on an AMD GPU it was not measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...formats.bsr import BSR

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
    def _product(  # type: ignore[no-untyped-def]
        weight,  # values, indices, indptr
        x,
        added,  # bias, residual
        y,
        sizes,  # tokens, out, k, elements from one token of x to the next
        alpha,
        TILE: tl.constexpr,  # rows and columns of a block; rows, columns and tokens at a time
        EPILOGUE: tl.constexpr,  # whether there is a bias, and a residual; activation
    ):
        values, indices, indptr = weight
        bias, residual = added
        tokens, out, k, pitch = sizes
        HEIGHT: tl.constexpr = TILE[0]
        WIDTH: tl.constexpr = TILE[1]
        ROWS: tl.constexpr = TILE[2]
        COLUMNS: tl.constexpr = TILE[3]
        TOKENS: tl.constexpr = TILE[4]
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
        kept = values + begin.to(tl.int64) * HEIGHT * WIDTH + inner[:, None] * WIDTH
        place_of = indices + begin
        for _ in range(tl.load(indptr + block_row + 1) - begin):
            # A free block is zeros: any columns will do.
            first = tl.maximum(tl.load(place_of), 0) * WIDTH
            for start in tl.static_range(0, WIDTH, COLUMNS):
                weights = tl.load(kept + start + column[None, :])
                at = first + start + column
                inside = (token < tokens)[:, None] & (at < k)[None, :]
                rows_of_x = tl.load(x + token[:, None] * pitch + at[None, :], mask=inside, other=0)
                sums = tl.dot(rows_of_x, tl.trans(weights), sums, input_precision="ieee")
            kept += HEIGHT * WIDTH
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


def why_not(w: BSR) -> str | None:
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
    w: BSR,
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
    tile = tile_of(w.block, tokens)
    # Along tokens first: what is in flight shares the blocks of few rows.
    grid = (-(-tokens // tile[4]), -(-out // w.block[0]) * (w.block[0] // tile[2]))
    _product[grid](
        (w.values.contiguous(), w.indices.contiguous(), w.indptr.contiguous()),
        rows,
        tuple(y if each is None else each.contiguous() for each in (bias, residual)),
        y,
        (tokens, out, k, rows.stride(0)),
        float(alpha),
        TILE=tile,
        EPILOGUE=(bias is not None, residual is not None, activation),
    )
    return y


def tile_of(block: tuple[int, int], tokens: int) -> tuple[int, int, int, int, int]:
    """Sides of a block, and rows, columns and tokens that are multiplied at a time.

    Args:
        block: Rows and columns of a block.
        tokens: Rows of x.

    Example:
        >>> tile_of((128, 128), 2048), tile_of((16, 48), 1)
        ((128, 128, 128, 64, 128), (16, 48, 16, 16, 16))
    """
    at_a_time = min(128, max(_LEAST, 1 << (tokens - 1).bit_length()))
    rows, columns = _divisor(block[0], _MOST_ROWS), _divisor(block[1], _MOST_COLUMNS)
    return (block[0], block[1], rows, columns, at_a_time)


def compiled_for(
    backend: str, arch: str | int, warp: int, dtype: torch.dtype, block: tuple[int, int]
) -> bytes:
    """The code of one kernel for a GPU that need not be here.

    Args:
        backend: `hip` or `cuda`, as Triton calls them.
        arch: `gfx942`, or a compute capability such as 90.
        warp: Threads of a warp there.
        dtype: Of x, w and y.
        block: Rows and columns of a block.

    Returns:
        An ELF file.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number, whole = f"*{_DTYPES[dtype]}", "*i32"
    kinds = ((number, whole, whole), number, (number, number), number, ("i32",) * 4, "fp32")
    names = _product.arg_names
    signature = dict(zip(names, (*kinds, "constexpr", "constexpr"), strict=True))
    constants = {(6,): tile_of(block, 2048), (7,): (True, False, "silu")}
    source = ASTSource(_product, signature, constants)
    made = triton.compile(source, target=GPUTarget(backend, arch, warp))
    code: bytes = made.asm["hsaco" if backend == "hip" else "cubin"]
    return code


def _divisor(side: int, most: int) -> int:
    """The largest power of two that divides a side, `most` at most."""
    return min(most, side & -side)
