"""Which kernels score blocks and take in keys, and the bytes of their arguments."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Head dimensions that kernels are made for, and the most query heads of a head of keys.
DIMS, MOST_GROUP = (64, 128, 256), 16
#: Query heads that a row of a block meets at once; more of them come four by four.
HEADS = (1, 2, 4)
#: Query heads of an instruction of the tensor cores that are not zeros: half of its rows, or all.
TENSOR_HEADS = (8, 16)
#: Blocks of threads of a cluster: for many heads of keys, for few, and for few that are long. Those
#: of 4 are there to be measured.
CLUSTERS = (2, 4, 8, 16)
KINDS = ("bound", "mean", "mass")
TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
#: Tokens of a block, at most: with more of them the slack of float32 is as large as the scores.
MOST_TOKENS = 1 << 20

WARPS = 8
#: Blocks of a sequence that one block of threads has the ranks of, and chooses from.
MOST_RANKS = 8192
_SCORES = 8192  # of a block of threads that are kept
_BLOCKS_PER_SM = 2
# Pieces of 16 KB that are asked for into the L2 cache before they are loaded, where a launch asks
# (starts.py): 64 KB, where registers have 16 or 32 KB on their way. How far was not fitted.
_AHEAD = 4
# Beside clusters of 8 those of 16 lost 0.76 us with room for 512 blocks of keys and won 0.28 with
# room for 2048: a straight line between them crosses zero at 1630.
_FEW_ROWS = 1630

# Instructions that the SASS of a kernel must show: loads of 16 bytes, the wait for the kernel
# ahead, and the cluster.
_SASS = ("LDG.E.LTC128B.128", "FFMA", "ACQBULK", "UCGABAR_ARV", "STAS.128", "CCTL.E.PF2")
_SASS_TENSOR = ("HMMA.16816.F32", "HMNMX2")
_SASS_CHOOSE = ("ATOMS.POPC.INC.32", "VOTE")
_SASS_APPEND = ("LDG.E.LTC128B", "FADD", "ACQBULK")


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "low", "high", "total", "lengths", "scores")),
        ("keys", ctypes.c_void_p),
        *((f"low_{name}", ctypes.c_int64) for name in ("batch", "head", "block")),
        *((f"high_{name}", ctypes.c_int64) for name in ("batch", "head", "block")),
        *((f"total_{name}", ctypes.c_int64) for name in ("batch", "head", "block")),
        *((f"key_{name}", ctypes.c_int64) for name in ("batch", "head")),
        *((name, ctypes.c_uint32) for name in ("blocks", "block", "kv_heads", "group")),
        *((name, ctypes.c_uint32) for name in ("q_type", "per_head")),
        *((name, ctypes.c_uint32) for name in ("ask_first", "ask_later", "key_type")),
        ("scale", ctypes.c_float),
        ("slack", ctypes.c_float),
    )


class ChooseArgs(ctypes.Structure):
    """The argument of the kernel that chooses too; `struct ChooseArgs` of choose.cuh."""

    _fields_ = (
        ("of", Args),
        *((name, ctypes.c_void_p) for name in ("k", "indices", "counts")),
        ("width", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("k_of_all", "sink", "recent")),
    )


class AppendArgs(ctypes.Structure):
    """The argument of the kernel that takes in keys; `struct Args` of append.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high", "total", "keys", "starts", "counts")),
        *((f"low_{name}", ctypes.c_int64) for name in ("batch", "head", "block")),
        *((f"high_{name}", ctypes.c_int64) for name in ("batch", "head", "block")),
        *((f"total_{name}", ctypes.c_int64) for name in ("batch", "head", "block")),
        *((f"key_{name}", ctypes.c_int64) for name in ("batch", "token", "head")),
        *((name, ctypes.c_uint32) for name in ("blocks", "block", "kv_heads", "new_tokens")),
    )


