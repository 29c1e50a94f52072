"""What im2col means, in operations of torch: differentiable, and one kernel of torch.compile."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .._windows import Windows


def im2col(x: Tensor, windows: Windows) -> Tensor:
    """Gather the windows of x [n, c, height, width], of any strides, on any device."""
    rows, columns = windows.padding
    if rows or columns:
        x = F.pad(x, (columns, columns, rows, rows))
    for axis in (0, 1):
        step = windows.dilation[axis]
        span = (windows.kernel[axis] - 1) * step + 1
        x = x.unfold(2 + axis, span, windows.stride[axis])[..., ::step]
    # [n, c, y, x, tap row, tap column], the taps before the channels.
    count = x.shape[0] * x.shape[2] * x.shape[3]
    return x.permute(0, 2, 3, 4, 5, 1).reshape(count, windows.taps * x.shape[1])
