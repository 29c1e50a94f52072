"""`keys` of score_blocks and select_blocks: append_keys first, whatever runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops import BlockBudget, KeyBlocks, append_keys, score_blocks, select_blocks
from hopsparse.ops.score_blocks import explain_scores
from hopsparse.ops.score_blocks.dispatch import traced_both as scored
from hopsparse.ops.select_blocks import explain_select_blocks
from hopsparse.ops.select_blocks.dispatch import traced_both as selected
from tests.helpers.block_scores import Problem, problem

KINDS = pytest.mark.parametrize("kind", ["bound", "mean", "mass"])
BLOCK, ROOM, DIM = 16, 6, 24
LENGTHS = [0, 1, 16, 17, 50, BLOCK * ROOM]
BUDGETS: list[dict[str, Any]] = [
    {"k": 3, "sink": 1, "recent": 1},
    {"k": 5, "top_p": 0.7, "recent": 1},
    {"k": 5, "threshold": -2.0},
]


def grown(dtype: torch.dtype = torch.bfloat16, new: int = 1) -> tuple[Problem, Tensor]:
    """Blocks that lack the last tokens of each sequence, and their keys."""
    before = [max(length - new, 0) for length in LENGTHS]
    p = problem((2, 3, DIM), before, block=BLOCK, count=ROOM, dtype=dtype)
    p = replace(p, lengths=torch.tensor(LENGTHS).int())
    return p, torch.randn(len(LENGTHS), new, 2, DIM).to(dtype)


def copied(p: Problem) -> Problem:
    kept = [each.clone() for each in p.kept]
    return replace(p, blocks=KeyBlocks(kept[0], kept[1], kept[2], p.blocks.block))


def appended(p: Problem, keys: Tensor) -> Problem:
    """By append_keys, a token at a time of those that a sequence has."""
    behind, new = copied(p), keys.shape[1]
    for i in range(new):
        at = p.lengths - new + i
        append_keys(behind.blocks, keys[:, i : i + 1], at.clamp(min=0), (at >= 0).int())
    return behind


def assert_same_kept(mine: Problem, other: Problem) -> None:
    for ours, theirs in zip(mine.kept, other.kept, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@KINDS
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_keys_are_taken_in_first(dtype: torch.dtype, new: int, kind: str) -> None:
    p, keys = grown(dtype, new)
    behind = appended(p, keys)
    for per_head in (True, False):
        ours, options = copied(p), {"kind": kind, "scale": 0.3, "per_head": per_head}
        mine = score_blocks(ours.q, ours.blocks, ours.lengths, keys=keys, **options)  # type: ignore[arg-type]
        want = score_blocks(p.q, behind.blocks, p.lengths, **options)  # type: ignore[arg-type]
        assert torch.equal(mine, want)
        assert_same_kept(ours, behind)
    for given in BUDGETS:
        ours, budget = copied(p), BlockBudget(**given)
        lists = select_blocks(ours.q, ours.blocks, ours.lengths, budget, kind=kind, keys=keys)
        others = select_blocks(p.q, behind.blocks, p.lengths, budget, kind=kind)
        assert all(torch.equal(*each) for each in zip(lists, others, strict=True))
        assert_same_kept(ours, behind)


def test_no_new_keys_at_all() -> None:
    p, keys = grown()
    before = copied(p)
    select_blocks(p.q, p.blocks, p.lengths, 3, keys=keys[:, :0])
    assert_same_kept(p, before)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"keys": torch.zeros(6, 1, 2, DIM)}, "keys .* of torch.float32"),
        ({"keys": torch.zeros(6, 2, 1, DIM).bfloat16()}, r"\[6, new, 2, 24\]"),
        ({"keys": torch.zeros(6, 2, DIM).bfloat16()}, "keys"),
        ({"keys": torch.zeros(6, 1, 2, DIM).bfloat16().to("meta")}, "keys"),
        ({"lengths": torch.tensor([*LENGTHS[1:], BLOCK * ROOM + 1]).int()}, "97 tokens"),
        ({"lengths": torch.tensor([*LENGTHS[1:], -1]).int()}, "-1 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    p, keys = grown()
    before = copied(p)
    given = {"q": p.q, "blocks": p.blocks, "lengths": p.lengths, "keys": keys} | change
    for run in (score_blocks, lambda **each: select_blocks(budget=3, **each)):
        with pytest.raises(ArgumentError, match=told):
            run(**given)  # type: ignore[operator]
    assert_same_kept(p, before)


@pytest.mark.parametrize(
    "budget",
    [
        BlockBudget(0),
        BlockBudget(3, sink=-1),
        BlockBudget(3, top_p=0.5, threshold=0.1),
        BlockBudget(3, top_p=torch.ones(5)),
        BlockBudget(torch.ones(3).int(), threshold=0.1),
    ],
    ids=range(5),
)
def test_a_budget_that_is_refused_takes_nothing_in(budget: BlockBudget) -> None:
    p, keys = grown()
    before = copied(p)
    with pytest.raises(ArgumentError):
        select_blocks(p.q, p.blocks, p.lengths, budget, keys=keys)
    assert_same_kept(p, before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_sees_what_changes(backend: str) -> None:
    torch.compiler.reset()
    p, keys = grown()
    behind = appended(p, keys)

    def step(q: Tensor, low: Tensor, high: Tensor, total: Tensor, newest: Tensor) -> list[Tensor]:
        blocks = KeyBlocks(low, high, total, BLOCK)
        lists = select_blocks(q, blocks, p.lengths, 3, keys=newest)
        return [*lists, score_blocks(q, blocks, p.lengths), low.clone()]

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    ours, theirs = copied(p), copied(behind)
    found = compiled(p.q, *ours.kept, keys)
    lists = select_blocks(p.q, theirs.blocks, p.lengths, 3)
    want = [*lists, score_blocks(p.q, theirs.blocks, p.lengths), theirs.blocks.low]
    for mine, other in zip(found, want, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))
    assert_same_kept(ours, behind)


def test_operators_are_as_they_say() -> None:
    p, keys = grown(torch.float32)
    kept = [each.nan_to_num(0.5) for each in p.kept]  # they are compared with themselves
    lengths = p.lengths.clamp(min=1)
    torch.library.opcheck(scored, (p.q, kept, keys, lengths, BLOCK, "bound", 0.2, False))
    asked = (lengths, None, BLOCK, "mean", 0.2, [3, 3, 1, 1])
    torch.library.opcheck(selected, (p.q, kept, keys, *asked))


def test_a_change_is_counted() -> None:
    p, keys = grown()
    before = p.blocks.total._version
    select_blocks(p.q, p.blocks, p.lengths, 3, keys=keys)
    assert p.blocks.total._version > before


def test_the_plan_says_what_runs() -> None:
    p, keys = grown()
    assert explain_scores(p.q, p.blocks, keys=keys).name == "reference"
    assert explain_select_blocks(p.q, p.blocks, 3, keys=keys).name == "in turn"
