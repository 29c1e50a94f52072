"""Programmatic dependent launch: which kernels may start before the one ahead has ended."""

from __future__ import annotations

import re

# SASS writes griddepcontrol.wait as ACQBULK. A comment that only speaks of it must not count.
_WAIT = re.compile(r"^[^/\n]*?\bgriddepcontrol\.wait\b|^.*?\*/.*\bACQBULK\b", re.MULTILINE)


def pdl_is_safe(text: str) -> bool:
    """Whether a kernel waits for the one ahead of it, without which it would read stale data.

    Args:
        text: PTX, or SASS as nvdisasm prints it.

    Example:
        >>> pdl_is_safe("griddepcontrol.wait;")
        True
        >>> pdl_is_safe("// griddepcontrol.wait;")
        False
    """
    return _WAIT.search(text) is not None
