"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError

# The disk is full, the user's quota is used up, or a file may not grow any further.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Turn a full disk into a CheckpointError; safetensors reports it as text only."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _no_space(path, error) from error
    except SafetensorError as error:
        if not any(f"os error {code})" in str(error) for code in _NO_ROOM):
            raise
        raise _no_space(path, error) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file under a temporary name, flush it, and give it its name."""
    temporary = path.with_name(path.name + ".tmp")
    with _full_disk_named(path):
        try:
            whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(whole, temporary, metadata={"format": "pt"})
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a whole safetensors file.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})",
            need="a complete safetensors file",
            hint="download or write that file again",
        ) from error
    return tensors


def write_json(path: Path, value: object) -> None:
    """Write one JSON file under a temporary name, flush it, and give it its name."""
    temporary = path.with_name(path.name + ".tmp")
    with _full_disk_named(path):
        try:
            temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist",
            need=f"a folder with {path.name}",
            hint="check the path, or download the model again",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})", need="a JSON object", hint="restore the file"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}", need="a JSON object", hint="restore the file"
        )
    return value


def publish(temporary: Path, path: Path) -> None:
    """Flush `temporary` to disk, then move it to `path` in one step."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go of it however the process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is being written by another process",
                need="one writer for a folder",
                hint="wait for it, or choose another output folder",
            ) from error
        yield


def _no_space(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"no space left for {path} ({error})",
        need="room for the packed checkpoint; what is complete was kept",
        hint="free some space and run the same command with --resume",
    )
