"""spmm_bsr on a GPU: a call of which every fact was seen before is one look-up and one launch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...formats.bsr import BSR
from ...launch import Bound, Kernel, current_stream, encode, max_active_blocks
from ...plan import Target, parse_target
from ...ranges import in_phase
from ...tune import machine_of
from .fragments_device import fragment_launch_for, run_fragments
from .fragments_kernel import FragmentConfig
from .grains import grain_of, grains_for
from .kernel import SCALARS, Config
from .launching import (
    BOUND,
    ELEMENTS,
    NAMES,
    Epilogue,
    address,
    as_float32,
    check_sizes,
    loaded,
    on_16_bytes,
    readable,
)
from .plan import Decision, Problem
from .ready import Ready, class_of, forget_decisions, keep_for_graph, layout_of
from .schedule import raster_group, rows_of_x, token_tiles
from .strips import Strips

__all__ = [
    "Epilogue",
    "Launch",
    "decide_on",
    "forget_launches",
    "launch_for",
    "run",
    "target_of",
]


@dataclass(frozen=True)
class Launch:
    """All of a call but its pointers.

    Attributes:
        kernel: It is loaded.
        config: The tile.
        problem: Sizes.
        strips: Of the weight.
        dtype: Of x.
    """

    kernel: Kernel
    config: Config
    problem: Problem
    strips: int
    dtype: str

    def __call__(
        self,
        w: tuple[Strips, Tensor],
        x: Tensor,
        y: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        alpha: float = 1.0,
    ) -> None:
        """Put the kernel on torch's current stream; nothing waits for it.

        Args:
            w: The weight: `ready`.
            x: [tokens, k], rows that start on 16 bytes, neighbouring columns.
            y: [tokens, out], contiguous; all of it is written.
            bias: [out] or None.
            residual: [tokens, out], contiguous, or None.
            alpha: What the sum is multiplied by.
        """
        strips, values = w
        weight = (values.data_ptr(), strips.columns.data_ptr(), strips.table.data_ptr())
        pointers = (*weight, y.data_ptr(), address(bias), address(residual))
        stream = current_stream(self.kernel.device)
        self.bind(stream, x.data_ptr(), x.stride(0), pointers, alpha)()

    def bind(
        self,
        stream: int,
        x: int,
        row: int,
        pointers: tuple[int, int, int, int, int, int],
        alpha: float,
    ) -> Bound:
        """The launch with its arguments.

        Args:
            stream: Handle of the stream.
            x: Address of the tokens.
            row: Elements from one of them to the next.
            pointers: Addresses of the weights, their columns, the table of strips, y, bias and
                residual, 0 where there is none.
            alpha: What the sum is multiplied by.

        Raises:
            ArgumentError: alpha is no number.
        """
        p, c = self.problem, self.config
        scalars = SCALARS.pack(
            *pointers,
            as_float32(alpha),
            *(p.tokens, p.out, self.strips, token_tiles(c, p.tokens)),
            *(raster_group(c, p.tokens), rows_of_x(c, p.tokens)),
        )
        x_map = encode(
            x,
            ELEMENTS[self.dtype],
            (p.k, p.tokens),
            (row * 2,),
            (c.width, rows_of_x(c, p.tokens)),
            swizzle=2 * c.width,
        )
        count = self.strips * token_tiles(c, p.tokens)
        grid = min(count, max_active_blocks(self.kernel))
        return self.kernel.bind(grid, x_map + scalars, stream)


@cache
def target_of(device: int) -> Target:
    """The row of the table, or the slice of it, that a GPU which is present belongs to."""
    machine = machine_of(device)
    name = "h100" if "H100" in machine.gpu else "h200"
    share = re.search(r"MIG (\d)g", machine.gpu)
    return parse_target(f"{name}:{share[1]}/7" if share else name)


@lru_cache(maxsize=4096)
def launch_for(
    problem: Problem,
    strips: int,
    dtype: torch.dtype,
    epilogue: Epilogue,
    device: int,
    config: Config,
) -> Launch:
    """The launch of a problem; compiles and loads its kernel where that was not done before.

    Args:
        problem: Sizes, all positive.
        strips: Of the weight.
        dtype: Of x and w: bfloat16 or float16.
        epilogue: What happens to the sums.
        device: Ordinal of the GPU.
        config: The tile.

    Raises:
        UnsupportedError: No driver, another GPU, a side or a number of items of over 2^31 - 2^13,
            or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    count = strips * token_tiles(config, problem.tokens)
    check_sizes(problem, count)
    kernel = loaded(config, problem, dtype, epilogue, device)
    return Launch(kernel, config, problem, strips, NAMES[dtype])


