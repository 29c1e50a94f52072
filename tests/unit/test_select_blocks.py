"""select_blocks is score_blocks and then select, whatever runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.ops import BlockBudget, KeyBlocks, score_blocks, select, select_blocks
from hopsparse.ops.select_blocks import explain_select_blocks
from hopsparse.ops.select_blocks.dispatch import row_lengths
from tests.helpers.block_scores import Problem, problem

BUDGETS: list[dict[str, Any]] = [
    {"k": 5},
    {"k": 100, "most": 9},
    {"k": 8, "sink": 1, "recent": 2},
    {"k": 20, "top_p": 0.7, "recent": 1},
    {"k": 20, "threshold": -3.0},
    {"k": torch.tensor([[3, 40], [0, 7], [9, 1]]).int(), "most": 12, "sink": 2},
    {"k": 20, "top_p": torch.tensor([[0.3, 0.6], [0.9, 1.0], [0.5, 0.1]])},
]


def some(dim: int = 64) -> Problem:
    return problem((2, 3, dim), [0, 333, 700], count=46)


@pytest.mark.parametrize("kind", ["bound", "mean", "mass"])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_it_is_what_both_give_in_turn(budget: dict[str, Any], kind: str) -> None:
    p = some()
    there = torch.tensor([[0, 0], [21, 21], [44, 44]]).int()
    scores = score_blocks(p.q, p.blocks, p.lengths, kind=kind, scale=0.3)
    want = select(scores, lengths=there, **budget)
    got = select_blocks(p.q, p.blocks, p.lengths, BlockBudget(**budget), kind=kind, scale=0.3)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == torch.int32
        assert torch.equal(mine, other)


def test_a_number_is_k() -> None:
    p = some()
    one, other = (select_blocks(p.q, p.blocks, p.lengths, each) for each in (4, BlockBudget(4)))
    assert torch.equal(one[0], other[0])
    assert one[1].tolist() == [[0, 0], [4, 4], [4, 4]]


def test_blocks_that_a_sequence_has() -> None:
    lengths = torch.tensor([-(2**31), -1, 0, 1, 16, 17, 2**31 - 1]).int()
    assert row_lengths(lengths, 16, 2)[:, 1].tolist() == [0, 0, 0, 1, 1, 2, 2**27]


def test_torch_compile_sees_one_operator() -> None:
    torch.compiler.reset()
    p = some()
    budget = BlockBudget(6, sink=1, recent=1)
    compiled = torch.compile(
        lambda q: select_blocks(q, p.blocks, p.lengths, budget), fullgraph=True, backend="eager"
    )
    want = select_blocks(p.q, p.blocks, p.lengths, budget)
    for mine, other in zip(compiled(p.q), want, strict=True):
        assert torch.equal(mine, other)
    shape = torch.ops.hopsparse.select_blocks.default
    kept = [each.to("meta") for each in p.kept]
    q, lengths = p.q.to("meta"), p.lengths.to("meta")
    found = shape(q, kept, lengths, None, 16, "bound", 0.1, [6, 6, 1, 1])
    assert [tuple(each.shape) for each in found] == [(3, 2, 6), (3, 2)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "max"}, "kind='max'"),
        ({"budget": 0}, "k=0"),
        ({"budget": BlockBudget(4, sink=-1)}, "sink=-1"),
        ({"budget": BlockBudget(4, top_p=0.5, threshold=0.0)}, "top_p and threshold"),
        ({"budget": BlockBudget(torch.ones(3).int())}, r"k \[3\] of torch.int32"),
        ({"lengths": torch.tensor([0, 333, 5000]).int()}, "5000 tokens"),
        ({"scale": -1.0}, "scale=-1.0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    p = some()
    arguments = {"q": p.q, "blocks": p.blocks, "lengths": p.lengths, "budget": 4} | change
    with pytest.raises(ArgumentError, match=told):
        select_blocks(**arguments)


def test_the_plan_says_what_runs() -> None:
    p = some()
    plan = explain_select_blocks(p.q, p.blocks, 4)
    assert (plan.op, plan.name) == ("select_blocks", "in turn")
    assert "cpu" in plan.why
    with pytest.raises(ArgumentError, match="kind"):
        explain_select_blocks(p.q, p.blocks, 4, "max")


def test_no_blocks_at_all() -> None:
    blocks = KeyBlocks.empty((2, 1, 0, 64), block=16)
    indices, counts = select_blocks(torch.ones(2, 4, 64), blocks, torch.zeros(2).int(), 3)
    assert indices.shape == (2, 1, 0)
    assert counts.tolist() == [[0], [0]]
