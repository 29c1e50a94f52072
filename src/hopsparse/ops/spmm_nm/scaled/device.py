"""spmm_nm_scaled on a GPU: a call that was seen before is one look-up and one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ....formats.nm import NM
from ....launch import KnownLaunches, Turn, current_stream, starts_early
from ....ranges import in_phase
from ..._rows import rows_for_tma
from ..chosen import coded_launch, one_of
from ..cost import Problem
from ..device import Scales, address_of
from ..kernel import fold_of
from .dispatch import Call, Pair, groups_of_scale, numbers_of
from .plan import SCALED
from .widened import forget, widened, widens_here

_BOUND = KnownLaunches()
_OF_WIDENED = 2.0**9  # what x of 4 bits is multiplied by, that was widened to steps of 2^-9


@in_phase("sparse", "spmm_nm_scaled")
def run(w: NM, x: Tensor, scales: Pair, added: Pair, call: Call) -> Tensor:
    """The product of arguments that were checked; as for `dispatch.scaled`."""
    (out, k), (w_scale, x_scale), device = w.shape, scales, x.get_device()
    width = out // fold_of(call.activation)
    y = torch.empty((*x.shape[:-1], width), dtype=call.out_dtype, device=x.device)
    row = x.shape[-1]  # in bytes
    tokens, few = x.numel() // row, row < k
    if tokens == 0:
        return y
    if not x.is_contiguous() or row % 16 or x.data_ptr() % 16:
        x = rows_for_tma(x, whole=few)
        row = x.stride(0)
    one, stream = one_of(device), current_stream(device)
    groups = groups_of_scale(w_scale, out)
    once = few and _widens_once(w, x, tokens, groups, call)
    if once:
        x = widened(x, tokens, k)
        row = x.stride(0)
    # Behind the kernel that widens all has ended that came before it, and it writes no weight.
    turn = Turn(stream, once or starts_early(w.values, w.meta))
    # All that a launch reads is made contiguous, and lives as long as this call.
    bias, residual, w_scale, x_scale = (
        None if each is None else each.contiguous() for each in (*added, w_scale, x_scale)
    )
    if residual is not None and residual.data_ptr() % 16:
        residual = residual.clone()  # read 16 bytes at a time
    x_step = 0 if x_scale is None or x_scale.numel() == 1 else 1
    alpha = _OF_WIDENED if few else 1.0
    key = (
        (x.data_ptr(), w.values.data_ptr(), w.meta.data_ptr(), y.data_ptr()),
        (address_of(bias), address_of(residual), address_of(w_scale), address_of(x_scale)),
        *(groups, x_step, tokens, out, k, row, w.dtype, x.dtype, alpha, call, device, turn),
    )
    bound = _BOUND.get(key)
    if bound is None:
        numbers = numbers_of(w.dtype, x.dtype, call, groups)
        problem, has_residual = Problem(tokens, out, k), residual is not None
        how = call.activation, has_residual, device, call.config
        launch = coded_launch(SCALED, problem, numbers, *how)
        layout = Scales(
            address_of(one if w_scale is None else w_scale),
            address_of(one if x_scale is None else x_scale),
            groups,
            x_step,
            1.0 if call.out_scale is None else 1 / call.out_scale,
        )
        bound = _BOUND.keep(key, launch.bind(turn, key[0], row, key[1][:2], alpha, layout))
    bound()
    return y


def _widens_once(w: NM, x: Tensor, tokens: int, groups: int, call: Call) -> bool:
    """Whether x becomes E4M3 ahead of the product; a tile that is asked for widens by itself."""
    if call.config is not None:
        return False
    numbers = numbers_of(w.dtype, x.dtype, call, groups)
    return widens_here(Problem(tokens, *w.shape), numbers, call.activation, x.get_device())


def forget_scaled_launches() -> None:
    """Plan every launch anew; kernels stay loaded."""
    coded_launch.cache_clear()
    forget()
    _BOUND.clear()
