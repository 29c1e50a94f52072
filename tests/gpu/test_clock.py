"""The clock itself: what it must find where the answer is known."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hopsparse.measure.clock import (
    Contender,
    copies_to_defeat_l2,
    host_time,
    ratio,
    time_side_by_side,
)
from hopsparse.measure.contest import Layer, Reference, Way, random_24
from hopsparse.measure.peers import PEERS, CuBLAS, CuSPARSELt
from hopsparse.measure.power import Sampler, sample


def copies(count: int, megabytes: int, device: torch.device) -> list[Tensor]:
    return [torch.rand(megabytes << 18, device=device) for _ in range(count)]


def reading(name: str, tensors: list[Tensor]) -> Contender:
    return Contender(name, [each.sum for each in tensors])


def test_one_thing_under_two_names_takes_one_time(device: torch.device) -> None:
    tensors = copies(4, 64, device)
    timings = time_side_by_side([reading("a", tensors), reading("b", tensors)])
    found = ratio(*timings)
    # What the quartiles of the samples themselves say about telling the two apart.
    spread = max(each.spread for each in timings)
    assert found.low - spread <= 1 <= found.high + spread
    assert [len(each.samples_us) for each in timings] == [25, 25]
    assert all(not each.error for each in timings)


def test_twice_the_bytes_take_about_twice_the_time(device: torch.device) -> None:
    small, large = copies(4, 128, device), copies(4, 256, device)
    fast, slow = time_side_by_side([reading("small", small), reading("large", large)])
    assert 1.5 < ratio(slow, fast).value < 3


def test_rotated_copies_do_not_come_from_the_cache(device: torch.device) -> None:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    tensors = copies(copies_to_defeat_l2(16 << 20, l2_bytes), 16, device)
    outs = [torch.empty_like(tensors[0])] * len(tensors)
    rotated = [partial(torch.neg, each, out=out) for each, out in zip(tensors, outs, strict=True)]
    cold = Contender("rotated", rotated)
    hot = Contender("one", rotated[:1])
    timings = time_side_by_side([cold, hot])
    assert ratio(*timings).low > 1


def test_an_overwritten_cache_makes_one_copy_cold(device: torch.device) -> None:
    (tensor,) = copies(1, 16, device)
    out = torch.empty_like(tensor)
    contender = Contender("one", [partial(torch.neg, tensor, out=out)])
    (flushed,) = time_side_by_side([contender], flush_l2=True)
    (hot,) = time_side_by_side([contender])
    assert flushed.calls_per_sample == 1
    assert flushed.us > hot.us


@pytest.mark.parametrize("how", ["raises", "waits", "raises in the capture"])
def test_a_contender_that_fails_is_reported_and_the_others_go_on(
    how: str, device: torch.device
) -> None:
    tensors = copies(2, 64, device)

    def fails() -> object:
        capturing = torch.cuda.is_current_stream_capturing()
        if how == "raises" or (how == "raises in the capture" and capturing):
            raise ValueError("no such shape")
        return tensors[0].sum().item()

    contenders = [reading("first", tensors), Contender("bad", [fails]), reading("last", tensors)]
    first, bad, last = time_side_by_side(contenders, rounds=5)
    assert not first.error
    assert not last.error
    assert bad.samples_us == ()
    assert ("no such shape" in bad.error) == (how != "waits")
    # The allocator must not believe that the broken capture goes on.
    torch.cuda.empty_cache()
    (again,) = time_side_by_side([reading("again", tensors)], rounds=3)
    assert not again.error


def test_a_spent_budget_stops_rounds_and_contenders(device: torch.device) -> None:
    tensors = copies(2, 64, device)
    (late,) = time_side_by_side([reading("late", tensors)], budget_s=0.0)
    assert "spent" in late.error
    (few,) = time_side_by_side([reading("few", tensors)], rounds=100_000, budget_s=1.0)
    assert 3 <= len(few.samples_us) < 100_000


def test_host_time_does_not_wait_for_the_gpu(device: torch.device) -> None:
    (tensor,) = copies(1, 1024, device)
    (on_device,) = time_side_by_side([reading("sum", [tensor])], rounds=5)
    assert 1e6 * host_time(tensor.sum, calls=200, chunk=20) < on_device.us


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.NAME)
def test_peers_compute_the_product(peer: type, tokens: int, device: torch.device) -> None:
    if peer is CuSPARSELt and not torch.backends.cusparselt.is_available():
        assert "without cuSPARSELt" in str(CuSPARSELt.available())
        return
    weight = random_24((512, 256), torch.bfloat16, torch.Generator(device).manual_seed(0))
    x = torch.randn(tokens, 256, device=device, dtype=torch.bfloat16)
    product = peer.prepare(weight)
    assert Reference(x, weight).excess(product(x)) <= 1
    assert peer.describe(product, x)


def test_a_wrong_way_is_named_and_not_timed(device: torch.device) -> None:
    def prepare(weight: Tensor, bias: Tensor | None) -> object:
        return lambda x: 2 * CuBLAS.prepare(weight, bias)(x)

    wrong = Way("twice", prepare, lambda product, x: "twice")
    first: list[Tensor] = []

    def stale(weight: Tensor, bias: Tensor | None) -> object:
        first.append(weight)
        return CuBLAS.prepare(first[0], bias)

    ways = [Way.of(CuBLAS), wrong, Way("stale", stale, lambda product, x: "stale")]
    layer = Layer.random((1024, 512), torch.bfloat16, ways, device=device)
    right, twice, kept = layer.contest(32, rounds=3).results
    assert right.timing.samples_us
    for result in (twice, kept):
        assert result.timing.samples_us == ()
        assert "wrong" in result.timing.error


def test_the_gpu_tells_its_clocks_and_power(device: torch.device) -> None:
    state = sample(device)
    assert state.sm_mhz is not None
    assert state.sm_mhz > 0
    tensors = copies(2, 512, device)
    with Sampler(device) as seen:
        time_side_by_side([reading("sum", tensors)], warm_s=1.0)
    assert seen.watts is not None
    assert seen.watts > 0
    assert len(seen.states) > 5
