"""The files of the Deep Learning Matrix Collection: three lines of integers, no values."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from ...errors import FormatError
from ..csr import CSR
from .entries import from_pointers
from .limits import MOST_ENTRIES, check_size
from .numbers import integers

_NEED = "three lines: `rows, cols, entries`, then row pointers, then columns"
_HINT = "download it again, or write the matrix as .mtx"
# An index of a matrix that is read has at most 8 digits, and something in front of it.
_LONGEST_LINE = 12 * MOST_ENTRIES


def read_smtx(path: Path, notes: list[str]) -> CSR:
    """Read the one matrix of a .smtx file; all values are one.

    Raises:
        FormatError: The file is none, or disagrees with its first line.
        UnsupportedError: The matrix is larger than is read.
    """
    with path.open("rb") as file:
        head = file.readline(200)
        found = re.fullmatch(rb"\s*(\d{1,18})[,\s]+(\d{1,18})[,\s]+(\d{1,18})\s*", head)
        if not found:
            raise FormatError(f"line 1 is {head[:40]!r}", need=_NEED, hint=_HINT)
        rows, cols, entries = (int(number) for number in found.groups())
        check_size((rows, cols), entries)
        lines = [_integers(file.readline(_LONGEST_LINE), number) for number in (2, 3)]
        if file.read(4096).strip():
            raise FormatError("something behind the third line", need=_NEED, hint=_HINT)
    counts = [line.numel() for line in lines]
    if counts != [rows + 1, entries]:
        raise FormatError(
            f"{counts[0]} row pointers and {counts[1]} columns, where line 1 says "
            f"{rows} rows and {entries} entries",
            need=f"{rows + 1} pointers and {entries} columns",
            hint=_HINT,
        )
    notes.append("the file has no values: all are one")
    return from_pointers((rows, cols), lines[0], lines[1], None, notes)


def _integers(line: bytes, number: int) -> Tensor:
    numbers = integers(line)
    if numbers is None:
        raise FormatError(f"line {number} is not all integers", need=_NEED, hint=_HINT)
    return torch.from_numpy(numbers)
