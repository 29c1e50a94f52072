"""CUlaunchConfig of the driver as ctypes, filled from a spec, and what a spec lets a launch be."""

from __future__ import annotations

import ctypes

from ..errors import ArgumentError
from ..plan.spec import KernelSpec

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes whose first words are used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_config(spec: KernelSpec) -> LaunchConfig:
    """What every launch of a spec has in common: block, shared memory, cluster.

    The grid is one cluster. One more attribute lies behind those that are counted, the early
    start of a kernel (PDL): whoever launches counts it in, or not.

    Example:
        >>> spec = KernelSpec("op", "name", "kernel.cuh", "", "entry", 384, (2, 1, 1), 1024, 64)
        >>> config = launch_config(spec)
        >>> config.grid_x, config.block_x, config.smem_bytes, config.attribute_count
        (2, 384, 1024, 1)
    """
    attributes = (LaunchAttribute * 2)()
    count = 0
    if spec.cluster != (1, 1, 1):
        attributes[0].id = _CLUSTER_DIMENSION
        attributes[0].value[:3] = spec.cluster
        count = 1
    attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[count].value[0] = 1
    grid, block = spec.cluster, (spec.threads, 1, 1)
    return LaunchConfig(*grid, *block, spec.smem_bytes, None, attributes, count)


def check_launch(spec: KernelSpec, grid: tuple[int, int, int], args_bytes: int, pdl: bool) -> None:
    """Refuse a launch that does not go with its spec. It needs no driver.

    Args:
        spec: The kernel.
        grid: Blocks along x, y and z.
        args_bytes: Size of the argument struct that was packed.
        pdl: Whether it may start before the kernel ahead of it has ended.

    Raises:
        ArgumentError: The grid is empty or cuts a cluster, the size is another, or the kernel
            does not wait for the one ahead.

    Example:
        >>> spec = KernelSpec("op", "name", "kernel.cuh", "", "entry", 384, (2, 1, 1), 1024, 64)
        >>> check_launch(spec, (132, 1, 1), 64, pdl=False)
    """
    x, y, z = grid
    a, b, c = spec.cluster
    if x % a or y % b or z % c or x < 1 or y < 1 or z < 1:
        near = [max(-(-n // side), 1) * side for n, side in zip(grid, spec.cluster, strict=True)]
        raise ArgumentError(
            f"a grid of {x} x {y} x {z} blocks for {spec.name}",
            need=f"multiples of its cluster, {a} x {b} x {c}, and at least one block",
            hint=" x ".join(map(str, near)),
        )
    if args_bytes != spec.args_bytes:
        raise ArgumentError(
            f"an argument of {args_bytes} bytes for {spec.name}",
            need=f"{spec.args_bytes} bytes, the size of its struct",
            hint="pack every field, and the padding behind the last one",
        )
    if pdl and not spec.pdl:
        raise ArgumentError(
            f"pdl=True for {spec.name}",
            need="a kernel that executes griddepcontrol.wait, and a spec that says so",
            hint="pdl=False",
        )
