"""The formats that a matrix of plain values can be stored in, by token."""

from __future__ import annotations

from ..errors import ArgumentError
from ._base import SparseMatrix
from .bitmask import Bitmask
from .bsr import BSR
from .bsr24 import BSR24
from .csr import CSC, CSR
from .dense import Dense
from .hyb import HYB
from .nm import NM

#: The class of each format token.
FORMATS: dict[str, type[SparseMatrix]] = {
    kind.name: kind for kind in (NM, BSR, BSR24, CSR, CSC, HYB, Bitmask, Dense)
}


def format_named(fmt: str) -> type[SparseMatrix]:
    """The class of a format token.

    Raises:
        ArgumentError: No such format.

    Example:
        >>> format_named("csr").__name__
        'CSR'
    """
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ArgumentError(f"format {fmt!r}", need="one of " + ", ".join(FORMATS), hint='"nm"')
    return FORMATS[fmt]
