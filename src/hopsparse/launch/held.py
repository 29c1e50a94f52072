"""Copies that a CUDA graph reads: they must live as long as it does, and be what was copied.

A layer that multiplies by a decoded copy of its weight keeps that copy until the weight changes. A
graph has its address for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor


class Held(NamedTuple):
    """A copy that a graph reads.

    Attributes:
        copy: It lives while this does.
        is_current: Whether what it was made of is unchanged.
    """

    copy: Tensor
    is_current: Callable[[], bool]


_HOLDING: ContextVar[list[Held] | None] = ContextVar("copies of a graph", default=None)


@contextmanager
def holding() -> Iterator[list[Held]]:
    """Gather the copies that work of this thread reads meanwhile."""
    found: list[Held] = []
    token = _HOLDING.set(found)
    try:
        yield found
    finally:
        _HOLDING.reset(token)


def hold(copy: Tensor, is_current: Callable[[], bool]) -> None:
    """Tell a capture, if there is one, of a copy that is read.

    Args:
        copy: What is read.
        is_current: Whether what it was made of is unchanged.

    Example:
        >>> import torch
        >>> with holding() as found:
        ...     hold(torch.ones(1), lambda: True)
        >>> len(found)
        1
    """
    found = _HOLDING.get()
    if found is not None:
        found.append(Held(copy, is_current))
