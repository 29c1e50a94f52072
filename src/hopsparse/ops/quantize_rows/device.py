"""quantize_rows on a GPU: a call of which every fact was seen before is one look-up, one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import UnsupportedError
from ...launch import Bound, KnownLaunches, Turn, current_stream, kernel_for, starts_early
from ...ranges import in_phase
from . import plan
from .plan import Source

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_CODE_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.int8,
    "int4_in_e4m3": torch.float8_e4m3fn,
}

_BOUND = KnownLaunches()


@in_phase("format", "quantize_rows")
def run(
    x: Tensor,
    kind: str,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """Codes, scales and, with a residual, sums, of arguments that were checked.

    Args:
        x: [..., k] on a Hopper GPU, or [..., 2 k] where there is a gate; not empty, any strides.
        kind: "int8", "fp8", "int4" or "int4_in_e4m3".
        scale: float32 [1] or None.
        norm: [k] or None.
        eps: Added to the mean square.
        gate: "halves", "interleaved" or None.
        residual: As x, or None.

    Raises:
        UnsupportedError: No driver; too many rows or columns; or a graph is captured and the
            kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    x = x.contiguous()
    norm = None if norm is None else norm.contiguous()
    residual = None if residual is None else residual.contiguous()
    *lead, k = x.shape
    if gate is not None:
        k //= 2
    stored = k // 2 if kind == "int4" else k
    results = [
        x.new_empty((*lead, stored), dtype=_CODE_DTYPES[kind]),
        x.new_empty((*lead, 1), dtype=torch.float32),
    ]
    if residual is not None:
        results.append(torch.empty_like(x))
    enqueue(results, x, kind, scale, norm, eps, gate, residual)
    return results


def enqueue(
    results: list[Tensor],
    x: Tensor,
    kind: str,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> None:
    """Put the kernel on torch's current stream. Nothing waits for it, and nothing is checked.

    Args:
        results: What `run` returns, contiguous, codes on 8 bytes and sums on 16; all is written.
        x: As for `run`, like all the rest; contiguous.
        kind: "int8", "fp8", "int4" or "int4_in_e4m3".
        scale: float32 [1] or None.
        norm: [k], contiguous, or None.
        eps: Added to the mean square.
        gate: "halves", "interleaved" or None.
        residual: As x, contiguous, or None.
    """
    codes, scales, *sums = results
    k = x.shape[-1] // 2 if gate else x.shape[-1]
    device = x.get_device()
    addresses = (
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        sums[0].data_ptr() if sums else 0,
    )
    turn = Turn(current_stream(device), starts_early())
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (addresses, scales.numel(), k, x.dtype, kind, eps, gate, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        size = (scales.numel(), k)
        bound = _BOUND.keep(key, _bind(turn, addresses, size, x.dtype, kind, eps, gate, device))
    bound()


def _bind(
    turn: Turn,
    addresses: tuple[int, ...],
    size: tuple[int, int],
    dtype: torch.dtype,
    kind: str,
    eps: float,
    gate: str | None,
    device: int,
) -> Bound:
    """The launch with its arguments; compiles and loads its kernel where that was not done yet."""
    rows, k = size
    if rows > plan.MOST_ROWS or k > plan.LONGEST_ROW:
        raise UnsupportedError(
            f"quantize_rows: {rows} rows of {k}",
            need=f"at most {plan.MOST_ROWS} rows of {plan.LONGEST_ROW}",
            hint="x in pieces",
        )
    x, residual, norm = addresses[:3]
    vector = k % plan.CHUNK == 0 and not any(each % 16 for each in (x, residual, norm))
    source: Source = gate or ("norm" if norm else "plain")  # type: ignore[assignment]
    shape = plan.shape_for(k, vector=vector)
    spec = plan.spec_for(_NAMES[dtype], kind, source, shape)
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    args = plan.Args(*addresses, rows, k, vector, eps)
    blocks = plan.blocks_for(shape, rows)
    return kernel.bind(blocks, bytes(args), turn.stream, pdl=turn.early)
