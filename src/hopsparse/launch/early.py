"""Which launches may start before the kernel ahead of them has ended, while a graph is captured.

A kernel that starts early loads weights while the one ahead still runs, and waits for it before it
reads anything else (`griddepcontrol.wait`). So no kernel of the same graph may write those weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor


class Turn(NamedTuple):
    """Where a launch stands in line.

    Attributes:
        stream: Handle of the stream.
        early: Whether it may start before the kernel ahead has ended.
    """

    stream: int
    early: bool = False


class EarlyStarts:
    """What was seen of a function's launches, and allowed.

    A function runs a few times before it is captured, and is watched: a weight may be read early if
    every run found it at the same place, in the same version. One that the function makes or
    changes has another version, or another place, in each run.

    Attributes:
        allowed: Launches that were allowed to start early.
    """

    def __init__(self) -> None:
        self.allowed = 0
        self._seen: set[tuple[int, int]] = set()
        self._in_last: set[tuple[int, int]] = set()
        self._captures = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch one run, in which nothing starts early."""
        first, self._in_last = not self._in_last, set()
        with self._at_work(captures=False):
            yield
        self._seen = self._in_last if first else self._seen & self._in_last

    @contextmanager
    def use(self) -> Iterator[None]:
        """Allow what was the same in every run that was watched."""
        with self._at_work(captures=True):
            yield

    @contextmanager
    def _at_work(self, *, captures: bool) -> Iterator[None]:
        self._captures = captures
        token = _AT_WORK.set(self)
        try:
            yield
        finally:
            _AT_WORK.reset(token)

    def allow(self, weights: tuple[Tensor, ...]) -> bool:
        """Whether a launch may start early.

        Args:
            weights: What it reads before it waits.
        """
        # torch counts no versions of tensors that were made in inference mode.
        found = {(w.data_ptr(), -1 if w.is_inference() else w._version) for w in weights}
        if not self._captures:
            self._in_last |= found
            return False
        allowed = found <= self._seen
        self.allowed += allowed
        return allowed


_AT_WORK: ContextVar[EarlyStarts | None] = ContextVar("early starts", default=None)


def starts_early(*weights: Tensor) -> bool:
    """Whether a launch of this moment may start before the kernel ahead of it has ended.

    Args:
        weights: What it reads before it waits.

    Example:
        >>> starts_early()
        False
    """
    at_work = _AT_WORK.get()
    return at_work is not None and at_work.allow(weights)
