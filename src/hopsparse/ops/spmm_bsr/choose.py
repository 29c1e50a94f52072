"""Which tile runs a weight, in which grain: the one that was measured to win, else the model's.

The model is asked about every tile in every grain that the weight can be cut into. It was fitted to
weights in the grain of their own blocks; another one has to be predicted to win by more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import torch

from ...plan import Target
from ...tune import Key, Machine, Store, kernel_hash, token_class, version_of
from . import fragments_cost
from .fragments_kernel import FragmentConfig
from .grains import Counts, Grain, PieceCounts, StripCounts, grain_of, own_grains
from .kernel import Config
from .plan import (
    CANDIDATES,
    FRAGMENT_CANDIDATES,
    Decision,
    Problem,
    decoding_us,
    dense_us,
    doubted_us,
    spec_of,
)
from .schedule import predicted_us

Tile = Config | FragmentConfig

#: Every tile of both kernels.
TILES: tuple[Tile, ...] = (*CANDIDATES, *FRAGMENT_CANDIDATES)
#: What cuBLAS does, by its name in tuning results. Another torch brings another cuBLAS.
DENSE = f"dense, torch {torch.__version__}"
# How much faster a tile of another grain must be predicted to be: the rows that the model is fitted
# to have none, and the weight is laid out larger.
_DOUBT_OF_GRAINS = 1.1


def predicted_by_tile(
    counts: Mapping[Grain, Counts], problem: Problem, target: Target
) -> dict[Tile, float]:
    """Device time of every tile of some grains, in us.

    Args:
        counts: `counts_of` the weight by grain.
        problem: Sizes.
        target: The GPU.
    """
    timed: dict[Tile, float] = {}
    for tile in TILES:
        found = counts.get(grain_of(tile))
        if isinstance(tile, Config) and isinstance(found, StripCounts):
            timed[tile] = predicted_us(tile, found.lengths, problem, target.sm_count)
        elif isinstance(tile, FragmentConfig) and isinstance(found, PieceCounts):
            timed[tile] = fragments_cost.predicted_us(tile, found, problem, target.sm_count)
    return timed


def by_model(
    counts: Mapping[Grain, Counts],
    block: tuple[int, int],
    problem: Problem,
    dtype: str,
    target: Target,
) -> Decision:
    """The tile that is predicted to be fastest, with the doubt that its grain deserves.

    Args:
        counts: `counts_of` the weight by grain; those of its own blocks at least.
        block: Sides of its blocks.
        problem: Sizes.
        dtype: Of x and w.
        target: The GPU.
    """
    timed, own = predicted_by_tile(counts, problem, target), own_grains(block)

    def doubted(tile: Tile) -> float:
        doubt = 1.0 if grain_of(tile) in own else _DOUBT_OF_GRAINS
        return doubt * doubted_us(tile, timed[tile])

    best = min(timed, key=doubted)
    return Decision(
        best, timed[best], dense_us(problem, dtype, target), decoding_us(problem, target)
    )


def by_measurement(
    pattern: str, problem: Problem, dtype: str, machine: Machine, target: Target
) -> Decision | None:
    """The tile that was measured to be fastest for a pattern and its class of token counts.

    Args:
        pattern: `grains.digest` of the weight.
        problem: Sizes.
        dtype: Of x and w.
        machine: The GPU, for what was tuned on its like.
        target: The same, for what was not measured.

    Returns:
        None where no tile of it was.
    """
    entry = Store.default().get(key_of(pattern, problem, dtype, machine))
    if not entry.measured:
        return None
    names = versions(dtype)
    best = entry.best(names)
    if best is None:
        return None
    dense = entry.measured[DENSE].us if entry.best([DENSE]) else dense_us(problem, dtype, target)
    found = entry.measured[best].us
    return Decision(names[best], found, dense, decoding_us(problem, target), measured=True)


def key_of(pattern: str, problem: Problem, dtype: str, machine: Machine) -> Key:
    """What tuning results of a pattern are kept under."""
    sizes = f"{problem.out}x{problem.k} {dtype}, pattern {pattern}"
    return Key(
        "spmm_bsr", _kernels(), f"{sizes}, tokens {token_class(problem.tokens).name}", machine
    )


def versions(dtype: str, tiles: Iterable[Tile] = TILES) -> dict[str, Tile]:
    """Tiles by the names that tuning results have them under, in their order."""
    return {_version(tile, dtype): tile for tile in tiles}


@cache
def _version(tile: Tile, dtype: str) -> str:
    return version_of(tile.name, spec_of(tile, 64, dtype))


@cache
def _kernels() -> str:
    specs = (spec_of(tile, 64, "bfloat16") for tile in (CANDIDATES[0], FRAGMENT_CANDIDATES[0]))
    return " ".join(kernel_hash(spec) for spec in specs)
