"""Kernels of codes that are there before the first call, as ahead.py has them for 16 bits."""

from __future__ import annotations

from functools import partial

import torch

from ....formats.nm import NM
from ..cost import Problem, counted
from ..kernel import Config
from .dispatch import Call, groups_of_scale, numbers_of
from .op import Scaling, check_codes, check_x_dtype, why_no_kernel
from .plan import SCALED


def prepare_scaled(
    w: NM,
    max_tokens: int,
    scaling: Scaling | None = None,
    *,
    x_dtype: torch.dtype | None = None,
    act: str | None = None,
    residual: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Config, ...]:
    """Compile and load every kernel that `spmm_nm_scaled(w, x, ...)` may run.

    That is one for each tile that some token count up to `max_tokens` chooses, tuned or not. Call
    it outside a CUDA graph capture.

    Args:
        w: The weight, where it will be used. Where no kernel runs it there is nothing to do.
        max_tokens: Most rows of x, all leading dimensions multiplied.
        scaling: Its `sums`, and the shape of its `w`, count; None as for `spmm_nm_scaled`.
        x_dtype: Of the codes of x; None is that of w.
        act: As for `spmm_nm_scaled`.
        residual: Whether there will be one.
        out_dtype: As for `spmm_nm_scaled`.

    Returns:
        The tiles, by the least token count that chooses each.

    Raises:
        ArgumentError: No tokens, no such activation or x, or another kind of weight or scaling.
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured.

    Example:
        >>> prepare_scaled(NM.from_dense(torch.zeros(16, 64, dtype=torch.int8)), 4096)
        ()
    """
    activation = "none" if act is None else act
    scaling = Scaling() if scaling is None else scaling
    max_tokens = counted(max_tokens)
    check_codes(w, scaling, activation)
    of_x = w.dtype if x_dtype is None else x_dtype
    check_x_dtype(w, of_x)
    if why_no_kernel(w, w.values) is not None:
        return ()
    from ..chosen import prepare_coded
    from .widened import prepare_both

    call = Call(scaling.sums, activation, scaling.out, out_dtype)
    numbers = numbers_of(w.dtype, of_x, call, groups_of_scale(scaling.w, w.shape[0]))
    problem, device = Problem(max_tokens, *w.shape), w.values.get_device()
    prepare = prepare_both if numbers.x == "int4" else partial(prepare_coded, SCALED)
    return prepare(problem, numbers, activation, residual, device)
