"""What is sent of a gradient has the bits of the CPU, whatever the gradient is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.errors import UnsupportedError
from hopsparse.launch import KnownLaunches, capture
from hopsparse.launch import kernel as launch_kernel
from hopsparse.ops import hybrid_gradient
from hopsparse.ops.hybrid_gradient import device as launches
from hopsparse.ops.hybrid_gradient import plan
from tests.helpers.hybrid_gradients import DTYPES, KINDS, differing, gradient_of
from tests.helpers.waiting import nothing_waits

REMAINDERS: Any = tuple(plan.REMAINDERS)
NAMES = ("values", "counts", "offsets", "codes", "scales", "rest", "finite")
SIZES = (1, 31, 127, 128, 129, 511, 512, 513, 4099, 65_537, 300_001)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels at once, before the first is asked for."""
    failed = [built.error for built in KernelCache.default().compile_all(plan.every_spec())]
    assert [error for error in failed if error is not None] == []


def wrong_on(
    device: torch.device, gradient: Tensor, residual: Tensor | None, *given: Any, **turn: int
) -> list[str]:
    kept = None if residual is None else residual.to(device)
    got = hybrid_gradient(gradient.to(device), kept, *given, **turn)
    return differing(got, hybrid_gradient(gradient, residual, *given, **turn), NAMES)


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_gives_the_bits_of_the_cpu(
    dtype: torch.dtype, remainder: Any, device: torch.device
) -> None:
    for n in SIZES:
        gradient, _ = gradient_of("normal", n, dtype)
        for residual in (None, torch.randn(n) * 0.01):
            for k in {0, 1, -(-n // 1000), n // 4, n}:
                assert wrong_on(device, gradient, residual, k, remainder) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_hard_gradients_give_the_bits_of_the_cpu(
    remainder: Any, kind: str, device: torch.device
) -> None:
    for dtype in DTYPES:
        for n in (1501, 400_003):
            gradient, residual = gradient_of(kind, n, dtype)
            for k, every, phase in ((n // 1000, 1, 0), (n // 90, 3, 2), (0, 2, 1)):
                turn = {"every": every, "phase": phase}
                assert wrong_on(device, gradient, residual, k, remainder, **turn) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_misleading_sample_is_noticed(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few deviations make a threshold that is too high: everything is read once more."""
    monkeypatch.setattr(plan, "_SURE", -1000)
    gradient, residual = gradient_of(kind, 1_000_001, torch.float32)
    assert wrong_on(device, gradient, residual, 1000, "int4") == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_does_not_start_on_16_bytes(dtype: torch.dtype, device: torch.device) -> None:
    gradient, residual = torch.randn(70_001).to(dtype), torch.randn(70_001)
    wanted = hybrid_gradient(gradient[1:], residual[1:], 70, "int4")
    got = hybrid_gradient(gradient.to(device)[1:], residual.to(device)[1:], 70, "int4")
    assert differing(got, wanted, NAMES) == []
    pairs = torch.randn(9_000, 2).to(dtype)
    got = hybrid_gradient(pairs.to(device)[:, 0], None, 9, "sign")
    assert differing(got, hybrid_gradient(pairs[:, 0], None, 9, "sign"), NAMES) == []


def test_nothing_to_do(device: torch.device) -> None:
    for dtype in DTYPES:
        for remainder in REMAINDERS:
            empty = torch.empty(0, dtype=dtype)
            assert wrong_on(device, empty, None, 0, remainder) == []


def test_every_run_gives_the_same_bits(device: torch.device) -> None:
    """Ties are many: who comes first in a warp, block or queue must not matter."""
    gradient = torch.randint(-3, 4, (3_000_000,), device=device).float()
    residual = torch.randint(-1, 2, (3_000_000,), device=device).float()
    first = hybrid_gradient(gradient, residual, 50_000, "int4")
    for _ in range(20):
        assert differing(hybrid_gradient(gradient, residual, 50_000, "int4"), first, NAMES) == []


def test_all_of_the_results_is_written(device: torch.device) -> None:
    gradient, residual = (each.to(device) for each in (torch.randn(10_007), torch.randn(10_007)))
    for remainder in REMAINDERS:
        wanted = hybrid_gradient(gradient, residual, 10, remainder)
        poisoned = [each.clone() for each in wanted]
        whole = torch.empty(-(-10_007 // plan.STRIP) * plan.STRIP, device=device)
        poisoned[5] = whole[: wanted[5].numel()]
        workspace = torch.empty(plan.Workspace.of(10_007).nbytes, dtype=torch.uint8, device=device)
        for each in (*poisoned, whole, workspace):
            each.view(torch.uint8).fill_(0xA5)
        launches.enqueue(poisoned, workspace, gradient, residual, 10, remainder, 1, 0)
        assert differing(poisoned, wanted, NAMES) == []


def test_a_graph_replays_it_on_other_values(device: torch.device) -> None:
    gradient, residual = torch.randn(500_001, device=device), torch.zeros(500_001, device=device)
    graph = capture(lambda: hybrid_gradient(gradient, residual, 500, "int4"))
    for kind in ("normal", "few values", "nan", "sparse", "zeros", "normal"):
        values, _ = gradient_of(kind, 500_001, torch.float32)
        gradient.copy_(values)
        residual.copy_(torch.randn(500_001) * 0.01)
        graph.replay()
        wanted = hybrid_gradient(gradient.cpu(), residual.cpu(), 500, "int4")
        assert differing(graph.outputs, wanted, NAMES) == []


def test_nothing_waits_for_the_gpu(device: torch.device) -> None:
    gradient = torch.randn(100_000, device=device)
    hybrid_gradient(gradient, None, 100, "int4")
    with nothing_waits():
        hybrid_gradient(gradient, None, 100, "int4")


def test_more_values_than_32_bits_count(device: torch.device) -> None:
    """Nearly all zero, so that what must come out is known without a second of these."""
    n = 2**31 + 4099
    gradient = torch.zeros(n, dtype=torch.bfloat16, device=device)
    places = torch.tensor([0, 5, 2**31 - 1, 2**31, n - 1], device=device)
    gradient[places] = torch.tensor([1.0, -9.0, 3.0, 5.0, -7.0], device=device).bfloat16()
    values, counts, offsets, codes, scales, rest, finite = hybrid_gradient(
        gradient, None, 4, "int4"
    )
    assert values.tolist() == [-9.0, 3.0, 5.0, -7.0]
    chunks = counts.nonzero().flatten().tolist()
    assert chunks == [0, 2**15 - 1, 2**15]
    assert counts.sum().item() == 4
    assert (offsets.long() + 32768).tolist() == [5, 65535, 0, 4098]
    assert finite.item() == 1
    # The 1 is rounded, to seven seventh of itself less what bfloat16 takes from the scale.
    assert scales.nonzero().flatten().tolist() == [0]
    assert (codes[1:] == 0x88).all()
    assert rest[0].item() == 1 - 7 * scales[0].float().item()
    assert not rest[1:].any()


def test_a_kernel_that_is_not_loaded_is_not_captured(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = torch.randn(1000, device=device)
    gradient + gradient  # loads what the capture begins with: torch warns of one that is empty
    monkeypatch.setattr(launch_kernel, "_LOADED", {})
    monkeypatch.setattr(launches, "_BOUND", KnownLaunches())
    with pytest.raises(UnsupportedError, match="captured"):
        capture(lambda: hybrid_gradient(gradient + gradient, None, 1, "int4"), warmup=0)
