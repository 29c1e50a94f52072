"""The text of the peer_sum kernels, run by threads of the CPU: ranks that meet, add and gather.

What this cannot see is the compiler's code for the GPU, NVLink and its order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops.peer_sum import device, plan, reference
from tests.helpers.peers_on_cpu import Call, Run, compiled, memory

THREADS = 32
PATIENCE_MS = 120_000
# Slots as a captured graph of three calls uses them, twice; the first call drains.
GRAPH = ((4, True), (3, False), (2, False)) * 2
EAGER = tuple((turn % 2, False) for turn in range(5))
# A graph of one call has no other between its replays.
ALONE = ((4, True),) * 6


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("peer_sum")
    names = [plan.spec_of_sum(part, "bfloat16", ranks).name for part, ranks in SUMS]
    made = {name: compiled(folder, name, THREADS, 2) for name in names}
    return made | {"gather": compiled(folder, "gather", THREADS, 3)}


SUMS = (("bfloat16", 2), ("float32", 2), ("bfloat16", 3))


def parts_of(
    ranks: int, calls: int, shape: tuple[int, int], dtype: torch.dtype
) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    made = torch.randn((ranks, calls, *shape), generator=generator) * 3
    return [list(of_rank.to(dtype)) for of_rank in made]


def call_of(
    bases: Sequence[Tensor], rank: int, turn: tuple[int, bool], slot_bytes: int
) -> plan.Place:
    addresses = tuple(each.data_ptr() for each in bases)
    slot, drain = turn
    start = plan.HEADER_BYTES + slot * slot_bytes
    return plan.Place(addresses, rank, start, drain, PATIENCE_MS)


@pytest.mark.parametrize("turns", [EAGER, GRAPH, ALONE], ids=["eager", "graph", "alone"])
@pytest.mark.parametrize(("part", "ranks"), SUMS, ids=str)
def test_parts_are_added_in_the_order_of_ranks(
    kernels: dict[str, Run], part: str, ranks: int, turns: Sequence[tuple[int, bool]]
) -> None:
    tokens, out = 5, 344  # 215 chunks: 3 blocks of 32 threads as the test counts them, cut
    dtype = getattr(torch, part)
    parts = parts_of(ranks, len(turns), (tokens, out), dtype)
    generator = torch.Generator().manual_seed(9)
    bias, residual = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((out,), (tokens, out))
    )
    bases, results, calls = memory(ranks, 5, tokens * out * 4), [], []
    for rank in range(ranks):
        mine = []
        for number, turn in enumerate(turns):
            y = torch.full((tokens, out), -7.0, dtype=torch.bfloat16)
            added = (residual.data_ptr(), bias.data_ptr()) if number % 2 else (0, 0)
            place = call_of(bases, rank, turn, tokens * out * 4)
            args = plan.args_of(place, (*added, y.data_ptr()), tokens * out // 8, out // 8)
            args.blocks = 3
            given = parts[rank][number]
            mine.append(Call(args, given.data_ptr(), given.nbytes))
            results.append((rank, number, y))
        calls.append(mine)
    kernels[plan.spec_of_sum(part, "bfloat16", ranks).name](calls)
    for _, number, y in results:
        more = (bias, residual) if number % 2 else ()
        want = reference.peer_sum([each[number] for each in parts], torch.bfloat16, *more)
        assert torch.equal(y, want)


@pytest.mark.parametrize("turns", [EAGER, GRAPH, ALONE], ids=["eager", "graph", "alone"])
@pytest.mark.parametrize("bounds", [(0, 64, 104), (0, 8, 16, 80)], ids=str)
def test_columns_of_uneven_ranks_come_side_by_side(
    kernels: dict[str, Run], bounds: tuple[int, ...], turns: Sequence[tuple[int, bool]]
) -> None:
    tokens, ranks = 7, len(bounds) - 1
    whole = parts_of(1, len(turns), (tokens, bounds[-1]), torch.bfloat16)[0]
    bases, results, calls, kept = memory(ranks, 5, tokens * 128 * 2), [], [], []
    for rank in range(ranks):
        mine = []
        for number, turn in enumerate(turns):
            y = torch.full_like(whole[number], -7.0)
            place = call_of(bases, rank, turn, tokens * 128 * 2)
            starts = [bound // 8 for bound in bounds]
            sizes = (tokens * bounds[-1] // 8, bounds[-1] // 8)
            args = plan.args_of(place, (0, 0, y.data_ptr()), *sizes, starts)
            args.blocks = 2
            given = whole[number][:, bounds[rank] : bounds[rank + 1]].contiguous()
            kept.append(given)
            mine.append(Call(args, given.data_ptr(), given.nbytes))
            results.append((number, y))
        calls.append(mine)
    kernels["gather"](calls)
    assert all(torch.equal(y, whole[number]) for number, y in results)


def test_turns_may_wrap(kernels: dict[str, Run]) -> None:
    parts = parts_of(2, 3, (1, 8), torch.bfloat16)
    bases = memory(2, 2, 64)
    for rank, base in enumerate(bases):
        words = base[: plan.HEADER_BYTES].view(torch.int32)
        words[1 - rank] = words[2 * plan.MOST_BLOCKS * plan.MOST_RANKS] = -2  # 2^32 - 2
    results = [[torch.zeros(1, 8, dtype=torch.bfloat16) for _ in range(3)] for _ in range(2)]
    calls = []
    for rank in range(2):
        mine = []
        for number in range(3):
            place = call_of(bases, rank, (number % 2, False), 64)
            args = plan.args_of(place, (0, 0, results[rank][number].data_ptr()), 1, 1)
            mine.append(Call(args, parts[rank][number].data_ptr(), 16))
        calls.append(mine)
    kernels[plan.spec_of_sum("bfloat16", "bfloat16", 2).name](calls)
    for number in range(3):
        want = reference.peer_sum([parts[0][number], parts[1][number]], torch.bfloat16)
        assert all(torch.equal(results[rank][number], want) for rank in range(2))


def test_what_no_kernel_takes_is_said() -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    assert device.why_no_sum(4096, bf16, bf16, 16) is None
    assert device.why_no_sum(4096, f32, bf16, 16) is None
    assert "float32 of float32" in str(device.why_no_sum(4096, f32, f32, 16))
    assert "no multiple of 8" in str(device.why_no_sum(4100, bf16, bf16, 16))
    assert "too many" in str(device.why_no_sum(2**20, bf16, bf16, 2**20))
    assert device.why_no_gather((0, 64, 72), 2, 5) is None
    assert "start at 68" in str(device.why_no_gather((0, 68, 136), 2, 5))
    assert "too many" in str(device.why_no_gather((0, 2**19, 2**20), 2, 2**20))
    for wrong in (
        ("float16", "bfloat16", 2),
        ("bfloat16", "bfloat16", 9),
        ("float32", "float32", 2),
    ):
        with pytest.raises(ArgumentError, match="peer_sum kernel"):
            plan.spec_of_sum(*wrong)


def test_flags_leave_room_for_parts() -> None:
    assert plan.FLAGS_BYTES <= plan.HEADER_BYTES
    assert plan.HEADER_BYTES % 1024 == 0
