"""What a chooser chose for products of codes, on a GPU: planned once, loaded, and told."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import UnsupportedError
from ...launch import device_facts, is_capturing
from ...tune import machine_of
from .chooser import Chooser
from .cost import Problem
from .device import Launch, check_sides, planned
from .kernel import Config, Numbers, fold_of, spec_of_numbers, stores_directly


@lru_cache(maxsize=8192)
def coded_launch(
    chooser: Chooser,
    problem: Problem,
    numbers: Numbers,
    activation: str,
    has_residual: bool,
    device: int,
    config: Config | None = None,
) -> Launch:
    """The launch of a problem; its kernel is compiled and loaded if it was not before.

    Until `coded_launch.cache_clear`, which follows tuning, a problem keeps its tile.

    Args:
        chooser: Of the operator.
        problem: Sizes, all positive.
        numbers: Dtypes, and how sums are taken.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        has_residual: Whether something is added at the end.
        device: Ordinal of the GPU.
        config: The tile; None chooses one.

    Raises:
        UnsupportedError: No driver, another GPU, a side of over 2^31 - 2^13, or a graph is captured
            and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    check_sides(problem)
    config = config or chooser.choose(
        problem,
        numbers,
        device_facts(device).sm_count,
        activation=activation,
        machine=machine_of(device),
    )
    return planned(problem, numbers, activation, has_residual, device, config)


def prepare_coded(
    chooser: Chooser,
    problem: Problem,
    numbers: Numbers,
    activation: str,
    has_residual: bool,
    device: int,
) -> tuple[Config, ...]:
    """Compile and load what any count up to `problem.tokens` runs, where it is not there already.

    Args:
        chooser: Of the operator.
        problem: Sizes; the most tokens.
        numbers: Dtypes, and how sums are taken.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        has_residual: Whether something is added at the end.
        device: Ordinal of the GPU.

    Returns:
        The tiles, by the least token count that chooses each.

    Raises:
        CompileError: A kernel does not compile.
        UnsupportedError: As for `coded_launch`.
    """
    machine = machine_of(device)
    found = chooser.choices(
        problem, numbers, machine.sm_count, activation=activation, machine=machine
    )
    prepare_found(chooser, found, problem, numbers, activation, has_residual, device)
    return tuple(found)


def prepare_found(
    chooser: Chooser,
    found: dict[Config, int],
    problem: Problem,
    numbers: Numbers,
    activation: str,
    has_residual: bool,
    device: int,
) -> None:
    """Compile and load tiles, each with a token count that chooses it; the rest as above."""
    direct = stores_directly(problem.out // fold_of(activation), numbers.out)
    specs = [spec_of_numbers(each, numbers, activation, has_residual, direct) for each in found]
    # Side by side what is then loaded one after the other.
    for built in KernelCache.default().compile_all(specs):
        if built.error is not None:
            raise built.error
    one_of(device)
    for tokens in found.values():
        each = replace(problem, tokens=tokens)
        coded_launch(chooser, each, numbers, activation, has_residual, device, None)


def describe(
    chooser: Chooser, problem: Problem, numbers: Numbers, activation: str, device: int
) -> str:
    """The tile that runs for a problem, and who chose it, as a clause."""
    machine = machine_of(device)
    config = chooser.choose(
        problem, numbers, machine.sm_count, activation=activation, machine=machine
    )
    is_tuned = chooser.tuned(problem, numbers, machine, activation=activation) is not None
    return f"wgmma.sp, tile {config.name}, {'tuned' if is_tuned else 'predicted'}"


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
