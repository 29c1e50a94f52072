"""What spmm_nm runs for a problem, and why: the numbers behind a choice, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from ...measure.product import Product, work
from ...measure.roofline import predict
from ...plan import KernelSpec, Target, parse_target, target
from ...plan.budget import check, smem_left, warpgroup_registers
from ...tune import Entry, Machine, Store
from .cost import FITTED, Problem, blocks_at_once, predicted_us, tiles
from .dense import DenseWin, dense_win
from .kernel import Config
from .plan import candidates, choose, key_of, spec_of, tuned, versions

#: When a layer does not run the kernel: the facts of `op.why_no_kernel`, and `dense.dense_win`.
RUNS_DENSE_WHEN = (
    "values are float32 or have 8 bits",
    "the pattern is neither 2:4 nor 1:4",
    "the GPU is no H100 or H200",
    "tuning measured it to be faster",
)


@dataclass(frozen=True)
class Tile:
    """One tile on one problem.

    Attributes:
        config: The tile.
        predicted_us: By the cost model.
        tiles: Tiles of y, in whole clusters.
        at_once: How many run at one time.
        smem_bytes: Dynamic shared memory of a block.
        smem_left_bytes: What a block could have besides.
        registers: Of a thread of the producer, and of each consumer warpgroup.
    """

    config: Config
    predicted_us: float
    tiles: int
    at_once: int
    smem_bytes: int
    smem_left_bytes: int
    registers: tuple[int, ...]

    @property
    def waves(self) -> int:
        """How often the GPU is filled; the last time perhaps in part."""
        return ceil(self.tiles / self.at_once)

    def sm_use(self, sm_count: int) -> float:
        """Part of the SMs that has a tile, or a part of k of one, over all waves."""
        return self.tiles * self.config.cluster_k / (self.waves * sm_count)


@dataclass(frozen=True)
class Floors:
    """What no kernel can be faster than: `measure.roofline.floor_us`, in its two parts.

    Attributes:
        bytes: Read and written.
        bytes_us: At the read bandwidth.
        operations: Counted as if dense.
        operations_us: At the sustained ceiling of sparse wgmma.
    """

    bytes: int
    bytes_us: float
    operations: float
    operations_us: float

    @property
    def us(self) -> float:
        """The longer one."""
        return max(self.bytes_us, self.operations_us)


@dataclass(frozen=True)
class Explanation:
    """Why a problem runs as it does.

    Attributes:
        problem: Sizes.
        dtype: Of x and w.
        target: The GPU, planned for or present.
        machine: The GPU that is present, if that was asked for.
        chosen: The tile that the kernel runs.
        is_tuned: Whether it was measured to be the fastest; else the cost model says so.
        others: The next candidates by the cost model.
        floors: Of the problem.
        dense_us: Predicted time of the dense product.
        results: Tuning results of the problem's class, of all machines.
        names: Tiles by the names that those have for them.
        won: Where the dense product was measured to be faster than every tile: layers run that.
            Else None.
        sums: Of 8-bit codes, how they are taken; "" for others.
        dense_when: When a layer does not run the kernel.
        cautions: What the numbers leave out, beside what all leave out.
        of_codes: Whether w is of codes, which no layer multiplies dense for being faster.
    """

    problem: Problem
    dtype: str
    target: Target
    machine: Machine | None
    chosen: Tile
    is_tuned: bool
    others: tuple[Tile, ...]
    floors: Floors
    dense_us: float
    results: tuple[Entry, ...]
    names: Mapping[str, Config] = field(hash=False, repr=False)
    won: DenseWin | None = None
    sums: str = ""
    dense_when: tuple[str, ...] = RUNS_DENSE_WHEN
    cautions: tuple[str, ...] = ()
    of_codes: bool = False

    def winner(self, entry: Entry) -> tuple[Config, float] | None:
        """The fastest tile of a tuning result, and its time; None if it has none of today's."""
        best = entry.best(self.names)
        return None if best is None else (self.names[best], entry.measured[best].us)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers leave out."""
        found = []
        if self.target.read_bandwidth != target("h200").read_bandwidth:
            found.append(
                "the cost model has the memory of a whole H200: here it predicts too little where "
                "bytes decide"
            )
        least = FITTED[self.chosen.config.bits].least_tokens
        if self.problem.tokens < least:
            found.append(f"the cost model of 8 bits was fitted to {least} tokens and more")
        found += self.cautions
        if self.dense_us < self.chosen.predicted_us and not self.is_tuned:
            runs = (
                "no layer runs codes dense"
                if self.of_codes
                else "it runs where `hopsparse tune` agrees"
            )
            found.append(f"dense is predicted to be faster; {runs}")
        if self.won is not None:
            found.append("the function spmm_nm, which keeps no decoded weight, runs the tile")
        return tuple(found)


def explain(
    problem: Problem, dtype: str, gpu: Target, *, machine: Machine | None = None, others: int = 3
) -> Explanation:
    """Say what would run.

    Args:
        problem: Sizes, all positive.
        dtype: `bfloat16` or `float16`.
        gpu: The GPU to plan for.
        machine: The GPU that is present: what was tuned on its like is taken. None goes by the cost
            model.
        others: How many candidates to tell besides.

    Raises:
        UnsupportedError: A block of a tile does not fit an SM of that GPU.

    Example:
        >>> found = explain(Problem(4096, 4096, 4096), "bfloat16", target("h200"))
        >>> round(found.floors.us, 1), found.is_tuned
        (95.3, False)
    """
    sm_count = gpu.sm_count if machine is None else machine.sm_count
    chosen = choose(problem, sm_count, dtype=dtype, machine=machine)
    ordered = [each for each in candidates(problem, sm_count) if each != chosen]
    described = [
        tile_of(config, problem, spec_of(config, problem.out, dtype), gpu, sm_count)
        for config in (chosen, *ordered[:others])
    ]
    key = key_of(problem, dtype, machine or Machine("", 0, ""))
    shape = (problem.out, problem.k)
    won = None if machine is None else dense_win(problem, dtype, machine)
    return Explanation(
        problem=problem,
        dtype=dtype,
        target=gpu,
        machine=machine,
        chosen=described[0],
        is_tuned=machine is not None and tuned(problem, dtype, machine) is not None,
        others=tuple(described[1:]),
        floors=floors_of(Product(shape, dtype, "nm", "2:4"), problem.tokens, gpu),
        dense_us=predict(Product(shape, dtype), problem.tokens, gpu).time_us,
        results=tuple(Store.default().entries(key.op, key.kernel, key.problem)),
        names=versions(dtype),
        won=won,
    )


def target_of(machine: Machine) -> Target:
    """The row of the table, or the slice of it, that a GPU which is present belongs to.

    Example:
        >>> target_of(Machine("NVIDIA H200 MIG 1g.18gb", 16, "580.65.06")).sm_count
        16
    """
    name = "h100" if "H100" in machine.gpu else "h200"
    share = re.search(r"MIG (\d)g", machine.gpu)
    return parse_target(f"{name}:{share[1]}/7" if share else name)


def tile_of(
    config: Config,
    problem: Problem,
    spec: KernelSpec,
    gpu: Target,
    sm_count: int,
    us: float | None = None,
) -> Tile:
    """What is said of a tile.

    Args:
        config: The tile.
        problem: Sizes.
        spec: Its kernel.
        gpu: The GPU.
        sm_count: Its SMs.
        us: Its predicted time; None is that of 16 bits.

    Raises:
        UnsupportedError: A block does not fit an SM.
    """
    producer, consumer = warpgroup_registers(config.warpgroups)
    registers = (producer, *[consumer] * config.warpgroups)
    check(spec, gpu, registers)
    return Tile(
        config=config,
        predicted_us=predicted_us(config, problem, sm_count) if us is None else us,
        tiles=tiles(config, problem),
        at_once=blocks_at_once(config, sm_count) // config.cluster_k,
        smem_bytes=spec.smem_bytes,
        smem_left_bytes=smem_left(spec, gpu),
        registers=registers,
    )


def floors_of(product: Product, tokens: int, gpu: Target) -> Floors:
    """What a 2:4 product can at best take."""
    least = work(product, tokens)
    return Floors(
        bytes=least.bytes,
        bytes_us=1e6 * least.bytes / gpu.read_bandwidth,
        operations=least.flops,
        operations_us=1e6 * least.flops / gpu.sparse_peak[product.compute_dtype].sustained,
    )
