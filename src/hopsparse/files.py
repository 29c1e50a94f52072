"""Files that appear whole or not at all, and the headers of safetensors files."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

# The disk is full, the user's quota is used up, or a file may not grow any further.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How unfinished files are named; one that a killed process left is no use to anyone.
TEMPORARY_GLOB = ".*.tmp"


@contextmanager
def written_whole(
    path: Path, hint: str = "free some space, or choose another folder"
) -> Iterator[Path]:
    """Give a temporary path, which becomes `path` once the block is done and it is on disk.

    A file that was at `path` before stays until then, and for good if the block fails.

    Args:
        path: The file to make; its folder exists.
        hint: What to do when there is no room.

    Raises:
        CheckpointError: The file cannot be written: no room, no permission, no folder.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with written_whole(Path(folder) / "a.txt") as temporary:
        ...         _ = temporary.write_text("all of it")
        ...     os.listdir(folder)
        ['a.txt']
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as file:
            # mkstemp keeps others out; the finished file gets the rights of an ordinary one.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise _not_written(path, error, hint) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_tensors(path: Path) -> Any:
    """A safetensors file as `safetensors.safe_open` gives it: nothing but its header is read.

    Raises:
        CheckpointError: The file is missing, truncated or damaged.
    """
    try:
        return cast(Any, safe_open)(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself.

    Attributes:
        metadata: Text by key.
        tensors: Shape and dtype (as safetensors writes it, such as "BF16") by name.
    """

    metadata: dict[str, str]
    tensors: dict[str, tuple[tuple[int, ...], str]]


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: The file is missing, truncated or damaged.
    """
    with open_tensors(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        tensors = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
        return Header(dict(file.metadata() or {}), tensors)


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that ends early or holds something else."""
    return CheckpointError(
        f"{path} cannot be read: missing, truncated or corrupt ({error})",
        need="a complete safetensors file",
        hint="restore it from its source, or write it again",
    )


def _not_written(path: Path, error: Exception, hint: str) -> CheckpointError:
    # safetensors reports the system's error as text only.
    codes = [error.errno] if isinstance(error, OSError) else []
    full = any(code in codes or f"os error {code})" in str(error) for code in _NO_ROOM)
    if full:
        return CheckpointError(
            f"{path} cannot be written: no space left ({error})",
            need="room for the whole file",
            hint=hint,
        )
    return CheckpointError(
        f"{path} cannot be written ({error})",
        need="an existing folder with write permission",
        hint="choose another folder",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold Ctrl-C back until the end.

    Native code that calls back into Python, as safetensors does to make a tensor, turns the
    KeyboardInterrupt that Python raises there into an error of its own.

    Example:
        >>> with unbroken():
        ...     pass
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
