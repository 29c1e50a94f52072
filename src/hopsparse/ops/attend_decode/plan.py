"""Which kernel attends with which heads, in how many parts, and the bytes of its argument."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Head dimensions and query heads a head of keys that kernels are made for; a group of another size
#: runs in the next larger one. An instruction takes 8 heads or 16, whether they are there or not.
DIMS, GROUPS = (64, 128, 256), (8, 16)
#: Blocks that share a list, as a cluster. They run one code.
SPLITS = (1, 2, 4, 8, 16)
#: Tokens of a tile, which lies in one page.
TILE = 16
#: Tokens of a block and a length are added in 32 bits; so are tiles of a list and a look ahead.
LARGEST_BLOCK, MOST_TOKENS = 2**31, 2**35

_TYPES = {"bfloat16": "bf16", "float16": "f16"}
DTYPES = tuple(_TYPES)
_BLOCKS_PER_SM = 2
# So many tokens (dim 128) keep a block busy for 30 us, beside which it starts and merges quickly.
# More blocks even out lists of different lengths.
_LONG_TOKENS = 1024

# Instructions that the SASS of a kernel must show: copies that nobody waits for, tensor cores on
# both products, values that are transposed as they are loaded, and the cluster.
_MMA = {"bf16": "HMMA.16816.F32.BF16", "f16": "HMMA.16816.F32"}
_SASS = (
    *("LDGSTS.E.BYPASS.LTC128B.128", "LDSM.16.M88.4", "LDSM.16.MT88.4"),
    *("UCGABAR_ARV", "STAS.128", "MUFU.EX2"),
)


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
        ("splits", ctypes.c_uint32),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def group_for(group: int) -> int | None:
    """The group of the kernel that takes so many query heads; None if none does.

    Example:
        >>> group_for(3), group_for(16), group_for(17)
        (8, 16, None)
    """
    return next((each for each in GROUPS if group <= each), None)


def splits_for(lists: int, tokens: int, sm_count: int, dim: int = 128) -> int:
    """Blocks that share a list: as many as run at once, more for long lists, none without a tile.

    Args:
        lists: Sequences times heads of keys.
        tokens: Most tokens of a list, by its shape; how many there are is known to the device.
        sm_count: Streaming multiprocessors.
        dim: Of a head.

    Example:
        >>> [splits_for(8 * batch, 2048, 132) for batch in (1, 8, 32)]
        [16, 4, 2]
        >>> splits_for(64, 131_072, 132), splits_for(8, 64, 132)
        (16, 1)
    """
    at_once = _BLOCKS_PER_SM * sm_count // max(lists, 1)
    wanted = max(at_once, tokens // _LONG_TOKENS, 1)
    useful = -(-tokens // (TILE * warps_for(dim)))
    fitting = [each for each in SPLITS if each <= wanted and each <= useful]
    return fitting[-1] if fitting else 1


def warps_for(dim: int) -> int:
    """Warps of a block.

    Example:
        >>> warps_for(128), warps_for(256)
        (4, 2)
    """
    return 4 if dim <= 128 else 2


def stages_for(dim: int, group: int) -> int:
    """Tiles that a warp has room for: two blocks fit an SM.

    Example:
        >>> [stages_for(dim, 8) for dim in DIMS]
        [6, 3, 3]
    """
    if _shares_queries(dim, group):
        return 2
    return 6 if dim == 64 else 3


def smem_bytes(dim: int, group: int) -> int:
    """Shared memory of a block, as `struct Smem` of kernel.cuh has it."""
    warps = warps_for(dim)
    rows = warps * stages_for(dim, group) * 2 * TILE * 2 * dim
    queries = 16 * 32 * (dim // 16 if _shares_queries(dim, group) else 1)
    received = 4 * (group * dim + 2 * group * SPLITS[-1])
    return -(-(rows + queries + received + 4 * 2 * warps * group + 8) // 128) * 128


def _shares_queries(dim: int, group: int) -> bool:
    # 64 registers of queries beside 128 of outputs are too many.
    return dim * group > 2048


def spec_for(dtype: str, dim: int, group: int, splits: int = 1) -> KernelSpec:
    """The kernel for keys of `dtype`.

    Args:
        dtype: bfloat16 or float16.
        dim: One of `DIMS`.
        group: One of `GROUPS`.
        splits: One of `SPLITS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("bfloat16", 128, 8, 4).name
        'bfloat16, dim 128, group 8, 4 blocks a list'
    """
    if dtype not in _TYPES or dim not in DIMS or group not in GROUPS or splits not in SPLITS:
        raise ArgumentError(
            f"an attend_decode kernel for {dtype}, dim {dim}, group {group}, splits {splits}",
            need=f"one of {', '.join(_TYPES)}; of {DIMS}; of {GROUPS}; of {SPLITS}",
            hint='spec_for("bfloat16", 128, 8)',
        )
    return KernelSpec(
        op="attend_decode",
        name=f"{dtype}, dim {dim}, group {group}, {splits} block{'s' * (splits > 1)} a list",
        kernel="ops/attend_decode/kernel.cuh",
        text=_text(_TYPES[dtype], dim, group),
        entry="attend_decode_kernel",
        threads=32 * warps_for(dim),
        cluster=(splits, 1, 1),
        smem_bytes=smem_bytes(dim, group),
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return (*_SASS, _MMA[_TYPES[spec.name.split(",")[0]]])


def splits_of(spec: KernelSpec) -> list[KernelSpec]:
    """The same kernel for every number of blocks that share a list."""
    name = spec.name.rpartition(", ")[0]
    return [
        replace(
            spec,
            name=f"{name}, {each} block{'s' * (each > 1)} a list",
            cluster=(each, 1, 1),
        )
        for each in SPLITS
    ]


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    return [spec_for(*chosen) for chosen in product(_TYPES, DIMS, GROUPS, SPLITS)]


def _text(kind: str, dim: int, group: int) -> str:
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr int kDim = {dim}, kHeads = {group};
  static constexpr int kWarps = {warps_for(dim)}, kStages = {stages_for(dim, group)};
  static constexpr bool kSharedQueries = {str(_shares_queries(dim, group)).lower()};
}};
static_assert(sizeof(attend_decode::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(sizeof(attend_decode::Smem<Config>) == {smem_bytes(dim, group)}, "plan.py counts it");
extern "C" __global__ void __launch_bounds__({32 * warps_for(dim)}, {_BLOCKS_PER_SM})
    attend_decode_kernel(const __grid_constant__ attend_decode::Args a) {{
  attend_decode::run<Config>(a);
}}
"""
