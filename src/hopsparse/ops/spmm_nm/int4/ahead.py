"""Kernels of 4-bit weights that are there before the first call, as ahead.py has them."""

from __future__ import annotations

import torch

from ....formats.quantized import Quantized
from ..cost import Problem, counted
from ..kernel import Config
from .dispatch import numbers_of
from .op import check_int4_weight, check_int4_x, why_no_int4_kernel
from .plan import INT4


def prepare_int4(
    w: Quantized, max_tokens: int, *, x_dtype: torch.dtype | None = None, act: str | None = None
) -> tuple[Config, ...]:
    """Compile and load every kernel that `spmm_nm_int4(w, x, act=act)` runs.

    That is one for each tile that some token count up to `max_tokens` chooses, tuned or not.

    Args:
        w: The weight, where it will be used. Where no kernel runs it there is nothing to do.
        max_tokens: Most rows of x, all leading dimensions multiplied.
        x_dtype: Of x; None is what w stands for, as the result is.
        act: As for `spmm_nm_int4`.

    Returns:
        The tiles, by the least token count that chooses each.

    Raises:
        ArgumentError: No tokens, or another kind of weight or of x.
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured.

    Example:
        >>> from hopsparse.quant import quantize_matrix
        >>> prepare_int4(quantize_matrix(torch.zeros(16, 64).bfloat16(), "2:4+int4"), 4096)
        ()
    """
    max_tokens = counted(max_tokens)
    check_int4_weight(w)
    (out, k), of_x = w.shape, w.dtype if x_dtype is None else x_dtype
    check_int4_x(w, of_x)
    if why_no_int4_kernel(w, w.tensors["values"].new_empty((0, k), dtype=of_x)) is not None:
        return ()
    from ..chosen import prepare_coded

    device = w.tensors["values"].get_device()
    problem, numbers = Problem(max_tokens, out, k), numbers_of(w.scheme.group, of_x, w.dtype)
    return prepare_coded(INT4, problem, numbers, act or "none", False, device)
