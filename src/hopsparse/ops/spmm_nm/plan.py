"""What spmm_nm runs for a problem: which kernels may, and which one does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import torch

from ...plan import KernelSpec
from ...tune import Key, Machine, Store, kernel_hash, token_class, version_of
from .cost import Problem, fastest, predicted_us, suits
from .kernel import (
    SWIGLU,
    Config,
    Numbers,
    deepest,
    fold_of,
    spec_for,
    spec_of_numbers,
    stores_directly,
)
from .widen import SASS as SASS_OF_WIDEN
from .widen import widen_spec

__all__ = [
    "CANDIDATES",
    "DENSE",
    "Problem",
    "candidates",
    "choices",
    "choose",
    "every_spec",
    "key_of",
    "sass_of",
    "spec_of",
    "tuned",
    "versions",
]

# Token counts of every tile, and of every class, are multiples of it.
_STEP = 16

#: What cuBLAS does, by its name in tuning results. Another torch brings another cuBLAS.
DENSE = f"dense, torch {torch.__version__}"

# Instructions that every kernel of this operator must hold, beside its product.
_SASS = ("UTMALDG", "USETMAXREG")
_PRODUCTS = {"bf16": "HGMMA.SP", "f16": "HGMMA.SP", "s8": "IGMMA.SP"}


def _tile(
    warpgroups: int, panels: int, tokens: int, units: int, cluster: tuple[int, ...] = (1, 1)
) -> Config:
    return deepest(Config(warpgroups, panels, tokens, units, 2, *cluster))


#: Every tile that is ever considered, the largest first: those that were fastest, or within 2 %
#: of it, for some row of benchmarks/results/h200/spmm_nm_candidates.jsonl.
CANDIDATES: tuple[Config, ...] = (
    _tile(2, 1, 256, 1, (2, 1)),
    _tile(2, 1, 256, 1),
    _tile(2, 2, 192, 1, (2, 1)),
    _tile(2, 2, 128, 1, (2, 1)),
    _tile(2, 2, 128, 1, (1, 2)),
    _tile(2, 2, 128, 1),
    _tile(3, 1, 192, 1, (2, 1)),
    _tile(2, 1, 192, 1, (1, 2)),
    _tile(3, 1, 128, 1, (1, 2)),
    _tile(3, 1, 96, 1, (1, 2)),
    _tile(2, 1, 128, 2, (1, 2)),
    _tile(2, 1, 128, 2),
    _tile(2, 1, 96, 2, (2, 1)),
    _tile(2, 1, 64, 2, (1, 2)),
    _tile(2, 1, 64, 2),
    _tile(1, 1, 64, 2, (1, 2)),
    _tile(1, 1, 64, 2),
    _tile(2, 1, 32, 2),
    _tile(1, 1, 32, 2, (1, 2)),
    _tile(1, 1, 32, 2),
    _tile(2, 1, 16, 2),
    _tile(1, 1, 16, 2),
    _tile(1, 1, 64, 2, (1, 1, 2)),
    _tile(1, 1, 32, 2, (1, 1, 2)),
    _tile(1, 1, 16, 2, (1, 1, 2)),
    _tile(1, 1, 16, 2, (1, 1, 4)),
)


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    if spec == widen_spec():
        return SASS_OF_WIDEN
    return (_PRODUCTS.get(spec.name.split()[0], "QGMMA.SP"), *_SASS)


@cache
def tiles(activation: str = "none") -> tuple[Config, ...]:
    """Every tile that a product of 16 bits considers.

    The largest has no registers left for results of gate and up.

    Args:
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
    """
    if activation != SWIGLU:
        return CANDIDATES
    return tuple(config for config in CANDIDATES if config.panels * config.tokens < 384)


def candidates(
    problem: Problem, sm_count: int, configs: Iterable[Config] = CANDIDATES
) -> list[Config]:
    """The tiles that suit a problem, the one that is predicted to be fastest first."""
    suited = [config for config in configs if suits(config, problem, sm_count)]
    return sorted(suited, key=lambda config: predicted_us(config, problem, sm_count))


def choose(
    problem: Problem,
    sm_count: int,
    *,
    dtype: str = "bfloat16",
    machine: Machine | None = None,
    activation: str = "none",
) -> Config:
    """The tile that runs: the tuned winner of its class of token counts, else the cost model's.

    It is the same for all token counts that round up to one multiple of 16, whatever the cost model
    says: no tile is finer, and `choices` need not ask for every count.

    Args:
        problem: Sizes, all positive.
        sm_count: SMs of the GPU.
        dtype: Of x and w, `bfloat16` or `float16`.
        machine: The GPU, for what was tuned on its like; None goes by the cost model alone.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`, which not every tile has.
    """
    known = tiles(activation)
    if machine is not None and (found := tuned(problem, dtype, machine)) in known:
        return found
    return _by_model(replace(problem, tokens=_rounded(problem.tokens)), sm_count, known)


def choices(
    problem: Problem,
    sm_count: int,
    *,
    dtype: str = "bfloat16",
    machine: Machine | None = None,
    activation: str = "none",
) -> dict[Config, int]:
    """Every tile that some count from 1 to `problem.tokens` chooses, and the least such count.

    Args:
        problem: Sizes; the most tokens.
        sm_count: As for `choose`.
        dtype: As for `choose`.
        machine: As for `choose`.
        activation: As for `choose`.

    Example:
        >>> list(choices(Problem(16, 4096, 4096), 132).values())
        [1]
    """
    found: dict[Config, int] = {}
    for tokens in range(_STEP, _rounded(problem.tokens) + 1, _STEP):
        each = replace(problem, tokens=tokens)
        config = choose(each, sm_count, dtype=dtype, machine=machine, activation=activation)
        found.setdefault(config, tokens - _STEP + 1)
    return found


def tuned(problem: Problem, dtype: str, machine: Machine) -> Config | None:
    """The fastest tile that was measured for the class of a problem; None if none was.

    A dense product that is faster yet is no matter here: `dense.dense_win` says where one is.
    """
    entry = Store.default().get(key_of(problem, dtype, machine))
    if not entry.measured:
        return None
    names = versions(dtype)
    best = entry.best(names)
    return None if best is None else names[best]


def key_of(problem: Problem, dtype: str, machine: Machine) -> Key:
    """What tuning results of a problem are kept under."""
    sizes = f"{problem.out}x{problem.k} {dtype}, tokens {token_class(problem.tokens).name}"
    kernel = kernel_hash(spec_for(CANDIDATES[0], dtype))
    return Key("spmm_nm", kernel, sizes, machine)


def versions(dtype: str, configs: Sequence[Config] = CANDIDATES) -> dict[str, Config]:
    """Tiles by the names that tuning results have them under, in their order."""
    return {_version(config, dtype): config for config in configs}


def spec_of(
    config: Config,
    out: int,
    dtype: str,
    *,
    out_dtype: str | None = None,
    activation: str = "none",
    residual: bool = False,
) -> KernelSpec:
    """The kernel of a tile for a weight of `out` rows; the rest is as for `spec_for`."""
    return spec_for(
        config,
        dtype,
        out_dtype=out_dtype,
        activation=activation,
        residual=residual,
        direct=stores_directly(out // fold_of(activation), out_dtype or dtype),
    )


@cache
def _version(config: Config, dtype: str) -> str:
    return version_of(config.name, spec_for(config, dtype))


@lru_cache(maxsize=1 << 16)
def _by_model(problem: Problem, sm_count: int, known: tuple[Config, ...]) -> Config:
    return fastest(candidates(problem, sm_count, known), problem, sm_count)


def _rounded(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


def every_spec() -> list[KernelSpec]:
    """Every kernel that a plain product may run, and one of each kind of epilogue."""
    specs = [spec_for(config, dtype) for dtype in ("bfloat16", "float16") for config in CANDIDATES]
    specs += [spec_for(config, "bfloat16", activation=SWIGLU) for config in tiles(SWIGLU)[::3]]
    for config in (CANDIDATES[0], CANDIDATES[2], CANDIDATES[-1]):
        specs += [spec_for(config, "bfloat16", activation=act) for act in ("relu", "gelu", "silu")]
        specs.append(spec_for(config, "bfloat16", activation="gelu_tanh", residual=True))
        specs.append(spec_for(config, "float16", out_dtype="float32"))
        specs.append(spec_for(config, "bfloat16", direct=True))
    specs.append(widen_spec())
    from .verified import verified_specs  # These need the tiles of this module.
    from .windows.plan import window_specs

    specs += _eight_bit_specs() + _four_bit_specs() + _experts_specs() + window_specs()
    return list(dict.fromkeys([*specs, *verified_specs()]))


def _eight_bit_specs() -> list[KernelSpec]:
    fp8, plain = "float8_e4m3fn", ("none", False, False)
    specs = []
    for numbers in (Numbers(fp8, fp8, "bfloat16"), Numbers("int8", "int8", "bfloat16")):
        specs += [spec_of_numbers(c, numbers, *plain) for c in eight_bit(numbers)]
    for numbers in (
        Numbers(fp8, fp8, "bfloat16", promoted=True),
        Numbers(fp8, fp8, "bfloat16", grouped=True),
        Numbers(fp8, "int4", "bfloat16"),
        Numbers(fp8, "int4", "bfloat16", promoted=True),
    ):
        specs += [spec_of_numbers(c, numbers, *plain) for c in eight_bit(numbers)]
    for numbers in (
        Numbers(fp8, fp8, fp8),
        Numbers(fp8, "float8_e5m2", "float16"),
        Numbers(fp8, "int4", "float16", grouped=True),
        Numbers("int8", "int8", "int8"),
        Numbers("int8", "int8", "int32"),
        Numbers("int8", "int8", "float32"),
    ):
        first, *_, last = eight_bit(numbers)
        specs += [spec_of_numbers(c, numbers, *plain) for c in (first, last)]
        if numbers.out not in ("int8", "int32", fp8):
            specs.append(spec_of_numbers(first, numbers, "silu", True, False))
        if numbers.out != "int32":
            folded = eight_bit(numbers, SWIGLU)
            specs += [spec_of_numbers(c, numbers, SWIGLU, False, False) for c in folded[::7]]
    return specs


def _four_bit_specs() -> list[KernelSpec]:
    """Kernels with w of 4 bits."""
    plain, specs = ("none", False, False), []
    for numbers in (
        Numbers("int4", "bfloat16", "bfloat16"),
        Numbers("int4", "float16", "float16"),
        Numbers("int4", "float8_e4m3fn", "bfloat16", grouped=True),
        Numbers("int4", "int8", "bfloat16", grouped=True),
    ):
        specs += [spec_of_numbers(config, numbers, *plain) for config in four_bit(numbers)]
    fine = Numbers("int4", "bfloat16", "bfloat16", fine=True)
    specs += [spec_of_numbers(config, fine, *plain) for config in four_bit(fine)[::3]]
    first, *_, last = four_bit(fine)
    for config in (first, last):
        specs.append(spec_of_numbers(config, fine, "silu", True, False))
        specs.append(spec_of_numbers(config, replace(fine, out="float32"), *plain))
    return specs


def _experts_specs() -> list[KernelSpec]:
    """Kernels with several weights."""
    halves, plain = Numbers("bfloat16", "bfloat16", "bfloat16"), ("none", False, False)
    specs = [spec_of_numbers(config, halves, *plain) for config in for_experts()[1:-1:3]]
    first, *_, last = for_experts()
    specs += [spec_of_numbers(config, halves, *plain) for config in (first, last)]
    for config in (first, last):
        specs.append(spec_of_numbers(config, Numbers("float16", "float16", "float16"), *plain))
        specs += [spec_of_numbers(config, halves, a, False, False) for a in ("silu", SWIGLU)]
        specs.append(spec_of_numbers(config, replace(halves, out="float32"), "none", False, True))
    return specs


@cache
def eight_bit(numbers: Numbers, activation: str = "none") -> tuple[Config, ...]:
    """Every tile that an 8-bit product considers.

    Sums that leave the tensor cores stage by stage need registers twice: 128 tokens at most for one
    panel a warpgroup. So many registers are left to those of x of 4 bits that it is 256. Of three
    warpgroups whose sums leave, none was the fastest in a problem measured. Where
    stages have scales, one is a group of 128 columns. Results of gate and up leave 32 tokens at a
    time.

    Args:
        numbers: Dtypes, and how sums are taken.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
    """
    twice = numbers.promoted or numbers.grouped
    # Sums of a thread, at two columns each.
    most = 128 if twice else 256 if numbers.x == "int4" else 384
    fits = [c for c in CANDIDATES if c.panels * c.tokens <= most]
    fits = [c for c in fits if not twice or c.warpgroups < 3]
    fits = [c for c in fits if c.store_tokens % (16 * fold_of(activation)) == 0]
    units = [1 if numbers.grouped else config.units for config in fits]
    made = (replace(c, units=n, stages=2, bits=8) for c, n in zip(fits, units, strict=True))
    return tuple(dict.fromkeys(deepest(config) for config in made))


@cache
def four_bit(numbers: Numbers) -> tuple[Config, ...]:
    """Every tile that a product with w of 4 bits considers.

    What is widened is in registers, so the largest tile of 16 bits does not fit. Where a step of 64
    columns is all of a stage, blocks cannot share it by halves.

    Args:
        numbers: Dtypes; w is `int4`.
    """
    if numbers.grouped:
        fits = list(eight_bit(numbers))
    else:
        fits = [c for c in CANDIDATES if c.panels * c.tokens < 384]
        fits = [c for c in fits if c.units % c.cluster_tokens == 0]
    made = [deepest(replace(config, stages=2, four_bit_w=True)) for config in fits]
    return tuple(dict.fromkeys(made + _in_turns(numbers)))


# Warpgroups of a team, tokens, blocks that share a tile.
_TEAMS = (
    (2, 64, 1),
    (3, 64, 1),
    (3, 64, 2),
    (3, 32, 1),
    (3, 32, 2),
    (3, 16, 1),
    (3, 16, 2),
    (3, 16, 4),
)
_MOST_STAGES_IN_TURNS = 24


def _in_turns(numbers: Numbers) -> list[Config]:
    """Tiles of few tokens that a team of consumers shares.

    One consumer would widen a weight slower than it arrives. With 4 bits a stage is small, and each
    of a team has two: so there are more of them.
    """
    units = 1 if numbers.grouped else 2
    made = []
    for ways, tokens, parts in _TEAMS:
        sizes = (ways, 1, tokens, units, 2 * ways, 1, 1, parts)
        config = Config(*sizes, bits=8 if numbers.grouped else 16, four_bit_w=True, ways=ways)
        made.append(deepest(config, _MOST_STAGES_IN_TURNS))
    return made


@cache
def for_experts() -> tuple[Config, ...]:
    """Every tile that a launch with several weights considers: those of one, with room for a table.

    None shares k: such a cluster has one tile, and the host knows of no number of tiles.

    Example:
        >>> all(each.cluster_k == 1 for each in for_experts())
        True
    """
    whole = [config for config in CANDIDATES if config.cluster_k == 1]
    made = (deepest(replace(config, stages=2, experts=True)) for config in whole)
    return tuple(dict.fromkeys(made))
