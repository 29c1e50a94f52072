"""What `scipy.sparse.save_npz` writes, read without scipy and without pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import FormatError, UnsupportedError
from .._base import check_indptr, check_shape
from ..csr import CSR
from .entries import canonical, from_column_pointers, from_pointers, refuse_complex
from .limits import MOST_ENTRIES, MOST_SIDE

# The arrays of each layout, beside `format` and `shape`.
_ARRAYS = {
    "csr": ("data", "indices", "indptr"),
    "csc": ("data", "indices", "indptr"),
    "bsr": ("data", "indices", "indptr"),
    "coo": ("data", "row", "col"),
    "dia": ("data", "offsets"),
}
_HINT = "scipy.sparse.save_npz(path, matrix)"
_READ_BYTES = 1 << 24
# Values of 8 bytes are the widest that are read, and pointers are one more than rows.
_MOST_BYTES = 8 * max(MOST_ENTRIES, MOST_SIDE + 1)


def read_npz(path: Path, notes: list[str]) -> CSR:
    """Read the one matrix of a .npz file.

    Raises:
        FormatError: The file is damaged, or no layout of scipy.
        UnsupportedError: Complex values, or a matrix larger than is read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _matrix(archive, notes)
    except (zipfile.BadZipFile, EOFError, zipfile.LargeZipFile, NotImplementedError) as error:
        raise FormatError(f"no sound zip archive ({error})", need="a .npz", hint=_HINT) from error


def _matrix(archive: zipfile.ZipFile, notes: list[str]) -> CSR:
    members = {info.filename.removesuffix(".npy") for info in archive.infolist()}
    if not {"format", "shape"} <= members:
        raise FormatError(
            f"arrays {', '.join(sorted(members)[:6]) or 'none'}",
            need="the arrays of scipy.sparse: format, shape, data and indices",
            hint=_HINT,
        )
    word = _array(archive, "format").reshape(-1)
    kind = word[0].decode("latin-1") if word.dtype.kind == "S" and len(word) else str(word[:1])
    if kind not in _ARRAYS or not set(_ARRAYS[kind]) <= members:
        raise FormatError(
            f"format {kind!r} with arrays {', '.join(sorted(members)[:8])}",
            need="one of " + ", ".join(_ARRAYS) + ", with its arrays",
            hint=_HINT,
        )
    sides = _array(archive, "shape").reshape(-1)
    if sides.dtype.kind not in "iu" or len(sides) != 2:
        raise FormatError(f"shape {sides.tolist()[:4]}", need="[rows, cols]", hint=_HINT)
    shape = (int(sides[0]), int(sides[1]))
    check_shape(shape)
    values, *places = (_tensor(archive, name) for name in _ARRAYS[kind])
    for name, place in zip(_ARRAYS[kind][1:], places, strict=True):
        if place.dtype.is_floating_point or place.ndim != 1:
            raise FormatError(
                f"{name} is {place.dtype} {list(place.shape)}",
                need="a list of integers",
                hint=_HINT,
            )
    return _assembled(kind, shape, values, places, notes)


def _assembled(
    kind: str, shape: tuple[int, int], values: Tensor, places: list[Tensor], notes: list[str]
) -> CSR:
    if kind == "dia":
        return _from_diagonals(shape, values, places[0], notes)
    block = (1, 1)
    if kind == "bsr":
        if values.ndim != 3:
            raise FormatError(f"data of {list(values.shape)}", need="[blocks, r, c]", hint=_HINT)
        block = (values.shape[1], values.shape[2])
        if 0 in block or shape[0] % block[0] or shape[1] % block[1]:
            raise FormatError(
                f"blocks of {list(block)} in {list(shape)}", need="sides that divide", hint=_HINT
            )
    elif values.ndim != 1:
        raise FormatError(f"data of {list(values.shape)}", need="a list", hint=_HINT)
    count = values.shape[0]
    if places[0].numel() != count or (kind == "coo" and places[1].numel() != count):
        raise FormatError(
            f"{count} values at {places[0].numel()} places", need="a place a value", hint=_HINT
        )
    if kind == "coo":
        return canonical(shape, places[0], places[1], values, notes)
    if kind == "csr":
        return from_pointers(shape, places[1], places[0], values, notes)
    if kind == "csc":
        return from_column_pointers(shape, places[1], places[0], values, notes)
    return _from_blocks(shape, places[1], places[0], values, notes)


def _from_blocks(
    shape: tuple[int, int], indptr: Tensor, indices: Tensor, values: Tensor, notes: list[str]
) -> CSR:
    high, wide = values.shape[1:]
    if indptr.numel() != shape[0] // high + 1:
        raise FormatError(
            f"{indptr.numel()} pointers for {shape[0] // high} block rows",
            need=f"{shape[0] // high + 1}",
            hint=_HINT,
        )
    check_indptr("bsr", indptr, indices.numel())
    line = torch.repeat_interleave(indptr.diff().long())
    row = (line * high)[:, None, None] + torch.arange(high)[:, None]
    col = (indices.long() * wide)[:, None, None] + torch.arange(wide)
    sizes = values.shape
    places = (row.expand(sizes).reshape(-1), col.expand(sizes).reshape(-1))
    return canonical(shape, *places, values.reshape(-1), notes)


def _from_diagonals(
    shape: tuple[int, int], values: Tensor, offsets: Tensor, notes: list[str]
) -> CSR:
    if values.ndim != 2 or values.shape[0] != offsets.numel():
        raise FormatError(
            f"data of {list(values.shape)} for {offsets.numel()} diagonals",
            need="[diagonals, cols]",
            hint=_HINT,
        )
    col = torch.arange(values.shape[1]).expand(values.shape)
    row = col - offsets.long()[:, None]
    inside = (row >= 0) & (row < shape[0]) & (col < shape[1])
    return canonical(shape, row[inside], col[inside], values[inside], notes)


def _tensor(archive: zipfile.ZipFile, name: str) -> Tensor:
    array = _array(archive, name)
    if array.dtype.kind not in "fiub":
        if array.dtype.kind == "c":
            refuse_complex(torch.complex128)
        raise FormatError(f"{name} of {array.dtype}", need="numbers", hint=_HINT)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native))


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """One array; its header is compared with the size of the member before memory is asked for."""
    try:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as file:
            shape, fortran, dtype = _header(file)
            size = dtype.itemsize
            for side in shape:
                size *= side
            if dtype.hasobject or size > _MOST_BYTES:
                raise UnsupportedError(
                    f"{name} of {dtype} {list(shape)}",
                    need=f"numbers, up to {MOST_ENTRIES} of them",
                    hint="pickled objects are never loaded; cut a large matrix into row ranges",
                )
            if file.tell() + size != info.file_size:
                raise FormatError(
                    f"{name} has {info.file_size} bytes, where its header says {list(shape)}",
                    need=f"{file.tell() + size} bytes",
                    hint=_HINT,
                )
            data = np.empty(size, dtype=np.uint8)
            ends_early = _fill(file, data.data)
    except (KeyError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{name} cannot be read ({error})", need=".npy", hint=_HINT) from error
    if ends_early:
        raise FormatError(f"{name} ends early", need=f"{size} bytes", hint=_HINT)
    return data.view(dtype).reshape(shape, order="F" if fortran else "C")


def _fill(file: IO[bytes], memory: memoryview) -> bool:
    """Read into memory; whether the file ended before it was full."""
    done = 0
    while done < len(memory):
        piece = file.read(min(_READ_BYTES, len(memory) - done))
        if not piece:
            return True
        memory[done : done + len(piece)] = piece
        done += len(piece)
    return False


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version}")
