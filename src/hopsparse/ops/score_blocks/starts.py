"""How a launch starts: before the kernel ahead has ended or not, and what it asks for ahead.

Rules by rows of an H200, by bound, in `benchmarks/results/h200`: `attention_scores.jsonl` is of a
kernel that asks for nothing, `attention_scores_prefetch.jsonl` of one that always asks. Both rules
are played over these rows by `tests/unit/test_score_starts.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from .plan import Shape

# One block of threads an SM, by the pieces that each has: an early start won 3.3 to 3.9 us with 4
# of them, lost 0.2 to 2.2 with 8 and 11.2 to 12.4 with 32. Lines from 4 to 8 cross zero at 6.6 to
# 7.8.
_MOST_EARLY = 6
# One block of threads an SM: asking ahead lost 0.65 us with 8 pieces and won 1.16 with 32, a line
# crosses zero at 16.6; with 32 pieces it lost 1.16 us on 16 SMs and won as much on 128, which
# crosses zero at 72 of 132.
_FEW_PIECES = 16


class Work(NamedTuple):
    """What a launch has to do.

    Attributes:
        programs: Blocks of threads, of all clusters.
        pieces: Of 16 KB, that each of them has where a sequence fills its room.
        held: Pieces that are on their way to registers at a time.
    """

    programs: int
    pieces: int
    held: int = 1


class Asks(NamedTuple):
    """What a kernel asks the L2 cache for.

    Attributes:
        first: The first pieces, before it waits for the kernel ahead.
        later: A piece that is some pieces ahead of the one that is loaded.
    """

    first: bool
    later: bool


def work_of(shape: Shape, pairs: int, rows: int, cluster: int) -> Work:
    """What a launch by clusters of a size has to do.

    Args:
        shape: Of the kernel.
        pairs: Heads of keys of all sequences.
        rows: Blocks of keys that there is room for, of each.
        cluster: Blocks of threads of a cluster.

    Example:
        >>> work_of(Shape("bound", "bfloat16", 128, 4), 64, 2048, 2)
        Work(programs=128, pieces=32, held=1)
    """
    return Work(pairs * cluster, -(-rows // (shape.piece_rows * cluster)), shape.pieces_held)


def early_pays(work: Work, sm_count: int) -> bool:
    """Whether the launch gains by a start before the kernel ahead has ended.

    As many blocks of threads as SMs, or fewer, lie one on each SM where all SMs are free. Those
    that start while others still run take the places that become free first, two on an SM, and
    other SMs have nothing to do: what that costs grows with the pieces that a block has. Where
    there are more blocks than SMs each SM has two of them, however they start.

    Example:
        >>> [early_pays(each, 132) for each in (Work(128, 4), Work(128, 8), Work(512, 8))]
        [True, False, True]
    """
    return work.programs > sm_count or work.pieces <= _MOST_EARLY


def asks_of(work: Work, sm_count: int, *, early: bool) -> Asks:
    """What the launch shall ask the L2 cache for.

    At 4.35 TB/s and 0.7 us an SM needs 23 KB on its way at a time. Two blocks of threads on an SM
    have 32 KB on their way to registers: asking too is asking twice. One has 16 KB: with many
    pieces on most of the SMs memory is what it waits for, and 64 KB that are asked for help; where
    few SMs read memory answers sooner. A kernel that starts early has time to ask for its first
    pieces; one that does not would load them at once. All that is asked for at a time is 8.4 MB at
    most, a sixth of the L2 cache. The kernel for the tensor cores has 32 or 64 KB on their way to
    registers, and asks for no more.

    Args:
        work: What the launch has to do.
        sm_count: Of the GPU.
        early: Whether it starts before the kernel ahead has ended.

    Example:
        >>> asks_of(Work(128, 32), 132, early=False), asks_of(Work(128, 4), 132, early=True)
        (Asks(first=True, later=True), Asks(first=True, later=False))
        >>> asks_of(Work(512, 8), 132, early=True)
        Asks(first=False, later=False)
        >>> asks_of(Work(128, 32, held=4), 132, early=False)
        Asks(first=False, later=False)
    """
    if work.programs > sm_count:
        return Asks(first=False, later=False)
    if work.held > 1:
        return Asks(first=early, later=False)
    by_memory = work.pieces > _FEW_PIECES and 2 * work.programs > sm_count
    return Asks(first=early or by_memory, later=by_memory)
