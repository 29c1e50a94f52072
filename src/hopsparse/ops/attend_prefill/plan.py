"""Which kernels attend, what a call is cut into, and the bytes of their arguments."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import product

from ...compiler.wgmma_chain import chained_products
from ...errors import ArgumentError
from ...plan.budget import check, warpgroup_registers
from ...plan.spec import KernelSpec
from ...plan.target import target

#: Head dimensions and pages that the kernel is made for, and what blocks are multiples of.
DIMS, PAGES, BLOCK = (64, 128), (16, 32, 64, 128), 64
KEYS, ROWS = 128, 64  # keys of a tile, queries of a warpgroup
MAP_BYTES = 128
_TYPES = {"bfloat16": "bf16", "float16": "f16"}
_CONSUMERS, _PIECES = 2, 8
_THREADS = 128 * (_CONSUMERS + 1)
_PRODUCER_REGISTERS = 56
_ORDER_THREADS, _MOST_SECTIONS = 1024, 64
# Keys and values that are read again and again while lists of one section are walked.
_L2_SHARE = 0.6

# Instructions that the SASS of a kernel must show: both products, TMA, and the powers.
_ORDER = "order"


@dataclass(frozen=True)
class Config:
    """How a block works; the fields of `Config` in kernel.cuh.

    Attributes:
        dim: One of `DIMS`.
        stages: Tiles of keys, and of values, that shared memory holds; at least 2.
        turns: Whether the warpgroups issue their products in turns.

    Raises:
        ArgumentError: No block can work like that.

    Example:
        >>> Config(128, stages=3).smem_bytes
        229712
    """

    dim: int
    stages: int
    turns: bool = True

    def __post_init__(self) -> None:
        most = target("h200").smem_per_block
        if self.dim not in DIMS or self.stages < 2 or self.smem_bytes > most:
            raise ArgumentError(
                f"{self} with {self.smem_bytes} bytes of shared memory",
                need=f"a dim of {DIMS}, two stages, and at most {most} bytes",
                hint="Config(128, stages=3)",
            )

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, as `struct Smem` of kernel.cuh has it."""
        tiles = 2 * self.dim * (_CONSUMERS * ROWS + 2 * self.stages * KEYS)
        told = -(-self.stages * 4 * (_PIECES + 1) // 16) * 16
        return tiles + told + 2 * 32 + 8 * (4 * self.stages + 8)

    @property
    def name(self) -> str:
        """Dimension and stages, as people write them."""
        return f"dim {self.dim}, {self.stages} stages" + ("" if self.turns else ", no turns")


#: What runs if nothing else is asked for, by dimension; and what else may be.
CHOSEN = {64: Config(64, 4), 128: Config(128, 3)}
CANDIDATES = (*CHOSEN.values(), Config(128, 2), Config(128, 3, turns=False))


class Args(ctypes.Structure):
    """What follows the three tensor maps in `struct Args` of kernel.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "table", "indices")),
        *((name, ctypes.c_void_p) for name in ("counts", "work", "out", "lse")),
        *((name, ctypes.c_uint32) for name in ("heads", "kv_heads", "lists", "tokens")),
        *((name, ctypes.c_uint32) for name in ("rows", "units")),
        *((name, ctypes.c_uint32) for name in ("block", "q_blocks", "most")),
        *((name, ctypes.c_uint32) for name in ("pages", "page", "table_width")),
        ("power", ctypes.c_float),
        ("padding", ctypes.c_uint32 * 3),
    )


class OrderArgs(ctypes.Structure):
    """`struct Args` of order.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "counts", "work")),
        *((name, ctypes.c_uint32) for name in ("batch", "lists", "per_section", "tokens")),
        *((name, ctypes.c_uint32) for name in ("rows", "block", "q_blocks", "most")),
        *((name, ctypes.c_uint32) for name in ("capacity", "padding")),
    )


ARGS_BYTES = 3 * MAP_BYTES + ctypes.sizeof(Args)
ORDER_ARGS_BYTES = ctypes.sizeof(OrderArgs)


@dataclass(frozen=True)
class Division:
    """What a call is cut into.

    Attributes:
        rows: Queries of an item: 128 of one head, or 64 of two.
        lists: Lists of a block of queries: heads of keys, or query heads.
        units: Items of a list and `rows` queries.
        bundles: Most pairs of a list and `rows` queries, of all sequences.
        per_section: Lists that are worked on at a time.
    """

    rows: int
    lists: int
    units: int
    bundles: int
    per_section: int


