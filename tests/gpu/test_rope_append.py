"""rope_append on a GPU: what transformers computes, bit for bit where no norm is ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.graphs import capture
from hopsparse.ops.rope_append import device as launches
from hopsparse.ops.rope_append import plan, rope_append
from tests.helpers.rope import assert_right, problem

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def kernel_ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    run = launches.run

    def told(*args: Any) -> Tensor:
        ran.append(1)
        return run(*args)

    monkeypatch.setattr(launches, "run", told)
    return ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize(
    ("heads", "ends", "tokens"),
    [
        ((32, 8), [5], 1),
        ((32, 8), [64, 3, 65, 1, 0], 1),
        ((9, 3), [40, 70, 20], 20),
        ((1, 1), [300], 300),
        ((4, 4), [500, 513], 500),
    ],
    ids=str,
)
def test_it_is_what_transformers_computes(
    heads: tuple[int, int],
    ends: list[int],
    tokens: int,
    dim: int,
    norm: bool,
    dtype: torch.dtype,
    device: torch.device,
    kernel_ran: list[int],
) -> None:
    p = problem(heads, dim, ends, tokens, room=512, norm=norm, dtype=dtype, device=device)
    before = p.copied().cache
    q = p.run()
    assert kernel_ran == [1]
    assert_right(p, before, q)


def test_a_strided_cache_and_rows_that_are_part_of_others(device: torch.device) -> None:
    p = problem((4, 2), 128, [33, 20], 7, room=64, device=device)
    wide = torch.cat([p.qkv, p.qkv], -1)[..., : p.qkv.shape[-1]]
    keys, values = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in p.cache)
    other = replace(p, qkv=wide, cache=(keys, values), turns=(p.turns[0][:1], p.turns[1][:1]))
    same = replace(p, turns=(p.turns[0][:1], p.turns[1][:1]))
    assert torch.equal(other.run(), same.run())
    assert torch.equal(keys, p.cache[0])
    assert torch.equal(values, p.cache[1])


def test_a_captured_call_counts_on(device: torch.device) -> None:
    p = problem((8, 2), 64, [1], 1, room=16, device=device)
    count = torch.zeros((), dtype=torch.long, device=device)

    def step(qkv: Tensor) -> Tensor:
        ends = (count + 1).to(torch.int32).view(1)
        return rope_append(qkv, p.turns, p.cache, ends, count=count)

    graph = capture(step, p.qkv, reuse_outputs=False)
    count.zero_()
    p.cache[0].fill_(7.0)
    rows = [torch.randn_like(p.qkv) for _ in range(5)]
    for row in rows:
        graph(row)
    assert count.item() == 5
    values = torch.stack([row.view(-1, 64)[-2:] for row in rows], 1)
    assert torch.equal(p.cache[1][0, :, :5], values)
    assert (p.cache[0][0, :, 5:] == 7.0).all()
    graph.release()
