"""fragments.cuh as Python sees it: how a block divides its work, its text, its arguments."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from struct import Struct
from typing import NoReturn

from ...errors import ArgumentError
from ...plan import KernelSpec, target
from ...plan.budget import check, warpgroup_registers
from .fragments import SLAB, SLOTS, STRIPS, TILE
from .kernel import TYPES, variant_name

MAP_BYTES = 128
_SMEM_BYTES = target("h200").smem_per_block
# As many as leave 60 KiB of L1 to what is on its way there.
_MOST_STAGES = 10
_CONSUMERS = SLOTS // 4  # warpgroups
# Four warps more, of which one works: 17 warps would have 96 registers a thread, since one quarter
# of the SM then has five of them; whole warpgroups hand theirs over.
_THREADS = 128 * (_CONSUMERS + 1)
#: Pieces that a warp has in registers, by their height: as many as 112 of them hold. Those behind
#: them it has asked to come to L1.
HELD, BEHIND = {1: 3, 2: 2}, {1: 0, 2: 2}
_MOST_SUMS = 64  # height x tokens / 2 of a thread


@dataclass(frozen=True)
class FragmentConfig:
    """How a block divides its work; the fields of `Config` in fragments.cuh.

    Attributes:
        height: Fragments of 16 rows of a slot: 2 where blocks have multiples of 32 rows, else 1.
        tokens: Tokens of an item, a multiple of 16, 128 at most for all fragments.
        cluster: Blocks that load x for each other: 1, or 2, a pair of strips.

    Raises:
        ArgumentError: No block can work like that.

    Example:
        >>> FragmentConfig(1, tokens=128, cluster=2).name
        'mma_256x128_s6_c2'
        >>> FragmentConfig(2, tokens=128, cluster=1)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: FragmentConfig(height=2, tokens=128, cluster=1). Required: \
tokens in steps of 16, up to 64: a thread holds 64 sums. Try: tokens=64.
    """

    height: int
    tokens: int
    cluster: int

    def __post_init__(self) -> None:
        if any(type(n) is not int or n < 1 for n in astuple(self)):
            self._refuse("positive whole numbers", "FragmentConfig(1, tokens=128, cluster=2)")
        if self.height > 2:
            self._refuse("slots of 16 or 32 rows", "height=2")
        if self.cluster > STRIPS:
            self._refuse("clusters of 1 or 2 blocks", "cluster=2")
        most = 2 * _MOST_SUMS // self.height
        if self.tokens % TILE or self.tokens > most:
            need = f"tokens in steps of 16, up to {most}: a thread holds {_MOST_SUMS} sums"
            self._refuse(need, f"tokens={min(most, max(TILE, self.tokens // TILE * TILE))}")

    def _refuse(self, need: str, hint: str) -> NoReturn:
        raise ArgumentError(f"{self}", need=need, hint=hint)

    @property
    def rows(self) -> int:
        """Out-features of a strip."""
        return SLOTS * TILE * self.height

    @property
    def stages(self) -> int:
        """Slabs that shared memory holds, 10 at most."""
        return min(_MOST_STAGES, (_SMEM_BYTES - self._store_bytes) // (self.stage_bytes + 16))

    @property
    def name(self) -> str:
        """Tile, stages and cluster, as people write them."""
        return f"mma_{self.rows}x{self.tokens}_s{self.stages}_c{self.cluster}"

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a slab of tokens."""
        return self.tokens * SLAB * 2

    @property
    def _store_bytes(self) -> int:
        """Of two buffers a warp, each of 16 tokens of its rows."""
        return SLOTS * 2 * TILE * TILE * self.height * 2

    def smem_bytes(self, *, direct: bool = False) -> int:
        """Dynamic shared memory of a block."""
        store = 0 if direct else self._store_bytes
        return self.stages * (self.stage_bytes + 16) + store


#: What follows the tensor map in the argument struct: values, words, slots, slabs, pairs, y, bias,
#: residual; alpha; tokens, out, pairs, tiles along tokens, raster group, rows of x. It is as
#: aligned as the map.
SCALARS = Struct("<8Q f 6i 36x")
ARGS_BYTES = MAP_BYTES + SCALARS.size


@cache
def spec_for(
    config: FragmentConfig,
    dtype: str,
    *,
    out_dtype: str | None = None,
    activation: str = "none",
    residual: bool = False,
    direct: bool = False,
) -> KernelSpec:
    """The kernel of a config.

    Args:
        config: Tile and cluster.
        dtype: Of x, w and bias: `bfloat16` or `float16`.
        out_dtype: Of y and residual; None is that of x. float32 is stored directly.
        activation: One of `kernel.ACTIVATIONS`.
        residual: Whether something is added to y at the end.
        direct: Whether y is stored a number at a time.

    Raises:
        UnsupportedError: It does not fit an SM.
    """
    out = out_dtype or dtype
    direct = direct or out == "float32"
    spec = KernelSpec(
        op="spmm_bsr",
        name=variant_name(config.name, dtype, out, activation, residual, direct),
        kernel="ops/spmm_bsr/fragments.cuh",
        text=_text(config, dtype, out, activation, residual, direct),
        entry="spmm_bsr_fragments",
        threads=_THREADS,
        cluster=(config.cluster, 1, 1),
        smem_bytes=config.smem_bytes(direct=direct),
        args_bytes=ARGS_BYTES,
    )
    producer, consumer = warpgroup_registers(_CONSUMERS)
    check(spec, target("h200"), (producer, *[consumer] * _CONSUMERS))
    return spec


def _text(
    config: FragmentConfig, dtype: str, out: str, activation: str, residual: bool, direct: bool
) -> str:
    """What follows fragments.cuh: its Config, and the entry."""
    producer, consumer = warpgroup_registers(_CONSUMERS)
    return f"""
struct Config {{
  static constexpr int kHeight = {config.height}, kTokens = {config.tokens};
  static constexpr int kHeld = {HELD[config.height]}, kBehind = {BEHIND[config.height]};
  static constexpr int kCluster = {config.cluster}, kStages = {config.stages};
  static constexpr int kProducerRegisters = {producer}, kConsumerRegisters = {consumer};
  static constexpr bool kDirect = {str(direct).lower()}, kResidual = {str(residual).lower()};
  static constexpr Activation kActivation = Activation::{activation};
  static constexpr Type kNumbers = Type::{TYPES[dtype]}, kOut = Type::{TYPES[out]};
}};

static_assert(sizeof(spmm_bsr::Args) == {ARGS_BYTES}, "Args of fragments.cuh and Python differ");
static_assert(spmm_bsr::Smem<Config>::kBytes == {config.smem_bytes(direct=direct)},
              "shared memory of fragments.cuh and of Python differ");
extern __shared__ __align__(1024) u8 dynamic_smem[];

extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
    spmm_bsr_fragments(const __grid_constant__ spmm_bsr::Args args) {{
  spmm_bsr::run<Config>(args, dynamic_smem);
}}
"""
