"""The files of a model folder: tensors, JSON, the small ones, and a lock."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError
from ..files import unbroken, unreadable, written_whole

INDEX_NAME = "model.safetensors.index.json"
LOCK_NAME = ".lock"
STATE_NAME = "run-state.json"

_AGAIN = "free some space and run the same command again"
# Tokenizers, chat templates and generation settings.
_EXTRA_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
# Written anew for every checkpoint, or about one alone. A plan is about forms, which stay.
_NOT_EXTRA = {"config.json", "report.json", "recover.json", STATE_NAME}
# Of the folders beside them only those count that hold nothing but small text files, such as
# additional_chat_templates.
_TEXT_SUFFIXES = {".json", ".txt", ".jinja"}
_TEXT_BYTES = 1 << 20


def partial_of(out: Path) -> Path:
    """The folder in which OUT is made until it is complete.

    Example:
        >>> print(partial_of(Path("models/small")))
        models/small.partial
    """
    return out.parent / (out.name + ".partial")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], no_room: str = _AGAIN) -> None:
    """Write one safetensors file; it appears whole or not at all.

    Raises:
        CheckpointError: It cannot be written; `no_room` is what to do about a full disk.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_whole(path, no_room) as temporary:
        save_file(whole, temporary, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a whole safetensors file.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        with unbroken():
            tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error
    return tensors


def write_json(path: Path, value: object, no_room: str = _AGAIN) -> None:
    """Write one JSON file; it appears whole or not at all.

    Raises:
        CheckpointError: It cannot be written; `no_room` is what to do about a full disk.
    """
    with written_whole(path, no_room) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})", need="a JSON object", hint="restore the file"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}", need="a JSON object", hint="restore the file"
        )
    return value


def sha256(path: Path) -> str:
    """Digest of a file, in hexadecimal.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def copy_extras(source: Path, destination: Path) -> None:
    """Copy the small files of a model folder: tokenizer, chat templates, generation settings.

    Weights, indices of weights and what a checkpoint writes itself stay behind.

    Raises:
        CheckpointError: One cannot be written.
    """
    for path in sorted(source.iterdir()):
        if path.is_dir():
            files = _text_files(path)
            if files:
                (destination / path.name).mkdir(exist_ok=True)
            for file in files:
                _copy(file, destination / path.name / file.name)
        elif _is_extra(path):
            _copy(path, destination / path.name)


def _is_extra(path: Path) -> bool:
    own = path.name in _NOT_EXTRA or path.name.endswith(".index.json")
    return path.suffix in _EXTRA_SUFFIXES and not own and path.is_file()


def _text_files(folder: Path) -> list[Path]:
    """What a folder holds, if that is small text files and nothing else."""
    if folder.name.startswith("."):
        return []
    files = sorted(folder.iterdir())
    fit = all(
        path.is_file() and path.suffix in _TEXT_SUFFIXES and path.stat().st_size <= _TEXT_BYTES
        for path in files
    )
    return files if fit else []


def _copy(source: Path, target: Path) -> None:
    with written_whole(target) as temporary:
        shutil.copyfile(source, temporary)


def check_result(path: Path) -> None:
    """Refuse a path that cannot be the name of something new.

    Raises:
        CheckpointError: It has no name of its own, or is a symbolic link.
    """
    if path.name in ("", ".."):
        raise CheckpointError(
            f"{str(path)!r} as the result", need="a path that ends in a new name", hint="-o OUT"
        )
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link",
            need="a name that is free, or that of a real folder",
            hint=f"-o {path.resolve()}",
        )


def is_held(folder: Path) -> bool:
    """Whether another process holds `folder` with `exclusive`."""
    try:
        with (folder / LOCK_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def held_elsewhere(folder: Path) -> CheckpointError:
    """The error for a folder that another process holds."""
    return CheckpointError(
        f"{folder} is being written by another process",
        need="one writer for a folder",
        hint="wait for it, or choose another output folder",
    )


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go of it however the process ends.

    Raises:
        CheckpointError: Another process holds it, or has just renamed it.
    """
    lock = folder / LOCK_NAME
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have renamed the folder before this process got the lock.
            if not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                raise BlockingIOError
        except OSError as error:
            raise held_elsewhere(folder) from error
        yield
