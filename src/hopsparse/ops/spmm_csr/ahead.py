"""What a server does before its first call: the weight packed, kernels compiled and loaded."""

from __future__ import annotations

from ...formats.csr import CSR
from . import dispatch
from .packed import Packed
from .tiles import token_tiles


def prepare(w: CSR, max_tokens: int) -> bool:
    """Make ready what calls of `spmm_csr` with up to `max_tokens` rows of x run on tensor cores.

    Args:
        w: The weight.
        max_tokens: 1 or more.

    Returns:
        Whether none of them decodes or gathers.

    Raises:
        FormatError: Indices form no matrix.
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured.

    Example:
        >>> import torch
        >>> prepare(CSR.from_dense(torch.eye(4)), 16)  # on the CPU there is nothing to do
        False
    """
    parts, cols = (w.indptr, w.indices, w.values), w.shape[1]
    suits = dispatch.suits_tiles(w.indices.numel(), w.shape, 1, w.dtype)
    # Only facts of x are asked for; values are placed as it will be.
    if not dispatch.runs_kernel(w.values) or not suits:
        return False
    if w.values.requires_grad or not dispatch.may_pack(*parts):
        return False
    dispatch.pattern_of(w.indptr, w.indices, cols)
    packed = dispatch.packed_of(*parts, cols)
    if packed is None:
        return False
    load(packed, min(max_tokens, dispatch.WIDE_TOKENS))
    return max_tokens <= dispatch.WIDE_TOKENS


def load(packed: Packed, max_tokens: int) -> None:
    """Kernels for all counts of tokens: a graph may be captured of any of them next."""
    from .device import load_tiles
    from .wide_device import load_wide

    few = min(max_tokens, dispatch.TILE_TOKENS)
    counts = sorted({token_tiles(tokens) for tokens in range(1, few + 1)})
    load_tiles(packed.values, counts, packed.room)
    if max_tokens > dispatch.TILE_TOKENS:
        load_wide(packed, max_tokens)
