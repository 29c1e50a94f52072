"""How a block of kernel.cuh divides its work: a tile, as numbers."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import NoReturn

from ...errors import ArgumentError
from ...plan import target
from ...plan.budget import warpgroup_registers

PANEL = 64  # out-features of one instruction, rows of a panel of the packed layout
WORD = 64  # columns of k that share an index word of the packed layout
UNIT_BITS = 1024  # of a token: 64 columns of 16 bits, or 128 of 8
#: Weights of one launch, at most; as kMostExperts of kernel.cuh.
MOST_EXPERTS = 256
_SMEM_BYTES = target("h200").smem_per_block
_MOST_STAGES = 8
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
        return self.units * UNIT_BITS // self.bits

    @property
    def words(self) -> int:
        """Index words a thread of a unit."""
        return UNIT_BITS // self.bits // WORD

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
