"""kernel.cuh as Python sees it: how a block divides its work, its text, its arguments."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cache
from struct import Struct
from typing import NoReturn

from ...compiler.wgmma_dense import dense_product
from ...errors import ArgumentError
from ...plan import KernelSpec, target
from ...plan.budget import check, warpgroup_registers

PANEL = 64  # out-features of one instruction
STEP = 64  # columns of k that are multiplied at a time, wherever they come from
#: Columns that one box of tokens has; a block is cut into the widest that divides it.
WIDTHS = (64, 32, 16)
MAP_BYTES = 128
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_SMEM_BYTES = target("h200").smem_per_block
_MOST_STAGES = 8
# The columns of a step and of the next are in registers: 24 spill where a step has four places.
_PRODUCER_REGISTERS = 40
_CONSUMERS = 2  # one stores while the other multiplies


@dataclass(frozen=True)
class Config:
    """How a block divides its work; the fields of `Config` in kernel.cuh.

    Attributes:
        panels: Panels of 64 out-features of a strip: 2 where blocks have 128 rows, else 1.
        tokens: Tokens of an item, a multiple of 16, 256 at most.
        width: Columns that are gathered from one place, one of `WIDTHS`.
        stages: Stages of shared memory, at least 2.

    Raises:
        ArgumentError: No block can work like that.

    Example:
        >>> Config(1, tokens=256, width=64, stages=9)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: Config(panels=1, tokens=256, width=64, stages=9) with \
385168 bytes of shared memory. Required: at most 232448. Try: stages=5.
    """

    panels: int
    tokens: int
    width: int
    stages: int

    def __post_init__(self) -> None:
        if any(type(n) is not int or n < 1 for n in astuple(self)):
            self._refuse("", "positive whole numbers", "one of spmm_bsr.plan.CANDIDATES")
        if self.width not in WIDTHS:
            self._refuse("", f"a width of {', '.join(map(str, WIDTHS))}", "width=64")
        if self.tokens % 16 or self.tokens > 256:
            near = min(256, max(16, self.tokens // 16 * 16))
            self._refuse("", "tokens in steps of 16, up to 256", f"tokens={near}")
        if self.panels * self.tokens > 256:
            need = "at most 256 tokens for all panels: a thread holds a sum for each two"
            self._refuse("", need, f"tokens={max(16, 256 // self.panels // 16 * 16)}")
        # A batch stays in flight while the next stage is waited for.
        if self.stages < 2:
            self._refuse("", "a stage to fill while another is multiplied", "stages=2")
        if self.smem_bytes() > _SMEM_BYTES:
            self._refuse(
                f" with {self.smem_bytes()} bytes of shared memory",
                f"at most {_SMEM_BYTES}",
                f"stages={self.most_stages}",
            )

    def _refuse(self, fact: str, need: str, hint: str) -> NoReturn:
        raise ArgumentError(f"{self}{fact}", need=need, hint=hint)

    @property
    def rows(self) -> int:
        """Out-features of a strip."""
        return PANEL * self.panels

    @property
    def groups(self) -> int:
        """Places of k that a step comes from."""
        return STEP // self.width

    @property
    def name(self) -> str:
        """Tile, what is gathered, and stages, as people write them."""
        return f"{self.rows}x{self.tokens}x{self.groups}x{self.width}_s{self.stages}"

    @property
    def store_tokens(self) -> int:
        """Tokens of y that leave together."""
        return next(n for n in (32, 16) if self.tokens % n == 0)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step: tokens and weights."""
        return (self.tokens + self.rows) * STEP * 2

    @property
    def most_stages(self) -> int:
        """Stages that shared memory holds, however many there are now."""
        return (_SMEM_BYTES - self._store_bytes) // (self.stage_bytes + 16)

    @property
    def _store_bytes(self) -> int:
        return 2 * _CONSUMERS * self.store_tokens * 128

    def smem_bytes(self, *, direct: bool = False) -> int:
        """Dynamic shared memory of a block."""
        store = 0 if direct else self._store_bytes
        return self.stages * (self.stage_bytes + 16) + store