def divide(
    tokens: int,
    batch: int,
    heads: tuple[int, int, int],
    block: int,
    key_bytes: int,
    l2_bytes: int = target("h200").l2_bytes,
) -> Division:
    """Cut a call by what the host knows: sequences are cut on the device.

    Args:
        tokens: Queries of all sequences.
        batch: Sequences.
        heads: Query heads, heads of keys, lists.
        block: Tokens of a block; 0 where all tokens are attended.
        key_bytes: Keys and values of one head and sequence.
        l2_bytes: The cache that they are read again from.

    Example:
        >>> divide(32_768, 1, (32, 8, 8), 128, 32_768 * 512).units
        4
        >>> divide(32_768, 1, (32, 8, 8), 64, 32_768 * 512).units
        2
    """
    query_heads, kv_heads, lists = heads
    rows = 2 * ROWS if block % (2 * ROWS) == 0 else ROWS
    sharers = query_heads // lists
    units = sharers if rows == 2 * ROWS else -(-sharers // 2)
    fit = max(1, int(l2_bytes * _L2_SHARE) // max(1, key_bytes))
    per_section = max(1, fit * lists // kv_heads, -(-lists // _MOST_SECTIONS))
    return Division(rows, lists, units, (tokens // rows + batch) * lists, per_section)


@cache
def spec_for(dtype: str, config: Config) -> KernelSpec:
    """The kernel for keys of `dtype`.

    Args:
        dtype: bfloat16 or float16.
        config: How a block works.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("bfloat16", CHOSEN[128]).name
        'bfloat16, dim 128, 3 stages'
    """
    if dtype not in _TYPES:
        raise ArgumentError(
            f"an attend_prefill kernel for {dtype}", need=" or ".join(_TYPES), hint="bfloat16"
        )
    producer, consumer = warpgroup_registers(_CONSUMERS, least=_PRODUCER_REGISTERS)
    spec = KernelSpec(
        op="attend_prefill",
        name=f"{dtype}, {config.name}",
        kernel="ops/attend_prefill/kernel.cuh",
        text=_text(_TYPES[dtype], config),
        entry="attend_prefill_kernel",
        threads=_THREADS,
        cluster=(1, 1, 1),
        smem_bytes=config.smem_bytes,
        args_bytes=ARGS_BYTES,
    )
    check(spec, target("h200"), (producer, *[consumer] * _CONSUMERS))
    return spec


@cache
def order_spec() -> KernelSpec:
    """The kernel that sorts the items of a call."""
    return KernelSpec(
        op="attend_prefill",
        name=_ORDER,
        kernel="ops/attend_prefill/order.cuh",
        text=f"""
static_assert(sizeof(attend_prefill_order::Args) == {ORDER_ARGS_BYTES}, "plan.py packs them");
static_assert(attend_prefill_order::kThreads == {_ORDER_THREADS}, "plan.py launches them");
static_assert(attend_prefill_order::kMostSections == {_MOST_SECTIONS}, "plan.py divides by them");
extern "C" __global__ void __launch_bounds__({_ORDER_THREADS}, 1)
    attend_prefill_order_kernel(const __grid_constant__ attend_prefill_order::Args a) {{
  attend_prefill_order::run(a);
}}
""",
        entry="attend_prefill_order_kernel",
        threads=_ORDER_THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ORDER_ARGS_BYTES,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    if spec.name == _ORDER:
        return ("ATOMS", "STG.E.128")
    kind = "BF16" if spec.name.startswith("bfloat16") else "F32"
    dim = 64 if "dim 64" in spec.name else 128
    products = tuple(f"HGMMA.64x{n}x16.F32" + (".BF16" * (kind == "BF16")) for n in (KEYS, dim))
    return (*products, "UTMALDG.4D", "UTMALDG.3D", "MUFU.EX2", "USETMAXREG", "STG.E.128")


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    return [order_spec(), *(spec_for(*chosen) for chosen in product(_TYPES, CANDIDATES))]


def _text(kind: str, config: Config) -> str:
    producer, consumer = warpgroup_registers(_CONSUMERS, least=_PRODUCER_REGISTERS)
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr int kDim = {config.dim}, kStages = {config.stages};
  static constexpr bool kTurns = {str(config.turns).lower()};
  static constexpr int kProducerRegisters = {producer}, kConsumerRegisters = {consumer};
{chained_products(kind, KEYS, config.dim)}
}};
static_assert(sizeof(attend_prefill::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(attend_prefill::Smem<Config>::kBytes == {config.smem_bytes}, "plan.py counts it");
extern __shared__ __align__(1024) u8 dynamic_smem[];
extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
    attend_prefill_kernel(const __grid_constant__ attend_prefill::Args a) {{
  attend_prefill::run<Config>(a, dynamic_smem);
}}
"""
