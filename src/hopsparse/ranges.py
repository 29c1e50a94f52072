"""Named phases of work, for whoever listens: a profiler, a trace, or nobody.

Operators say where a phase begins and ends; `hopsparse.measure.phases` has listeners that hand it
on to NVTX or take the time. Without a listener a phase costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

from .errors import ArgumentError

#: Storing a matrix in another format, or decoding it; choosing what is kept; a product or an
#: attention over what is stored; what is done to its result in a step of its own.
PHASES = ("format", "select", "sparse", "epilogue")

Of = ParamSpec("Of")
Result = TypeVar("Result")


class Listener(Protocol):
    """What is told of phases, in the thread that they run in."""

    def enter(self, phase: str, what: str) -> None:
        """A phase of `what` begins."""

    def leave(self) -> None:
        """The phase that began last ends."""


_listener: Listener | None = None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every phase meanwhile.

    Raises:
        ArgumentError: Somebody listens already.

    Example:
        >>> class Names(list):
        ...     def enter(self, phase, what):
        ...         self.append(f"{phase} {what}")
        ...     def leave(self):
        ...         self.append("end")
        >>> with listening(names := Names()), phase("format", "nm"):
        ...     pass
        >>> names
        ['format nm', 'end']
    """
    global _listener
    if _listener is not None:
        raise ArgumentError("two listeners at a time", need="one", hint="after the other has ended")
    _listener = listener
    try:
        yield
    finally:
        _listener = None


@contextmanager
def phase(name: str, what: str) -> Iterator[None]:
    """Work that belongs to a phase; for where a call takes long anyway.

    Args:
        name: One of `PHASES`.
        what: Operator or format.
    """
    listener = _listener
    if listener is None:
        yield
        return
    listener.enter(name, what)
    try:
        yield
    finally:
        listener.leave()


def in_phase(name: str, what: str) -> Callable[[Callable[Of, Result]], Callable[Of, Result]]:
    """A function whose calls are a phase.

    Args:
        name: One of `PHASES`.
        what: Operator or format.

    Raises:
        ArgumentError: There is no such phase.

    Example:
        >>> @in_phase("sparse", "doubling")
        ... def double(x):
        ...     return 2 * x
        >>> double(2)
        4
    """
    if name not in PHASES:
        raise ArgumentError(f"phase {name!r}", need="one of " + ", ".join(PHASES), hint=PHASES[2])

    def watch(function: Callable[Of, Result]) -> Callable[Of, Result]:
        @wraps(function)
        def watched(*args: Of.args, **kwargs: Of.kwargs) -> Result:
            if _listener is None:
                return function(*args, **kwargs)
            with phase(name, what):
                return function(*args, **kwargs)

        return watched

    return watch
