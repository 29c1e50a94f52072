"""Measurements as JSON lines: what was measured, with what, and what an earlier run has already.

A run that is stopped keeps every row that it finished, and the next run goes on behind them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..version import __version__
from .power import driver_version

Row = dict[str, Any]

_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_CUSPARSELT = ("nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12")


def environment(device: torch.device | int | None = None) -> Row:
    """With what a number was measured; None where there is no such thing.

    Returns:
        `gpu`, `driver`, `cuda` and `torch`, `cusparselt`, `nvrtc`, `hopsparse`, `commit` (with a
        `+` where files differ from it) and `date` (UTC, of today).

    Example:
        >>> environment()["torch"] == torch.__version__
        True
    """
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name(device) if has_gpu else None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cusparselt": _installed(_CUSPARSELT),
        "nvrtc": _installed(_NVRTC),
        "hopsparse": __version__,
        "commit": _commit(Path(__file__).parents[3]),
        "date": datetime.now(UTC).date().isoformat(),
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Write one row behind the others, at once: stopping the process later does not lose it.

    Raises:
        CheckpointError: The file cannot be written; a full disk leaves whole rows.
        ValueError: The row holds NaN or infinity, which JSON does not have.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     append(Path(folder) / "rows.jsonl", {"us": 1.5})
        ...     read(Path(folder) / "rows.jsonl")
        [{'us': 1.5}]
    """
    line = json.dumps(dict(row), allow_nan=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            _drop_broken_end(file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path, error) from error


def check_can_append(path: Path) -> None:
    """Refuse a file that no row can be written to, before anything is measured for it.

    What is missing is made: the folder, and an empty file.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written ({error.strerror})", need="a file for rows", hint="another path"
    )


def read(path: Path) -> list[Row]:
    """All rows of a file, none where there is no file.

    A last line without an end was cut off while it was written, and does not count.

    Raises:
        CheckpointError: Another line is no JSON object.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise CheckpointError(
                f"{path}, line {number}: no JSON object",
                need="one JSON object a line",
                hint="another file for new rows",
            )
        rows.append(row)
    return rows


def done(path: Path, key_fields: Sequence[str]) -> set[tuple[Any, ...]]:
    """The keys that a file has rows for; rows without all of the fields do not count.

    Example:
        >>> done(Path("no-such-file.jsonl"), ("out", "k"))
        set()
    """
    rows = read(path)
    return {
        tuple(row[field] for field in key_fields)
        for row in rows
        if all(field in row for field in key_fields)
    }


def _drop_broken_end(file: Any) -> None:
    """Cut off a last line without an end, so that the next row stands on its own."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)


@cache
def _commit(root: Path) -> str | None:
    """The commit of the checkout that this package runs from, or None."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return found.stdout.strip() if found.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (commit + "+" if changed else commit) or None


def _installed(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
