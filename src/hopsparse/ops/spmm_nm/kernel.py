"""kernel.cuh as Python sees it: how a block divides its work, its text, its arguments."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from functools import cache
from struct import Struct
from typing import NoReturn

from ...compiler.wgmma import sparse_product, words_of
from ...errors import ArgumentError
from ...plan import KernelSpec, target
from ...plan.budget import check, warpgroup_registers

PANEL = 64  # out-features of one instruction, rows of a panel of the packed layout
WORD = 64  # columns of k that share an index word of the packed layout
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
_UNIT_BITS = 1024  # of a token: 64 columns of 16 bits, or 128 of 8
_SMEM_BYTES = target("h200").smem_per_block
#: Weights of one launch, at most; as kMostExperts of kernel.cuh.
MOST_EXPERTS = 256
_MOST_STAGES = 8
# Of a thread that widens: pieces of 16 bytes of a stage and of the next, and the rest.
_PIECE_REGISTERS, _WIDENING_REGISTERS = 4, 40
_MOST_CLUSTER = 8  # more needs a kernel that says so when it is loaded


@dataclass(frozen=True)
class Config:
    """How a block divides its work; the fields of `Config` in kernel.cuh.

    Attributes:
        warpgroups: Consumers, 1 to 4.
        panels: Panels of 64 out-features each of them multiplies.
        tokens: Tokens of a tile, a multiple of 16, 256 at most.
        units: Units of 128 bytes of k in a stage.
        stages: Stages of shared memory, at least 2.
        cluster_out: Blocks that share their tokens.
        cluster_tokens: Blocks that share their weights.
        cluster_k: Blocks that share a tile, each a part of k.
        bits: Of an entry of x and w, 16 or 8.
        four_bit_w: Whether kept values have 4 bits in shared memory, and `bits` in registers.
        ways: Consumers that share their panels, and take the stages in turn.

    Raises:
        ArgumentError: No block can work like that. What is left may still want more registers than
            there are: the compiler says so.

    Example:
        >>> Config(2, 1, tokens=64, units=2, stages=20)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: Config(warpgroups=2, panels=1, tokens=64, units=2, \
stages=20, cluster_out=1, cluster_tokens=1, cluster_k=1, bits=16, four_bit_w=False, experts=False, \
ways=1) with 713024 bytes of shared memory. Required: at most 232448. Try: stages=6.
    """

    warpgroups: int
    panels: int
    tokens: int
    units: int
    stages: int
    cluster_out: int = 1
    cluster_tokens: int = 1
    cluster_k: int = 1
    bits: int = 16
    four_bit_w: bool = field(default=False, kw_only=True)
    experts: bool = field(default=False, kw_only=True)
    ways: int = field(default=1, kw_only=True)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_out * self.cluster_tokens * self.cluster_k

    def __post_init__(self) -> None:
        *sizes, four_bit_w, experts, ways = astuple(self)
        sizes.append(ways)
        flags = type(four_bit_w) is type(experts) is bool
        if not flags or any(type(n) is not int or n < 1 for n in sizes):
            need = "positive whole numbers; experts and four_bit_w, True or False"
            self._refuse("", need, "one of hopsparse.ops.spmm_nm.plan.CANDIDATES")
        warpgroup_registers(self.warpgroups)
        if self.bits not in (16, 8):
            self._refuse("", "entries of 16 or 8 bits", "bits=16")
        if self.tokens % 16 or self.tokens > 256:
            near = min(256, max(16, self.tokens // 16 * 16))
            self._refuse("", "tokens that wgmma takes in steps of 16, up to 256", f"tokens={near}")
        # With one stage the consumers, which keep a batch of wgmma in flight, would wait for ever.
        if self.stages < 2:
            self._refuse("", "a stage to fill while another is multiplied", "stages=2")
        if self.warpgroups % self.ways or self.stages < 2 * self.ways:
            need = "whole teams of consumers, and two stages for each of a team"
            self._refuse("", need, "ways=1")
        self._check_cluster()
        if self.smem_bytes() > _SMEM_BYTES:
            self._refuse(
                f" with {self.smem_bytes()} bytes of shared memory",
                f"at most {_SMEM_BYTES}",
                f"stages={self.most_stages}" if self.most_stages > 1 else "a smaller tile",
            )

    def _check_cluster(self) -> None:
        if self.cluster > _MOST_CLUSTER:
            need = f"at most {_MOST_CLUSTER} blocks, which every GPU can schedule"
            self._refuse("", f"a cluster of {need}", "cluster_out=2, cluster_tokens=1")
        # A block loads its part of what is shared: whole atoms of the swizzle, whole steps of k.
        steps = self.units * (self.words if self.four_bit_w else 2)
        if self.tokens % (8 * self.cluster_out) or steps % self.cluster_tokens:
            need = "parts of 8 tokens for each of cluster_out, of whole steps for cluster_tokens"
            self._refuse("", need, "cluster_out=1, cluster_tokens=1")

    def _refuse(self, fact: str, need: str, hint: str) -> NoReturn:
        raise ArgumentError(f"{self}{fact}", need=need, hint=hint)

    @property
    def out(self) -> int:
        """Out-features of a tile."""
        return PANEL * self.all_panels

    @property
    def all_panels(self) -> int:
        """Panels of a tile."""
        return self.warpgroups // self.ways * self.panels

    @property
    def columns(self) -> int:
        """Columns of k of a stage."""
        return self.units * _UNIT_BITS // self.bits

    @property
    def words(self) -> int:
        """Index words a thread of a unit."""
        return _UNIT_BITS // self.bits // WORD

    @property
    def name(self) -> str:
        """Tile, stages and cluster, as people write them."""
        return (
            f"{self.out}x{self.tokens}x{self.columns}_w{self.warpgroups}"
            + (f"k{self.ways}" if self.ways > 1 else "")
            + f"_s{self.stages}_c{self.cluster_out}x{self.cluster_tokens}"
            + (f"x{self.cluster_k}" if self.cluster_k > 1 else "")
        )

    @property
    def store_tokens(self) -> int:
        """Tokens of y that leave together."""
        return next(n for n in (32, 16) if self.tokens % n == 0)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: tokens, kept values, index words."""
        of_panel = self.value_bytes + 512 * self.words
        return self.units * (self.tokens * 128 + self.all_panels * of_panel)

    @property
    def value_bytes(self) -> int:
        """Shared memory of a panel's kept values of a unit."""
        return 1024 * self.words if self.four_bit_w else 2 * 2048

    @property
    def most_stages(self) -> int:
        """Stages that shared memory holds, however many there are now."""
        rest = self._store_bytes + self._experts_bytes + self._ways_bytes
        return (_SMEM_BYTES - rest - 8 - (8 if self.ways > 1 else 0)) // (self.stage_bytes + 16)

    @property
    def _store_bytes(self) -> int:
        return 2 * self.warpgroups // self.ways * self.store_tokens * 128

    @property
    def _experts_bytes(self) -> int:
        return 4 * MOST_EXPERTS if self.experts else 0

    @property
    def _ways_bytes(self) -> int:
        """Sums of all but the first warpgroup of a team."""
        return (self.ways - 1) * self.all_panels * PANEL * self.tokens * 4

    def smem_bytes(self, *, direct: bool = False) -> int:
        """Dynamic shared memory of a block."""
        parts = 8 if self.cluster_k > 1 else 0
        store = 0 if direct else self._store_bytes
        size = self.stages * (self.stage_bytes + 16) + store + parts + self._experts_bytes
        return size if self.ways == 1 else -(-size // 16) * 16 + self._ways_bytes


def deepest(config: Config, most: int = _MOST_STAGES) -> Config:
    """The same with as many stages as shared memory holds, `most` at most.

    Example:
        >>> deepest(Config(2, 1, 256, 1, stages=2)).stages
        5
    """
    return replace(config, stages=min(most, config.most_stages))


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
    made = _UNIT_BITS // WORD // words_of(numbers.kind), numbers.w == "int4"
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
