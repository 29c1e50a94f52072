"""The text that is compiled: a kernel's file with our own headers in it, then what a spec adds.

NVRTC never opens a file: every header is inlined here. The text holds no path outside the package
and no `#line`, so that two installations of one version compile, and cache, the same bytes.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import NoReturn

from ..errors import CompileError
from ..plan.spec import KernelSpec

#: Where `#include "ptx/wgmma.cuh"` is looked up.
DEVICE = PurePosixPath("device")
_DIRECTIVE = re.compile(r"\s*#\s*(include\b|pragma\s+once\b)\s*(.*)")
_OURS = re.compile(r'"([^"]+)"\s*(?://.*)?')


def translation_unit(spec: KernelSpec, root: Traversable | None = None) -> str:
    r"""The whole C++ text of a kernel.

    Each `#include "name"` is replaced by that file, the first time it is met; later ones, and
    cycles, leave nothing. `name` is relative to the device headers, or to the including file if it
    starts with `./`. Includes belong at the head of a file, not under an `#if`.

    Args:
        spec: The kernel.
        root: Folder that `spec.kernel` is relative to; the package if None.

    Raises:
        CompileError: A file that is not there, or a system header; it says the file and the line.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> spec = KernelSpec("fill", "one", "a.cuh", "// end", "entry", 32, (1, 1, 1), 0, 8)
        >>> with TemporaryDirectory() as name:
        ...     _ = Path(name, "a.cuh").write_text('#include "./b.cuh"\n#include "./b.cuh"\n')
        ...     _ = Path(name, "b.cuh").write_text("int b;")
        ...     translation_unit(spec, Path(name)).splitlines()
        ['int b;', '// end']
    """
    inliner = _Inliner(_package() if root is None else root)
    inliner.add(PurePosixPath(spec.kernel), asked_by=f"the spec {spec.op}/{spec.name}")
    return "\n".join([*inliner.lines, spec.text]) + "\n"


class _Inliner:
    """The lines of a unit as they grow, and the files that are in it."""

    def __init__(self, root: Traversable) -> None:
        self.root = root
        self.lines: list[str] = []
        self.seen: set[PurePosixPath] = set()

    def add(self, path: PurePosixPath, asked_by: str) -> None:
        if path in self.seen:
            return
        self.seen.add(path)
        for number, line in enumerate(self._read(path, asked_by).splitlines(), 1):
            directive = _DIRECTIVE.match(line)
            if directive is None:
                self.lines.append(line)
            elif directive[1] == "include":
                place = f"{path}, line {number}"
                self.add(_resolved(path, directive[2], place), asked_by=place)

    def _read(self, path: PurePosixPath, asked_by: str) -> str:
        try:
            return self.root.joinpath(*path.parts).read_text(encoding="utf-8")
        except (OSError, KeyError):
            # A missing member of a zip is a KeyError.
            _refuse(f"{asked_by}: no file {path}")


def _resolved(includer: PurePosixPath, name: str, place: str) -> PurePosixPath:
    """The file that an include names, relative to the package."""
    found = _OURS.fullmatch(name)
    if found is None:
        _refuse(f"{place}: #include {name}")
    path = PurePosixPath(found[1])
    if path.is_absolute() or ".." in path.parts:
        _refuse(f"{place}: #include {name} leaves its folder")
    return (includer.parent if found[1].startswith("./") else DEVICE) / path


def _refuse(got: str) -> NoReturn:
    raise CompileError(
        got,
        need=f"a file under {DEVICE}, or one beside the including file written as ./name",
        hint="system headers are not there for NVRTC; declare what is needed",
    )


@cache
def _package() -> Traversable:
    return files(__package__.partition(".")[0])
