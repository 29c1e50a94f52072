"""peer_sum on a GPU: a call of which every fact was seen before is one look-up and one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import KnownLaunches, Turn, current_stream, kernel_for, starts_early
from ...plan.spec import KernelSpec
from ...ranges import in_phase
from . import plan
from .plan import CHUNK, CHUNK_BYTES, Place

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

_BOUND = KnownLaunches()


def why_no_sum(out: int, part: torch.dtype, dtype: torch.dtype, tokens: int) -> str | None:
    """What keeps the kernel from adding parts [tokens, out], as a clause; None if nothing does.

    Args:
        out: Columns.
        part: Dtype of the parts.
        dtype: Of the result.
        tokens: Rows.
    """
    if dtype not in (torch.bfloat16, torch.float16) or part not in (dtype, torch.float32):
        told = [str(each).removeprefix("torch.") for each in (part, dtype)]
        return f"the kernel makes 16 bits of 16 bits or float32, not {told[1]} of {told[0]}"
    if out % CHUNK:
        return f"rows of {out} are no multiple of {CHUNK}"
    return None if tokens * out <= plan.MOST_CHUNKS * CHUNK else "there are too many numbers"


def why_no_gather(bounds: Sequence[int], itemsize: int, tokens: int) -> str | None:
    """What keeps the kernel from gathering columns, as a clause; None if nothing does.

    Args:
        bounds: First column of each rank, and their end.
        itemsize: Bytes of an entry.
        tokens: Rows.
    """
    for bound in bounds:
        if bound * itemsize % CHUNK_BYTES:
            return f"columns of a rank start at {bound}, which is not on {CHUNK_BYTES} bytes"
    whole = tokens * bounds[-1] * itemsize <= plan.MOST_CHUNKS * CHUNK_BYTES
    return None if whole else "there are too many numbers"


@in_phase("epilogue", "peer_sum")
def peer_sum(
    y: Tensor,
    place: Place,
    part: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Add what all ranks have. Nothing waits for it here, and nothing is checked.

    Every rank makes the same call; parts must be written on the same stream.

    Args:
        y: [..., out], bfloat16 or float16, contiguous; all is written.
        place: Where the parts [..., out] are.
        part: Their dtype.
        bias: [out], as y, on 16 bytes, or None.
        residual: As y, contiguous, on 16 bytes, or None.

    Raises:
        UnsupportedError: No driver, or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    addresses = tuple(0 if each is None else each.data_ptr() for each in (residual, bias, y))
    spec = plan.spec_of_sum(_NAMES[part], _NAMES[y.dtype], len(place.bases))
    sizes = (y.numel() // CHUNK, y.shape[-1] // CHUNK)
    _enqueue(spec, place, addresses, sizes, (), y.get_device())


def peer_gather(y: Tensor, place: Place, bounds: Sequence[int]) -> None:
    """Put columns of all ranks side by side. Nothing waits for it here, and nothing is checked.

    Args:
        y: [..., out], contiguous; all is written.
        place: Where the parts [..., columns of a rank] are.
        bounds: First column of each rank, and their end: each on 16 bytes.

    Raises:
        UnsupportedError: No driver, or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    each = CHUNK_BYTES // y.itemsize
    starts = tuple(bound // each for bound in bounds)
    sizes = (y.numel() // each, starts[-1])
    _enqueue(plan.spec_of_gather(), place, (0, 0, y.data_ptr()), sizes, starts, y.get_device())


def load(part: torch.dtype, dtype: torch.dtype, ranks: int, device: int) -> None:
    """Compile and load both kernels, so that a first call can be captured.

    Args:
        part: Dtype of the parts.
        dtype: Of the result.
        ranks: How many.
        device: Ordinal of the GPU.
    """
    for spec in (plan.spec_of_sum(_NAMES[part], _NAMES[dtype], ranks), plan.spec_of_gather()):
        kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)


def _enqueue(
    spec: KernelSpec,
    place: Place,
    addresses: tuple[int, ...],
    sizes: tuple[int, int],
    starts: tuple[int, ...],
    device: int,
) -> None:
    turn = Turn(current_stream(device), starts_early())
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (spec.name, place, addresses, sizes, starts, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
        residual, bias, y = addresses
        args = plan.args_of(place, (residual, bias, y), *sizes, starts)
        blocks = plan.blocks_for(sizes[0])
        bound = _BOUND.keep(key, kernel.bind(blocks, bytes(args), turn.stream, pdl=turn.early))
    bound()
