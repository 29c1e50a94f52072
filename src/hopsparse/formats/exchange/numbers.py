"""Numbers in text, read by numpy."""

from __future__ import annotations

import warnings
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Filters of warnings are those of all threads. numpy reads text in one thread at a time anyway.
_ONE = Lock()


def integers(text: bytes) -> NDArray[np.int64] | None:
    """Integers between white space, or None where something else is among them.

    Example:
        >>> integers(b"1 22 3").tolist(), integers(b"1 x") is None
        ([1, 22, 3], True)
    """
    return _read(text, np.int64)


def reals(text: bytes) -> NDArray[np.float64] | None:
    """Numbers between white space, or None where something else is among them.

    Example:
        >>> reals(b"1 -2e3 nan").tolist(), reals(b"1,5") is None
        ([1.0, -2000.0, nan], True)
    """
    return _read(text, np.float64)


def _read(text: bytes, dtype: Any) -> NDArray[Any] | None:
    if not text or text.isspace():
        return np.empty(0, dtype=dtype)
    with _ONE, warnings.catch_warnings():
        # numpy warns where it cannot read on; it says that later versions raise.
        warnings.filterwarnings("error", "string or file could not be read", DeprecationWarning)
        try:
            return np.fromstring(text, dtype=dtype, sep=" ")
        except (DeprecationWarning, ValueError):
            return None
