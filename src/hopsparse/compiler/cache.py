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
import os
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..entry_folder import EntryFolder
from ..errors import CompileError
from ..plan.spec import KernelSpec
from ..settings import Settings
from .cubin import Cubin
from .delays import delayed
from .nvrtc import OPTIONS, Nvrtc, compile_unit, default_nvrtc
from .source import translation_unit

#: Goes up when the layout of an entry, or what `Cubin` means, changes.
SCHEMA = 1
_LOSS = "kernels cannot be kept in %s (%s) and are compiled again by every process"
_DIGEST_BYTES = hashlib.sha256().digest_size


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
        delays: Seed of the pauses that kernels are compiled with (`compiler/delays.py`); None: no
            pauses.

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
        self,
        folder: Path,
        *,
        nvrtc: Nvrtc | None = None,
        root: Traversable | None = None,
        delays: int | None = None,
    ) -> None:
        self.folder = folder
        self.delays = delays
        self._chosen = nvrtc
        self._root = root
        self._loaded: dict[KernelSpec, Cubin] = {}
        self._files = EntryFolder(folder, ".kernel", _LOSS)

    @classmethod
    def default(cls) -> KernelCache:
        """The cache that the settings name, one for the whole process."""
        settings = Settings.from_environment()
        return _shared(settings.cache_dir / "kernels", settings.delays)

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
        return spec in self._loaded or self._read(self.key(spec)) is not None

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
        unit = self._unit(spec)
        return cache_key(unit, spec.entry, spec.arch, OPTIONS, self._nvrtc.version)

    def entries(self) -> list[Path]:
        """The files of the folder that are entries, by name."""
        return self._files.entries()

    def damaged(self) -> list[Path]:
        """Those of them that are not, bit by bit, what was written; they are compiled again."""
        return [path for path in self.entries() if not _is_whole(path)]

    def unfinished(self) -> list[Path]:
        """Files that are being written, or that killed writers left."""
        return self._files.unfinished()

    def size_bytes(self) -> int:
        """Size of all entries."""
        return sum(_size(path) for path in self.entries())

    def clear(self) -> int:
        """Forget every kernel, in memory and on disk; gives the number of entries deleted."""
        self._loaded.clear()
        entries = self.entries()
        for path in [*entries, *self.unfinished()]:
            with suppress(OSError):
                path.unlink()
        return len(entries) - len(self.entries())

    @property
    def _nvrtc(self) -> Nvrtc:
        return self._chosen or default_nvrtc()

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
        unit = self._unit(spec)
        key = cache_key(unit, spec.entry, spec.arch, OPTIONS, self._nvrtc.version)
        cubin = self._read(key)
        was_cached = cubin is not None
        if cubin is None:
            cubin = self._compile(spec, unit)
            # One that is there is of a quicker process, with the same bytes, or it is damaged.
            self._files.write(key, encode(cubin, key), stays=lambda: self._read(key) is not None)
        _check(spec, cubin)
        self._loaded[spec] = cubin
        return cubin, was_cached

    def _unit(self, spec: KernelSpec) -> str:
        unit = translation_unit(spec, self._root)
        return unit if self.delays is None else delayed(unit, self.delays)

    def _compile(self, spec: KernelSpec, unit: str) -> Cubin:
        try:
            return compile_unit(unit, spec.entry, spec.arch, OPTIONS, self._nvrtc)
        except CompileError as error:
            got = f"{spec.op}/{spec.name}: {error.got}"
            raise CompileError(got, need=error.need, hint=error.hint) from None

    def _read(self, key: str) -> Cubin | None:
        """An entry; None if there is none, or if what is there is not whole."""
        data = self._files.read(key)
        return None if data is None else decode(data, key)


@cache
def _shared(folder: Path, delays: int | None) -> KernelCache:
    return KernelCache(folder, delays=delays)


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


def _is_whole(path: Path) -> bool:
    try:
        return decode(path.read_bytes(), path.stem) is not None
    except OSError:
        return False
