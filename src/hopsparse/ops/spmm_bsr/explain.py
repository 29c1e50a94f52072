"""Why spmm_bsr runs what it runs: what a weight becomes, and what everything is predicted to take.

No GPU is needed, and none of the times is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...errors import UnsupportedError
from ...formats.bsr import BSR
from ...plan import Target
from .fragments import TILE, fragments_of
from .fragments_cost import busy_clocks
from .fragments_kernel import FragmentConfig
from .kernel import STEP, Config
from .plan import Decision, Problem, all_predicted_us, candidates, decide
from .ready import takes_fragments
from .schedule import loads, token_tiles
from .strips import strips_of, width_of


@dataclass(frozen=True)
class Explanation:
    """What is known of a product before it runs.

    Attributes:
        problem: Sizes.
        target: The GPU.
        decision: The fastest kernel, and dense.
        others: The other tiles and their predicted device times, the fastest first.
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
    problem = Problem(tokens, *w.shape)
    width = width_of(w.block)
    if width is None:
        raise UnsupportedError(
            f"spmm_bsr: blocks of {w.block[0]} x {w.block[1]}",
            need="blocks of a multiple of 16 columns",
            hint="BSR.from_dense(w.to_dense(), (64, 64))",
        )
    strips, (out, k) = strips_of(w), w.shape
    fragments = fragments_of(w) if takes_fragments(w.block) else None
    dtype = str(w.dtype).removeprefix("torch.")
    known = candidates(strips.panels, width)
    decision = decide(strips.lengths, known, problem, dtype, target, fragments=fragments)
    timed = all_predicted_us(strips.lengths, known, problem, target, fragments=fragments)
    config = decision.config
    if isinstance(config, Config):
        count = strips.lengths.numel() * token_tiles(config, tokens)
        work, _ = loads(strips.lengths, config, tokens, min(count, target.sm_count))
        walked, filled = strips.steps * strips.rows * STEP, strips.filled
    else:
        assert fragments is not None  # a tile of it was chosen
        width, work = TILE, busy_clocks(config, fragments, tokens, target.sm_count)
        walked, filled = fragments.pieces * TILE * TILE * config.height, 1.0
    moved = 2 * (strips.kept + tokens * (out + k))
    peak = target.dense_peak[dtype].sustained
    others = [each for each in timed.items() if each[0] != config]
    count = ceil(out / config.rows)
    return Explanation(
        problem,
        target,
        decision,
        tuple(sorted(others, key=lambda each: each[1])),
        width,
        count,
        walked / (config.rows * count * k),
        filled,
        float(work.max() / work.double().mean()),
        1e6 * max(moved / target.read_bandwidth, 2 * strips.kept * tokens / peak),
    )
