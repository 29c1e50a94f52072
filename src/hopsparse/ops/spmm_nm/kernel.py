"""kernel.cuh as Python sees it: how a block divides its work, its text, its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import Struct

from ...compiler.wgmma import sparse_product, words_of
from ...errors import ArgumentError
from ...plan import KernelSpec, target
from ...plan.budget import check, warpgroup_registers
from .config import MOST_EXPERTS as MOST_EXPERTS
from .config import PANEL as PANEL
from .config import UNIT_BITS
from .config import WORD as WORD
from .config import Config as Config
from .config import deepest as deepest

MAP_BYTES = 128
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
#: silu(gate) * up of eight rows of gate, then eight of up: half as many results as rows.
SWIGLU = "swiglu"
_TYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int32": "s32",
    "int8": "s8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_LINE_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_ACTIVATION = {SWIGLU: "silu"}
# Of a thread that widens: pieces of 16 bytes of a stage and of the next, and the rest.
_PIECE_REGISTERS, _WIDENING_REGISTERS = 4, 40


#: What follows the three tensor maps, as aligned as they are: y, bias, residual, scales of w and x,
#: x of 4 bits, ends of experts; alpha, multiplier of y; tokens, out, stages of k, tiles along out
#: and tokens, raster group, rows of x; scales a row of w, step of those of x; pitch, bytes of a row
#: of x of 4 bits; log2 of columns that share a scale of w of 4 bits; experts; stages ahead.
SCALARS = Struct("<7Q 2f 14i 8x")
ARGS_BYTES = 3 * MAP_BYTES + SCALARS.size


@dataclass(frozen=True)
class Numbers:
    """What a kernel computes with; dtypes by torch's names.

    Attributes:
        w: Of the kept values; `int4` is widened to x's.
        x: Of the tokens; `int4` is widened to w's.
        out: Of y.
        promoted: Leave the tensor cores after every stage, to add in float32.
        grouped: w has a scale for every stage of columns; those are promoted too.
        fine: w of 4 bits has a scale for 32 columns, and not for 64 or more.
    """

    w: str
    x: str
    out: str
    promoted: bool = False
    grouped: bool = False
    fine: bool = False

    @property
    def kind(self) -> str:
        """As `sparse_product` names it."""
        w, x = (
            _TYPES[other if own == "int4" else own]
            for own, other in ((self.w, self.x), (self.x, self.w))
        )
        return w if w == x else f"{w}.{x}"

    @property
    def bias(self) -> str:
        """Dtype of a bias: that of w where it can hold one, else that of y, else float32."""
        return next((t for t in (self.w, self.out) if t in ("bfloat16", "float16")), "float32")

    @property
    def scaled(self) -> bool:
        """Whether w and x have scales."""
        return words_of(self.kind) > 1


def spec_for(
    config: Config,
    dtype: str,
    *,
    out_dtype: str | None = None,
    activation: str = "none",
    residual: bool = False,
    direct: bool = False,
) -> KernelSpec:
    """The kernel of a config for 16-bit w and x.

    Args:
        config: Tile, stages, cluster.
        dtype: Of x and w: `bfloat16` or `float16`.
        out_dtype: Of y; None is that of x. float32 is stored directly.
        activation: One of `ACTIVATIONS`.
        residual: Whether something is added to y at the end.
        direct: Whether y is stored a number at a time.

    Raises:
        UnsupportedError: It does not fit an SM.
    """
    numbers = Numbers(dtype, dtype, out_dtype or dtype)
    return spec_of_numbers(config, numbers, activation, residual, direct)


@cache
def spec_of_numbers(
    config: Config, numbers: Numbers, activation: str, residual: bool, direct: bool
) -> KernelSpec:
    """The kernel of a config for any dtypes; the rest is as for `spec_for`.

    Raises:
        ArgumentError: The config is a tile of other numbers.
    """
    check_numbers(config, numbers)
    direct = direct or not _has_lines(config, numbers, activation)
    producer, consumer = _registers(config, numbers)
    words = [f"int4 {side}" for side in "wx" if getattr(numbers, side) == "int4"]
    words += [activation] if activation != "none" else []
    words += [numbers.out] if numbers.scaled or numbers.out != numbers.x else []
    words += [each for each in ("promoted", "grouped", "fine") if getattr(numbers, each)]
    words += ["residual"] * residual + ["direct"] * direct + ["experts"] * config.experts
    spec = KernelSpec(
        op="spmm_nm",
        name=" ".join([numbers.kind, config.name, *words]),
        kernel="ops/spmm_nm/kernel.cuh",
        text=_text(config, numbers, activation, residual, direct),
        entry="spmm_nm_kernel",
        threads=128 * (config.warpgroups + 1),
        cluster=(config.cluster, 1, 1),
        smem_bytes=config.smem_bytes(direct=direct),
        args_bytes=ARGS_BYTES,
        pdl=True,
    )
    check(spec, target("h200"), (producer, *[consumer] * config.warpgroups))
    return spec


def check_numbers(config: Config, numbers: Numbers) -> None:
    """Refuse a tile of other numbers, which would read their bytes as its own.

    Raises:
        ArgumentError: It says what such a tile has.
    """
    made = UNIT_BITS // WORD // words_of(numbers.kind), numbers.w == "int4"
    units = _units_of(numbers)
    if (config.bits, config.four_bit_w) != made or (units and config.units not in units):
        counts = f", units={' or '.join(map(str, units))}" if units else ""
        raise ArgumentError(
            f"{config} for {numbers}",
            need=f"a tile with bits={made[0]}, four_bit_w={made[1]}{counts}",
            hint="config=None, which chooses one",
        )


def _units_of(numbers: Numbers) -> tuple[int, ...]:
    """Units of a stage that a kernel gets right; none if any will do."""
    if numbers.grouped:
        return (1,)  # a stage has one scale a row
    if numbers.promoted:
        return (1, 2)  # whose sums stay in the tensor cores: measure.error.PROMOTED_COLUMNS
    # A thread that widens x has rows of one place in the swizzle.
    return (1, 2, 4) if numbers.x == "int4" else ()


def _text(config: Config, numbers: Numbers, activation: str, residual: bool, direct: bool) -> str:
    """What follows kernel.cuh: its Config, and the entry."""
    producer, consumer = _registers(config, numbers)
    threads = 128 * (config.warpgroups + 1)
    return f"""
