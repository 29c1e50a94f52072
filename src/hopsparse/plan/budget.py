"""What a block may take of an SM: shared memory, registers, threads, cluster.

A kernel whose warps have different roles moves registers between them with setmaxnreg (PTX ISA,
section setmaxnreg): 24 to 240 a thread, in steps of 8, out of those that the block was given when
it was launched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from ..errors import ArgumentError, UnsupportedError
from .spec import KernelSpec
from .target import TARGETS, Target

WARPGROUP = 128
REGISTER_STEP, LEAST_REGISTERS, MOST_REGISTERS = 8, 24, 240
_MOST_THREADS = 1024
_MOST_CLUSTER = 16
# A producer holds addresses and a loop; it spills nowhere below this, and needs nothing above it.
_PRODUCER_REGISTERS = 40


def smem_left(spec: KernelSpec, target: Target) -> int:
    """Bytes of shared memory that a block of `spec` leaves unused; negative if it does not fit.

    Example:
        >>> spec = KernelSpec("op", "k", "k.cuh", "", "k", 128, (1, 1, 1), 200 * 1024, 16)
        >>> smem_left(spec, TARGETS["h200"])
        27648
    """
    return target.smem_per_block - spec.smem_bytes


def launch_registers(threads: int, target: Target = TARGETS["h200"]) -> int:
    """Registers a thread has at launch where one block has the SM to itself.

    Example:
        >>> launch_registers(640)
        96
    """
    return _whole_steps(target.registers_per_sm // threads)


def warpgroup_registers(
    consumers: int, target: Target = TARGETS["h200"], *, least: int = LEAST_REGISTERS
) -> tuple[int, int]:
    """Registers a thread of the producer and of a consumer warpgroup keeps after setmaxnreg.

    Consumers get equal shares of what the block has at launch, less the least that a producer may
    keep; the producer gets what their rounding leaves, as far as it has use for it.

    Args:
        consumers: Warpgroups beside the one producer, 1 to 4.
        target: The GPU.
        least: What the producer needs, a multiple of 8; one that only starts copies needs no more.

    Raises:
        ArgumentError: Another number of warpgroups.

    Example:
        >>> [warpgroup_registers(consumers) for consumers in (1, 2, 3, 4)]
        [(40, 240), (24, 240), (32, 160), (32, 112)]
        >>> warpgroup_registers(2, least=72)
        (72, 216)
    """
    if not 1 <= consumers <= 4:
        raise ArgumentError(
            f"{consumers} consumer warpgroups", need="1 to 4", hint="2, which most tiles have"
        )
    warpgroups = consumers + 1
    pool = warpgroups * launch_registers(WARPGROUP * warpgroups, target)
    share = _whole_steps((pool - least) // consumers)
    consumer = min(MOST_REGISTERS, share)
    return min(max(least, _PRODUCER_REGISTERS), pool - consumers * consumer), consumer


def check(spec: KernelSpec, target: Target, registers: Sequence[int] = ()) -> None:
    """Refuse a kernel that no SM of a GPU can run.

    A MIG slice has whole SMs, so that all but the number of them is as on the full GPU.

    Args:
        spec: The kernel.
        target: The GPU.
        registers: Registers a thread of each warpgroup after setmaxnreg; not checked if empty.

    Raises:
        UnsupportedError: Another architecture, or too much of something; it says of what.

    Example:
        >>> spec = KernelSpec("op", "big", "k.cuh", "", "k", 128, (1, 1, 1), 240 * 1024, 16)
        >>> check(spec, TARGETS["h100"])
        Traceback (most recent call last):
        hopsparse.errors.UnsupportedError: op/big with 245760 bytes of shared memory a block. \
Required: at most 232448 on h100. Try: fewer stages, or a smaller tile.
    """
    cluster = math.prod(spec.cluster)
    if spec.arch != target.arch:
        _refuse(
            spec,
            f"for {spec.arch}",
            f"{target.arch}, as {target.name} is",
            f'arch="{target.arch}"',
        )
    if spec.threads % 32 or not 0 < spec.threads <= _MOST_THREADS:
        _refuse(
            spec,
            f"with {spec.threads} threads a block",
            f"whole warps, {_MOST_THREADS} threads at most",
            "fewer warpgroups",
        )
    if smem_left(spec, target) < 0:
        _refuse(
            spec,
            f"with {spec.smem_bytes} bytes of shared memory a block",
            f"at most {target.smem_per_block} on {target.name}",
            "fewer stages, or a smaller tile",
        )
    if not 0 < cluster <= min(_MOST_CLUSTER, target.sm_count):
        _refuse(
            spec,
            f"with clusters of {cluster} blocks",
            f"1 to {min(_MOST_CLUSTER, target.sm_count)} on {target.name}",
            "a smaller cluster",
        )
    if registers:
        _check_registers(spec, target, registers)


def _check_registers(spec: KernelSpec, target: Target, registers: Sequence[int]) -> None:
    if len(registers) * WARPGROUP != spec.threads:
        _refuse(
            spec,
            f"with registers of {len(registers)} warpgroups for {spec.threads} threads",
            "one number a warpgroup of 128 threads",
            "the producer's and those of each consumer",
        )
    for count in registers:
        if count % REGISTER_STEP or not LEAST_REGISTERS <= count <= MOST_REGISTERS:
            _refuse(
                spec,
                f"with {count} registers a thread",
                f"a multiple of {REGISTER_STEP} from {LEAST_REGISTERS} to {MOST_REGISTERS}, "
                "which setmaxnreg takes",
                str(min(MOST_REGISTERS, max(LEAST_REGISTERS, _whole_steps(count)))),
            )
    # What setmaxnreg adds to one warpgroup another one has given back: nothing comes from outside.
    had = len(registers) * launch_registers(spec.threads, target)
    if sum(registers) > had:
        _refuse(
            spec,
            f"with {sum(registers) * WARPGROUP} registers a block",
            f"at most {had * WARPGROUP}, which {spec.threads} threads have at launch",
            "fewer for each consumer",
        )


def _whole_steps(registers: int) -> int:
    return registers // REGISTER_STEP * REGISTER_STEP


def _refuse(spec: KernelSpec, got: str, need: str, hint: str) -> NoReturn:
    raise UnsupportedError(f"{spec.op}/{spec.name} {got}", need=need, hint=hint)
