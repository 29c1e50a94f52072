"""Where output goes and how numbers read: results on standard output, the rest on stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from ..units import bytes_text as bytes_text
from ..units import seconds_text as seconds_text
from ..units import time_text as time_text

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
    """Write one JSON document to standard output, and nothing else; what is not finite is null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def number_text(value: float | None, digits: int) -> str:
    """A number of a table, or a dash where it was not measured.

    Example:
        >>> number_text(1.25, 1), number_text(None, 1)
        ('1.2', '-')
    """
    return "-" if value is None else f"{value:.{digits}f}"


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(error: HopsparseError) -> None:
    """Write the three parts of `error`, one line each."""
    from rich.markup import escape

    console = stderr()
    for label, text in (("got ", error.got), ("need", error.need), ("try ", error.hint)):
        one_line = " ".join(str(text).split())
        console.print(f"[red][bold]{label}[/bold]  {escape(one_line)}[/red]", soft_wrap=True)
