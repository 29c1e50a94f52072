"""Division by a number that is known beforehand, as a multiplication on the GPU."""

from __future__ import annotations

import ctypes


class Divisor(ctypes.Structure):
    """`struct Divisor` of device/tile/divisor.cuh."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("factor", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    )


def divisor(size: int) -> Divisor:
    """Numbers that divide by `size`: n / size = n * factor >> shift for n below 2^31.

    Division by invariant integers using multiplication (Granlund and Montgomery, PLDI 1994).

    Args:
        size: 1 to 2^31 - 1.

    Example:
        >>> by = divisor(7)
        >>> 2147483647 * by.factor >> by.shift, 2147483647 // 7
        (306783378, 306783378)
    """
    shift = 31 + (size - 1).bit_length()
    return Divisor(size, -(-(1 << shift) // size), shift)
