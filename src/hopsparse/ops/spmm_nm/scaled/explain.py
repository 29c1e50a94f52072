"""What spmm_nm_scaled runs for a problem, and why; as explain.py for 16 bits."""

from __future__ import annotations

from dataclasses import replace

from ....formats.scheme import Scheme
from ....measure.product import Product
from ....measure.roofline import predict
from ....plan import Target
from ....tune import Machine, Store
from ..chooser import coded_us
from ..cost import Problem
from ..explain import Explanation, Floors, floors_of, tile_of
from ..kernel import Numbers, spec_of_numbers, stores_directly
from .dispatch import GROUP
from .plan import (
    candidates_scaled,
    choose_scaled,
    codes_of,
    scaled_key,
    scaled_versions,
    sums_of,
    tuned_scaled,
)

_SCHEMES = {"int8": "int8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int4": "int4"}

#: When a layer of codes decodes them: the facts of `scaled.why_no_kernel`, and those of layers.
CODES_RUN_DENSE_WHEN = (
    "the pattern is neither 2:4 nor 1:4",
    "the GPU is no H100 or H200",
    "inputs are not rounded to the codes of w, or to int4 beside float8_e4m3fn",
    "a row of w has several scales",
    "a gradient is to be kept",
)


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
    sm_count = gpu.sm_count if machine is None else machine.sm_count
    chosen = choose_scaled(problem, numbers, sm_count, machine=machine)
    ordered = [each for each in candidates_scaled(problem, numbers, sm_count) if each != chosen]
    direct = stores_directly(problem.out, numbers.out)
    key = scaled_key(problem, numbers, machine or Machine("", 0, ""))
    tiles = tuple(
        tile_of(
            config,
            problem,
            spec_of_numbers(config, numbers, "none", False, direct),
            gpu,
            sm_count,
            coded_us(config, problem, numbers, sm_count),
        )
        for config in (chosen, *ordered[:others])
    )
    product = _product(problem, numbers)
    return Explanation(
        problem=problem,
        dtype=codes_of(numbers),
        target=gpu,
        machine=machine,
        chosen=tiles[0],
        is_tuned=machine is not None and tuned_scaled(problem, numbers, machine) is not None,
        others=tiles[1:],
        floors=_floors(product, problem, numbers, gpu),
        dense_us=predict(product.as_dense(), problem.tokens, gpu).time_us,
        results=tuple(Store.default().entries(key.op, key.kernel, key.problem)),
        names=scaled_versions(numbers),
        sums=sums_of(numbers),
        dense_when=CODES_RUN_DENSE_WHEN,
    )


def _floors(product: Product, problem: Problem, numbers: Numbers, gpu: Target) -> Floors:
    """Those of the layer; but scales by group are in float32 here, where layers have 16 bits."""
    found = floors_of(product, problem.tokens, gpu)
    if not numbers.grouped:
        return found
    more = found.bytes + 2 * problem.out * -(-problem.k // GROUP)
    return replace(found, bytes=more, bytes_us=1e6 * more / gpu.read_bandwidth)


def _product(problem: Problem, numbers: Numbers) -> Product:
    """The layer with its scales, and one for each token."""
    group = GROUP if numbers.grouped else 0
    scheme = Scheme(_SCHEMES[numbers.w], group, _SCHEMES[numbers.x])
    return Product((problem.out, problem.k), "bfloat16", "nm", "2:4", scheme=str(scheme))
