"""im2col on a GPU: a call of which every fact was seen before is one look-up and one launch."""

from __future__ import annotations

from torch import Tensor

from ...compiler import KernelCache
from ...launch import KnownLaunches, Turn, current_stream, kernel_for, starts_early
from ...plan.division import divisor
from ...ranges import in_phase
from .._windows import Windows
from . import plan

_BOUND = KnownLaunches()


@in_phase("format", "im2col")
def run(x: Tensor, windows: Windows) -> Tensor:
    """The windows of images that were checked.

    Args:
        x: [n, c, height, width] on a Hopper GPU, as `vector_of` takes it, not empty.
        windows: What is gathered.

    Returns:
        [n * places, taps * c], contiguous.

    Raises:
        UnsupportedError: No driver; or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    n, c, height, width = x.shape
    places = windows.places(height, width)
    columns = x.new_empty((n * places[0] * places[1], windows.taps * c))
    device = x.get_device()
    turn = Turn(current_stream(device), starts_early())
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (x.data_ptr(), columns.data_ptr(), x.shape, x.stride(), x.dtype, windows, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        vector = vector_of(x)
        spec, args = plan.spec_for(vector), args_for(x, columns, windows, vector)
        grid = plan.share_of(args.vectors).grid(args.rows)
        kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
        bound = _BOUND.keep(key, kernel.bind(grid, bytes(args), turn.stream, pdl=turn.early))
    bound()
    return columns


def vector_of(x: Tensor) -> int:
    """Bytes that the kernel moves at a time; 0 where channels are no neighbours.

    Args:
        x: [n, c, height, width].

    Example:
        >>> import torch
        >>> images = torch.zeros(2, 8, 5, 5, dtype=torch.bfloat16)
        >>> vector_of(images), vector_of(images.to(memory_format=torch.channels_last))
        (0, 16)
    """
    n, c, height, width = x.shape
    size = x.element_size()
    if c > 1 and x.stride(1) != 1:
        return 0
    spans = [c * size, x.data_ptr()]
    spans += [x.stride(i) * size for i, count in ((0, n), (2, height), (3, width)) if count > 1]
    return next(v for v in plan.VECTORS if all(span % v == 0 for span in spans))


def args_for(x: Tensor, columns: Tensor, windows: Windows, vector: int) -> plan.Args:
    """The kernel's argument.

    Args:
        x: [n, c, height, width].
        columns: [n * places, taps * c], contiguous.
        windows: What is gathered.
        vector: Bytes that move at a time.
    """
    _, c, height, width = x.shape
    size = x.element_size()
    of_tap = c * size // vector
    vectors = windows.taps * of_tap
    share = plan.share_of(vectors)
    return plan.Args(
        x.data_ptr(),
        columns.data_ptr(),
        *(x.stride(i) * size for i in (0, 2, 3)),
        *(divisor(count) for count in windows.places(height, width)),
        columns.shape[0],
        height,
        width,
        windows.kernel[1],
        vectors,
        of_tap,
        share.lanes,
        share.rows_at_once,
        *windows.stride,
        *windows.padding,
        *windows.dilation,
    )
