"""What every kernel has to show when it is compiled, on any machine."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

from hopsparse.compiler import Cubin
from hopsparse.ops.plans import plans
from hopsparse.plan import TARGETS, KernelSpec

_WARP, _REGISTER_STEP, _INSTRUCTION_BYTES = 32, 8, 16
_EXECUTABLE = 4


def all_specs() -> list[KernelSpec]:
    """Every kernel that any operator may run."""
    return [spec for plan in plans().values() for spec in plan.every_spec()]


def promised(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that the operator says its kernels have."""
    found: tuple[str, ...] = plans()[spec.op].sass_of(spec)
    return found


def disassemble(images: list[bytes]) -> list[str]:
    """The SASS of each cubin.

    nvdisasm takes half a second to start and next to nothing for a kernel: it gets the code of all
    as one, and what it prints is cut by address.
    """
    nvdisasm = find_nvidia_binary_utility("nvdisasm")
    assert nvdisasm, "nvdisasm comes with the extra `dev`"
    codes = [_code(image) for image in images]
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(b"".join(codes))
        told = subprocess.check_output([nvdisasm, "-ndf", "-b", "SM90a", file.name], text=True)
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/.*", told, re.MULTILINE)
    ends = list(accumulate(len(code) // _INSTRUCTION_BYTES for code in codes))
    assert len(lines) == ends[-1]
    return ["\n".join(lines[start:end]) for start, end in pairwise([0, *ends])]


def _code(image: bytes) -> bytes:
    """The instructions in a cubin: the executable sections of an ELF-64 file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    header_bytes, count = struct.unpack_from("<HH", image, 58)
    code = b""
    for number in range(count):
        header = struct.unpack_from("<IIQQQQ", image, table + number * header_bytes)
        _, _, flags, _, offset, size = header
        code += image[offset : offset + size] if flags & _EXECUTABLE else b""
    return code


def problems(
    spec: KernelSpec, cubin: Cubin, sass: str, instructions: tuple[str, ...]
) -> Iterator[str]:
    """What is wrong with a kernel that compiles, one line each."""
    yield from cubin.warnings
    yield from cubin.advice
    if cubin.stack_bytes or cubin.spill_bytes:
        yield f"{cubin.stack_bytes} bytes of stack, {cubin.spill_bytes} spilled"
    warps = -(-spec.threads // _WARP)
    registers = -(-cubin.registers // _REGISTER_STEP) * _REGISTER_STEP * _WARP * warps
    smem_bytes = cubin.static_smem_bytes + spec.smem_bytes
    for target in TARGETS.values():
        if target.arch != spec.arch:
            continue
        if registers > target.registers_per_sm:
            yield f"{registers} registers, {target.name} has {target.registers_per_sm}"
        if smem_bytes > target.smem_per_block:
            yield f"{smem_bytes} bytes shared, {target.name} has {target.smem_per_block}"
    for name in instructions:
        if not re.search(rf"(?<![\w.]){re.escape(name)}(?![A-Z0-9])", sass):
            yield f"no {name}"
