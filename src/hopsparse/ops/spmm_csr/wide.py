"""The kernels that multiply 33 to 512 tokens by a packed weight: wide.cuh and arrange.cuh."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from struct import Struct
from typing import NoReturn

from ...compiler.wgmma_dense import dense_product
from ...errors import ArgumentError
from ...plan import KernelSpec, target
from ...plan.budget import check, warpgroup_registers
from .tiles import ROOMS, TYPES, UNIT, UNIT_WORDS

#: Panels of 64 rows of a block, and its rows.
PANELS, BLOCK_ROWS = 2, 2 * UNIT
ARRANGE_THREADS = 256
#: Columns of a piece that a thread of arrange.cuh lays.
PIECE_COLUMNS = 16
#: What follows the tensor map: words, prefixes, values, starts, bias, y; rows, tokens, units,
#: steps, tiles along tokens, rows of x in a box. It is as aligned as the map.
SCALARS = Struct("<6Q 6I 56x")
ARRANGE_ARGS = Struct("<2Q Q 4I")
MAP_BYTES = 128
ARGS_BYTES = MAP_BYTES + SCALARS.size
_ROW_PAD = BLOCK_ROWS + 4
_SMEM_BYTES = target("h200").smem_per_block
_MOST_STAGES = 8
_PRODUCER_REGISTERS = 40


@dataclass(frozen=True)
class Config:
    """How a block divides its work; the fields of `Config` in wide.cuh.

    Attributes:
        tokens: Tokens of an item, a multiple of 16 up to 256.
        ways: Warpgroups that take the units of a panel in turn: 2 up to 64 tokens, else 1.
        parts: Blocks of a cluster that have parts of k: 1, 2 or 4.
        share: Blocks of a cluster that share tokens, each with other rows: 1 or 2.

    Raises:
        ArgumentError: No block can work like that.

    Example:
        >>> Config(tokens=256, ways=1, parts=1, share=2).name
        '128x256_w1_p1_c2'
    """

    tokens: int
    ways: int
    parts: int
    share: int = 1

    def __post_init__(self) -> None:
        if any(type(n) is not int or n < 1 for n in astuple(self)):
            self._refuse("positive whole numbers", "one of CANDIDATES")
        if self.tokens % 16 or self.tokens > 256:
            self._refuse("tokens in steps of 16, up to 256", "tokens=256")
        if self.ways > 2 or (self.ways == 2 and self.tokens > 64):
            self._refuse(
                "one way, or two up to 64 tokens: five warpgroups share registers", "ways=1"
            )
        if self.parts not in (1, 2, 4):
            self._refuse("1, 2 or 4 parts", "parts=1")
        if self.share > 2:
            self._refuse("1 or 2 blocks that share tokens", "share=2")

    def _refuse(self, need: str, hint: str) -> NoReturn:
        raise ArgumentError(f"{self}", need=need, hint=hint)

    @property
    def name(self) -> str:
        """Rows and tokens of a block, ways, parts, and blocks that share tokens."""
        return f"{BLOCK_ROWS}x{self.tokens}_w{self.ways}_p{self.parts}_c{self.share}"

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return PANELS * self.ways

    def stage_bytes(self, room: int) -> int:
        """Shared memory of a step, of units with up to so many values."""
        unit = UNIT_WORDS * 6 + room * 2
        return self.ways * (self.tokens * UNIT * 2 + PANELS * unit)

    def stages(self, room: int) -> int:
        """Stages of a block: as many as shared memory holds, 8 at most.

        Example:
            >>> [Config(256, 1, 1).stages(room) for room in ROOMS]
            [6, 5, 4]
        """
        return min(_MOST_STAGES, _SMEM_BYTES // (self.stage_bytes(room) + 16))

    def smem_bytes(self, room: int) -> int:
        """Dynamic shared memory of a block; sums go where stages were."""
        stages = self.stages(room)
        sums = self.ways * self.tokens * _ROW_PAD * 4
        return max(stages * self.stage_bytes(room), sums) + stages * 16

    def steps(self, units: int) -> int:
        """Steps of a part of k: an even number, for two sets of registers.

        Example:
            >>> Config(256, 1, 1).steps(64), Config(64, 2, 2).steps(63), Config(256, 1, 4).steps(1)
            (64, 16, 2)
        """
        each = -(-units // (self.ways * self.parts))
        return each + each % 2

    def blocks(self, rows: int, tokens: int) -> int:
        """Blocks of a launch, whole clusters."""
        shared = -(-rows // (BLOCK_ROWS * self.share))
        return shared * self.token_tiles(tokens) * self.parts * self.share

    def token_tiles(self, tokens: int) -> int:
        """Items side by side."""
        return -(-tokens // self.tokens)

    def rows_of_x(self, tokens: int) -> int:
        """Tokens that a block loads for a step: its slice of a tile, in atoms of 8 rows.

        Example:
            >>> Config(256, 1, 1).rows_of_x(300), Config(128, 1, 1, 2).rows_of_x(65)
            (256, 40)
        """
        each = -(-min(self.tokens, tokens) // self.share)
        return -(-each // 8) * 8


#: What a call may run.
CANDIDATES = tuple(
    Config(tokens, ways, parts, share)
    for tokens, ways in ((64, 2), (128, 1), (192, 1), (256, 1))
    for parts, share in ((1, 2), (1, 1), (2, 1), (4, 1))
)


@cache
def wide_spec(config: Config, dtype: str, room: int) -> KernelSpec:
    """The kernel.

    Args:
        config: Tokens of a block, ways and parts.
        dtype: bfloat16 or float16.
        room: One of `ROOMS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> wide_spec(Config(256, 1, 1), "bfloat16", 1024).name
        'wide bfloat16, 128x256_w1_p1_c1, units of up to 1024 values'
    """
    if dtype not in TYPES or room not in ROOMS:
        raise ArgumentError(
            f"a spmm_csr kernel of many tokens for {dtype}, {room}",
            need=f"one of {', '.join(TYPES)}; of {ROOMS}",
            hint='wide_spec(CANDIDATES[-1], "bfloat16", 1024)',
        )
    producer, consumer = warpgroup_registers(config.consumers, least=_PRODUCER_REGISTERS)
    threads, smem = 128 * (config.consumers + 1), config.smem_bytes(room)
    spec = KernelSpec(
        op="spmm_csr",
        name=f"wide {dtype}, {config.name}, units of up to {room} values",
        kernel="ops/spmm_csr/wide.cuh",
        text=f"""
struct Config {{
  static constexpr Type kType = Type::{TYPES[dtype]};
  static constexpr u32 kTokens = {config.tokens}, kWays = {config.ways}, kParts = {config.parts};
  static constexpr u32 kShare = {config.share};
  static constexpr u32 kUnitValues = {room};
  static constexpr int kStages = {config.stages(room)};
  static constexpr int kProducerRegisters = {producer}, kConsumerRegisters = {consumer};
{dense_product(TYPES[dtype], config.tokens, registers=True)}
}};
static_assert(sizeof(spmm_csr_wide::Args) == {ARGS_BYTES}, "wide.py packs {ARGS_BYTES} bytes");
static_assert(spmm_csr_wide::Smem<Config>::kBytes == {smem}, "wide.py asks for {smem}");
extern __shared__ __align__(1024) u8 dynamic_smem[];
extern "C" __global__ void __launch_bounds__({threads}, 1)
    spmm_csr_wide_kernel(const __grid_constant__ spmm_csr_wide::Args args) {{
  spmm_csr_wide::run<Config>(args, dynamic_smem);
}}
""",
        entry="spmm_csr_wide_kernel",
        threads=threads,
        cluster=(config.parts * config.share, 1, 1),
        smem_bytes=smem,
        args_bytes=ARGS_BYTES,
        pdl=True,
    )
    check(spec, target("h200"), (producer, *[consumer] * config.consumers))
    return spec


@cache
def arrange_spec() -> KernelSpec:
    """The kernel that lays tokens for the others; there is one for both dtypes.

    Example:
        >>> arrange_spec().name
        'arrange tokens'
    """
    size = ARRANGE_ARGS.size
    return KernelSpec(
        op="spmm_csr",
        name="arrange tokens",
        kernel="ops/spmm_csr/arrange.cuh",
        text=f"""
static_assert(sizeof(spmm_csr_arrange::Args) == {size}, "wide.py packs {size} bytes");
static_assert(spmm_csr_arrange::kThreads == {ARRANGE_THREADS}, "as wide.py counts blocks");
extern "C" __global__ void __launch_bounds__({ARRANGE_THREADS})
    spmm_csr_arrange_kernel(const __grid_constant__ spmm_csr_arrange::Args args) {{
  spmm_csr_arrange::run(args);
}}
""",
        entry="spmm_csr_arrange_kernel",
        threads=ARRANGE_THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=size,
    )


def wide_specs() -> list[KernelSpec]:
    """All of them."""
    return [
        arrange_spec(),
        *(wide_spec(each, dtype, room) for each in CANDIDATES for dtype in TYPES for room in ROOMS),
    ]
