"""A folder of entries that any number of processes share, be killed in, or find damaged.

An entry is one file, which appears whole; its reader says whether it is what was written. No fault
of the folder is an error: what cannot be kept is lost, which is logged once.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TEMPORARY = ".tmp"
# No writer takes this long: whoever left an older temporary file was killed.
_ABANDONED_S = 3600
_log = logging.getLogger(__name__)


class EntryFolder:
    """The files of one folder.

    Args:
        path: The folder; made when the first entry is written.
        suffix: What the names of entries end with.
        loss: What to log where nothing can be kept: a format of the folder and the reason.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as name:
        ...     folder = EntryFolder(Path(name), ".txt", "nothing is kept in %s (%s)")
        ...     folder.write("one", b"all of it", stays=lambda: True)
        ...     folder.read("one"), len(folder.entries())
        (b'all of it', 1)
    """

    def __init__(self, path: Path, suffix: str, loss: str) -> None:
        self.path = path
        self._suffix, self._loss = suffix, loss
        self._has_swept = self._has_warned = False

    def entries(self) -> list[Path]:
        """The files that are entries, by name; none where the folder cannot be read."""
        return self._files("", self._suffix)

    def unfinished(self) -> list[Path]:
        """Files that are being written, or that killed writers left."""
        return self._files(".", _TEMPORARY)

    def read(self, name: str) -> bytes | None:
        """What an entry holds; None if there is none, or if it cannot be read."""
        try:
            return self._path(name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, data: bytes, *, stays: Callable[[], bool]) -> None:
        """Publish an entry; whatever prevents it is logged once and forgotten.

        Args:
            name: Of the entry, without the suffix.
            data: What it holds.
            stays: Asked where there is an entry already: whether that one stays.
        """
        temporary = self.path / f".{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._publish(temporary, self._path(name), stays)
        except OSError as error:
            self._warn(error)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.path / (name + self._suffix)

    def _files(self, prefix: str, suffix: str) -> list[Path]:
        try:
            found = [path for path in self.path.iterdir() if path.name.endswith(suffix)]
        except OSError:
            return []
        return sorted(path for path in found if path.name.startswith(prefix))

    def _publish(self, temporary: Path, path: Path, stays: Callable[[], bool]) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            if not stays():
                temporary.replace(path)
        except OSError:
            # Some file systems have no hard links.
            temporary.replace(path)

    def _sweep(self) -> None:
        """Delete what killed writers left, once for each folder."""
        if self._has_swept:
            return
        self._has_swept = True
        for path in self.unfinished():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(self._loss, self.path, error.strerror)
