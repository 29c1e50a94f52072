"""Matrix Market files (.mtx), as NIST describes them: coordinates or a dense array, in text.

Text is read in pieces of some megabytes. In a piece, columns that hold integers are read as such,
which numpy does twice as fast as floating-point numbers. Finding out where they are takes as long
as reading them, and lets other threads run: two pieces are read at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
_THREADS = 2

# Rows and columns of some entries, from 0, and their values; an empty array is what is not there.
_Piece = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[Any]]


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
        row, col, values = _gathered(file, head)
    if head.layout == "array":
        return _from_array(head, values, notes)
    if head.field == "pattern":
        notes.append("the file has no values: all are one")
        return canonical(head.shape, *_mirrored(head, row, col, None)[:2], None, notes)
    return canonical(head.shape, *_mirrored(head, row, col, values), notes)


def _gathered(file: IO[bytes], head: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """All pieces behind each other, in arrays as large as the head says and the file allows."""
    kind = np.int64 if head.field == "integer" and head.layout == "coordinate" else np.float64
    sizes = [0 if head.layout == "array" else head.entries] * 2
    sizes.append(0 if head.columns == 2 else head.entries)
    kinds = (np.int32, np.int32, kind)
    arrays = [np.empty(size, dtype=of) for size, of in zip(sizes, kinds, strict=True)]
    found = 0
    for piece in _pieces(file, head):
        count = max(map(len, piece))
        if found + count <= head.entries:
            for into, part in zip(arrays, piece, strict=True):
                into[found : found + len(part)] = part
        found += count
    if found != head.entries:
        raise FormatError(
            f"the head says {head.entries} entries, and there are {found}",
            need="as many as the head says",
            hint="write the file again",
        )
    row, col, values = (torch.from_numpy(each) for each in arrays)
    return row, col, values


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


def _pieces(file: IO[bytes], head: _Head) -> Iterator[_Piece]:
    """The entries of the file, some at a time and in order."""
    waiting: deque[Future[_Piece]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        line = head.lines + 1
        for text, lines in _texts(file):
            waiting.append(pool.submit(_numbers, text, lines, head, line))
            line += lines
            if len(waiting) > _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _texts(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Whole lines, some megabytes of them at a time, and how many."""
    rest = b""
    while block := file.read(_PIECE_BYTES):
        end = block.rfind(b"\n") + 1
        if not end:
            rest += block
            continue
        text, rest = rest + block[:end], block[end:]
        yield text, text.count(b"\n")
    if rest.strip():
        yield rest + b"\n", 1


def _places(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows and columns from 0, of both in turns from 1.

    All that are inside a matrix fit 32 bits, and the others stay outside.
    """
    most = np.iinfo(np.int32).max
    row, col = (
        (part.clip(-1, most) - 1).astype(np.int32) for part in (numbers[0::2], numbers[1::2])
    )
    return row, col


def _numbers(text: bytes, lines: int, head: _Head, line: int) -> _Piece:
    """The entries of so many whole lines, of which the first has the number `line`."""
    found = _split(text, lines, head)
    if found is None and not text.isascii():
        _blame(text, head, line)
    if found is None:
        # Lines may end with a carriage return, or a space.
        found = _split(text.replace(b"\r\n", b"\n").replace(b" \n", b"\n"), lines, head)
    if found is None:
        # They may be empty, and have more around them; without that it goes.
        kept = [each.strip() for each in text.split(b"\n") if each.strip()]
        if not kept:
            none: NDArray[Any] = np.empty(0, dtype=np.int32)
            return none, none, none
        found = _split(b"\n".join(kept) + b"\n", len(kept), head)
    if found is None:
        _blame(text, head, line)
    return found


def _split(text: bytes, lines: int, head: _Head) -> _Piece | None:
    """The entries of lines that all have the same count of numbers; None if one has not.

    Lines end where their last number does.
    """
    buffer = np.frombuffer(text, dtype=np.uint8)
    blank = buffer <= _SPACE
    # The last byte of what is blank and of what is not, in turns.
    edges = np.flatnonzero(np.not_equal(blank[1:], blank[:-1]))
    if not blank[0]:
        edges = np.append(-1, edges)
    if len(edges) != 2 * head.columns * lines:
        return None
    before, last = (edges[2 * head.columns - n :: 2 * head.columns] for n in (2, 1))
    # As many as there are lines: no other line ends.
    if not (buffer[last + 1] == _NEWLINE).all():
        return None
    none: NDArray[Any] = np.empty(0, dtype=np.int32)
    if head.columns == 3 and head.field != "integer":
        return _split_real(buffer, before, last)
    count = head.columns * lines
    if head.columns == 1:
        values = reals(text)
        return None if values is None or len(values) != count else (none, none, values)
    numbers = integers(text)
    if numbers is None or len(numbers) != count:
        return None
    if head.columns == 2:
        return *_places(numbers), none
    table = numbers.reshape(-1, 3)
    return *_places(table[:, :2].reshape(-1)), table[:, 2].copy()


def _split_real(
    buffer: NDArray[np.uint8], before: NDArray[np.int64], last: NDArray[np.int64]
) -> _Piece | None:
    """Entries whose values begin behind and end with these bytes; None if one is no number."""
    # Lengths of what is no value and of what is one, in turns; a line's end goes with its value.
    lengths = np.empty(2 * len(last), dtype=np.int64)
    np.subtract(last + 1, before, out=lengths[1::2])
    lengths[0] = before[0] + 1
    np.subtract(before[1:], last[:-1] + 1, out=lengths[2::2])
    inside = np.repeat(np.tile(np.array([False, True]), len(last)), lengths)
    places = integers(buffer[~inside].tobytes())
    found = reals(buffer[inside].tobytes())
    if places is None or found is None or not 2 * len(found) == len(places) == 2 * len(last):
        return None
    return *_places(places), found


def _blame(text: bytes, head: _Head, line: int) -> NoReturn:
    """Name the first line that is no entry."""
    kinds = "a row and a column" + ("" if head.field == "pattern" else f", and a {head.field}")
    lines = enumerate(text.split(b"\n"), line)
    bad = (at for at in lines if at[1].strip() and _split(at[1].strip() + b"\n", 1, head) is None)
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
