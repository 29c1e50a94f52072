"""What spmm_nm_int4 runs for a problem, and why; as explain.py for 16 bits."""

from __future__ import annotations

from dataclasses import replace

from ....measure.product import Product
from ....measure.roofline import predict
from ....plan import Target
from ....tune import Machine
from ..coded_explain import explain_coded
from ..cost import Problem
from ..explain import Explanation
from .plan import INT4, Kind

#: When a layer decodes its weight: the facts of `op.why_no_int4_kernel`, and those of layers.
INT4_RUNS_DENSE_WHEN = (
    "the pattern is neither 2:4 nor 1:4",
    "the GPU is no H100 or H200",
    "groups of w are not of 32, 64 or 128 columns (beside codes of x: of 128)",
    "x is float32, or rounded to int4",
    "a gradient is to be kept",
)


def explain_int4(
    problem: Problem,
    kind: Kind,
    gpu: Target,
    *,
    machine: Machine | None = None,
    others: int = 3,
) -> Explanation:
    """Say what would run for a weight of 4 bits; dense is the product of 16 bits, without codes.

    Args:
        problem: Sizes, all positive.
        kind: Groups of w, and dtype of x.
        gpu: The GPU to plan for.
        machine: The GPU that is present: what was tuned on its like is taken. None goes by the cost
            model.
        others: How many candidates to tell besides.

    Raises:
        UnsupportedError: A block of a tile does not fit an SM of that GPU.

    Example:
        >>> from hopsparse.plan import target
        >>> kind = Kind(128, "bfloat16")
        >>> found = explain_int4(Problem(16, 4096, 4096), kind, target("h200"))
        >>> round(found.floors.us, 1), found.dtype
        (1.6, 'int4:128/bfloat16')
    """
    dtype = str(kind.logical).removeprefix("torch.")
    product = Product((problem.out, problem.k), dtype, "nm", "2:4", scheme=kind.scheme)
    found = explain_coded(INT4, problem, kind.numbers, product, gpu, machine=machine, others=others)
    dense = replace(product.as_dense(), scheme="")
    bits = found.chosen.config.bits
    return replace(
        found,
        dtype=str(kind),
        dense_us=predict(dense, problem.tokens, gpu).time_us,
        dense_when=INT4_RUNS_DENSE_WHEN,
        cautions=(
            f"the cost model is that of {bits} bits with the bytes of 4; what widening costs was "
            "fitted beside x of bfloat16 alone",
        ),
    )
