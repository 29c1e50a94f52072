"""What spmm_nm_scaled runs for a problem: the tile that was tuned for it, else the cost model's.

As plan.py for 16 bits. A winner is of the codes of w, of whether those of x are widened, and of how
sums are taken; results of other dtypes, and codes of x in E5M2, take it too: neither changes the
main loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from ....errors import ArgumentError
from ....plan import KernelSpec
from ....tune import Key, Machine, Store, kernel_hash, token_class, version_of
from ..cost import Problem, fastest, predicted_us, suits
from ..kernel import Config, Numbers, fold_of, spec_of_numbers
from ..plan import eight_bit

#: Codes that can be multiplied, those of x behind a stroke where they are others; and how sums of
#: 8-bit floats are taken.
CODES = ("int8", "float8_e4m3fn", "float8_e4m3fn/int4")
SUMS = ("promoted", "fast")

# Token counts of every tile, and of every class, are multiples of it.
_STEP = 16
_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def numbers_for(dtype: str, sums: str = "promoted", *, grouped: bool = False) -> Numbers:
    """What a product of codes computes with, its result in bfloat16.

    Args:
        dtype: One of `CODES`.
        sums: Of 8-bit floats, `promoted` or `fast`; those of integers are exact.
        grouped: w has a scale for each 128 columns.

    Raises:
        ArgumentError: No such codes or sums, or groups of integers.

    Example:
        >>> sums_of(numbers_for("float8_e4m3fn")), sums_of(numbers_for("int8"))
        ('promoted', 'exact')
    """
    if dtype not in CODES or sums not in SUMS:
        raise ArgumentError(
            f"codes of {dtype}, sums {sums!r}",
            need=f"{', '.join(CODES)}; {' or '.join(SUMS)}",
            hint="float8_e4m3fn, promoted",
        )
    if grouped and dtype == "int8":
        raise ArgumentError(
            "scales by group of int8",
            need="8-bit floats, whose sums are no integers",
            hint="one scale a row",
        )
    w, _, x = dtype.partition("/")
    promoted = w != "int8" and sums == "promoted" and not grouped  # Groups always are.
    return Numbers(w, x or w, "bfloat16", promoted, grouped)


def sums_of(numbers: Numbers) -> str:
    """How sums are taken, in a word."""
    if numbers.w == "int8":
        return "exact"
    return "grouped" if numbers.grouped else "promoted" if numbers.promoted else "fast"


def codes_of(numbers: Numbers) -> str:
    """The one of `CODES` that is multiplied."""
    return f"{numbers.w}/{numbers.x}" if numbers.x == "int4" else numbers.w


def kind_of(numbers: Numbers) -> str:
    """Codes and sums as tuning results have them.

    Example:
        >>> kind_of(numbers_for("int8")), kind_of(numbers_for("float8_e4m3fn", "fast"))
        ('int8', 'float8_e4m3fn fast')
    """
    sums = sums_of(numbers)
    return codes_of(numbers) if sums == "exact" else f"{codes_of(numbers)} {sums}"


def scaled_us(
    config: Config, problem: Problem, numbers: Numbers, sm_count: int, activation: str = "none"
) -> float:
    """Device time of one product, predicted."""
    return predicted_us(
        config,
        problem,
        sm_count,
        promoted=numbers.promoted or numbers.grouped,
        result_bytes=_BYTES.get(numbers.out, 1) / fold_of(activation),
    )


def candidates_scaled(
    problem: Problem,
    numbers: Numbers,
    sm_count: int,
    *,
    activation: str = "none",
    configs: Iterable[Config] | None = None,
) -> list[Config]:
    """The tiles that suit a problem, the one that is predicted to be fastest first.

    Args:
        problem: Sizes, all positive.
        numbers: Dtypes, and how sums are taken.
        sm_count: SMs of the GPU.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        configs: Tiles of 8 bits; None is all of `eight_bit`.
    """
    known = eight_bit(numbers, activation) if configs is None else configs
    suited = [config for config in known if suits(config, problem, sm_count)]
    return sorted(suited, key=lambda c: scaled_us(c, problem, numbers, sm_count, activation))


def choose_scaled(
    problem: Problem,
    numbers: Numbers,
    sm_count: int,
    *,
    activation: str = "none",
    machine: Machine | None = None,
) -> Config:
    """The tile that runs: the tuned winner of its class of token counts, else the cost model's.

    It is the same for all token counts that round up to one multiple of 16, as for 16 bits.

    Args:
        problem: Sizes, all positive.
        numbers: Dtypes, and how sums are taken.
        sm_count: SMs of the GPU.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`, which not every tile has.
        machine: The GPU, for what was tuned on its like; None goes by the cost model alone.
    """
    if machine is not None:
        found = tuned_scaled(problem, numbers, machine, activation=activation)
        if found is not None:
            return found
    rounded = replace(problem, tokens=-(-problem.tokens // _STEP) * _STEP)
    return _by_model(rounded, numbers, sm_count, activation)


def choices_scaled(
    problem: Problem,
    numbers: Numbers,
    sm_count: int,
    *,
    activation: str = "none",
    machine: Machine | None = None,
) -> dict[Config, int]:
    """Every tile that some count from 1 to `problem.tokens` chooses, and the least such count.

    Arguments are those of `choose_scaled`; the problem has the most tokens.

    Example:
        >>> list(choices_scaled(Problem(16, 4096, 4096), numbers_for("int8"), 132).values())
        [1]
    """
    found: dict[Config, int] = {}
    for first in range(1, problem.tokens + 1, _STEP):
        each = replace(problem, tokens=first)
        config = choose_scaled(each, numbers, sm_count, activation=activation, machine=machine)
        found.setdefault(config, first)
    return found


def tuned_scaled(
    problem: Problem, numbers: Numbers, machine: Machine, *, activation: str = "none"
) -> Config | None:
    """The fastest tile that was measured for the class of a problem; None if none was.

    Args:
        problem: Sizes, all positive.
        numbers: Dtypes, and how sums are taken.
        machine: The GPU.
        activation: The fastest of those that have it.
    """
    entry = Store.default().get(scaled_key(problem, numbers, machine))
    if not entry.measured:
        return None
    names = scaled_versions(numbers, eight_bit(numbers, activation))
    best = entry.best(names)
    return None if best is None else names[best]


def scaled_key(problem: Problem, numbers: Numbers, machine: Machine) -> Key:
    """What tuning results of a problem are kept under: codes, sums and groups are in its words."""
    sizes = f"{problem.out}x{problem.k} {kind_of(numbers)}"
    spec = _plain(eight_bit(_standing(numbers))[0], _standing(numbers))
    words = f"{sizes}, tokens {token_class(problem.tokens).name}"
    return Key("spmm_nm_scaled", kernel_hash(spec), words, machine)


def scaled_versions(numbers: Numbers, configs: Sequence[Config] | None = None) -> dict[str, Config]:
    """Tiles by the names that tuning results have them under, in their order.

    Args:
        numbers: Dtypes, and how sums are taken.
        configs: The tiles; None is all of `eight_bit`.
    """
    known = eight_bit(_standing(numbers)) if configs is None else configs
    return {_version(config, _standing(numbers)): config for config in known}


def _standing(numbers: Numbers) -> Numbers:
    """What is measured for all dtypes of the result, and for E5M2 too."""
    return replace(numbers, x=numbers.x if numbers.x == "int4" else numbers.w, out="bfloat16")


def _plain(config: Config, numbers: Numbers) -> KernelSpec:
    return spec_of_numbers(config, numbers, "none", False, False)


@cache
def _version(config: Config, numbers: Numbers) -> str:
    return version_of(config.name, _plain(config, numbers))


@lru_cache(maxsize=1 << 16)
def _by_model(problem: Problem, numbers: Numbers, sm_count: int, activation: str) -> Config:
    found = candidates_scaled(problem, numbers, sm_count, activation=activation)
    return fastest(found, problem, sm_count)