def deepest(panels: int, tokens: int, width: int) -> Config:
    """A tile with as many stages as shared memory holds, 8 at most.

    Example:
        >>> deepest(1, 256, 64).stages
        5
    """
    least = Config(panels, tokens, width, stages=2)
    return replace(least, stages=min(_MOST_STAGES, least.most_stages))


#: What follows the tensor map in the argument struct: values, columns, strips, y, bias, residual;
#: alpha; tokens, out, strips, tiles along tokens, raster group, rows of x. It is as aligned as the
#: map.
SCALARS = Struct("<6Q f 6i 52x")
ARGS_BYTES = MAP_BYTES + SCALARS.size


@cache
def spec_for(
    config: Config,
    dtype: str,
    *,
    out_dtype: str | None = None,
    activation: str = "none",
    residual: bool = False,
    direct: bool = False,
) -> KernelSpec:
    """The kernel of a config.

    Args:
        config: Tile, gathered width, stages.
        dtype: Of x, w and bias: `bfloat16` or `float16`.
        out_dtype: Of y and residual; None is that of x. float32 is stored directly.
        activation: One of `ACTIVATIONS`.
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
        kernel="ops/spmm_bsr/kernel.cuh",
        text=_text(config, dtype, out, activation, residual, direct),
        entry="spmm_bsr_kernel",
        threads=128 * (_CONSUMERS + 1),
        cluster=(1, 1, 1),
        smem_bytes=config.smem_bytes(direct=direct),
        args_bytes=ARGS_BYTES,
    )
    producer, consumer = warpgroup_registers(_CONSUMERS, least=_PRODUCER_REGISTERS)
    check(spec, target("h200"), (producer, *[consumer] * _CONSUMERS))
    return spec


def variant_name(
    tile: str, dtype: str, out: str, activation: str, residual: bool, direct: bool
) -> str:
    """A kernel by its tile and what is compiled into it, of either kind of tile.

    Example:
        >>> variant_name("64x256x1x64_s5", "bfloat16", "float32", "relu", False, True)
        'bf16 64x256x1x64_s5 relu float32 direct'
    """
    words = [activation] if activation != "none" else []
    words += [out] if out != dtype else []
    words += ["residual"] * residual + ["direct"] * direct
    return " ".join([TYPES[dtype], tile, *words])


def _text(
    config: Config, dtype: str, out: str, activation: str, residual: bool, direct: bool
) -> str:
    """What follows kernel.cuh: its Config, and the entry."""
    producer, consumer = warpgroup_registers(_CONSUMERS, least=_PRODUCER_REGISTERS)
    return f"""
struct Config {{
  static constexpr int kPanels = {config.panels}, kTokens = {config.tokens};
  static constexpr int kWidth = {config.width}, kStages = {config.stages};
  static constexpr int kStoreTokens = {config.store_tokens};
  static constexpr int kProducerRegisters = {producer}, kConsumerRegisters = {consumer};
  static constexpr bool kDirect = {_cpp(direct)}, kResidual = {_cpp(residual)};
  static constexpr Activation kActivation = Activation::{activation};
  static constexpr Type kNumbers = Type::{TYPES[dtype]}, kOut = Type::{TYPES[out]};
{dense_product(TYPES[dtype], config.tokens, config.panels)}
}};

static_assert(sizeof(spmm_bsr::Args) == {ARGS_BYTES}, "Args of kernel.cuh and kernel.py differ");
static_assert(spmm_bsr::Smem<Config>::kBytes == {config.smem_bytes(direct=direct)},
              "shared memory of kernel.cuh and of kernel.py differ");
extern __shared__ __align__(1024) u8 dynamic_smem[];

extern "C" __global__ void __launch_bounds__({128 * (_CONSUMERS + 1)}, 1)
    spmm_bsr_kernel(const __grid_constant__ spmm_bsr::Args args) {{
  spmm_bsr::run<Config>(args, dynamic_smem);
}}
"""


def _cpp(value: bool) -> str:
    return str(value).lower()


def stores_directly(out: int, out_dtype: str) -> bool:
    """Whether y [tokens, out] is stored directly: 32 bits, or rows that start off 16 bytes.

    Example:
        >>> stores_directly(72, "bfloat16"), stores_directly(70, "bfloat16")
        (False, True)
    """
    return out_dtype == "float32" or out % 8 != 0
