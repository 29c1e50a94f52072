"""Copies that a CUDA graph reads: they must live as long as it does, and be what was copied.

A layer that multiplies by a decoded copy of its weight keeps that copy until the weight changes. A
graph has its address for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Held(NamedTuple):
    """A copy that a graph reads.

    Attributes:
        copy: A tensor, or what holds several; it lives while this does.
        is_current: Whether what it was made of is unchanged.
    """

    copy: object
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


def is_holding() -> bool:
    """Whether a capture wants to be told of copies, so that telling it is worth the while."""
    return _HOLDING.get() is not None


def hold(copy: object, is_current: Callable[[], bool]) -> None:
    """Tell a capture, if there is one, of a copy that is read.

    Args:
        copy: A tensor that is read, or what holds several.
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
