"""spmm_nm_int4 on a GPU: a call that was seen before is one look-up and one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ....formats.quantized import Quantized
from ....launch import KnownLaunches, Turn, current_stream, starts_early
from ....ranges import in_phase
from ..._rows import rows_for_tma
from ..chosen import coded_launch, one_of
from ..cost import Problem
from ..device import Scales, address_of
from ..facts import PlainCall
from .dispatch import Added, numbers_of
from .plan import INT4

_BOUND = KnownLaunches()
# What sums are multiplied by, of kept values that were widened to steps of 2^-9, or to 16 times the
# code.
_OF_WIDENED = {torch.float8_e4m3fn: 2.0**9, torch.int8: 2.0**-4}


@in_phase("sparse", "spmm_nm_int4")
def run(w: Quantized, x: Tensor, added: Added, call: PlainCall) -> Tensor:
    """The product of arguments that were checked; as for `dispatch.int4_product`."""
    (out, k), device, scheme = w.shape, x.get_device(), w.scheme
    y = torch.empty((*x.shape[:-1], out), dtype=call.out_dtype, device=x.device)
    tokens = x.numel() // k
    if tokens == 0:
        return y
    row = k
    if not x.is_contiguous() or k * x.itemsize % 16 or x.data_ptr() % 16:
        x = rows_for_tma(x)
        row = x.stride(0)
    values, meta, scales = (w.tensors[name] for name in ("values", "meta", "scales"))
    # All that a launch reads is made contiguous, and lives as long as this call.
    x_scale, bias, residual = (None if each is None else each.contiguous() for each in added)
    if residual is not None and residual.data_ptr() % 16:
        residual = residual.clone()  # read 16 bytes at a time
    one, turn = one_of(device), Turn(current_stream(device), starts_early(values, meta))
    x_step = 0 if x_scale is None or x_scale.numel() == 1 else 1
    key = (
        (x.data_ptr(), values.data_ptr(), meta.data_ptr(), y.data_ptr(), scales.data_ptr()),
        (address_of(bias), address_of(residual), address_of(x_scale)),
        *(x_step, tokens, out, k, row, scheme, x.dtype, call, device, turn),
    )
    bound = _BOUND.get(key)
    if bound is None:
        numbers = numbers_of(scheme.group, x.dtype, call.out_dtype)
        problem, has_residual = Problem(tokens, out, k), residual is not None
        how = call.activation, has_residual, device, call.config
        launch = coded_launch(INT4, problem, numbers, *how)
        layout = Scales(
            key[0][4],
            address_of(one if x_scale is None else x_scale),
            scales.shape[1],
            x_step,
            w_shift=scheme.group.bit_length() - 1,
        )
        alpha = _OF_WIDENED.get(x.dtype, 1.0)
        bound = _BOUND.keep(key, launch.bind(turn, key[0][:4], row, key[1][:2], alpha, layout))
    bound()
    return y


def forget_int4_launches() -> None:
    """Plan every launch anew; kernels stay loaded."""
    coded_launch.cache_clear()
    _BOUND.clear()
