"""Matrix Market files (.mtx), as NIST describes them: coordinates or a dense array, in text.

Text is read in pieces of some megabytes. In a piece, columns that hold integers are read as such,
which numpy does seven times faster than floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import FormatError, UnsupportedError
from .._base import check_shape
from ..csr import CSR
from .entries import canonical, refuse_complex
from .limits import check_size
from .numbers import integers, reals

_PIECE_BYTES = 1 << 24
_BANNER = "%%MatrixMarket matrix coordinate|array real|integer|pattern general|symmetric"
_LAYOUTS, _FIELDS = ("coordinate", "array"), ("real", "integer", "pattern", "complex", "double")
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
_SPACE, _NEWLINE = 32, 10


@dataclass(frozen=True)
class _Head:
    """The first lines of a file."""

    layout: str
    field: str
    symmetry: str
    shape: tuple[int, int]
    entries: int
    lines: int

    @property
    def columns(self) -> int:
        """Numbers of a line below the head."""
        if self.layout == "array":
            return 1
        return 2 if self.field == "pattern" else 3


def read_mtx(path: Path, notes: list[str]) -> CSR:
    """Read the one matrix of a .mtx file.

    Raises:
        FormatError: The file is none, ends early, or disagrees with its head.
        UnsupportedError: Complex values, or a matrix larger than is read.
    """
    with path.open("rb") as file:
        head = _read_head(file)
        left = path.stat().st_size - file.tell()
        # The shortest line is `1 1` and its end; of an array, `1`.
        shortest = 2 * head.columns
        if head.entries * shortest - 1 > left:
            raise FormatError(
                f"the head says {head.entries} entries, and {left} bytes follow",
                need=f"at least {head.entries * shortest - 1} bytes",
                hint="the file is cut short, or its third number is wrong: write it again",
            )
        pieces = list(_pieces(file, head))
    places = torch.from_numpy(np.concatenate([place for place, _ in pieces]).reshape(-1, 2))
    values = np.concatenate([value for _, value in pieces])
    found = len(values) if head.columns != 2 else len(places)
    if found != head.entries:
        raise FormatError(
            f"the head says {head.entries} entries, and there are {found}",
            need="as many as the head says",
            hint="write the file again",
        )
    if head.layout == "array":
        return _from_array(head, torch.from_numpy(values), notes)
    row, col = places[:, 0] - 1, places[:, 1] - 1
    if head.field == "pattern":
        notes.append("the file has no values: all are one")
        return canonical(head.shape, *_mirrored(head, row, col, None)[:2], None, notes)
    return canonical(head.shape, *_mirrored(head, row, col, torch.from_numpy(values)), notes)


def _read_head(file: IO[bytes]) -> _Head:
    banner = file.readline(1024).decode("latin-1").lower().split()
    if len(banner) != 5 or banner[:2] != ["%%matrixmarket", "matrix"]:
        raise FormatError(f"line 1 is {' '.join(banner)[:60]!r}", need=_BANNER, hint="see NIST")
    layout, field, symmetry = banner[2:]
    known = layout in _LAYOUTS and field in _FIELDS and symmetry in _SYMMETRIES
    if not known or (layout == "array" and field == "pattern"):
        raise FormatError(f"a matrix {layout} {field} {symmetry}", need=_BANNER, hint="see NIST")
    if field == "complex":
        refuse_complex(torch.complex128)
    if layout == "array" and symmetry != "general":
        raise UnsupportedError(
            f"a dense array that is {symmetry}", need="general", hint="store it as coordinates"
        )
    lines, sizes = 2, file.readline(4096)
    while sizes and (sizes.startswith(b"%") or not sizes.strip()):
        lines, sizes = lines + 1, file.readline(4096)
    numbers = sizes.split()
    count = 3 if layout == "coordinate" else 2
    if len(numbers) != count or not all(n.isdigit() and len(n) < 19 for n in numbers):
        raise FormatError(
            f"line {lines} is {sizes[:40]!r}",
            need="rows, columns and entries" if count == 3 else "rows and columns",
            hint="the sizes come behind the comments",
        )
    rows, cols = int(numbers[0]), int(numbers[1])
    entries = int(numbers[2]) if count == 3 else rows * cols
    check_shape((rows, cols))
    check_size((rows, cols), entries)
    if symmetry != "general" and rows != cols:
        raise FormatError(
            f"a {symmetry} matrix of {rows} x {cols}", need="a square", hint="general"
        )
    return _Head(layout, field, symmetry, (rows, cols), entries, lines)


def _pieces(file: IO[bytes], head: _Head) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Row and column of each entry, from 1, and its value; an empty array is what is not there."""
    line, rest = head.lines + 1, b""
    none: NDArray[Any] = np.empty(0, dtype=np.int32)
    yield none, none.astype(np.float64 if head.field != "integer" else np.int64)
    while block := file.read(_PIECE_BYTES):
        text, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield _small(*_numbers(text + b"\n", head, line))
            line += text.count(b"\n") + 1
    if rest.strip():
        yield _small(*_numbers(rest + b"\n", head, line))


