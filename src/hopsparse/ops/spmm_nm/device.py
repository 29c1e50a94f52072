"""spmm_nm on a GPU: a planned call is one look-up, three tensor maps and one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import (
    Element,
    Kernel,
    current_stream,
    device_facts,
    encode,
    kernel_for,
    max_active_clusters,
)
from ...tune import machine_of
from .kernel import SCALARS, UNIT, Config, spec_for
from .plan import Problem, choose

_RASTER_TOKENS = 2048  # tokens of the tiles in flight at one time: near a square of y
_ELEMENTS = {torch.bfloat16: Element.BF16, torch.float16: Element.F16}
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


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
    """All of a call but its pointers."""

    kernel: Kernel
    config: Config
    problem: Problem
    element: Element
    grid: int
    sizes: tuple[int, int, int, int, int, int]

    def __call__(
        self,
        values: Tensor,
        meta: Tensor,
        x: Tensor,
        y: Tensor,
        *,
        bias: Tensor | None,
        residual: Tensor | None,
        alpha: float,
    ) -> None:
        """Put the kernel on torch's current stream; nothing waits for it.

        Args:
            values: As `NM.values`.
            meta: As `NM.meta`.
            x: [tokens, k], rows that start on 16 bytes, neighbouring columns.
            y: [tokens, out], contiguous; all of it is written.
            bias: [out] or None.
            residual: [tokens, out], contiguous, or None.
            alpha: What the sum is multiplied by.
        """
        args = b"".join(
            (
                self._x_map(x),
                self._values_map(values),
                self._meta_map(meta),
                SCALARS.pack(
                    y.data_ptr(),
                    0 if bias is None else bias.data_ptr(),
                    0 if residual is None else residual.data_ptr(),
                    alpha,
                    *self.sizes,
                ),
            )
        )
        self.kernel.launch(self.grid, args, current_stream(self.kernel.device))

    def _x_map(self, x: Tensor) -> bytes:
        p, c = self.problem, self.config
        box = (UNIT, c.tokens // c.cluster_out)
        return encode(
            x.data_ptr(), self.element, (p.k, p.tokens), (x.stride(0) * 2,), box, swizzle=128
        )

    def _values_map(self, values: Tensor) -> bytes:
        c, panels, steps = self.config, values.shape[0], values.shape[1]
        # A step of a panel is 2048 bytes, moved as 256 numbers of 8: a box has 256 at most.
        return encode(
            values.data_ptr(),
            Element.U64,
            (256, panels, steps),
            (steps * 2048, 2048),
            (256, c.warpgroups * c.panels, 2 * c.units // c.cluster_tokens),
        )

    def _meta_map(self, meta: Tensor) -> bytes:
        c, panels, units = self.config, meta.shape[0], meta.shape[1]
        return encode(
            meta.data_ptr(),
            Element.I32,
            (128, units, panels),
            (512, units * 512),
            (128, c.units, c.warpgroups * c.panels),
        )


@lru_cache(maxsize=4096)
def launch_for(
    problem: Problem,
    dtype: torch.dtype,
    epilogue: Epilogue,
    device: int,
    config: Config | None = None,
) -> Launch:
    """The launch of a problem; compiles and loads its kernel where that was not done before.

    Args:
        problem: Sizes, all positive.
        dtype: Of x and w: bfloat16 or float16.
        epilogue: What happens to the sums.
        device: Ordinal of the GPU.
        config: The tile; None chooses one.

    Raises:
        UnsupportedError: No driver, another GPU, or a graph is captured and the kernel is not
            loaded yet.
        CompileError: The kernel does not compile.
    """
    config = config or choose(
        problem,
        device_facts(device).sm_count,
        dtype=_NAMES[dtype],
        machine=machine_of(device),
    )
    direct = epilogue.out_dtype == torch.float32 or problem.out * 2 % 16 != 0
    spec = spec_for(
        config,
        _NAMES[dtype],
        out_dtype=_NAMES[epilogue.out_dtype],
        activation=epilogue.activation,
        residual=epilogue.has_residual,
        direct=direct,
    )
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    cluster = config.cluster_out * config.cluster_tokens
    out_tiles = ceil(ceil(problem.out / config.out) / config.cluster_out)
    token_tiles = ceil(ceil(problem.tokens / config.tokens) / config.cluster_tokens)
    stages = ceil(problem.k / (UNIT * config.units))
    group = max(1, _RASTER_TOKENS // (config.tokens * config.cluster_tokens))
    return Launch(
        kernel,
        config,
        problem,
        _ELEMENTS[dtype],
        min(out_tiles * token_tiles, max_active_clusters(kernel)) * cluster,
        (problem.tokens, problem.out, stages + stages % 2, out_tiles, token_tiles, group),
    )


def rows_for_tma(x: Tensor) -> Tensor:
    """X as [tokens, k] whose rows start on 16 bytes; copied only where it is not that already."""
    rows = x.reshape(-1, x.shape[-1])
    tokens, k = rows.shape
    strided = rows.stride(0) * 2 % 16 if tokens > 1 else 0
    if (rows.stride(1) == 1 or k == 1) and not strided and rows.data_ptr() % 16 == 0:
        if tokens > 1 and rows.stride(0) >= k:
            return rows
        if tokens == 1:
            return rows.as_strided((1, k), (-(-k // 8) * 8, 1))
    padded = x.new_empty((tokens, -(-k // 8) * 8))[:, :k]
    return padded.copy_(rows)


def run(
    values: Tensor,
    meta: Tensor,
    x: Tensor,
    out: int,
    epilogue: Epilogue,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    config: Config | None = None,
) -> Tensor:
    """Y = act(alpha * x @ w^T + bias) + residual, of arguments that were checked.

    Args:
        values: As `NM.values`, bfloat16 or float16.
        meta: As `NM.meta`.
        x: [..., k], any strides.
        out: Rows of w.
        epilogue: What happens to the sums.
        bias: [out] or None.
        residual: As y, or None.
        alpha: What the sums are multiplied by.
        config: The tile; None chooses one.

    Returns:
        [..., out], contiguous.
    """
    y = x.new_empty((*x.shape[:-1], out), dtype=epilogue.out_dtype)
    if y.numel() == 0:
        return y
    rows = rows_for_tma(x)
    problem = Problem(rows.shape[0], out, rows.shape[1])
    launch = launch_for(problem, x.dtype, epilogue, x.device.index, config)
    added = None if residual is None else residual.contiguous()
    if added is not None and added.data_ptr() % 16:
        added = added.clone()  # read 16 bytes at a time
    offset = None if bias is None else bias.contiguous()
    launch(values, meta, rows, y, bias=offset, residual=added, alpha=alpha)
    return y
