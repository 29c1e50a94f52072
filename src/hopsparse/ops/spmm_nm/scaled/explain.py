"""What spmm_nm_scaled runs for a problem, and why; as explain.py for 16 bits."""

from __future__ import annotations

from dataclasses import replace

from ....formats.scheme import Scheme
from ....measure.product import Product
from ....plan import Target
from ....tune import Machine
from ..coded_explain import explain_coded
from ..cost import Problem, widen_once_us
from ..explain import Explanation, Floors
from ..kernel import Numbers
from .dispatch import GROUP
from .plan import SCALED, as_widened, codes_of, sums_of, widens_once

_SCHEMES = {"int8": "int8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int4": "int4"}

#: When a layer of codes decodes them: the facts of `scaled.why_no_kernel`, and those of layers.
CODES_RUN_DENSE_WHEN = (
    "the pattern is neither 2:4 nor 1:4",
    "the GPU is no H100 or H200",
    "inputs are not rounded to the codes of w, or to int4 beside float8_e4m3fn",
    "a row of w has several scales",
    "a gradient is to be kept",
)

_OF_CALLS = {
    sums: (f"no layer has {sums} sums: it is calls of spmm_nm_scaled that run this",)
    for sums in ("fast", "grouped")
}


def explain_scaled(
    problem: Problem,
    numbers: Numbers,
    gpu: Target,
    *,
    machine: Machine | None = None,
    others: int = 3,
) -> Explanation:
    """Say what would run for codes.

    Args:
        problem: Sizes, all positive.
        numbers: As `numbers_for` makes them.
        gpu: The GPU to plan for.
        machine: The GPU that is present: what was tuned on its like is taken. None goes by the cost
            model.
        others: How many candidates to tell besides.

    Raises:
        UnsupportedError: A block of a tile does not fit an SM of that GPU.

    Example:
        >>> from hopsparse.plan import target
        >>> from hopsparse.ops.spmm_nm.scaled.plan import numbers_for
        >>> found = explain_scaled(Problem(4096, 4096, 4096), numbers_for("int8"), target("h200"))
        >>> round(found.floors.us, 1), found.sums
        (43.4, 'exact')
    """
    product, sums = _product(problem, numbers), sums_of(numbers)
    sm_count = gpu.sm_count if machine is None else machine.sm_count
    once = widens_once(problem, numbers, sm_count, machine=machine)
    runs = as_widened(numbers) if once else numbers
    found = explain_coded(SCALED, problem, runs, product, gpu, machine=machine, others=others)
    ahead = f"x is widened once ahead of it, in {widen_once_us(problem):.1f} us predicted"
    return replace(
        found,
        dtype=codes_of(numbers),
        floors=_floors(found.floors, problem, numbers, gpu),
        sums=sums,
        dense_when=CODES_RUN_DENSE_WHEN,
        cautions=(*((ahead,) if once else ()), *_OF_CALLS.get(sums, ())),
    )


def _floors(found: Floors, problem: Problem, numbers: Numbers, gpu: Target) -> Floors:
    """Those of the layer; but scales by group are in float32 here, where layers have 16 bits."""
    if not numbers.grouped:
        return found
    more = found.bytes + 2 * problem.out * -(-problem.k // GROUP)
    return replace(found, bytes=more, bytes_us=1e6 * more / gpu.read_bandwidth)


def _product(problem: Problem, numbers: Numbers) -> Product:
    """The layer with its scales, and one for each token."""
    group = GROUP if numbers.grouped else 0
    scheme = Scheme(_SCHEMES[numbers.w], group, _SCHEMES[numbers.x])
    return Product((problem.out, problem.k), "bfloat16", "nm", "2:4", scheme=str(scheme))
