"""What runs for a product whose weight is of codes, and why; as explain.py for 16 bits."""

from __future__ import annotations

from ...measure.product import Product
from ...measure.roofline import predict
from ...plan import Target
from ...tune import Machine, Store
from .chooser import Chooser, coded_us
from .cost import Problem
from .explain import Explanation, floors_of, tile_of
from .kernel import Numbers, spec_of_numbers, stores_directly


def explain_coded(
    chooser: Chooser,
    problem: Problem,
    numbers: Numbers,
    product: Product,
    gpu: Target,
    *,
    machine: Machine | None,
    others: int,
) -> Explanation:
    """Say what is the same for every operator; it knows its own notes, and when it is decoded.

    Args:
        chooser: Of the operator.
        problem: Sizes, all positive.
        numbers: Dtypes, and how sums are taken.
        product: The layer, for floors and for the dense product.
        gpu: The GPU to plan for.
        machine: The GPU that is present: what was tuned on its like is taken. None goes by the cost
            model.
        others: How many candidates to tell besides.

    Raises:
        UnsupportedError: A block of a tile does not fit an SM of that GPU.
    """
    sm_count = gpu.sm_count if machine is None else machine.sm_count
    chosen = chooser.choose(problem, numbers, sm_count, machine=machine)
    ordered = [each for each in chooser.candidates(problem, numbers, sm_count) if each != chosen]
    direct = stores_directly(problem.out, numbers.out)
    key = chooser.key(problem, numbers, machine or Machine("", 0, ""))
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
    return Explanation(
        problem=problem,
        dtype=chooser.kind(numbers),
        target=gpu,
        machine=machine,
        chosen=tiles[0],
        is_tuned=machine is not None and chooser.tuned(problem, numbers, machine) is not None,
        others=tiles[1:],
        floors=floors_of(product, problem.tokens, gpu),
        dense_us=predict(product.as_dense(), problem.tokens, gpu).time_us,
        results=tuple(Store.default().entries(key.op, key.kernel, key.problem)),
        names=chooser.versions(numbers),
        of_codes=True,
    )
