"""y = act(windows of x @ w.T + bias), gathered inside the kernel: what it takes, and the call."""

from __future__ import annotations

from torch import Tensor

from ....formats.nm import NM
from ..._windows import Windows
from ..op import check_operands, why_no_kernel
from .plan import why_not


def spmm_nm_windows(
    w: NM, x: Tensor, windows: Windows, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """The product, where `why_no_windows` has no reason and no gradient is to be kept.

    Args:
        w: [out, taps * c], 2:4, bfloat16 or float16.
        x: [n, c, height, width], dtype and device of w.
        windows: Of x.
        bias: [out] or None.
        activation: One of `spmm_nm.kernel.ACTIVATIONS`.

    Returns:
        [n * windows of an image, out], contiguous.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.
    """
    # A row of the matrix that is never made: as long, on the same device, of the same dtype.
    check_operands("spmm_nm", w, x.as_strided((1, windows.taps * x.shape[1]), (0, 0)), bias)
    from .device import run_windows  # A process on the CPU needs neither a compiler nor a driver.

    return run_windows(w, x, windows, bias, activation)


def why_no_windows(w: NM, x: Tensor, windows: Windows) -> str | None:
    """What keeps the kernel from gathering windows, as a clause; None if nothing does.

    Args:
        w: [out, taps * c].
        x: [n, c, height, width].
        windows: Of x.
    """
    if (why := why_no_kernel(w, x)) is not None:
        return why
    if (why := why_not(windows, x.shape[1])) is not None:
        return why
    if x.numel() == 0:
        return "there are no images"
    if not _is_mappable(x):
        return "x is not channels-last, or its pixels do not start on 16 bytes"
    return None


def _is_mappable(x: Tensor) -> bool:
    """Whether channels are neighbours, and pixels, lines and images start on 16 bytes."""
    atom = 16 // x.element_size()
    strides = [x.stride(i) for i in (0, 2, 3) if x.shape[i] > 1]
    inner = x.stride(1) == 1 and x.data_ptr() % 16 == 0
    return inner and all(stride % atom == 0 and stride > 0 for stride in strides)
