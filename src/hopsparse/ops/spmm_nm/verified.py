"""Tiles in the quick set of `hopsparse verify`, and all kernels that it launches for them.

Compiling a kernel takes ten times as long as all else of a check, so that the quick set takes few,
and `hopsparse compile --all` compiles those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from ...plan import KernelSpec
from .kernel import Config, Numbers, spec_for, spec_of_numbers
from .plan import CANDIDATES, eight_bit, for_experts, four_bit

_FP8, _INT8, _BF16, _F16 = "float8_e4m3fn", "int8", "bfloat16", "float16"

#: Of 16 bits: the most tokens, in a cluster that shares them; two panels and three warpgroups in
#: clusters that share w; k in four parts.
TILES: tuple[Config, ...] = tuple(CANDIDATES[i] for i in (0, 4, 8, -1))

#: Ways of 8 bits.
INT8 = Numbers(_INT8, _INT8, _BF16)
FAST = Numbers(_FP8, _FP8, _BF16)
_EIGHT_BIT = (
    INT8,
    FAST,
    replace(FAST, promoted=True),
    replace(FAST, grouped=True),
    replace(FAST, x="int4"),
    replace(FAST, x="int4", promoted=True),
)
#: Ways of w of 4 bits by every tile.
HALVES = Numbers("int4", _BF16, _BF16)
CODES = Numbers("int4", _INT8, _BF16, grouped=True)
_FOUR_BIT = (
    HALVES,
    CODES,
    replace(HALVES, fine=True),
    Numbers("int4", _F16, _F16),
    replace(CODES, x=_FP8),
)


@cache
def tiles_of_eight_bit(numbers: Numbers) -> tuple[Config, ...]:
    """The largest tile; of int8 also three warpgroups."""
    tiles = eight_bit(numbers)
    return tiles[:1] if numbers != INT8 else (tiles[0], tiles[8])


@cache
def tiles_of_four_bit(numbers: Numbers) -> tuple[Config, ...]:
    """The largest tile, and three warpgroups that share k in a cluster that does."""
    tiles = four_bit(numbers)
    return tiles[0], next(c for c in tiles if (c.ways, c.tokens, c.cluster_k) == (3, 64, 2))


def tiles_of_experts() -> tuple[Config, ...]:
    """The largest tile in a cluster, and without one."""
    return for_experts()[:2]


def verified_specs() -> list[KernelSpec]:
    """Kernels of the quick set; some are of `every_spec` in any case."""
    small = _small(CANDIDATES)
    specs = [spec_for(config, _BF16, direct=direct) for config in TILES for direct in (False, True)]
    specs.append(spec_for(small, _BF16, direct=True))
    specs += _behind_sums(small, Numbers(_BF16, _BF16, _BF16), "gelu", (_BF16, "float32"))
    specs.append(spec_for(small, _BF16, activation="gelu", residual=True, direct=True))
    for numbers in _EIGHT_BIT:
        specs += _of_tiles(tiles_of_eight_bit(numbers), numbers)
        specs += _plain(_small(eight_bit(numbers)), numbers, direct=False)
    small = _small(eight_bit(INT8))
    specs += _behind_sums(small, INT8, "gelu", (_BF16, _F16, "float32"))
    for code in (_INT8, _FP8):
        numbers = Numbers(code, code, code, promoted=code == _FP8)
        specs.append(spec_of_numbers(small, numbers, "none", False, True))
    for numbers in _FOUR_BIT:
        # Of few tokens three warpgroups share k.
        thin = next(c for c in four_bit(numbers) if (c.ways, c.tokens) == (3, 16))
        specs += _plain(thin, numbers, direct=False)
    for numbers in (HALVES, CODES):
        specs += _of_tiles(tiles_of_four_bit(numbers), numbers)
        small = _small(four_bit(numbers))
        specs += _behind_sums(small, numbers, "relu", (_BF16, "float32"))
    halves = Numbers(_BF16, _BF16, _BF16)
    specs += [spec_of_numbers(c, halves, "none", False, False) for c in tiles_of_experts()]
    small = _small(for_experts())
    for out in (_BF16, "float32"):
        specs.append(spec_of_numbers(small, replace(halves, out=out), "silu", False, False))
    return list(dict.fromkeys(specs))


def _small(tiles: Iterable[Config]) -> Config:
    """One panel by 16 tokens, alone."""
    own = (1, 1, 16, 1, 1, 1)
    facts = ("warpgroups", "panels", "tokens", "cluster", "cluster_k", "ways")
    return next(c for c in tiles if tuple(getattr(c, fact) for fact in facts) == own)


def _plain(config: Config, numbers: Numbers, direct: bool) -> list[KernelSpec]:
    """Results of 16 bits and of float32."""
    return [
        spec_of_numbers(config, each, "none", False, direct)
        for each in (numbers, replace(numbers, out="float32"))
    ]


def _of_tiles(tiles: Iterable[Config], numbers: Numbers) -> list[KernelSpec]:
    """Rows of whole lines, and others."""
    return [spec for c in tiles for direct in (False, True) for spec in _plain(c, numbers, direct)]


def _behind_sums(
    config: Config, numbers: Numbers, act: str, outs: Iterable[str]
) -> list[KernelSpec]:
    """All of an epilogue."""
    return [spec_of_numbers(config, replace(numbers, out=out), act, True, False) for out in outs]
