"""Windows of images as the rows of a matrix: checks, plan, run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from ...errors import ArgumentError
from .._call import is_plain, is_transformed
from .._product import Plan, is_dense, is_hopper, told
from .._windows import Windows
from . import reference
from .plan import VECTORS, has_kernel


def im2col(
    x: Tensor,
    kernel: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """Gather the windows of a convolution: y = columns @ w.T is conv2d for w [out, taps * c].

    A window is a row: its taps from left to right and down, and of each tap all channels. With it
    goes the weight of an `nn.Conv2d` as `weight.permute(0, 2, 3, 1).flatten(1)`.
    On a Hopper GPU channels-last images run as one kernel, which copies. All else is operations of
    torch: contiguous images, calls that keep a gradient, and calls that are traced, which
    torch.compile makes one kernel of.

    Args:
        x: [n, c, height, width], any dtype and strides.
        kernel: Taps; one number, or of rows and columns, like the rest.
        stride: From one window to the next.
        padding: Zeros on every side.
        dilation: From one tap to the next.

    Returns:
        [n * windows of an image, taps * c], contiguous, dtype and device of x.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> import torch
        >>> x = torch.arange(9.0).view(1, 1, 3, 3)
        >>> im2col(x, 2).tolist()[0], im2col(x, 3, padding=1).shape
        ([0.0, 1.0, 3.0, 4.0], torch.Size([9, 9]))
    """
    pairs = (_pair(each) for each in (kernel, stride, padding, dilation))
    return gather(x, Windows(*pairs))


def gather(x: Tensor, windows: Windows) -> Tensor:
    """`im2col` of windows that were put together before.

    Args:
        x: [n, c, height, width].
        windows: What is gathered.

    Raises:
        ArgumentError: x is no images, or smaller than a window.
    """
    if not is_dense(x) or x.ndim != 4 or x.shape[1] == 0:
        raise ArgumentError(
            f"im2col: images {told(x)}",
            need="[n, channels, height, width], at least one channel",
            hint="x[None] for one image",
        )
    windows.places(x.shape[2], x.shape[3])
    if _why_no_kernel(x, windows) is None:
        return _run()(x, windows)
    return reference.im2col(x, windows)


def plan(x: Tensor, windows: Windows) -> Plan:
    """What `gather(x, windows)` will run."""
    why = _why_no_kernel(x, windows)
    return Plan("im2col", "reference" if why else "kernel", why or "one launch, which copies")


def _why_no_kernel(x: Tensor, windows: Windows) -> str | None:
    """What keeps the kernel from running, as a clause; None if nothing does."""
    if not x.is_cuda:
        return f"x is on {'the CPU' if x.device.type == 'cpu' else x.device.type}"
    # Each of these asks torch, which a compiler cannot follow: first whether one does.
    if not is_plain(x):
        return "the call is traced or keeps a gradient"
    if is_transformed():
        return "torch.func or a forward derivative is at work"
    if not is_hopper(x.get_device()):
        return "the GPU is no H100 or H200"
    n, c, height, width = x.shape
    if c > 1 and x.stride(1) != 1:
        return "channels are no neighbours: x is not channels-last"
    rows, columns = windows.places(height, width)
    vectors = windows.taps * c * x.element_size() // VECTORS[-1]
    if not has_kernel(n * rows * columns, vectors, height, width):
        return "there are no images, or more than the kernel counts"
    return None


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


@cache
def _run() -> Callable[[Tensor, Windows], Tensor]:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from .device import run

    return run
