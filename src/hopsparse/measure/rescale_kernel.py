"""`rescale` as a Triton kernel. It reads and writes each number once, so memory is its bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # `rescale` says so before it comes here.
    triton = None

_BLOCK = 1024
_scale: Any = None

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _scale(  # type: ignore[no-untyped-def]
        sums,
        rows,
        columns,
        y,
        out,
        HAS_ROWS: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        exists = column < out
        value = tl.load(sums + token * out + column, mask=exists, other=0).to(tl.float32)
        if HAS_ROWS:
            value *= tl.load(rows + token)
        if HAS_COLUMNS:
            value *= tl.load(columns + column, mask=exists, other=0.0)
        tl.store(y + token * out + column, value.to(tl.bfloat16), mask=exists)


def launch(sums: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Arguments as `rescale` takes them, on a GPU.

    Args:
        sums: [tokens, out], contiguous.
        rows: float32 [tokens, 1] or None.
        columns: float32 [out] or None.

    Returns:
        bfloat16 [tokens, out].
    """
    tokens, out = sums.shape
    y = torch.empty(tokens, out, dtype=torch.bfloat16, device=sums.device)
    grid = (tokens, triton.cdiv(out, _BLOCK))
    with torch.cuda.device(sums.device):
        _scale[grid](
            sums,
            sums if rows is None else rows,
            sums if columns is None else columns,
            y,
            out,
            HAS_ROWS=rows is not None,
            HAS_COLUMNS=columns is not None,
            BLOCK=_BLOCK,
        )
    return y