struct Config {{
  static constexpr int kWarpgroups = {config.warpgroups}, kPanels = {config.panels};
  static constexpr int kWays = {config.ways};
  static constexpr int kTokens = {config.tokens}, kUnits = {config.units};
  static constexpr int kWords = {config.words};
  static constexpr int kStages = {config.stages}, kStoreTokens = {config.store_tokens};
  static constexpr int kClusterOut = {config.cluster_out};
  static constexpr int kClusterTokens = {config.cluster_tokens}, kClusterK = {config.cluster_k};
  static constexpr int kProducerRegisters = {producer}, kConsumerRegisters = {consumer};
  static constexpr bool kDirect = {_cpp(direct)}, kResidual = {_cpp(residual)};
  static constexpr bool kFourX = {_cpp(numbers.x == "int4")};
  static constexpr bool kFourW = {_cpp(numbers.w == "int4")}, kFine = {_cpp(numbers.fine)};
  static constexpr bool kScaled = {_cpp(numbers.scaled)}, kGrouped = {_cpp(numbers.grouped)};
  static constexpr bool kExperts = {_cpp(config.experts)};
  static constexpr bool kPromoted = {_cpp(numbers.promoted or numbers.grouped)};
  static constexpr int kFold = {fold_of(activation)};
  static constexpr Activation kActivation = Activation::{_ACTIVATION.get(activation, activation)};
  static constexpr Type kOut = Type::{_TYPES[numbers.out]}, kBias = Type::{_TYPES[numbers.bias]};
  static constexpr Type kWiden = Type::{numbers.kind.split(".")[0]};  // to what 4 bits become
{sparse_product(numbers.kind, config.tokens, config.panels, registers=numbers.w == "int4")}
  using Total = {"float" if numbers.grouped else "Number"};
}};

static_assert(sizeof(spmm_nm::Args) == {ARGS_BYTES}, "Args of kernel.cuh and of plan.py differ");
static_assert(spmm_nm::Smem<Config>::kBytes == {config.smem_bytes(direct=direct)},
              "shared memory of kernel.cuh and of plan.py differ");
extern __shared__ __align__(1024) u8 dynamic_smem[];

extern "C" __global__ void __cluster_dims__({config.cluster}, 1, 1) __launch_bounds__({threads}, 1)
    spmm_nm_kernel(const __grid_constant__ spmm_nm::Args args) {{
  spmm_nm::run<Config>(args, dynamic_smem);
}}
"""


def fold_of(activation: str) -> int:
    """Rows of w that one result is made of.

    Example:
        >>> fold_of("silu"), fold_of(SWIGLU)
        (1, 2)
    """
    return 2 if activation == SWIGLU else 1


def _registers(config: Config, numbers: Numbers) -> tuple[int, int]:
    """Of a thread of the producer, and of a consumer."""
    if numbers.x != "int4":
        return warpgroup_registers(config.warpgroups)
    pieces = 2 * -(-config.tokens * config.units // 32)
    least = _WIDENING_REGISTERS + pieces * _PIECE_REGISTERS
    return warpgroup_registers(config.warpgroups, least=least)


def _cpp(value: bool) -> str:
    return str(value).lower()


def stores_directly(out: int, out_dtype: str) -> bool:
    """Whether y [tokens, out] is stored directly: 32 bits, or rows that start off 16 bytes."""
    return out_dtype not in _LINE_BYTES or out * _LINE_BYTES[out_dtype] % 16 != 0


def _has_lines(config: Config, numbers: Numbers, activation: str) -> bool:
    """Whether a tile's results can leave as lines, if the rows of y allow it."""
    size, folds = _LINE_BYTES.get(numbers.out, 4), fold_of(activation) > 1
    if size == 4 or (size == 1 and folds):
        return size == 1  # bytes are put together one by one
    return config.store_tokens == 32 if size == 1 or folds else True
