"""Which kernel attends with which heads, and the bytes of its argument."""

from __future__ import annotations

import ctypes
from itertools import product

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

CLUSTER = 8
_TILE, _STAGES = 32, 2

#: Head dimensions and query heads a head of keys that kernels are made for; a group of another size
#: runs in the next larger one.
DIMS, GROUPS = (64, 128, 256), (1, 2, 4, 8, 16)
_TYPES = {"bfloat16": "bf16", "float16": "f16"}

# Instructions that the SASS of a kernel must show: copies that nobody waits for, and the cluster.
_SASS = ("LDGSTS.E.BYPASS.LTC128B.128", "FFMA", "UCGABAR_ARV", "MUFU.EX2")


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "table", "lengths")),
        *((name, ctypes.c_void_p) for name in ("indices", "counts", "out", "lse")),
        *((f"key_{name}", ctypes.c_int64) for name in ("page", "head", "token")),
        *((f"value_{name}", ctypes.c_int64) for name in ("page", "head", "token")),
        *((name, ctypes.c_uint32) for name in ("pages", "page", "block", "table_width")),
        *((name, ctypes.c_uint32) for name in ("most", "kv_heads", "group")),
        ("scale", ctypes.c_float),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def group_for(group: int) -> int | None:
    """The group of the kernel that takes so many query heads; None if none does.

    Example:
        >>> group_for(3), group_for(16), group_for(17)
        (4, 16, None)
    """
    return next((each for each in GROUPS if group <= each), None)


def warps_for(dim: int) -> int:
    """Warps of a block: as many as have room for their rows.

    Example:
        >>> warps_for(128), warps_for(256)
        (4, 2)
    """
    return 4 if dim <= 128 else 2


def smem_bytes(dim: int, group: int) -> int:
    """Shared memory of a block, as `struct Smem` of kernel.cuh has it."""
    warps = warps_for(dim)
    rows = 2 * warps * _STAGES * _TILE * (2 * dim + 16)
    floats = group * dim + warps * group * _TILE + 2 * warps * group + 2 * group
    return -(-(rows + 4 * floats) // 16) * 16


def spec_for(dtype: str, dim: int, group: int) -> KernelSpec:
    """The kernel for keys of `dtype`.

    Args:
        dtype: bfloat16 or float16.
        dim: One of `DIMS`.
        group: One of `GROUPS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("bfloat16", 128, 4).name
        'bfloat16, dim 128, group 4'
    """
    if dtype not in _TYPES or dim not in DIMS or group not in GROUPS:
        raise ArgumentError(
            f"an attend_decode kernel for {dtype}, dim {dim}, group {group}",
            need=f"one of {', '.join(_TYPES)}; of {DIMS}; of {GROUPS}",
            hint='spec_for("bfloat16", 128, 4)',
        )
    return KernelSpec(
        op="attend_decode",
        name=f"{dtype}, dim {dim}, group {group}",
        kernel="ops/attend_decode/kernel.cuh",
        text=_text(_TYPES[dtype], dim, group),
        entry="attend_decode_kernel",
        threads=32 * warps_for(dim),
        cluster=(CLUSTER, 1, 1),
        smem_bytes=smem_bytes(dim, group),
        args_bytes=ARGS_BYTES,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    return [spec_for(*chosen) for chosen in product(_TYPES, DIMS, GROUPS)]


def _text(kind: str, dim: int, group: int) -> str:
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr int kDim = {dim}, kGroup = {group};
  static constexpr int kCluster = {CLUSTER}, kWarps = {warps_for(dim)};
}};
static_assert(sizeof(attend_decode::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(sizeof(attend_decode::Smem<Config>) == {smem_bytes(dim, group)}, "plan.py counts it");
extern "C" __global__ void __launch_bounds__({32 * warps_for(dim)}, 1)
    attend_decode_kernel(const __grid_constant__ attend_decode::Args a) {{
  attend_decode::run<Config>(a);
}}
"""
