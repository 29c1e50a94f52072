"""The kernel of select gives the bits of the CPU, whatever the scores are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.launch import capture
from hopsparse.ops import select
from hopsparse.ops.select import cases, plan
from hopsparse.ops.select.device import enqueue
from tests.helpers.scores import KINDS, float64_top, scores_of
from tests.helpers.waiting import nothing_waits

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = pytest.mark.parametrize("case", cases.EDGE, ids=lambda case: case.name)
MODES: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"threshold": 0.25}, {"sink": 2, "recent": 5}]


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels, side by side, before the first test."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(KernelCache.default().get, plan.every_spec()))


def same_on(device: torch.device, scores: Tensor, k: int | Tensor, **options: Any) -> None:
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    on_device = k.to(device) if isinstance(k, Tensor) else k
    got = select(scores.to(device), on_device, **moved)
    for mine, other in zip(got, select(scores, k, **options), strict=True):
        assert torch.equal(mine.cpu(), other)


@CASES
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cases_give_the_bits_of_the_cpu(
    dtype: torch.dtype, options: dict[str, Any], case: cases.Case, device: torch.device
) -> None:
    scores = scores_of("normal", case.rows, case.columns).to(dtype)
    same_on(device, scores, case.k, **options)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [37, 5000, 20_000, 140_000])
def test_hard_rows_give_the_bits_of_the_cpu(
    columns: int, kind: str, options: dict[str, Any], device: torch.device
) -> None:
    scores = scores_of(kind, 3, columns)
    dice = torch.rand(scores.shape)
    gaps = scores.masked_fill(dice < 0.01, NAN).masked_fill(dice > 0.7, -INF)
    for each in (scores, gaps, scores.masked_fill(dice < 0.001, INF)):
        for k in (1, columns // 20 + 1, columns):
            same_on(device, each, k, **options)


def test_twenty_thousand_that_share_their_top_bits(device: torch.device) -> None:
    scores = scores_of("crowded", 4, 262_144).to(device)
    indices, _ = select(scores, 2048)
    values = scores.gather(1, indices.long()).double().sort(1, descending=True).values
    assert torch.equal(values, float64_top(scores, 2048))


@pytest.mark.parametrize("columns", [16_384, 16_448, 32_768])
def test_linearly_spaced_rows(columns: int, device: torch.device) -> None:
    indices, _ = select(torch.linspace(-1, 1, columns, device=device), 2048)
    assert torch.equal(indices.cpu(), torch.arange(columns - 2048, columns, dtype=torch.int32))


def test_infinity_and_nan_come_first_and_minus_infinity_never(device: torch.device) -> None:
    row = torch.tensor([INF] * 5 + [NAN] * 10 + [-INF] * 17)[torch.randperm(32)]
    same_on(device, row, 16)
    assert select(row.to(device), 16)[1].item() == 15


@pytest.mark.parametrize("by", ["k", "top_p", "threshold"])
@pytest.mark.parametrize("columns", [100, 30_000])
def test_rows_that_have_numbers_of_their_own(by: str, columns: int, device: torch.device) -> None:
    scores = scores_of("few values", 64, columns)
    k = torch.randint(0, columns + 1, (64,)).int()
    options: dict[str, Any] = {"lengths": torch.randint(0, columns + 1, (64,)).int()}
    if by != "k":
        options[by] = torch.rand(64) * 0.98 + 0.01
    same_on(device, scores, k, **options)


def test_numbers_that_are_out_of_range_are_taken_as_the_nearest(device: torch.device) -> None:
    scores = torch.randn(4, 50, device=device)
    lengths = torch.tensor([-5, 60, 2**31 - 1, -(2**31)]).int().to(device)
    k = torch.tensor([3, -1, 2**31 - 1, 4]).int().to(device)
    indices, counts = select(scores, k, lengths=lengths)
    assert counts.tolist() == [0, 0, 50, 0]
    assert indices[2].tolist() == list(range(50))


def test_many_rows(device: torch.device) -> None:
    same_on(device, scores_of("normal", 20_011, 100), 7)


@CASES
def test_every_entry_is_written_and_none_beside(case: cases.Case, device: torch.device) -> None:
    if case.columns > plan.MOST_COLUMNS:
        return
    guard, width = 64, min(case.k, case.columns)
    scores = scores_of("few values", case.rows, case.columns).to(device)
    scores[:, ::2] = -INF
    want = select(scores, case.k)
    frames, results = [], []
    for each in want:
        frame = torch.full((each.numel() + 2 * guard,), -7, dtype=torch.int32, device=device)
        frames.append(frame)
        results.append(frame[guard : guard + each.numel()].view(each.shape))
    enqueue(results, scores, (None, None, None), "rank", 0.0, [width, width, 0, 0])
    for frame, mine, other in zip(frames, results, want, strict=True):
        assert torch.equal(mine, other)
        assert (frame[:guard] == -7).all()
        assert (frame[-guard:] == -7).all()


def test_runs_do_not_differ(device: torch.device) -> None:
    scores = scores_of("few values", 16, 100_000).to(device)
    first = select(scores, 2048, top_p=0.9)
    for _ in range(20):
        for mine, other in zip(select(scores, 2048, top_p=0.9), first, strict=True):
            assert torch.equal(mine, other)


def test_a_captured_call_reads_what_is_there_when_it_is_replayed(device: torch.device) -> None:
    scores = torch.randn(8, 40_000, device=device)
    lengths = torch.full((8,), 40_000, dtype=torch.int32, device=device)
    graph = capture(lambda: list(select(scores, 100, lengths=lengths, recent=2)))
    for length in (40_000, 7, 12_345, 0):
        scores.copy_(torch.randn(8, 40_000))
        lengths.fill_(length)
        with nothing_waits():
            graph.replay()
        want = select(scores.cpu(), 100, lengths=lengths.cpu(), recent=2)
        for mine, other in zip(graph.outputs, want, strict=True):
            assert torch.equal(mine.cpu(), other)


def test_torch_compile_sees_one_operator(device: torch.device) -> None:
    torch.compiler.reset()
    scores = torch.randn(4, 500, device=device)
    compiled = torch.compile(select, fullgraph=True)
    for mine, other in zip(compiled(scores, 9), select(scores, 9), strict=True):
        assert torch.equal(mine, other)
