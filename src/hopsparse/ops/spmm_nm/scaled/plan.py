"""What spmm_nm_scaled runs for a problem: the tile that was tuned for it, else the cost model's.

By chooser.py. A winner is of the codes of w, of whether those of x are widened, and of how sums are
taken; results of other dtypes, and codes of x in E5M2, take it too: neither changes the main loop.
"""

from __future__ import annotations

from dataclasses import replace

from ....errors import ArgumentError
from ....tune import Machine
from ..chooser import Chooser, coded_us
from ..cost import Problem, widen_once_us
from ..kernel import Numbers
from ..plan import eight_bit
from ..widen import MOST_PIECES, pieces_of

#: Codes that can be multiplied, those of x behind a stroke where they are others; and how sums of
#: 8-bit floats are taken.
CODES = ("int8", "float8_e4m3fn", "float8_e4m3fn/int4")
SUMS = ("promoted", "fast")


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


def _standing(numbers: Numbers) -> Numbers:
    """What is measured for all dtypes of the result, and for E5M2 too."""
    return replace(numbers, x=numbers.x if numbers.x == "int4" else numbers.w, out="bfloat16")


#: What chooses for this operator.
SCALED = Chooser("spmm_nm_scaled", eight_bit, kind_of, _standing)
candidates_scaled = SCALED.candidates
choose_scaled = SCALED.choose
choices_scaled = SCALED.choices
tuned_scaled = SCALED.tuned
scaled_key = SCALED.key
scaled_versions = SCALED.versions


def as_widened(numbers: Numbers) -> Numbers:
    """What the product computes with where x was widened ahead of it."""
    return replace(numbers, x="float8_e4m3fn")


def widens_once(
    problem: Problem,
    numbers: Numbers,
    sm_count: int,
    *,
    activation: str = "none",
    machine: Machine | None = None,
) -> bool:
    """Whether x of 4 bits becomes E4M3 once, in a pass of its own, and not in every tile.

    It does where the pass and the product behind it are predicted to be faster; of each the tile
    that runs. As tiles are, it is the same for all token counts that round up to a multiple of 16.

    Args:
        problem: Sizes, all positive.
        numbers: Dtypes, and how sums are taken.
        sm_count: SMs of the GPU.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        machine: The GPU, for what was tuned on its like; None goes by the cost model alone.

    Example:
        >>> numbers = numbers_for("float8_e4m3fn/int4")
        >>> [widens_once(Problem(1024, out, 4096), numbers, 132) for out in (64, 4096)]
        [False, True]
    """
    if numbers.x != "int4" or problem.tokens * pieces_of(problem.k) > MOST_PIECES:
        return False
    rounded = replace(problem, tokens=-(-problem.tokens // 16) * 16)

    def product_us(of: Numbers) -> float:
        chosen = SCALED.choose(rounded, of, sm_count, activation=activation, machine=machine)
        return coded_us(chosen, rounded, of, sm_count, activation)

    return widen_once_us(rounded) + product_us(as_widened(numbers)) < product_us(numbers)