def _small(places: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Places in half the memory: all that are inside a matrix fit, and the others stay outside."""
    return places.clip(-1, np.iinfo(np.int32).max - 1).astype(np.int32), values


def _numbers(text: bytes, head: _Head, line: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The entries of whole lines, of which the first has the number `line`."""
    found = _split(text, head)
    if found is None and not text.isascii():
        _blame(text, head, line)
    if found is None:
        # Empty lines and carriage returns are allowed; without them it goes.
        lines = [each for each in text.split(b"\n") if each.strip()]
        if not lines:
            return np.empty(0, dtype=np.int64), np.empty(0)
        found = _split(b"\n".join(lines) + b"\n", head)
    if found is None:
        _blame(text, head, line)
    return found


def _split(text: bytes, head: _Head) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Places and values of lines that all have the same count of numbers; None if one has not."""
    buffer = np.frombuffer(text, dtype=np.uint8)
    blank = buffer <= _SPACE
    starts = np.flatnonzero(~blank & np.append(True, blank[:-1]))
    ends = np.flatnonzero(buffer == _NEWLINE)
    if len(starts) != head.columns * len(ends):
        return None
    tokens = starts.reshape(-1, head.columns)
    if not (tokens[:, -1] < ends).all() or not (tokens[1:, 0] > ends[:-1]).all():
        return None
    none: NDArray[Any] = np.empty(0, dtype=np.int64)
    if head.columns != 3:
        values = integers(text) if head.columns == 2 else reals(text)
        if values is None or len(values) != len(starts):
            return None
        return (values, np.empty(0)) if head.columns == 2 else (none, values)
    if head.field == "integer":
        numbers = integers(text)
        if numbers is None or len(numbers) != len(starts):
            return None
        table = numbers.reshape(-1, 3)
        return table[:, :2].reshape(-1), table[:, 2].copy()
    # One bit a byte: whether it belongs to a value. Lines end where values do.
    edges = np.zeros(len(buffer), dtype=np.int8)
    edges[tokens[:, 2]] = 1
    edges[ends] = -1
    inside = np.cumsum(edges, dtype=np.int8).astype(bool)
    places = integers(buffer[~inside].tobytes())
    inside[ends] = True
    found = reals(buffer[inside].tobytes())
    if places is None or found is None or not 2 * len(found) == len(places) == 2 * len(ends):
        return None
    return places, found


def _blame(text: bytes, head: _Head, line: int) -> NoReturn:
    """Name the first line that is no entry."""
    kinds = "a row and a column" + ("" if head.field == "pattern" else f", and a {head.field}")
    lines = enumerate(text.split(b"\n"), line)
    bad = (at for at in lines if at[1].strip() and _split(at[1] + b"\n", head) is None)
    number, each = next(bad)
    raise FormatError(
        f"line {number} is {each[:40]!r}",
        need=kinds if head.layout == "coordinate" else "one number a line",
        hint="comments stand above the sizes only",
    )


def _mirrored(
    head: _Head, row: Tensor, col: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries with those that symmetry leaves out."""
    kept = values if values is not None else torch.empty(0)
    if head.symmetry in ("general", "hermitian"):
        return row, col, kept
    off = row != col
    if bool((row < col).any()) and bool((row > col).any()):
        raise FormatError(
            f"a {head.symmetry} file with entries on both sides of the diagonal",
            need="one side; the other follows",
            hint="general, if both are meant",
        )
    if head.symmetry == "skew-symmetric" and not bool(off.all()):
        at = int((~off).nonzero()[0])
        raise FormatError(
            f"a skew-symmetric file with an entry on the diagonal, at {int(row[at]) + 1}",
            need="none there",
            hint="general, if it is meant",
        )
    sign = -1 if head.symmetry == "skew-symmetric" else 1
    if values is not None:
        kept = torch.cat((values, sign * values[off]))
    check_size(head.shape, row.numel() + int(off.sum()))
    return torch.cat((row, col[off])), torch.cat((col, row[off])), kept


def _from_array(head: _Head, values: Tensor, notes: list[str]) -> CSR:
    """Columns one after another."""
    rows = head.shape[0]
    place = values.nonzero().flatten()
    row, col = place % rows, torch.div(place, rows, rounding_mode="floor")
    return canonical(head.shape, row, col, values[place], notes)
