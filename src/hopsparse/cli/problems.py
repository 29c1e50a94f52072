"""Layers and token counts as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..measure.suite import Problem
    from ..ops.spmm_nm.int4.plan import Kind
    from ..ops.spmm_nm.kernel import Numbers

#: Dtypes of codes, those of x behind a stroke where they are others.
CODES = ("int8", "float8_e4m3fn", "float8_e4m3fn/int4")
#: Weights of 4 bits: columns that share a scale, and x behind a stroke.
FOUR_BITS = (
    *(f"int4:{group}/{x}" for x in ("bfloat16", "float16") for group in (128, 64, 32)),
    "int4:128/int8",
    "int4:128/float8_e4m3fn",
)
_PROMOTED = "promoted"
_FLOATS = CODES[1:]
# What users of quantized layers may write.
_SCHEMES = {
    "fp8": "float8_e4m3fn",
    "fp8/int4": "float8_e4m3fn",
    "int4": "int4:64/bfloat16",
    **{f"int4:{group}": f"int4:{group}/bfloat16" for group in (128, 64, 32)},
    "int4:128/fp8": "int4:128/float8_e4m3fn",
}

# Options that two commands share.
Sums = Annotated[
    str, typer.Option(metavar="HOW", help="Of 8-bit floats: promoted, as in layers, or fast.")
]
Grouped = Annotated[
    bool,
    typer.Option(
        "--grouped",
        help="8-bit floats with a scale for each 128 columns of w; layers have one a row.",
    ),
]

# More digits than any size has: Python refuses to read thousands of them.
_NUMBER = "[0-9]{1,18}"


def shape_of(text: str) -> tuple[int, int]:
    """Read OUTxK.

    Raises:
        ArgumentError: It is no shape.

    Example:
        >>> shape_of("28672x4096")
        (28672, 4096)
    """
    found = re.fullmatch(rf"({_NUMBER})x({_NUMBER})", text)
    if found is None:
        raise ArgumentError(f"shape {text!r}", need="OUTxK", hint="--shape 4096x4096")
    return int(found[1]), int(found[2])


def tokens_of(text: str) -> list[int]:
    """Read token counts with commas between them.

    Raises:
        ArgumentError: It is no list of numbers.

    Example:
        >>> tokens_of("1,256")
        [1, 256]
    """
    if re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", text) is None:
        raise ArgumentError(f"tokens {text!r}", need="numbers with commas", hint="--tokens 1,256")
    return [int(word) for word in text.split(",")]


def check_dtype(dtype: str | None, codes: Sequence[str] = (*CODES, *FOUR_BITS)) -> None:
    """Refuse a dtype that is neither of 16 bits nor of `codes`; None is for others to choose.

    Raises:
        ArgumentError: It says which there are.

    Example:
        >>> check_dtype("fp8", CODES)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: dtype 'fp8'. Required: one of bfloat16, float16, int8, \
float8_e4m3fn, float8_e4m3fn/int4. Try: --dtype float8_e4m3fn.
    """
    from ..measure.suite import Problem

    known = (*Problem.DTYPES, *codes)
    if dtype is not None and dtype not in known:
        near = _SCHEMES.get(dtype)
        hint = f"--dtype {near if near in known else known[0]}"
        raise ArgumentError(f"dtype {dtype!r}", need="one of " + ", ".join(known), hint=hint)


def check_sums(dtype: str, sums: str, grouped: bool) -> None:
    """Refuse --sums that do not exist, and --sums and --grouped of what has no two ways to add.

    Raises:
        ArgumentError: It says what.
    """
    from ..ops.spmm_nm.scaled.plan import numbers_for

    if dtype in CODES:
        numbers_for(dtype, sums, grouped=grouped)
    if (dtype not in CODES and grouped) or (dtype not in _FLOATS and sums != _PROMOTED):
        raise ArgumentError(
            f"--sums {sums}{' --grouped' * grouped} of {dtype}",
            need="8-bit floats, whose sums are taken in two ways",
            hint="--dtype float8_e4m3fn",
        )


def problem_of(
    layer: str, shape: tuple[int, int], tokens: int, dtype: str, sums: str, grouped: bool
) -> Problem:
    """A product, of 16 bits, of codes or with a weight of 4 bits.

    Args:
        layer: What it is in a model.
        shape: [out, k].
        tokens: Rows of x.
        dtype: Of x and w.
        sums: Of 8-bit floats.
        grouped: Whether w of 8-bit floats has a scale for each 128 columns.

    Raises:
        ArgumentError: There is no such product.
    """
    from ..measure.suite import Int4Problem, Problem, SummedProblem

    if dtype in FOUR_BITS:
        return Int4Problem(layer, *shape, tokens, dtype)
    if dtype not in CODES:
        return Problem(layer, *shape, tokens, dtype)
    return SummedProblem(layer, *shape, tokens, dtype, "rows", sums, grouped and dtype != "int8")


def numbers_of(problem: Problem) -> Numbers | None:
    """What a problem of 8-bit codes computes with; None for others."""
    from ..measure.suite import SummedProblem
    from ..ops.spmm_nm.scaled.plan import numbers_for

    if not isinstance(problem, SummedProblem):
        return None
    return numbers_for(problem.dtype, problem.sums, grouped=problem.grouped)


def four_bits_of(problem: Problem) -> Kind | None:
    """Weight and inputs of a problem with a weight of 4 bits; None for others."""
    from ..measure.suite import Int4Problem
    from ..ops.spmm_nm.int4.plan import Kind

    return Kind.parse(problem.dtype) if isinstance(problem, Int4Problem) else None
