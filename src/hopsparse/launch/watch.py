"""Which kernels a block of code launches: what ran, not what a plan said would run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .kernel import Bound


@contextmanager
def launches() -> Iterator[list[str]]:
    """Names of the kernels that the block launches, in order, as `spec.op/spec.name`.

    Launches of all threads are seen, those of replayed graphs are not. One block at a time: outside
    of it a launch costs nothing more.

    Example:
        >>> with launches() as names:
        ...     pass
        >>> names
        []
    """
    names: list[str] = []
    original = Bound.__call__

    def told(bound: Bound) -> None:
        original(bound)
        names.append(bound.name)

    Bound.__call__ = told  # type: ignore[method-assign,assignment]
    try:
        yield names
    finally:
        Bound.__call__ = original  # type: ignore[method-assign]
