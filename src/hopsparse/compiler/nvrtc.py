"""NVRTC called through its C interface: C++ text to a cubin, without a driver or a GPU.

ctypes and not cuda.bindings: importing those and finding the library through them takes 0.15 s of
a cold start; a cached kernel needs the name of the compiler only, which here does not load it; and
one process can hold two compilers, as the tests do. ctypes lets go of the interpreter lock in a
call: eight kernels took 3.8 s on one thread and 1.9 s on two.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CompileError, UnsupportedError
from .build_id import build_id
from .cubin import (
    UNIT_NAME,
    Cubin,
    advice_in,
    args_bytes_of,
    errors_in,
    usage_of,
    warnings_in,
)

#: Every kernel is compiled with these. `--minimal` leaves out textures and launches from kernels,
#: which saves 10 of the 50 ms of a small kernel and changes no bit of a cubin. `--no-cache`: the
#: cache that NVRTC has of its own gives the cubin and leaves the log empty, which says what the
#: kernel uses.
OPTIONS = ("--minimal", "--no-cache", "--no-source-include", "--ptxas-options=-v", "--std=c++17")
_LIBRARY, _BUILTINS = "libnvrtc.so.13", "libnvrtc-builtins.so.13."
_FUNCTIONS = (
    *("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram", "nvrtcGetErrorString"),
    *("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetPTXSize", "nvrtcGetPTX"),
    *("nvrtcGetCUBINSize", "nvrtcGetCUBIN"),
)
_WAIT = "griddepcontrol.wait"
_LINES_SHOWN = 3


def compile_unit(
    text: str,
    entry: str,
    arch: str = "sm_90a",
    options: tuple[str, ...] = OPTIONS,
    nvrtc: Nvrtc | None = None,
) -> Cubin:
    r"""Compile a whole text.

    Args:
        text: C++ that includes nothing.
        entry: Name of the `extern "C"` kernel that is wanted of it.
        arch: Architecture; only those with an `a`, such as sm_90a, have wgmma.
        options: Further options of NVRTC.
        nvrtc: The compiler; the one that `find_nvrtc` finds if None.

    Raises:
        CompileError: The text does not compile, or has no such kernel.
        UnsupportedError: There is no NVRTC.

    Example:
        >>> cubin = compile_unit('extern "C" __global__ void entry(float* y) { *y = 1; }', "entry")
        >>> cubin.image[:4], cubin.args_bytes, cubin.spill_bytes
        (b'\x7fELF', 8, 0)
    """
    compiler = default_nvrtc() if nvrtc is None else nvrtc
    started = time.perf_counter()
    image, ptx, log = compiler.compile(text, (f"--gpu-architecture={arch}", *sorted(options)))
    elapsed_ms = (time.perf_counter() - started) * 1e3
    usage = usage_of(log, entry)
    if usage is None:
        raise CompileError(
            f"a text without the kernel {entry!r}",
            need='extern "C" __global__ void with that name',
            hint="name it in the spec as it is named in the text",
        )
    return Cubin(
        image=image,
        entry=entry,
        **vars(usage),
        args_bytes=args_bytes_of(ptx, entry),
        advice=advice_in(log),
        warnings=warnings_in(log),
        has_grid_wait=_WAIT in ptx,
        nvrtc=compiler.version,
        compile_ms=elapsed_ms,
    )


def nvrtc_version() -> str:
    """The compiler that is used here: release, `+`, and the build id of its library.

    Raises:
        UnsupportedError: There is none.

    Example:
        >>> nvrtc_version()
        '13...+...'
    """
    return default_nvrtc().version


@cache
def default_nvrtc() -> Nvrtc:
    """The compiler of this process.

    Raises:
        UnsupportedError: There is none.
    """
    return Nvrtc(find_nvrtc())


def find_nvrtc() -> Path:
    """The library that a wheel, conda or a toolkit installed, in this order; nothing is loaded.

    Raises:
        UnsupportedError: There is none.
    """
    for folder in _folders():
        # Not Path.is_file, which raises where a folder may not be read or a name is too long.
        if os.path.isfile(path := folder / _LIBRARY):
            return path
    raise UnsupportedError(
        "NVRTC 13 is not installed",
        need=f"{_LIBRARY}, which compiles kernels",
        hint="pip install 'nvidia-cuda-nvrtc>=13.0,<14'",
    )


def _folders() -> Iterator[Path]:
    yield from (Path(entry, "nvidia", "cu13", "lib") for entry in sys.path)
    for variable, below in (
        ("CONDA_PREFIX", "lib"),
        ("CUDA_HOME", "lib64"),
        ("CUDA_PATH", "lib64"),
    ):
        if prefix := os.environ.get(variable):
            yield Path(prefix, below)
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    yield Path("/usr/local/cuda/lib64")


class Nvrtc:
    """One NVRTC library; threads may share it.

    Args:
        path: The file, with its builtins library beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def version(self) -> str:
        """Release, `+`, and the build id of the file: the same wherever the file lies."""
        builtins = sorted(self.path.parent.glob(_BUILTINS + "*"))
        release = builtins[0].name.split(".so.")[1] if builtins else "13"
        return f"{release}+{build_id(self.path)}"

    def compile(self, text: str, options: tuple[str, ...]) -> tuple[bytes, str, str]:
        """Compile; gives the cubin, the PTX and the log.

        Raises:
            CompileError: With the first errors of the log.
            UnsupportedError: The library cannot be loaded.
        """
        array = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        with self._program(text) as program:
            code = self._library.nvrtcCompileProgram(program, len(options), array)
            log = _decoded(self._fetch("ProgramLog", program))
            if code != 0:
                shown = errors_in(log, text)[:_LINES_SHOWN] or log.split("\n")[-_LINES_SHOWN:]
                self._refuse(code, shown)
            return self._fetch("CUBIN", program), _decoded(self._fetch("PTX", program)), log

    @contextmanager
    def _program(self, text: str) -> Iterator[ctypes.c_void_p]:
        program = ctypes.c_void_p()
        names = (text.encode(), UNIT_NAME.encode())
        code = self._library.nvrtcCreateProgram(ctypes.byref(program), *names, 0, None, None)
        if code != 0:
            self._refuse(code)
        try:
            yield program
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        code = getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        code = code or getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        if code != 0:
            self._refuse(code)
        return buffer.raw

    def _refuse(self, code: int, lines: Sequence[str] = ()) -> NoReturn:
        reason = self._library.nvrtcGetErrorString(code).decode()
        raise CompileError(
            "; ".join([reason, *filter(None, lines)]),
            need=f"a text and options that NVRTC {self.version.partition('+')[0]} takes",
            hint="look at what hopsparse.compiler.translation_unit(spec) gives",
        )

    @cached_property
    def _library(self) -> Any:
        try:
            # NVRTC 13.0 does not look beside itself for its builtins.
            for path in (*self.path.parent.glob(_BUILTINS + "*"), self.path):
                build_id(path)  # which refuses what must not be loaded
                library = ctypes.CDLL(str(path))
            for name in _FUNCTIONS:
                getattr(library, name)
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                f"{self.path} does not load ({error})",
                need="NVRTC 13 for this machine",
                hint="pip install --force-reinstall 'nvidia-cuda-nvrtc>=13.0,<14'",
            ) from error
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library


def _decoded(text: bytes) -> str:
    # ptxas ends its part of a log with a zero byte as well.
    return text.replace(b"\0", b"").decode(errors="replace")
