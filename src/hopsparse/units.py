"""Bytes and times as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Bytes in the unit that fits.

    Example:
        >>> bytes_text(269_000_000)
        '269.0 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def time_text(microseconds: float, micro: str = "u") -> str:
    """A predicted or measured time in the unit that fits.

    Args:
        microseconds: The time.
        micro: How to write the prefix; a terminal may lack the letter mu.

    Example:
        >>> time_text(1234.5)
        '1.23 ms'
    """
    if microseconds < 1000:
        return f"{microseconds:.1f} {micro}s"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.2f} ms"
    return f"{microseconds / 1e6:.2f} s"


def seconds_text(seconds: float) -> str:
    """A running time, whole seconds.

    Example:
        >>> seconds_text(125)
        '2:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration_text(seconds: float) -> str:
    """How long something took.

    Example:
        >>> duration_text(125), duration_text(3.21)
        ('2 min 05 s', '3.2 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
