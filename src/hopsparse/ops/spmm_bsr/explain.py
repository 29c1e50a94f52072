"""Why spmm_bsr runs what it runs: what a weight becomes, and what everything is predicted to take.

No GPU is needed, and none of the times is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from torch import Tensor

from ...errors import UnsupportedError
from ...formats.bsr import BSR
from ...plan import Target
from .choose import by_model, predicted_by_tile
from .fragments_cost import busy_clocks
from .fragments_kernel import FragmentConfig
from .grains import Counts, PieceCounts, counts_of, grain_of, grains_for, multiplied, stored
from .kernel import Config
from .plan import Decision, Problem
from .schedule import loads, token_tiles


@dataclass(frozen=True)
class Explanation:
    """What is known of a product before it runs.

    Attributes:
        problem: Sizes.
        target: The GPU.
        decision: The fastest kernel, and dense.
        others: The other tiles, of every grain, and their predicted device times, the fastest
            first.
        width: Columns that are gathered from one place.
        strips: Strips of the weight.
        multiplied: Part of the entries of w that is multiplied, what is filled up included.
        filled: Part of that which was stored.
        unevenness: Work of the block that has the most over that of the mean.
        floor_us: No kernel that multiplies the stored blocks alone is faster: the longer of their
            bytes over read bandwidth and their operations over the sustained ceiling.
    """

    problem: Problem
    target: Target
    decision: Decision
    others: tuple[tuple[Config | FragmentConfig, float], ...]
    width: int
    strips: int
    multiplied: float
    filled: float
    unevenness: float
    floor_us: float

    def lines(self, *, kept: bool = True) -> list[str]:
        """It in words, one fact a line.

        Args:
            kept: Whether the decoded weight would be kept between calls, as `SparseLinear` does.
        """
        p, d = self.problem, self.decision
        small = isinstance(d.config, FragmentConfig)
        name = "the kernel of small blocks" if small else "the kernel"
        runs = f"{name}, tile {d.config.name}" if d.uses_kernel(kept=kept) else "dense"
        others = ", ".join(f"{config.name} {us:.1f}" for config, us in self.others)
        return [
            f"spmm_bsr, {p.out} x {p.k}, {p.tokens} tokens, {self.target.name}: {runs}",
            f"predicted: kernel {d.kernel_us:.1f} us, dense {d.dense_us:.1f}, to decode w "
            f"{d.decoding_us:.1f}; the floor is {self.floor_us:.1f}",
            f"other tiles: {others}",
            f"{self.strips} strips of {d.config.rows} rows, gathered in {self.width} columns: "
            f"{self.multiplied:.1%} of w is multiplied, and {self.filled:.0%} of that is stored",
            f"the busiest block has {self.unevenness:.2f} times the work of the mean",
        ]


def explain(w: BSR, tokens: int, target: Target) -> Explanation:
    """What a weight of 16-bit values would run on a GPU.

    Args:
        w: [out, k], on any device.
        tokens: Rows of x, 1 or more.
        target: The GPU.

    Raises:
        ArgumentError: No tokens.
        UnsupportedError: Blocks that the kernel does not take.

    Example:
        >>> import torch
        >>> from hopsparse.plan import TARGETS
        >>> w = BSR.from_dense(torch.eye(8192, dtype=torch.bfloat16), (64, 64))
        >>> print(explain(w, 2048, TARGETS["h200"]).lines()[0])
        spmm_bsr, 8192 x 8192, 2048 tokens, h200: the kernel, tile 64x256x1x64_s5
    """
    problem, (out, k) = Problem(tokens, *w.shape), w.shape
    counts = {grain: counts_of(w, grain) for grain in grains_for(w.block)}
    if not counts:
        raise UnsupportedError(
            f"spmm_bsr: blocks of {w.block[0]} x {w.block[1]}",
            need="blocks of a multiple of 16 columns",
            hint="BSR.from_dense(w.to_dense(), (64, 64))",
        )
    dtype = str(w.dtype).removeprefix("torch.")
    decision = by_model(counts, w.block, problem, dtype, target)
    timed = predicted_by_tile(counts, problem, target)
    config, kept = decision.config, stored(w)
    grain = grain_of(config)
    work = _work(config, counts[grain], tokens, target.sm_count)
    part = multiplied(w, grain, counts[grain])
    peak = target.dense_peak[dtype].sustained
    others = [each for each in timed.items() if each[0] != config]
    return Explanation(
        problem,
        target,
        decision,
        tuple(sorted(others, key=lambda each: each[1])),
        grain[1],
        ceil(out / config.rows),
        part,
        kept / (part * out * k) if part else 1.0,
        float(work.max() / work.double().mean().clamp_min(1e-9)),
        1e6
        * max(
            2 * (kept + tokens * (out + k)) / target.read_bandwidth,
            2 * kept * tokens / peak,
        ),
    )


def _work(config: Config | FragmentConfig, counts: Counts, tokens: int, sm_count: int) -> Tensor:
    """What every block of a grid has to do, in clocks or steps."""
    if isinstance(config, FragmentConfig):
        assert isinstance(counts, PieceCounts)
        return busy_clocks(config, counts, tokens, sm_count)
    assert not isinstance(counts, PieceCounts)
    count = counts.lengths.numel() * token_tiles(config, tokens)
    work, _ = loads(counts.lengths, config, tokens, min(count, sm_count))
    return work
