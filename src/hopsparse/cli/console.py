"""Where output goes and how numbers read: results on standard output, the rest on stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..errors import HopsparseError


def stdout() -> Console:
    """The console of results. A pipe gets tables as wide as they need, not 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def stderr() -> Console:
    """The console of progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else 140, highlight=False)


def print_json(value: Any) -> None:
    """Write one JSON document to standard output, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_error(error: HopsparseError) -> None:
    """Write the three parts of `error`, one line each."""
    from rich.markup import escape

    console = stderr()
    for label, text in (("got ", error.got), ("need", error.need), ("try ", error.hint)):
        one_line = " ".join(str(text).split())
        console.print(f"[red][bold]{label}[/bold]  {escape(one_line)}[/red]", soft_wrap=True)


def bytes_text(count: float) -> str:
    """Bytes as people read them.

    Example:
        >>> bytes_text(269_000_000)
        '269.0 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def time_text(microseconds: float) -> str:
    """A predicted or measured time in the unit that fits.

    Example:
        >>> time_text(1234.5)
        '1.23 ms'
    """
    if microseconds < 1000:
        return f"{microseconds:.1f} us"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.2f} ms"
    return f"{microseconds / 1e6:.2f} s"


def seconds_text(seconds: float) -> str:
    """A duration, whole seconds.

    Example:
        >>> seconds_text(125)
        '2:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
