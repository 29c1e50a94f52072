"""Tiles in the quick set of `hopsparse verify`, and all kernels that it launches for them.

Compiling a kernel takes ten times as long as all else of a check, so that the quick set takes few,
and `hopsparse compile --all` compiles those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from ...plan import KernelSpec
from .chooser import Chooser
from .cost import Problem
from .kernel import SWIGLU, Config, Numbers, spec_for, spec_of_numbers, stores_directly
from .plan import CANDIDATES, eight_bit, for_experts, four_bit, tiles

_FP8, _INT8, _BF16, _F16 = "float8_e4m3fn", "int8", "bfloat16", "float16"

#: Of 16 bits: the most tokens, in a cluster that shares them; two panels and three warpgroups in
#: clusters that share w; k in four parts.
TILES: tuple[Config, ...] = tuple(CANDIDATES[i] for i in (0, 4, 8, -1))

#: tokens, out, k: a tile; ragged on all sides; with an epilogue; with 8 bits of results.
WHOLE, RAGGED = (256, 256, 512), (133, 264, 1168)
EPILOGUE_8, EPILOGUE_4, CODES_OUT = (77, 136, 640), (45, 136, 256), (65, 200, 256)
_SMS = 132  # of an H100 or H200, where tiles are chosen

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
    halves = Numbers(_BF16, _BF16, _BF16)
    specs = [spec_for(config, _BF16, direct=direct) for config in TILES for direct in (False, True)]
    small = _small(CANDIDATES)
    specs.append(spec_for(small, _BF16, direct=True))
    specs += [_behind(small, each, "gelu") for each in _outs(halves)]
    specs.append(spec_for(small, _BF16, activation="gelu", residual=True, direct=True))
    specs += [spec_of_numbers(c, halves, "none", False, False) for c in tiles_of_experts()]
    small = _small(for_experts())
    specs += [spec_of_numbers(small, each, "silu", False, False) for each in _outs(halves)]
    return list(dict.fromkeys([*specs, *_of_eight_bit(), *_of_four_bit()]))


def specs_of_all() -> list[KernelSpec]:
    """Kernels that all checks launch beside those that are compiled ahead."""
    specs = []
    for dtype in (_BF16, _F16):
        specs += [spec_for(config, dtype, direct=True) for config in CANDIDATES]
        own = Numbers(dtype, dtype, dtype)
        specs += [spec_of_numbers(config, own, "none", False, False) for config in for_experts()]
    specs += [spec_for(config, _BF16, activation=SWIGLU) for config in tiles(SWIGLU)]
    for numbers in _EIGHT_BIT:
        specs += _of_tiles(eight_bit(numbers), numbers)
    for numbers in (HALVES, CODES):
        specs += _of_tiles(four_bit(numbers), numbers)
    return list(dict.fromkeys(specs))


def _of_eight_bit() -> Iterator[KernelSpec]:
    from .scaled.plan import SCALED, as_widened, widens_once

    for numbers in _EIGHT_BIT:
        yield from _of_tiles(tiles_of_eight_bit(numbers), numbers)
        for shape in (RAGGED,) if numbers.x != "int4" else (WHOLE, RAGGED):
            widens = widens_once(Problem(*shape), numbers, _SMS)
            for each in _outs(as_widened(numbers) if widens else numbers):
                yield _chosen(SCALED, shape, each)
    for out in (_BF16, _F16, "float32"):
        yield _chosen(SCALED, EPILOGUE_8, replace(INT8, out=out), "gelu")
    for numbers in (replace(INT8, out=_INT8), replace(FAST, out=_FP8, promoted=True)):
        yield _chosen(SCALED, CODES_OUT, numbers)


def _of_four_bit() -> Iterator[KernelSpec]:
    from .int4.plan import INT4

    for numbers in _FOUR_BIT:
        for each in _outs(numbers):
            yield _chosen(INT4, RAGGED, each)
    for numbers in (HALVES, CODES):
        yield from _of_tiles(tiles_of_four_bit(numbers), numbers)
        for each in _outs(numbers):
            yield _chosen(INT4, EPILOGUE_4, each, "relu")


def _chosen(
    chooser: Chooser, shape: tuple[int, int, int], numbers: Numbers, act: str = "none"
) -> KernelSpec:
    """What runs where nothing was tuned; with an activation there is a residual as well."""
    config = chooser.choose(Problem(*shape), numbers, _SMS, activation=act)
    direct = stores_directly(shape[1], numbers.out)
    return spec_of_numbers(config, numbers, act, act != "none", direct)


def _small(tiles: Iterable[Config]) -> Config:
    """One panel by 16 tokens, alone."""
    own = (1, 1, 16, 1, 1)
    facts = ("warpgroups", "panels", "tokens", "cluster", "ways")
    return next(c for c in tiles if tuple(getattr(c, fact) for fact in facts) == own)


def _outs(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Results of 16 bits and of float32."""
    return numbers, replace(numbers, out="float32")


def _of_tiles(tiles: Iterable[Config], numbers: Numbers) -> Iterator[KernelSpec]:
    """Rows of whole lines, and others."""
    for config in tiles:
        for each in _outs(numbers):
            for direct in (False, True):
                yield spec_of_numbers(config, each, "none", False, direct)


def _behind(config: Config, numbers: Numbers, act: str) -> KernelSpec:
    """All of an epilogue."""
    return spec_of_numbers(config, numbers, act, True, False)
