"""Which build of a library a file is, told without loading it.

The layout is that of the ELF-64 Object File Format, version 1.5, and of the GNU build-id note.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import UnsupportedError

_SEGMENT_NOTE, _NOTE_BUILD_ID = 4, 3
_SHOWN = 16


def build_id(path: Path) -> str:
    """What the linker put into an ELF file to tell its builds apart, or else the file's size.

    Raises:
        UnsupportedError: The file cannot be read, is no such file, or was cut short: loading that
            would end the process.
    """
    try:
        with path.open("rb") as file:
            _check_whole(file, path.stat().st_size)
            for offset, size in _notes(file):
                file.seek(offset)
                if found := _gnu_build_id(file.read(size)):
                    return found[:_SHOWN]
            return f"{path.stat().st_size}-bytes"
    except (OSError, struct.error) as error:
        raise UnsupportedError(
            f"{path} cannot be read ({error})", need="an ELF library", hint="reinstall it"
        ) from error


def _check_whole(file: BinaryIO, size: int) -> None:
    """The table of sections is the last thing in a file that a linker wrote."""
    header = file.read(64)
    if not header.startswith(b"\x7fELF"):
        raise OSError("not an ELF file")
    (table,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, count = struct.unpack_from("<HH", header, 58)
    if table + entry_bytes * count > size:
        raise OSError("cut short")


def _notes(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Offset and size of the note segments of a 64-bit ELF file."""
    file.seek(0)
    header = file.read(64)
    (table,) = struct.unpack_from("<Q", header, 32)
    entry_bytes, count = struct.unpack_from("<HH", header, 54)
    file.seek(table)
    segments = file.read(entry_bytes * count)
    for number in range(count):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", segments, number * entry_bytes)
        if kind == _SEGMENT_NOTE:
            yield offset, size


def _gnu_build_id(notes: bytes) -> str:
    """The build id among the notes of a segment, as hexadecimal digits, or nothing."""
    start = 0
    while start + 12 <= len(notes):
        name_bytes, content_bytes, kind = struct.unpack_from("<III", notes, start)
        name = start + 12
        content = name + -(-name_bytes // 4) * 4
        if kind == _NOTE_BUILD_ID and notes[name : name + name_bytes] == b"GNU\0":
            return notes[content : content + content_bytes].hex()
        start = content + -(-content_bytes // 4) * 4
    return ""
