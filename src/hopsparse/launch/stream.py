"""The stream that torch would use now."""

from __future__ import annotations

import ctypes

import torch

from .driver import call, require_driver


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


def capture_id(device: int) -> int | None:
    """What tells one capture of torch's current stream from every other; None where none is on.

    Args:
        device: Ordinal of a GPU.

    Raises:
        DriverError: The driver cannot say.

    Example:
        >>> capture_id(0) is None
        True
    """
    if not is_capturing(device):
        return None
    # Not among the calls that every use of a driver needs.
    function = require_driver().cuStreamGetCaptureInfo_v2
    function.argtypes, function.restype = (ctypes.c_void_p,) * 6, ctypes.c_int
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = current_stream(device)
    call(function.__name__, stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value
