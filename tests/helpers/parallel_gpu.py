"""What ranks do in the tests of layers that two GPUs share; rank r has GPU r."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hopsparse.formats import bounds_of
from hopsparse.launch import capture
from hopsparse.ops.peer_sum import reference
from hopsparse.parallel import ColumnParallelSparseLinear, Peers, RowParallelSparseLinear
from tests.helpers import parallel_ranks
from tests.helpers.parallel_ranks import integers, layer_of

_PATIENCE_S = 15.0  # far more than any call takes, and less than a test does


def peers_of(**options: Any) -> Peers:
    """Ranks that read each other's memory; anything else fails the test."""
    peers = Peers(**{"patience_s": _PATIENCE_S, "capacity_bytes": 4 << 20} | options)
    assert peers.reason is None, peers.describe()
    return peers


def _on_gpu(layer: Any) -> Any:
    return layer.to("cuda")


def _equal(one: Tensor, other: Tensor, what: object) -> None:
    """Bit by bit."""
    same = one.shape == other.shape and one.dtype == other.dtype
    differs = int((one != other).sum()) if same else -1
    assert differs == 0, f"{what}: {differs} of {other.numel()} differ"


def layers(rank: int, kind: str, dtype: torch.dtype, tokens: int) -> list[str]:
    """Shared layers against whole ones on this GPU, in integers; what runs, in words."""
    peers = peers_of()
    k, middle, out = 136, 440, 264
    up = _on_gpu(layer_of(kind, middle, k, 1, dtype))
    down = _on_gpu(layer_of(kind, out, middle, 3, dtype))
    x = integers((tokens, k), 5, 0.1).to("cuda", dtype)
    residual = integers((tokens, out), 6).to("cuda", dtype)
    bounds = bounds_of(middle, 2, 64)
    one = ColumnParallelSparseLinear.from_layer(up, peers, bounds=bounds)
    other = RowParallelSparseLinear.from_layer(down, peers, bounds=bounds)
    wide = RowParallelSparseLinear.from_layer(down, peers, bounds=bounds, wide_parts=True)
    gathered = ColumnParallelSparseLinear.from_layer(up, peers, bounds=bounds, gather_output=True)
    with torch.no_grad():
        between = up(x)
        want = down(between)
        assert 0 < want.abs().max() <= 256
        for _ in range(3):
            _equal(gathered(x), between, "gathered")
            _equal(other(one(x)), want, "sum")
            _equal(other(one(x), residual), want + residual, "sum and residual")
            _equal(wide(one(x)), want, "float32 parts")
    return [other.plan(one(x)).describe(), gathered.plan(x).describe()]


def bits(rank: int, dtype: torch.dtype) -> int:
    """Sums of any numbers are those of the reference, bit for bit; how many were compared."""
    peers, compared = peers_of(), 0
    generator = torch.Generator("cuda").manual_seed(rank)
    for tokens, out in ((1, 8), (3, 72), (16, 4096), (64, 4096), (200, 4096), (7, 14336)):
        for part_dtype in (dtype, torch.float32):
            part = torch.randn(tokens, out, device="cuda", generator=generator) * 3
            part = part.to(part_dtype)
            parts = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(parts, part)
            shared = torch.Generator("cuda").manual_seed(7)
            bias = torch.randn(out, device="cuda", generator=shared).to(dtype)
            residual = torch.randn(tokens, out, device="cuda", generator=shared).to(dtype)
            for added in ((None, None), (bias, None), (bias, residual)):
                y = torch.full((tokens, out), torch.nan, device="cuda", dtype=dtype)
                write = partial(_copy, part)
                assert peers.why_no_sum((tokens, out), dtype, part_dtype) is None
                found = peers.sum_of(write, y, part_dtype, *added)
                _equal(found, reference.peer_sum(parts, dtype, *added), (tokens, out, part_dtype))
                compared += found.numel()
    return compared


def columns(rank: int) -> int:
    """Columns of uneven ranks come side by side, in any dtype."""
    peers, compared = peers_of(), 0
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        for tokens, bounds in ((1, (0, 64, 80)), (33, (0, 16, 4096)), (130, (0, 2048, 4096))):
            generator = torch.Generator("cuda").manual_seed(tokens)
            shape = (tokens, bounds[-1])
            whole = torch.randint(-99, 99, shape, device="cuda", generator=generator).to(dtype)
            own = whole[:, bounds[rank] : bounds[rank + 1]]
            assert peers.why_no_columns((tokens,), bounds, dtype) is None
            _equal(
                peers.columns_of(partial(_copy, own), torch.zeros_like(whole), bounds),
                whole,
                bounds,
            )
            compared += whole.numel()
    return compared


def _copy(part: Tensor, to: Tensor) -> None:
    to.copy_(part)


