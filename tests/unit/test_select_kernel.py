"""The text of the select kernel, run by threads of the CPU, against the reference: the same bits.

What this cannot see is the compiler's code for the GPU, its memory and its clocks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops.select import plan, reference
from tests.helpers.scores import scores_of
from tests.helpers.select_on_cpu import LONGEST, Run, compiled

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", params=[1, 2], ids="cluster {}".format)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("select"), request.param)


def with_gaps(scores: Tensor) -> Tensor:
    """Some scores are NaN, some infinite, some not there."""
    dice = torch.rand(scores.shape)
    scores = scores.masked_fill(dice < 0.1, NAN).masked_fill((dice > 0.1) & (dice < 0.2), INF)
    return scores.masked_fill(dice > 0.8, -INF)


@pytest.mark.parametrize("by", plan.BYS)
@pytest.mark.parametrize("kind", ["normal", "equal", "few values", "crowded"])
def test_rows_that_are_hard(kernel: Run, kind: str, by: plan.By) -> None:
    number = {"rank": 0.0, "mass": 0.75, "threshold": -0.25}[by]
    for scores, k in ((scores_of(kind, 1, 900), 300), (with_gaps(scores_of(kind, 1, 70)), 40)):
        sizes = reference.Sizes(k, k, sink=1, recent=2)
        arguments = (scores, None, None, by, None, float(torch.tensor(number)), sizes)
        want = reference.select(*arguments)
        for mine, other in zip(kernel(*arguments), want, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("by", plan.BYS)
def test_rows_that_have_numbers_of_their_own(kernel: Run, by: plan.By) -> None:
    columns = 333
    scores = with_gaps(scores_of("few values", 6, columns))
    k = torch.tensor([0, 1, 5, 200, 333, 2_000]).int()
    lengths = torch.tensor([333, 0, 3, 64, 300, 9_999]).int()
    limit = torch.rand(6) if by == "mass" else torch.randn(6)
    for sizes in (reference.Sizes(0, 333), reference.Sizes(0, 40, sink=3, recent=30)):
        arguments = (scores, k, lengths, by, limit, 0.0, sizes)
        for mine, other in zip(kernel(*arguments), reference.select(*arguments), strict=True):
            assert torch.equal(mine, other)


def test_the_longest_row_fills_the_memory(kernel: Run) -> None:
    scores = scores_of("normal", 1, LONGEST)
    arguments = (scores, None, None, "rank", None, 0.0, reference.Sizes(64, 64))
    for mine, other in zip(kernel(*arguments), reference.select(*arguments), strict=True):
        assert torch.equal(mine, other)


def test_shapes_grow_with_rows() -> None:
    for rows, shapes in ((1, plan.SHAPES), (99, (plan.SHAPES[0], *plan.SHAPES_OF_MANY))):
        for shape in shapes:
            assert plan.shape_for(shape.longest, rows) == shape
            # 227 KiB is what an SM gives to one block.
            assert shape.smem_bytes("mass") <= 232_448
    assert plan.shape_for(plan.MOST_COLUMNS, 99) == plan.SHAPES[-1]
    with pytest.raises(ArgumentError, match="rows of 393217"):
        plan.shape_for(plan.MOST_COLUMNS + 1, 1)
    with pytest.raises(ArgumentError, match="float64"):
        plan.spec_for("float64", "rank", plan.SHAPES[0])
