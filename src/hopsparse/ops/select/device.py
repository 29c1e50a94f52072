"""select on a GPU: a call of which every fact was seen before is one look-up and one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import UnsupportedError
from ...launch import Bound, KnownLaunches, Turn, current_stream, kernel_for, starts_early
from ...plan import KernelSpec
from ...ranges import in_phase
from . import plan
from .plan import By

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

_BOUND = KnownLaunches()


@in_phase("select", "select")
def run(
    scores: Tensor,
    k: Tensor | None,
    lengths: Tensor | None,
    by: By,
    limit: Tensor | None,
    number: float,
    sizes: list[int],
) -> list[Tensor]:
    """Indices and counts of arguments that were checked.

    Args:
        scores: [rows, columns] on a Hopper GPU, contiguous, not empty.
        k: int32 [rows] or None.
        lengths: int32 [rows] or None.
        by: What ends a row besides k.
        limit: float32 [rows] or None.
        number: The limit of all rows.
        sizes: k of all rows, width, sink, recent.

    Raises:
        UnsupportedError: No driver; too many rows; or a graph is captured and the kernel is not
            loaded yet.
        CompileError: The kernel does not compile.
    """
    indices = scores.new_empty((scores.shape[0], sizes[1]), dtype=torch.int32)
    counts = scores.new_empty((scores.shape[0],), dtype=torch.int32)
    enqueue([indices, counts], scores, (k, lengths, limit), by, number, sizes)
    return [indices, counts]


def enqueue(
    results: list[Tensor],
    scores: Tensor,
    of_rows: tuple[Tensor | None, Tensor | None, Tensor | None],
    by: By,
    number: float,
    sizes: list[int],
) -> None:
    """Put the kernel on torch's current stream. Nothing waits for it, and nothing is checked.

    Args:
        results: What `run` returns, contiguous; all is written.
        scores: As for `run`, like all the rest.
        of_rows: k, lengths and limit.
        by: What ends a row besides k.
        number: The limit of all rows.
        sizes: k of all rows, width, sink, recent.
    """
    tensors = (scores, *of_rows, *results)
    addresses = tuple(0 if each is None else each.data_ptr() for each in tensors)
    device = scores.get_device()
    rows, columns = scores.shape
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    turn = Turn(current_stream(device), starts_early())
    key = (addresses, rows, columns, scores.dtype, by, number, *sizes, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        spec = plan.spec_for(_NAMES[scores.dtype], by, plan.shape_for(columns, rows))
        k, width, sink, recent = sizes
        args = plan.Args(*addresses, columns, width, k, sink, recent, number)
        bound = _BOUND.keep(key, _bind(spec, rows, bytes(args), turn, device))
    bound()


def _bind(spec: KernelSpec, rows: int, args: bytes, turn: Turn, device: int) -> Bound:
    """The launch with its arguments; compiles and loads its kernel where that was not done yet."""
    if rows > plan.MOST_ROWS:
        raise UnsupportedError(
            f"select: {rows} rows", need=f"at most {plan.MOST_ROWS}", hint="scores in pieces"
        )
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    return kernel.bind(rows * spec.cluster[0], args, turn.stream, pdl=turn.early)
