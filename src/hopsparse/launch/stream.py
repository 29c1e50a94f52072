"""The stream that torch would use now."""

from __future__ import annotations

import torch


def current_stream(device: int) -> int:
    """Handle of torch's current stream on a GPU, as a launch takes it.

    It makes no `torch.cuda.Stream`, which costs more host time than a launch may.
    """
    return torch._C._cuda_getCurrentRawStream(device)


def is_capturing(device: int) -> bool:
    """Whether work on torch's current stream of a GPU goes into a CUDA graph; False without CUDA.

    Example:
        >>> is_capturing(0)
        False
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
