"""What every kernel has to show when it is compiled, on any machine."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

from hopsparse.compiler import Cubin
from hopsparse.ops.plans import plans
from hopsparse.plan import TARGETS, KernelSpec

_WARP, _REGISTER_STEP = 32, 8


def all_specs() -> list[KernelSpec]:
    """Every kernel that any operator may run."""
    return [spec for plan in plans().values() for spec in plan.every_spec()]


def promised(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that the operator says its kernels have."""
    found: tuple[str, ...] = plans()[spec.op].SASS
    return found


def disassemble(image: bytes) -> str:
    """The SASS of a cubin."""
    nvdisasm = find_nvidia_binary_utility("nvdisasm")
    assert nvdisasm, "nvdisasm comes with the extra `dev`"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(image)
        return subprocess.check_output([nvdisasm, "-c", "-ndf", file.name], text=True)


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
