"""spmm_bsr on a GPU: a call of which every fact was seen before is one look-up and one launch."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Real

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import ArgumentError, UnsupportedError
from ...formats.bsr import BSR
from ...launch import (
    Bound,
    Element,
    Kernel,
    KnownLaunches,
    current_stream,
    encode,
    kernel_for,
    max_active_blocks,
)
from ...plan import Target, parse_target
from ...tune import machine_of
from .kernel import SCALARS, Config
from .plan import Problem, spec_of
from .ready import keep_for_graph, layout_of, ready
from .schedule import raster_group, rows_of_x, token_tiles
from .strips import Strips

_LONGEST = 2**31 - 2**13  # the kernel counts in 32 bits, up to the end of the last tile or round
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_ELEMENTS = {"bfloat16": Element.BF16, "float16": Element.F16}
_BOUND = KnownLaunches()


@dataclass(frozen=True)
class Epilogue:
    """What happens to a sum before it is stored; what a kernel is compiled for.

    Attributes:
        out_dtype: Dtype of y.
        activation: One of `kernel.ACTIVATIONS`.
        has_residual: Whether something is added at the end.
    """

    out_dtype: torch.dtype
    activation: str = "none"
    has_residual: bool = False


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
        pointers = (*weight, y.data_ptr(), _address(bias), _address(residual))
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
        # A tensor would pass as a number, and be found again by its identity, not by its value.
        if not isinstance(alpha, Real):
            raise ArgumentError(
                f"spmm_bsr: alpha={alpha!r}", need="a number", hint="alpha.item(), once"
            )
        p, c = self.problem, self.config
        scalars = SCALARS.pack(
            *pointers,
            ctypes.c_float(alpha).value,  # Beyond float32 it is infinite, as on the CPU.
            *(p.tokens, p.out, self.strips, token_tiles(c, p.tokens)),
            *(raster_group(c, p.tokens), rows_of_x(c, p.tokens)),
        )
        x_map = encode(
            x,
            _ELEMENTS[self.dtype],
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
    longest = max(problem.tokens, problem.out, problem.k, count)
    if longest > _LONGEST:
        raise UnsupportedError(
            f"spmm_bsr: {longest} tokens, out-features, columns or tiles",
            need=f"at most {_LONGEST} of each",
            hint="x, or w, in pieces",
        )
    spec = spec_of(
        config,
        problem.out,
        _NAMES[dtype],
        out_dtype=_NAMES[epilogue.out_dtype],
        activation=epilogue.activation,
        residual=epilogue.has_residual,
    )
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    return Launch(kernel, config, problem, strips, _NAMES[dtype])


def forget_launches() -> None:
    """Plan every launch anew; kernels stay loaded."""
    launch_for.cache_clear()
    _BOUND.clear()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def rows_for_tma(x: Tensor) -> Tensor:
    """Rows [tokens, k] of x, each on 16 bytes; copied only where they are not that already.

    Example:
        >>> x = torch.ones(3, 20, dtype=torch.bfloat16)
        >>> rows_for_tma(x).stride(0), rows_for_tma(x[:, :16].contiguous()).stride(0)
        (24, 16)
    """
    rows, atom = x.reshape(-1, x.shape[-1]), 16 // x.itemsize
    tokens, k = rows.shape
    pitch = -(-k // atom) * atom
    aligned = (rows.stride(1) == 1 or k == 1) and rows.data_ptr() % 16 == 0
    if aligned and tokens == 1:
        return rows.as_strided((1, k), (pitch, 1))  # The stride of a single row may be anything.
    if aligned and rows.stride(0) % atom == 0 and rows.stride(0) >= k:
        return rows
    return x.new_empty((tokens, pitch))[:, :k].copy_(rows)


def run(
    w: BSR,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
    config: Config | None = None,
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
        config: The tile; None is the one that is predicted to be fastest.

    Returns:
        [..., out], contiguous.

    Raises:
        ArgumentError: `config` is a tile of other blocks.
    """
    out, k = w.shape
    y = x.new_empty((*x.shape[:-1], out), dtype=out_dtype)
    tokens = x.numel() // k
    if tokens == 0:
        return y
    (strips, values), device = ready(w), x.get_device()
    keep_for_graph(w)
    x, row = _readable(x, k)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else _on_16_bytes(residual)
    stream = current_stream(device)
    pointers = (
        *(values.data_ptr(), strips.columns.data_ptr(), strips.table.data_ptr()),
        *(y.data_ptr(), _address(bias), _address(residual)),
    )
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (
        *(pointers, x.data_ptr(), tokens, out, k, row, x.dtype, out_dtype, activation, alpha),
        *(config, device, stream, strips.panels, strips.width),
    )
    bound = _BOUND.get(key)
    if bound is None:
        problem = Problem(tokens, out, k)
        chosen = config or _choice(w, problem, device)
        _check_config(chosen, strips)
        epilogue = Epilogue(out_dtype, activation, residual is not None)
        launch = launch_for(problem, strips.lengths.numel(), x.dtype, epilogue, device, chosen)
        bound = _BOUND.keep(key, launch.bind(stream, x.data_ptr(), row, pointers, alpha))
    bound()
    return y


def _readable(x: Tensor, k: int) -> tuple[Tensor, int]:
    """Tokens as TMA reads them, and elements from one to the next."""
    if x.is_contiguous() and k % 8 == 0 and x.data_ptr() % 16 == 0:
        return x, k
    rows = rows_for_tma(x)
    return rows, rows.stride(0)


def _on_16_bytes(residual: Tensor) -> Tensor:
    residual = residual.contiguous()
    return residual.clone() if residual.data_ptr() % 16 else residual


def _choice(w: BSR, problem: Problem, device: int) -> Config:
    return layout_of(w).decide(problem, _NAMES[w.dtype], target_of(device)).config


def _check_config(config: Config, strips: Strips) -> None:
    if (config.panels, config.width) != (strips.panels, strips.width):
        raise ArgumentError(
            f"spmm_bsr: {config} for this weight",
            need=f"a tile with panels={strips.panels}, width={strips.width}",
            hint="config=None, which chooses one",
        )