def forget_launches() -> None:
    """Decide and plan every launch anew; kernels stay loaded, and weights laid out."""
    forget_decisions()
    launch_for.cache_clear()
    fragment_launch_for.cache_clear()
    BOUND.clear()


@in_phase("sparse", "spmm_bsr")
def run(
    w: BSR,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
    config: Config | FragmentConfig | None = None,
) -> Tensor:
    """The product y = act(alpha * x @ w^T + bias) + residual, of arguments that were checked.

    Args:
        w: [out, k], bfloat16 or float16, blocks that `strips.width_of` has a width for.
        x: [..., k], any strides.
        bias: [out] or None.
        residual: As y, or None.
        activation: One of `kernel.ACTIVATIONS`.
        alpha: What the sums are multiplied by.
        out_dtype: Of y.
        config: The tile; None is the one that is measured, or predicted, to be fastest.

    Returns:
        [..., out], contiguous.

    Raises:
        ArgumentError: `config` is a tile that blocks of these sides cannot run.
    """
    (out, k), device = w.shape, x.get_device()
    y = x.new_empty((*x.shape[:-1], out), dtype=out_dtype)
    tokens = x.numel() // k
    if tokens == 0:
        return y
    config = _tile(made := layout_of(w), w, tokens, device, config)
    if isinstance(config, FragmentConfig):
        epilogue = Epilogue(out_dtype, activation, residual is not None)
        return run_fragments(w, x, y, bias, residual, epilogue, alpha, config)
    grain = grain_of(config)
    strips, values = made.take(w, grain)
    assert isinstance(strips, Strips)
    keep_for_graph(w, grain)
    x, row = readable(x, k)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else on_16_bytes(residual)
    stream = current_stream(device)
    weight = (values.data_ptr(), strips.columns.data_ptr(), strips.table.data_ptr())
    pointers = (*weight, y.data_ptr(), address(bias), address(residual))
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (
        *(pointers, x.data_ptr(), tokens, out, k, row, x.dtype, out_dtype, activation, alpha),
        *(config, device, stream),
    )
    bound = BOUND.get(key)
    if bound is None:
        epilogue = Epilogue(out_dtype, activation, residual is not None)
        problem, count = Problem(tokens, out, k), strips.lengths.numel()
        launch = launch_for(problem, count, x.dtype, epilogue, device, config)
        bound = BOUND.keep(key, launch.bind(stream, x.data_ptr(), row, pointers, alpha))
    bound()
    return y


def decide_on(made: Ready, problem: Problem, dtype: torch.dtype, device: int) -> Decision:
    """What runs on a GPU: what was tuned there, else what is predicted.

    Args:
        made: Of the weight.
        problem: Sizes.
        dtype: Of x and w.
        device: Ordinal of the GPU.
    """
    return made.decide(problem, NAMES[dtype], target_of(device), machine_of(device))


def _tile(
    made: Ready, w: BSR, tokens: int, device: int, config: Config | FragmentConfig | None
) -> Config | FragmentConfig:
    """The tile that runs: the one that is asked for, if blocks can run it, or chosen."""
    if config is None:
        known = made.decided.get(class_of(tokens))
        return (known or decide_on(made, Problem(tokens, *w.shape), w.dtype, device)).config
    if grain_of(config) not in made.counts:
        _refuse(config, w)
    return config


def _refuse(config: Config | FragmentConfig, w: BSR) -> NoReturn:
    known = ", ".join(f"{rows} x {columns}" for rows, columns in grains_for(w.block))
    rows, columns = grain_of(config)
    raise ArgumentError(
        f"spmm_bsr: {config}, of cells of {rows} x {columns}, for blocks of "
        f"{w.block[0]} x {w.block[1]}",
        need=f"a tile of cells of {known}",
        hint="config=None, which chooses one",
    )
