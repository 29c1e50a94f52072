"""Make waiting for a GPU an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Calls inside raise if they wait for the GPU; whatever happens, calls after it may."""
    with warnings.catch_warnings():
        # torch says once in a process that the mode is a prototype, after it has set it.
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
