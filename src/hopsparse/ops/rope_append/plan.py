"""Which kernel rotates which heads, and the bytes of its argument."""

from __future__ import annotations

import ctypes
from itertools import product

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Head dimensions, of which a lane has 2 or 4 entries of each half.
DIMS = (64, 128, 256)
THREADS = 128
#: Blocks of a grid along x.
MOST_TOKENS = 2**31 - 1

_TYPES = {"bfloat16": "bf16", "float16": "f16"}
DTYPES = tuple(_TYPES)
# Instructions that the SASS of every kernel must show.
_SASS = ("LDG.E", "STG.E")


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "ends")),
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "count")),
        *((name, ctypes.c_int64) for name in ("row", "cos_batch", "cos_token")),
        *((name, ctypes.c_int64) for name in ("sin_batch", "sin_token")),
        *((f"key_{name}", ctypes.c_int64) for name in ("batch", "head", "token")),
        *((f"value_{name}", ctypes.c_int64) for name in ("batch", "head", "token")),
        *((name, ctypes.c_uint32) for name in ("tokens", "heads", "kv_heads", "room")),
        ("eps", ctypes.c_float),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def heads_at_once(dim: int) -> int:
    """Heads that a block of threads has at a time.

    Example:
        >>> [heads_at_once(dim) for dim in DIMS]
        [8, 4, 4]
    """
    return THREADS // min(dim // 4, 32)


def shares_for(rows: int, heads: int, dim: int, sm_count: int) -> int:
    """Blocks that share the heads of a token: as many as are of use, while SMs are idle.

    Args:
        rows: Tokens of all sequences.
        heads: Of q, k and v.
        dim: Of a head.
        sm_count: Streaming multiprocessors.

    Example:
        >>> [shares_for(rows, 48, 128, 132) for rows in (1, 64, 2048)]
        [12, 12, 1]
    """
    useful = -(-heads // heads_at_once(dim))
    return max(1, min(useful, 8 * sm_count // max(rows, 1)))


def spec_for(dtype: str, dim: int, *, norm: bool) -> KernelSpec:
    """The kernel for heads of `dim`.

    Args:
        dtype: bfloat16 or float16.
        dim: One of `DIMS`.
        norm: Whether q and k are normalised first.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("bfloat16", 128, norm=True).name
        'bfloat16, dim 128, norms'
    """
    if dtype not in _TYPES or dim not in DIMS:
        raise ArgumentError(
            f"a rope_append kernel for {dtype}, dim {dim}",
            need=f"one of {', '.join(_TYPES)}; of {', '.join(map(str, DIMS))}",
            hint='spec_for("bfloat16", 128, norm=False)',
        )
    return KernelSpec(
        op="rope_append",
        name=f"{dtype}, dim {dim}{', norms' if norm else ''}",
        kernel="ops/rope_append/kernel.cuh",
        text=_text(_TYPES[dtype], dim, norm),
        entry="rope_append_kernel",
        threads=THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return (*_SASS, "MUFU.RSQ") if "norms" in spec.name else _SASS


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    return [
        spec_for(dtype, dim, norm=norm) for dtype, dim, norm in product(_TYPES, DIMS, (False, True))
    ]


def _text(kind: str, dim: int, norm: bool) -> str:
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr u32 kDim = {dim}, kThreads = {THREADS};
  static constexpr bool kNorm = {str(norm).lower()};
}};
static_assert(sizeof(rope_append::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
extern "C" __global__ void __launch_bounds__({THREADS})
    rope_append_kernel(const __grid_constant__ rope_append::Args a) {{
  rope_append::run<Config>(a, gridDim.y);
}}
"""
