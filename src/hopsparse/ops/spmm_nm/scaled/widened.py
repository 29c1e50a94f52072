"""x of 4 bits that becomes E4M3 once, ahead of the product: whether, and its launch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ....compiler import KernelCache
from ....launch import (
    Bound,
    Kernel,
    KnownLaunches,
    Turn,
    current_stream,
    device_facts,
    kernel_for,
    starts_early,
)
from ....tune import machine_of
from ..chosen import prepare_found
from ..cost import Problem
from ..kernel import Config, Numbers
from ..widen import ARGS, blocks_for, pieces_of, widen_spec
from .plan import SCALED, as_widened, widens_once

_E4M3 = torch.float8_e4m3fn
_BOUND = KnownLaunches()


@lru_cache(maxsize=8192)
def widens_here(problem: Problem, numbers: Numbers, activation: str, device: int) -> bool:
    """`plan.widens_once` on a GPU, with what was tuned there; kept until `forget`."""
    machine = machine_of(device)
    return widens_once(problem, numbers, machine.sm_count, activation=activation, machine=machine)


def load_widen(device: int) -> Kernel:
    """The kernel, compiled and loaded if it was not before.

    Raises:
        UnsupportedError: No driver, another GPU, or a graph is captured and it is not loaded yet.
        CompileError: It does not compile.
    """
    return kernel_for(
        widen_spec(), device, lambda missing: KernelCache.default().get(missing).image
    )


def widened(x: Tensor, tokens: int, k: int) -> Tensor:
    """E4M3 of code * 2^-9: [tokens, k], rows on 16 bytes. It is the next work of the stream.

    A launch behind it that starts early finds all ended that came before this one.

    Args:
        x: [..., k / 2] bytes on a GPU, rows on 16 bytes, whole to the last 16, as `rows_for_tma`
            makes them.
        tokens: Its rows.
        k: Codes of a row.
    """
    device, pieces = x.get_device(), pieces_of(k)
    wide = torch.empty((tokens, 16 * pieces), dtype=_E4M3, device=x.device)
    pitch = 8 * pieces if x.is_contiguous() else x.stride(-2)
    turn = Turn(current_stream(device), starts_early())
    key = (x.data_ptr(), wide.data_ptr(), pitch, tokens, pieces, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        bound = _BOUND.keep(key, _bind(key[:2], pitch, (tokens, pieces), device, turn))
    bound()
    return wide[:, :k]


def _bind(
    addresses: tuple[int, int], pitch: int, size: tuple[int, int], device: int, turn: Turn
) -> Bound:
    rows, pieces = size
    blocks = blocks_for(rows * pieces, device_facts(device).sm_count)
    if pitch == 8 * pieces:  # One long row needs no division.
        rows, pieces = 1, rows * pieces
    args = ARGS.pack(*addresses, pitch, rows, pieces)
    return load_widen(device).bind(blocks, args, turn.stream, pdl=turn.early)


def prepare_both(
    problem: Problem, numbers: Numbers, activation: str, has_residual: bool, device: int
) -> tuple[Config, ...]:
    """As `chosen.prepare_coded`, for x of 4 bits: of each token count what it runs.

    Args:
        problem: Sizes; the most tokens.
        numbers: Dtypes, and how sums are taken; x is `int4`.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        has_residual: Whether something is added at the end.
        device: Ordinal of the GPU.
    """
    machine = machine_of(device)
    in_tile, behind = numbers, as_widened(numbers)
    found: dict[Numbers, dict[Config, int]] = {in_tile: {}, behind: {}}
    for first in range(1, problem.tokens + 1, 16):
        each = replace(problem, tokens=first)
        runs = behind if widens_here(each, numbers, activation, device) else in_tile
        config = SCALED.choose(each, runs, machine.sm_count, activation=activation, machine=machine)
        found[runs].setdefault(config, first)
    for runs, configs in found.items():
        prepare_found(SCALED, configs, problem, runs, activation, has_residual, device)
    if found[behind]:
        load_widen(device)
    tiles = [(first, config) for of in found.values() for config, first in of.items()]
    return tuple(dict.fromkeys(config for _, config in sorted(tiles, key=lambda tile: tile[0])))


def forget() -> None:
    """Decide anew, and plan every launch anew; kernels stay loaded."""
    widens_here.cache_clear()
    _BOUND.clear()
