"""spmm_nm_scaled on a GPU: a call that was seen before is one look-up and one launch."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....formats.nm import NM
from ....launch import KnownLaunches, current_stream, device_facts, is_capturing
from ....tune import machine_of
from ..cost import Problem
from ..device import Launch, Scales, address_of, check_sides, planned, rows_for_tma
from ..kernel import Config, Numbers, fold_of
from .dispatch import Call, Pair, groups_of_scale, numbers_of
from .plan import choose_scaled, sums_of, tuned_scaled

_BOUND = KnownLaunches()
_OF_WIDENED = 2.0**9  # what x of 4 bits is multiplied by, that was widened to steps of 2^-9


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
    # All that a launch reads is made contiguous, and lives as long as this call.
    bias, residual, w_scale, x_scale = (
        None if each is None else each.contiguous() for each in (*added, w_scale, x_scale)
    )
    if residual is not None and residual.data_ptr() % 16:
        residual = residual.clone()  # read 16 bytes at a time
    one, stream = one_of(device), current_stream(device)
    groups = groups_of_scale(w_scale, out)
    x_step = 0 if x_scale is None or x_scale.numel() == 1 else 1
    key = (
        (x.data_ptr(), w.values.data_ptr(), w.meta.data_ptr(), y.data_ptr()),
        (address_of(bias), address_of(residual), address_of(w_scale), address_of(x_scale)),
        *(groups, x_step, tokens, out, k, row, w.dtype, x.dtype, call, device, stream),
    )
    bound = _BOUND.get(key)
    if bound is None:
        numbers = numbers_of(w.dtype, x.dtype, call, groups)
        problem, has_residual = Problem(tokens, out, k), residual is not None
        launch = _launch(problem, numbers, call.activation, has_residual, device, call.config)
        layout = Scales(
            address_of(one if w_scale is None else w_scale),
            address_of(one if x_scale is None else x_scale),
            groups,
            x_step,
            1.0 if call.out_scale is None else 1 / call.out_scale,
        )
        alpha = _OF_WIDENED if few else 1.0
        bound = _BOUND.keep(key, launch.bind(stream, key[0], row, key[1][:2], alpha, layout))
    bound()
    return y


@lru_cache(maxsize=4096)
def _launch(
    problem: Problem,
    numbers: Numbers,
    activation: str,
    has_residual: bool,
    device: int,
    config: Config | None,
) -> Launch:
    check_sides(problem)
    config = config or choose_scaled(
        problem,
        numbers,
        device_facts(device).sm_count,
        activation=activation,
        machine=machine_of(device),
    )
    return planned(problem, numbers, activation, has_residual, device, config)


def load(
    problem: Problem, numbers: Numbers, activation: str, has_residual: bool, device: int
) -> None:
    """Compile and load what a problem runs, where that was not done before."""
    one_of(device)
    _launch(problem, numbers, activation, has_residual, device, None)


def forget_scaled_launches() -> None:
    """Plan every launch anew; kernels stay loaded."""
    _launch.cache_clear()
    _BOUND.clear()


def describe(problem: Problem, numbers: Numbers, activation: str, device: int) -> str:
    """What runs for a problem, as a clause."""
    machine = machine_of(device)
    config = choose_scaled(
        problem, numbers, machine.sm_count, activation=activation, machine=machine
    )
    is_tuned = tuned_scaled(problem, numbers, machine, activation=activation) is not None
    how = "tuned" if is_tuned else "predicted"
    return f"wgmma.sp, tile {config.name}, {how}; {sums_of(numbers)} sums"


@cache
def one_of(device: int) -> Tensor:
    """The scale of what has none; there for every stream once this has returned.

    Raises:
        UnsupportedError: A CUDA graph is being captured, which would keep the 1 to its replays.
    """
    if is_capturing(device):
        raise UnsupportedError(
            "a first product of codes while a CUDA graph is captured",
            need="one call before, or what prepares it",
            hint="make the same call once before the capture",
        )
    one = torch.ones(1, dtype=torch.float32, device=f"cuda:{device}")
    one.item()  # Waits for it.
    return one