ARGS_BYTES, APPEND_BYTES = ctypes.sizeof(Args), ctypes.sizeof(AppendArgs)
CHOOSE_BYTES = ctypes.sizeof(ChooseArgs)


@dataclass(frozen=True)
class Shape:
    """What a kernel is made for.

    Attributes:
        kind: "bound", "mean" or "mass".
        dtype: Of low and high; float32 for "mean", which reads none of them.
        dim: Of heads.
        heads: One of `HEADS`, or of `TENSOR_HEADS`.
        tensor: Whether the tensor cores multiply: bounds, queries in the 16 bits of keys.
    """

    kind: str
    dtype: str
    dim: int
    heads: int
    tensor: bool = False

    @property
    def held(self) -> int:
        """Loads of low and high that a lane has under way: rows, or for the tensor cores parts.

        Example:
            >>> Shape("mean", "float32", 128, 4).held, Shape("bound", "float16", 64, 8, True).held
            (2, 4)
        """
        return (4 if self.dim == 64 else 8) if self.tensor else self.rows

    @property
    def pieces_held(self) -> int:
        """Pieces of 16 KB that a block of threads has on their way at a time.

        Example:
            >>> Shape("bound", "bfloat16", 128, 8, True).pieces_held
            4
        """
        return self.held // 2 if self.tensor else 1

    @property
    def rows(self) -> int:
        """Rows of a piece for each team of lanes: as many as registers have room for.

        Example:
            >>> Shape("bound", "bfloat16", 128, 4).rows, Shape("mass", "bfloat16", 128, 4).rows
            (2, 1)
        """
        wide = self.dtype == "float32" and self.kind != "mean"
        return 1 if wide or self.kind == "mass" else 2

    @property
    def piece_rows(self) -> int:
        """Rows that a block of threads has at once: 16 KB, or 24 of float32 by mass.

        Example:
            >>> Shape("bound", "bfloat16", 128, 4).piece_rows
            32
        """
        return WARPS * 256 // self.dim * self.rows

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, as `struct Smem` of rows.cuh has it."""
        most = MOST_GROUP if self.heads >= HEADS[-1] else self.heads
        parts = 2 * MOST_GROUP * CLUSTERS[-1]
        # Of the newest key: itself, least, largest and sum.
        newest = (3 * (4 if self.dtype == "float32" else 2) + 4) * self.dim + 16
        return 4 * (most * self.dim + 3 * MOST_GROUP + parts + 4 + _SCORES) + newest

    @property
    def choose_bytes(self) -> int:
        """The same of `struct ChooseSmem` of choose.cuh: counts of digits, of warps, and ranks."""
        return self.smem_bytes + 4 * (4 * 256 + 2 * 32 + 4 + MOST_RANKS)


@lru_cache(maxsize=256)
def shape_for(kind: str, dtype: str, dim: int, group: int, tensor: bool = False) -> Shape | None:
    """Who scores; None where there is no kernel.

    Args:
        kind: "bound", "mean" or "mass".
        dtype: Of keys.
        dim: Of heads.
        group: Query heads of a head of keys.
        tensor: Whether the tensor cores may: queries have the dtype of keys.

    Example:
        >>> shape_for("bound", "bfloat16", 128, 7, tensor=True)
        Shape(kind='bound', dtype='bfloat16', dim=128, heads=8, tensor=True)
        >>> shape_for("mean", "bfloat16", 128, 7)
        Shape(kind='mean', dtype='float32', dim=128, heads=4, tensor=False)
        >>> shape_for("bound", "bfloat16", 96, 4) is None
        True
    """
    if kind not in KINDS or dtype not in TYPES or dim not in DIMS or not 0 < group <= MOST_GROUP:
        return None
    if tensor and kind == "bound" and dtype != "float32":
        heads = next(each for each in TENSOR_HEADS if group <= each)
        return Shape(kind, dtype, dim, heads, True)
    heads = next((each for each in HEADS if group <= each), HEADS[-1])
    return Shape(kind, "float32" if kind == "mean" else dtype, dim, heads)


def spec_for(shape: Shape, cluster: int) -> KernelSpec:
    """The kernel of a shape.

    Args:
        shape: As `shape_for` gives it.
        cluster: One of `CLUSTERS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for(Shape("bound", "bfloat16", 128, 4), 8).name
        'bound, bfloat16, dim 128, heads 4, cluster 8'
    """
    _check_shape(shape, cluster)
    return KernelSpec(
        op="score_blocks",
        name=f"{shape.kind}, {shape.dtype}, dim {shape.dim}, heads {shape.heads}, "
        f"{'tensor cores, ' if shape.tensor else ''}cluster {cluster}",
        kernel="ops/score_blocks/kernel.cuh",
        text=_text(shape),
        entry="score_blocks_kernel",
        threads=32 * WARPS,
        cluster=(cluster, 1, 1),
        smem_bytes=shape.smem_bytes,
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def choose_spec_for(shape: Shape, cluster: int) -> KernelSpec:
    """The kernel that scores and chooses; as `spec_for` else.

    Example:
        >>> choose_spec_for(Shape("bound", "bfloat16", 128, 4), 8).name
        'chosen, bound, bfloat16, dim 128, heads 4, cluster 8'
    """
    spec = spec_for(shape, cluster)
    return replace(
        spec,
        name=f"chosen, {spec.name}",
        kernel="ops/score_blocks/choose.cuh",
        text=_choose_text(shape),
        entry="select_blocks_kernel",
        smem_bytes=shape.choose_bytes,
        args_bytes=CHOOSE_BYTES,
    )


def _check_shape(shape: Shape, cluster: int) -> None:
    known = shape == shape_for(shape.kind, shape.dtype, shape.dim, shape.heads, shape.tensor)
    heads = TENSOR_HEADS if shape.tensor else HEADS
    if not known or shape.heads not in heads or cluster not in CLUSTERS:
        raise ArgumentError(
            f"a score_blocks kernel for {shape}, cluster {cluster}",
            need=f"what shape_for gives, and one of {CLUSTERS}",
            hint='spec_for(shape_for("bound", "bfloat16", 128, 4), 8)',
        )


def append_spec_for(dtype: str, dim: int) -> KernelSpec:
    """The kernel that takes in keys of `dtype`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> append_spec_for("bfloat16", 128).name
        'append, bfloat16, dim 128'
    """
    if dtype not in TYPES or dim not in DIMS:
        raise ArgumentError(
            f"an append_keys kernel for {dtype}, dim {dim}",
            need=f"one of {', '.join(TYPES)}; of {DIMS}",
            hint='append_spec_for("bfloat16", 128)',
        )
    return KernelSpec(
        op="score_blocks",
        name=f"append, {dtype}, dim {dim}",
        kernel="ops/score_blocks/append.cuh",
        text=_append_text(TYPES[dtype], dim),
        entry="append_keys_kernel",
        threads=32 * APPEND_WARPS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=APPEND_BYTES,
        pdl=True,
    )


APPEND_WARPS = 4


def clusters_for(pairs: int, rows: int, sm_count: int) -> tuple[int, ...]:
    """Clusters to try in turn: a large one must be able to run for all pairs at once.

    Clusters of 8 as long as all of them run at once, else of 2, since a second wave has its start
    to pay for; of 16 where they run at once too and there are many rows. Straight lines through
    times on an H200 (benchmarks/results/h200/attention_scores.jsonl, 8 and 64 pairs) put the step
    from 8 to 2 at 26 pairs of 512 rows and at 50 of 2048; all at once means up to 33.

    Args:
        pairs: Heads of keys of all sequences.
        rows: Blocks of keys that there is room for, of each.
        sm_count: Of the GPU.

    Example:
        >>> clusters_for(8, 2048, 132), clusters_for(8, 512, 132), clusters_for(64, 2048, 132)
        ((16, 8), (8,), (2,))
    """
    small, _, usual, large = CLUSTERS
    at_once = _BLOCKS_PER_SM * sm_count
    if pairs * usual > at_once:
        return (small,)
    return (large, usual) if rows > _FEW_ROWS and pairs * large <= at_once else (usual,)


def append_grid(blocks: int, block: int, kv_heads: int, new: int) -> int:
    """Blocks of threads a sequence: a warp for each block of keys that `new` tokens may touch.

    Example:
        >>> append_grid(100, 64, 8, 1), append_grid(100, 64, 8, 2), append_grid(2, 64, 8, 128)
        (2, 4, 4)
    """
    touched = min((new + block - 2) // block + 1, blocks)
    return -(-touched * kv_heads // APPEND_WARPS)


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    if spec.entry == "append_keys_kernel":
        return _SASS_APPEND
    products = _SASS_TENSOR if "tensor cores" in spec.name else ()
    choice = _SASS_CHOOSE if spec.entry == "select_blocks_kernel" else ()
    return (*_SASS, *products, *choice)


def every_shape() -> list[Shape]:
    """All shapes that a call may run."""
    found = [shape_for(*chosen) for chosen in product(KINDS, TYPES, DIMS, HEADS)]
    found += [shape_for("bound", *each, True) for each in product(TYPES, DIMS, TENSOR_HEADS)]
    return list(dict.fromkeys(shape for shape in found if shape is not None))


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    kernels = list(product(every_shape(), CLUSTERS))
    scores = [spec_for(*each) for each in kernels] + [choose_spec_for(*each) for each in kernels]
    return scores + [append_spec_for(*chosen) for chosen in product(TYPES, DIMS)]


def _config(shape: Shape) -> str:
    return f"""
struct Config {{
  static constexpr score_blocks::Kind kKind = score_blocks::Kind::{shape.kind};
  static constexpr Type kType = Type::{TYPES[shape.dtype]};
  static constexpr int kDim = {shape.dim}, kHeads = {shape.heads}, kRows = {shape.held};
  static constexpr bool kTensor = {str(shape.tensor).lower()};
  static constexpr int kWarps = {WARPS}, kScores = {_SCORES}, kRanks = {MOST_RANKS};
  static constexpr int kAhead = {_AHEAD};
}};
static_assert(sizeof(score_blocks::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(sizeof(score_blocks::Smem<Config>) == {shape.smem_bytes}, "plan.py counts its bytes");
"""


def _text(shape: Shape) -> str:
    return f"""{_config(shape)}
extern "C" __global__ void __launch_bounds__({32 * WARPS}, {_BLOCKS_PER_SM})
    score_blocks_kernel(const __grid_constant__ score_blocks::Args a) {{
  score_blocks::run<Config>(a);
}}
"""


def _choose_text(shape: Shape) -> str:
    return f"""{_config(shape)}
static_assert(sizeof(score_blocks::ChooseArgs) == {CHOOSE_BYTES}, "plan.py packs {CHOOSE_BYTES}");
static_assert(sizeof(score_blocks::ChooseSmem<Config>) == {shape.choose_bytes}, "plan.py");
extern "C" __global__ void __launch_bounds__({32 * WARPS}, {_BLOCKS_PER_SM})
    select_blocks_kernel(const __grid_constant__ score_blocks::ChooseArgs a) {{
  score_blocks::run_chosen<Config>(a);
}}
"""


def _append_text(kind: str, dim: int) -> str:
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr int kDim = {dim}, kWarps = {APPEND_WARPS};
}};
static_assert(sizeof(append_keys::Args) == {APPEND_BYTES}, "plan.py packs {APPEND_BYTES} bytes");
extern "C" __global__ void __launch_bounds__({32 * APPEND_WARPS})
    append_keys_kernel(const __grid_constant__ append_keys::Args a) {{
  append_keys::run<Config>(a);
}}
"""
