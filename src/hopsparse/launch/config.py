"""CUlaunchConfig of the driver as ctypes, filled from a spec."""

from __future__ import annotations

import ctypes

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
