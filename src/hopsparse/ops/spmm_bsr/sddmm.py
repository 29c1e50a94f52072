"""The product of two dense matrices at the blocks of a BSR pattern, and nowhere else.

values[block] = a[rows of the block] @ b[columns of the block].T: what MegaBlocks calls sdd, where
`spmm_bsr` is dds and, with its sides exchanged, dsd. It is the gradient of a block-sparse weight at
the blocks that it keeps. On a GPU it is one kernel in Triton, a program a block or a part of one,
whose time goes with the blocks; on a CPU the dense product is taken and cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...formats.bsr import BSR

_LEAST = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of more blocks the dense product is as fast: cuBLAS reaches what a product of blocks does not.
_DENSE_FROM = 0.5


def sddmm_bsr(pattern: BSR, a: Tensor, b: Tensor) -> BSR:
    """Multiply two dense matrices at the blocks of a pattern: y = a @ b.T there, nothing elsewhere.

    Differentiable in a and b; gradients are the products of the blocks with the other matrix.

    Args:
        pattern: [m, n]; its values are not read.
        a: [m, depth], float32, bfloat16 or float16, any strides.
        b: [n, depth], dtype and device of a, any strides.

    Returns:
        [m, n] in the dtype of a, blocks where `pattern` has them. Sums are float32, rounded once.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of the pattern have the wrong shape or dtype.

    Example:
        >>> pattern = BSR.from_dense(torch.block_diag(*torch.ones(2, 16, 16)), (16, 16))
        >>> y = sddmm_bsr(pattern, torch.ones(32, 5), torch.ones(32, 5))
        >>> y.values.unique().tolist(), int((y.to_dense() != 0).sum())
        ([5.0], 512)
    """
    _check(a, b, pattern)
    sides = [*pattern.shape, *pattern.block]
    values = torch.ops.hopsparse.sddmm_bsr.default(a, b, pattern.indices, pattern.indptr, sides)
    return BSR(pattern.shape, values, pattern.indices, pattern.indptr, pattern.block)


def _check(a: Tensor, b: Tensor, pattern: BSR) -> None:
    if not isinstance(pattern, BSR):
        got = f"sddmm_bsr: a pattern of type {type(pattern).__name__}"
        raise ArgumentError(got, need="a BSR", hint="BSR.from_dense(mask)")
    (m, n), depth = pattern.shape, a.shape[-1]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != m or tuple(b.shape) != (n, depth):
        raise ArgumentError(
            f"sddmm_bsr: a {list(a.shape)}, b {list(b.shape)} for a pattern of {[m, n]}",
            need=f"a [{m}, depth] and b [{n}, depth]",
            hint="b.T, if it is [depth, n]",
        )
    if a.dtype not in _DTYPES or b.dtype != a.dtype or a.device != b.device:
        raise ArgumentError(
            f"sddmm_bsr: a of {a.dtype} on {a.device}, b of {b.dtype} on {b.device}",
            need="float32, bfloat16 or float16, of both, on one device",
            hint="b.to(a)",
        )
    if pattern.indices.device != a.device:
        raise ArgumentError(
            f"sddmm_bsr: a pattern on {pattern.indices.device}, and a on {a.device}",
            need="one device",
            hint="pattern.to(a.device)",
        )
    if not torch.compiler.is_compiling():
        pattern._check_parts()


def block_rows(indptr: Tensor, blocks: int) -> Tensor:
    """The block row of each block, without a count read back.

    Example:
        >>> block_rows(torch.tensor([0, 2, 2, 3]), 3).tolist()
        [0, 0, 2]
    """
    return torch.repeat_interleave(indptr.diff().long(), output_size=blocks)


def _cut(a: Tensor, b: Tensor, indices: Tensor, indptr: Tensor, sides: Sequence[int]) -> Tensor:
    """The dense product, of which the blocks are taken."""
    m, n, height, width = sides
    down, across = -(-m // height), -(-n // width)
    dense = a.new_zeros(down * height, across * width)
    # On a GPU 16-bit numbers are added in float32 as well.
    dense[:m, :n] = a @ b.T if a.is_cuda else (a.float() @ b.float().T).to(a.dtype)
    tiles = dense.view(down, height, across, width).transpose(1, 2)
    found = tiles[block_rows(indptr, indices.numel()), indices.clamp_min(0).long()]
    return found * (indices >= 0)[:, None, None].to(found.dtype)


def _on_gpu(a: Tensor, b: Tensor, indices: Tensor, indptr: Tensor, sides: Sequence[int]) -> Tensor:
    m, n, height, width = sides
    blocks = indices.numel()
    fits = height % _LEAST == 0 and width % _LEAST == 0
    if not fits or blocks * height * width >= _DENSE_FROM * m * n or not has_triton():
        return _cut(a, b, indices, indptr, sides)
    from .sddmm_triton import run  # Half a second, which nobody pays who has no gradient.

    values = a.new_empty(blocks, height, width)
    run(values, block_rows(indptr, blocks).to(torch.int32), indices, a, b, (m, n))
    return values


@cache
def has_triton() -> bool:
    """Whether it is installed; it is not imported."""
    return find_spec("triton") is not None


def _result(a: Tensor, b: Tensor, indices: Tensor, indptr: Tensor, sides: Sequence[int]) -> Tensor:
    return a.new_empty(indices.shape[0], sides[2], sides[3])


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    a, b, indices, indptr, sides = inputs
    ctx.save_for_backward(a, b, indices, indptr)
    ctx.sides = tuple(sides)  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[object, ...]:
    a, b, indices, indptr = ctx.saved_tensors  # type: ignore[attr-defined]
    m, n, height, width = ctx.sides  # type: ignore[attr-defined]
    facts = ("bsr", m, n, f"{{'block': '{height}x{width}'}}")
    kept = grad * (indices >= 0)[:, None, None].to(grad.dtype)
    dense = torch.ops.hopsparse.decompress.default([kept, indices, indptr], *facts)
    needs = ctx.needs_input_grad  # type: ignore[attr-defined]
    return (dense @ b if needs[0] else None, dense.T @ a if needs[1] else None, None, None, None)


LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "sddmm_bsr(Tensor a, Tensor b, Tensor indices, Tensor indptr, int[] sides) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.impl("sddmm_bsr", _on_gpu, "CUDA")
LIBRARY.impl("sddmm_bsr", _cut, "CPU")
torch.library.register_fake("hopsparse::sddmm_bsr", _result, lib=LIBRARY)
torch.library.register_autograd(
    "hopsparse::sddmm_bsr", _backward, setup_context=_setup_context, lib=LIBRARY
)
