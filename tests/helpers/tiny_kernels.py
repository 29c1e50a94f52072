"""Kernels that compile in a blink, and copies of the package in which processes compile them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hopsparse
from hopsparse.plan import KernelSpec

HEADER, OTHER, BESIDE = "device/ptx/lanes.cuh", "device/ptx/other.cuh", "ops/tiny/step.cuh"
FILES = {
    "ops/tiny/kernel.cuh": '#pragma once\n#include "ptx/lanes.cuh"\n#include "./step.cuh"\n',
    "ops/tiny/alone.cuh": '#include "ptx/other.cuh"\nstruct Args { float* out; int n; };\n',
    BESIDE: '#include "ptx/lanes.cuh"  // once is enough\nstruct Args { float* out; int n; };\n',
    HEADER: '#include "ptx/lanes.cuh"\n__device__ inline int lane() { return threadIdx.x % 32; }\n',
    OTHER: "__device__ inline int lane() { return threadIdx.x & 31; }\n",
}
_PACKAGE = Path(hopsparse.__file__).parent


def tiny_spec(
    value: int = 0, *, kernel: str = "kernel", extra: str = "", pdl: bool = False
) -> KernelSpec:
    """A kernel that writes `value`; `extra` stands in front of that."""
    return KernelSpec(
        op="tiny",
        name=f"{kernel}{value}",
        kernel=f"ops/tiny/{kernel}.cuh",
        text='extern "C" __global__ void entry(const __grid_constant__ Args a) {'
        f"{extra} if (lane() < a.n) a.out[lane()] = {value}; }}",
        entry="entry",
        threads=32,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=16,
        pdl=pdl,
    )


def write_kernels(root: Path) -> Path:
    """Write the files of the kernels; gives what `translation_unit` takes as root."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def copy_package(folder: Path) -> Path:
    """Copy what compiling needs of the package, with the tiny kernels in it.

    Its `__init__` is empty: the real one imports torch, which takes seconds, and no compiler.
    """
    package = folder / "hopsparse"
    package.mkdir(parents=True)
    for name in ("compiler", "plan"):
        shutil.copytree(_PACKAGE / name, package / name)
    for name in ("entry_folder.py", "errors.py", "settings.py"):
        shutil.copy(_PACKAGE / name, package / name)
    (package / "__init__.py").touch()
    write_kernels(package)
    return folder


def start_child(
    package: Path, program: str, *arguments: object, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """Start a Python process that has the copy in `package`, and this module."""
    start = "from tests.helpers.tiny_kernels import *\nfrom hopsparse.compiler import *\n"
    paths = [str(package), str(Path(__file__).parents[2]), *filter(None, sys.path)]
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", start + program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def told_by(child: subprocess.Popen[str], returncode: int = 0) -> str:
    """What a child prints; it must end as expected."""
    told, errors = child.communicate(timeout=120)
    assert child.returncode == returncode, errors
    return told