def _late(rank: int, turn: int) -> None:
    """One of the ranks has other work first, now this one and now that one."""
    if (turn // 2) % 2 == rank and turn % 2:
        torch.cuda._sleep(200_000 * (turn % 5))


def replayed(rank: int, calls: int, early: bool) -> int:
    """A graph of some calls, replayed with new inputs each time, eager calls between."""
    peers = peers_of()
    down = _on_gpu(layer_of("2:4", 512, 512, 3, torch.bfloat16))
    row = RowParallelSparseLinear.from_layer(down, peers)
    column = ColumnParallelSparseLinear.from_layer(down, peers, gather_output=True)
    own = slice(row.bounds[rank], row.bounds[rank + 1])
    given = [torch.zeros(16, 512, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]

    def step() -> list[Tensor]:
        return [
            row(x[:, own].contiguous()) if place % 3 < 2 else column(x)
            for place, x in enumerate(given)
        ]

    with torch.no_grad():
        graph = capture(step, early=early)
        for turn in range(40):
            for place, x in enumerate(given):
                x.copy_(integers((16, 512), 100 * turn + place, 0.1))
            _late(rank, turn)
            graph.replay()
            if turn % 3 == 0:
                graph.replay()
            if turn % 4 == 1:
                _equal(row(given[0][:, own].contiguous()), down(given[0]), ("eager", turn))
            for place, (x, y) in enumerate(zip(given, graph.outputs, strict=True)):
                _equal(y, down(x), (turn, place))
    return graph.early


def many(rank: int, rounds: int) -> int:
    """Calls of changing sizes, none of which the host waits for; ranks are late in turn."""
    peers = peers_of()
    sizes = [(16, 4096), (1, 8), (256, 4096), (5, 1024), (64, 4096)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    base = torch.arange(256 * 4096, device="cuda") % 61
    for turn in range(rounds):
        tokens, out = sizes[turn % len(sizes)]
        values = base[: tokens * out].view(tokens, out)
        _late(rank, turn)
        part = ((values + turn + 17 * rank) % 101).to(torch.bfloat16)
        y = torch.empty_like(part)
        found = peers.sum_of(partial(_copy, part), y, torch.bfloat16)
        want = (values + turn) % 101 + (values + turn + 17) % 101
        wrong += (found != want.to(torch.bfloat16)).sum()
    return int(wrong)


def fallbacks(rank: int) -> list[str]:
    """What peers do not read, and that NCCL gives the same integers."""
    small = peers_of(capacity_bytes=1024)
    told = []
    down = _on_gpu(layer_of("2:4", 264, 256, 3, torch.bfloat16))
    odd = _on_gpu(layer_of("2:4", 260, 256, 3, torch.bfloat16))
    x = integers((16, 256), 5, 0.1).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for layer, peers in ((down, small), (odd, small), (down, Peers(peer_reads=False))):
            row = RowParallelSparseLinear.from_layer(layer, peers)
            own = x[:, row.bounds[rank] : row.bounds[rank + 1]]
            for tokens in (1, 16):
                _equal(row(own[:tokens]), layer(x[:tokens]), tokens)
            told.append(row.plan(own).describe())
    return told


def gradients(rank: int) -> int:
    """Gradients through shared 2:4 layers are those of whole ones; how many tensors are."""
    peers = peers_of()
    up = _on_gpu(layer_of("2:4", 192, 64, 1, torch.bfloat16))
    down = _on_gpu(layer_of("2:4", 24, 192, 3, torch.bfloat16))
    one = ColumnParallelSparseLinear.from_layer(up, peers)
    other = RowParallelSparseLinear.from_layer(down, peers)
    found = []
    for first, second in ((up, down), (one, other)):
        x = integers((5, 64), 5, 0.2).to("cuda", torch.bfloat16).requires_grad_(True)
        y = second(torch.relu(first(x)))
        y.backward(integers((5, 24), 7, 0.2).to("cuda", torch.bfloat16))
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    for whole, shared in zip(*found, strict=True):
        assert whole.abs().max() <= 256
        _equal(shared, whole, "gradient")
    return len(found)


def without_a_peer(rank: int) -> str:
    """A rank whose peer does not come is told, and does not wait for ever."""
    peers = peers_of(patience_s=2.0)
    peers.prepare(torch.bfloat16)
    dist.barrier(device_ids=[rank])
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(6)
        return "absent"
    y = torch.empty(1, 8, device="cuda", dtype=torch.bfloat16)
    call: Callable[[], object] = partial(peers.sum_of, _zero, y, torch.bfloat16)
    call()
    started = time.monotonic()
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return "told" if time.monotonic() - started < 5 else "late"
    return "waited for nobody"


def several(rank: int, works: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """One work after the other, by name: to start ranks takes longer than most of them do."""
    found: list[Any] = []
    for name, given in works:
        work: Callable[..., Any] = globals().get(name) or getattr(parallel_ranks, name)
        try:
            found.append(work(rank, *given))
        except Exception as error:
            found.append(error)
    return found


def _zero(part: Tensor) -> None:
    part.zero_()
