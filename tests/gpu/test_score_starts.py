"""What a launch asks for ahead, and whether it starts early, changes no bit; both are by size."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.launch import capture
from hopsparse.ops import BlockBudget, KeyBlocks, append_keys, score_blocks, select_blocks
from hopsparse.ops.score_blocks import choose, plan, starts
from hopsparse.ops.score_blocks.device import Wanted, enqueue
from tests.helpers.block_scores import problem
from tests.helpers.waiting import nothing_waits

KINDS = pytest.mark.parametrize("kind", plan.KINDS)
ASKS = [starts.Asks(*each) for each in product((False, True), repeat=2)]


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels of these shapes, side by side, before the first test."""
    shapes = [plan.shape_for(kind, "bfloat16", 128, 4, tensor=True) for kind in plan.KINDS]
    specs = [
        make(shape, cluster)
        for shape in shapes
        for cluster in plan.CLUSTERS
        for make in (plan.spec_for, plan.choose_spec_for)
        if shape is not None
    ]
    specs.append(plan.append_spec_for("bfloat16", 128))
    assert not any(built.error for built in KernelCache.default().compile_all(specs))


@KINDS
def test_what_is_asked_for_changes_no_bit(kind: str, device: torch.device) -> None:
    """The room ends behind the sequence, amid the pieces that are asked for."""
    p = problem((2, 4, 128), [20_011, 777], count=1300)
    kept = (p.blocks.low.to(device), p.blocks.high.to(device), p.blocks.total.to(device))
    q, lengths, block = p.q.to(device), p.lengths.to(device), p.blocks.block
    wanted = Wanted(kind, p.scale, False)
    for cluster in plan.CLUSTERS:
        found: list[list[Tensor]] = []
        for asks in ASKS:
            scores = torch.full((2, 2, 1300), 7.0, device=device)
            enqueue(scores, q, kept, lengths, block, wanted, cluster, asks)
            lists = [torch.full((2, 2, *w), -7, device=device).int() for w in ((40,), ())]
            asked = (lengths, block, wanted, choose.Choice(None, [40, 40, 1, 1]))
            choose.enqueue(lists, q, kept, asked, cluster, asks)
            found.append([scores, *lists])
        for other in found[1:]:
            assert all(torch.equal(*each) for each in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("batch", "blocks", "early"), [(1, 2048, 3), (8, 2048, 1), (32, 512, 3)])
def test_launches_start_early_where_that_pays(
    batch: int, blocks: int, early: int, device: torch.device
) -> None:
    """Append, score, and score and choose: the first one always may."""
    shape = (batch, 8, blocks, 128)
    ends = torch.randn(2, *shape, device=device).bfloat16()
    kept = KeyBlocks(ends.amin(0), ends.amax(0), torch.zeros(shape, device=device), 64)
    q = torch.randn(batch, 32, 128, device=device).bfloat16()
    key = torch.randn(batch, 1, 8, 128, device=device).bfloat16()
    lengths = torch.full((batch,), blocks * 64, dtype=torch.int32, device=device)
    start, budget = lengths - 1, BlockBudget(32, sink=1, recent=1)

    def step() -> list[Tensor]:
        append_keys(kept, key, start)
        scores = score_blocks(q, kept, lengths)
        return [scores, *select_blocks(q, kept, lengths, budget)]

    graph = capture(step, early=True)
    assert graph.early == early
    for _ in range(20):
        q.copy_(torch.randn(q.shape))
        with nothing_waits():
            graph.replay()
        found = [each.clone() for each in graph.outputs]
        for mine, other in zip(found, step(), strict=True):
            assert torch.equal(mine, other)
