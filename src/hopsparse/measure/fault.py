"""Whose kernel failed: a name for what would otherwise be blamed on whoever waits for the GPU next.

A kernel that fails is noticed by a later call, and every call after that fails as well. So whoever
is compared with others runs alone once, with a wait for the GPU behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ..errors import GpuLostError


def wait_for(device: torch.device) -> Callable[[], None]:
    """What waits for all work of a GPU."""
    return partial(torch.cuda.synchronize, device)


@contextmanager
def named(who: str, wait: Callable[[], object]) -> Iterator[None]:
    """Wait for the GPU behind the block; if a kernel failed in it, say whose it was.

    Args:
        who: What the block runs, as people know it.
        wait: Waits for the GPU, as `wait_for` does.

    Raises:
        GpuLostError: A kernel of the block failed. Whatever else the block raises passes as it is.

    Example:
        >>> with named("nobody", lambda: None):
        ...     raise ValueError("a refusal")
        Traceback (most recent call last):
            ...
        ValueError: a refusal
    """
    try:
        yield
        wait()
    except Exception as error:
        # One with a cause has its name from a block inside this one.
        has_name = isinstance(error, GpuLostError) and error.__cause__ is not None
        if has_name or not _is_lost(wait):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise GpuLostError(
            f"{who} ran a kernel that failed ({words})",
            need="kernels that end well; this process can use the GPU no more",
            hint="the same without it, or under compute-sanitizer, which shows the kernel",
        ) from error


def _is_lost(wait: Callable[[], object]) -> bool:
    # torch tells a refused call once, and a failed kernel every time.
    for _ in range(2):
        try:
            wait()
        except Exception:
            continue
        return False
    return True
