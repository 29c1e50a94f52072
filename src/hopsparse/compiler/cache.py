"""Compiled kernels kept by content.

The name of an entry is a hash of what goes into a compilation, never of what comes out, of paths
or of times: a package that is moved or installed again finds its kernels, and an edited header
changes the names of exactly those kernels that have it in them. One entry is one file, which
appears whole and is checked when read, so that any number of processes may share a folder, be
killed in it, or find it damaged. No fault of the folder is an error: the kernel is compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import CompileError
from ..plan.spec import KernelSpec
from ..settings import Settings
from .cubin import Cubin
from .nvrtc import OPTIONS, Nvrtc, compile_unit, default_nvrtc
from .source import translation_unit

#: Goes up when the layout of an entry, or what `Cubin` means, changes.
SCHEMA = 1
_ENTRY = ".kernel"
_TEMPORARY = ".tmp"
# No compilation takes this long: whoever wrote an older temporary file was killed.
_ABANDONED_S = 3600
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


def cache_key(
    unit_text: str, entry: str, arch: str, options: tuple[str, ...], nvrtc_version: str
) -> str:
    """The name of a compilation: SHA-256, in hexadecimal digits, of all that decides its result.

    Example:
        >>> key = cache_key("text", "entry", "sm_90a", ("-a", "-b"), "13.0+65be0db342ad51a0")
        >>> key == cache_key("text", "entry", "sm_90a", ("-b", "-a"), "13.0+65be0db342ad51a0")
        True
    """
    facts = [SCHEMA, nvrtc_version, arch, sorted(options), entry, unit_text]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True)
class Built:
    """What became of one spec.

    Attributes:
        spec: The kernel.
        cubin: The result; None if there is an error.
        was_cached: Whether nothing had to be compiled.
        error: Why it did not compile.
    """

    spec: KernelSpec
    cubin: Cubin | None
    was_cached: bool
    error: CompileError | None = None


class KernelCache:
    """Cubins in memory and in a folder.

    Args:
        folder: Where entries are kept; made when the first is stored.
        nvrtc: The compiler; that of this process if None.
        root: Folder that `KernelSpec.kernel` is relative to; the package if None.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> text = 'extern "C" __global__ void entry(Args a) { *a.y = 1; }'
        >>> spec = KernelSpec("fill", "one", "fill.cuh", text, "entry", 32, (1, 1, 1), 0, 8)
        >>> with TemporaryDirectory() as name:
        ...     root = Path(name)
        ...     _ = (root / "fill.cuh").write_text("struct Args { float* y; };")
        ...     kernels = KernelCache(root / "kernels", root=root)
        ...     kernels.contains(spec), kernels.get(spec).args_bytes, kernels.contains(spec)
        (False, 8, True)
    """

    def __init__(
        self, folder: Path, *, nvrtc: Nvrtc | None = None, root: Traversable | None = None
    ) -> None:
        self.folder = folder
        self._chosen = nvrtc
        self._root = root
        self._loaded: dict[KernelSpec, Cubin] = {}
        self._has_swept = self._has_warned = False

    @classmethod
    def default(cls) -> KernelCache:
        """The cache that the settings name, one for the whole process."""
        return _shared(Settings.from_environment().cache_dir / "kernels")

    def get(self, spec: KernelSpec) -> Cubin:
        """The compiled kernel, from memory, from the folder, or compiled now and stored.

        Raises:
            CompileError: It does not compile, or its code is not what the spec says.
            UnsupportedError: There is no NVRTC.
        """
        return self._get(spec)[0]

    def contains(self, spec: KernelSpec) -> bool:
        """Whether `get` need not compile.

        Raises:
            CompileError: A file of its text is not there.
            UnsupportedError: There is no NVRTC.
        """
        return spec in self._loaded or self._read(self._path(self.key(spec))) is not None

    def compile_all(
        self, specs: Iterable[KernelSpec], workers: int = 0
    ) -> Generator[Built, None, None]:
        """Get many kernels, several at a time; each is given out as soon as it is there.

        Errors of a kernel are given out too, not raised. Leaving early drops what has not begun.

        Args:
            specs: The kernels; equal ones count once.
            workers: Threads; as many as there are processors if 0.

        Raises:
            UnsupportedError: There is no NVRTC, or it does not load: no kernel would fare better.
        """
        pool = ThreadPoolExecutor(workers or usable_cores(), "hopsparse-compile")
        try:
            for done in as_completed([pool.submit(self._build, s) for s in dict.fromkeys(specs)]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def key(self, spec: KernelSpec) -> str:
        """The name of the entry of `spec`.

        Raises:
            CompileError: A file of its text is not there.
            UnsupportedError: There is no NVRTC.
        """
        unit = translation_unit(spec, self._root)
        return cache_key(unit, spec.entry, spec.arch, OPTIONS, self._nvrtc.version)

    def entries(self) -> list[Path]:
        """The files of the folder that are entries, by name."""
        return self._files(_ENTRY)

    def size_bytes(self) -> int:
        """Size of all entries."""
        return sum(_size(path) for path in self.entries())

    def clear(self) -> int:
        """Forget every kernel, in memory and on disk; gives the number of entries deleted."""
        self._loaded.clear()
        entries = self.entries()
        for path in [*entries, *self._files(_TEMPORARY)]:
            with suppress(OSError):
                path.unlink()
        return len(entries) - len(self.entries())

    @property
    def _nvrtc(self) -> Nvrtc:
        return self._chosen or default_nvrtc()

    def _path(self, key: str) -> Path:
        return self.folder / (key + _ENTRY)

    def _files(self, suffix: str) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.name.endswith(suffix))
        except OSError:
            return []

    def _build(self, spec: KernelSpec) -> Built:
        try:
            cubin, was_cached = self._get(spec)
        except CompileError as error:
            return Built(spec, None, was_cached=False, error=error)
        return Built(spec, cubin, was_cached)

    def _get(self, spec: KernelSpec) -> tuple[Cubin, bool]:
        """The kernel, and whether it was there."""
        if (known := self._loaded.get(spec)) is not None:
            return known, True
        unit = translation_unit(spec, self._root)
        path = self._path(cache_key(unit, spec.entry, spec.arch, OPTIONS, self._nvrtc.version))
        cubin = self._read(path)
        was_cached = cubin is not None
        if cubin is None:
            cubin = self._compile(spec, unit)
            self._store(path, cubin)
        _check(spec, cubin)
        self._loaded[spec] = cubin
        return cubin, was_cached

    def _compile(self, spec: KernelSpec, unit: str) -> Cubin:
        try:
            return compile_unit(unit, spec.entry, spec.arch, OPTIONS, self._nvrtc)
        except CompileError as error:
            got = f"{spec.op}/{spec.name}: {error.got}"
            raise CompileError(got, need=error.need, hint=error.hint) from None

    def _read(self, path: Path) -> Cubin | None:
        """An entry; None if there is none, or if what is there is not whole."""
        try:
            return decode(path.read_bytes(), path.stem)
        except OSError:
            return None

    def _store(self, path: Path, cubin: Cubin) -> None:
        """Publish an entry; whatever prevents it is logged once and forgotten."""
        temporary = self.folder / f".{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with temporary.open("xb") as file:
                file.write(encode(cubin, path.stem))
                file.flush()
                os.fsync(file.fileno())
            self._publish(temporary, path)
        except OSError as error:
            self._warn(error)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _publish(self, temporary: Path, path: Path) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # Either another process was quicker, with the same bytes, or the file is damaged.
            if self._read(path) is None:
                temporary.replace(path)
        except OSError:
            # Some file systems have no hard links.
            temporary.replace(path)

    def _sweep(self) -> None:
        """Delete what killed writers left, once for each cache."""
        if self._has_swept:
            return
        self._has_swept = True
        for path in self._files(_TEMPORARY):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "kernels cannot be kept in %s (%s) and are compiled again by every process",
                self.folder,
                error.strerror,
            )


@cache
def _shared(folder: Path) -> KernelCache:
    return KernelCache(folder)


def usable_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def encode(cubin: Cubin, key: str) -> bytes:
    """An entry: a line of JSON, the cubin, and the SHA-256 of both."""
    header = {field.name: getattr(cubin, field.name) for field in fields(cubin)}
    del header["image"]
    body = json.dumps({"key": key, **header}).encode() + b"\n" + cubin.image
    return body + hashlib.sha256(body).digest()


def decode(entry: bytes, key: str) -> Cubin | None:
    """Read an entry; None if it is not, bit by bit, what was written for `key`."""
    body, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    line, _, image = body.partition(b"\n")
    # The digest holds, so we wrote it; but perhaps for another key, and it was copied here.
    try:
        header: dict[str, Any] = json.loads(line)
        if header.pop("key") != key:
            return None
        for name in ("advice", "warnings"):
            header[name] = tuple(header[name])
        return Cubin(image=image, **header)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _check(spec: KernelSpec, cubin: Cubin) -> None:
    """A launch trusts the spec: what the code does otherwise would be garbage, and no error."""
    name = f"{spec.op}/{spec.name}"
    if spec.args_bytes != cubin.args_bytes:
        raise CompileError(
            f"{name}: args_bytes is {spec.args_bytes}, and its code takes {cubin.args_bytes} bytes",
            need="the size of its argument struct, as C++ lays it out",
            hint="compare the fields in the kernel with those that Python packs",
        )
    if spec.pdl != cubin.has_grid_wait:
        has = "has" if cubin.has_grid_wait else "does not have"
        raise CompileError(
            f"{name}: pdl is {spec.pdl}, and its code {has} griddepcontrol.wait",
            need="pdl exactly where the kernel waits",
            hint="set pdl in the spec, or wait before the first read of another kernel's results",
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
