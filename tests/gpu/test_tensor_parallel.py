"""Layers that two GPUs share: peers' memory read by kernels, under NCCL's process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.test_comm import equal
from tests.helpers import parallel_gpu
from tests.helpers.ranks import KILLED, on_ranks

# A kernel that waits for its peer fails after 15 s, a collective after 30.
pytestmark = pytest.mark.timeout(180)

LAYERS = (
    ("layers", ("2:4", torch.bfloat16, 16)),
    ("layers", ("2:4", torch.float16, 1)),
    ("layers", ("2:4", torch.bfloat16, 257)),
    ("layers", ("dense", torch.bfloat16, 17)),
)
BITS = (("bits", (torch.bfloat16,)), ("bits", (torch.float16,)))
COLUMNS = (("columns", ()),)
FALLBACKS = (("fallbacks", ()),)
GRADIENTS = (("gradients", ()),)
QUANTIZED = tuple(
    ("quantized", (form, "cuda")) for form in ("2:4+fp8/fp8", "2:4+int8/int8", "2:4+int4:64")
)
GRAPHS = tuple(("replayed", (calls, early)) for early in (False, True) for calls in (1, 2, 5))
MANY = (("many", (3000,)),)

Work = tuple[str, tuple[Any, ...]]
Found = dict[Work, list[Any]]


def on_gpus(works: tuple[Work, ...]) -> Found:
    """What each rank found of each work; all of them by two processes."""
    found = on_ranks(parallel_gpu.several, 2, list(works), timeout=30, backend="nccl")
    for rank, each in enumerate(found):
        if isinstance(each, BaseException):
            raise each
        assert not isinstance(each, str), f"rank {rank} was {each}"
    return {work: [each[place] for each in found] for place, work in enumerate(works)}


def of(found: Found, work: Work) -> list[Any]:
    for each in found[work]:
        if isinstance(each, BaseException):
            raise each
    return found[work]


@pytest.fixture(scope="module")
def two(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture(scope="module")
def numbers(two: None) -> Found:
    return on_gpus((*LAYERS, *BITS, *COLUMNS, *FALLBACKS, *GRADIENTS, *QUANTIZED))


@pytest.fixture(scope="module")
def turns(two: None) -> Found:
    return on_gpus((*GRAPHS, *MANY))


@pytest.mark.parametrize("work", LAYERS, ids=str)
def test_shared_layers_compute_what_whole_ones_do(numbers: Found, work: Work) -> None:
    for told in of(numbers, work):
        assert all("by the kernel that reads peers' memory" in each for each in told)


@pytest.mark.parametrize("work", BITS, ids=str)
def test_sums_are_those_of_the_reference_bit_for_bit(numbers: Found, work: Work) -> None:
    assert min(of(numbers, work)) > 10**6


@pytest.mark.parametrize("work", COLUMNS, ids=str)
def test_columns_come_side_by_side(numbers: Found, work: Work) -> None:
    assert min(of(numbers, work)) > 10**6


@pytest.mark.parametrize("work", GRAPHS, ids=str)
def test_graphs_may_be_replayed(turns: Found, work: Work) -> None:
    _, early = work[1]
    assert all((starts > 0) == early for starts in of(turns, work))


@pytest.mark.parametrize("work", MANY, ids=str)
def test_many_calls_keep_apart(turns: Found, work: Work) -> None:
    assert of(turns, work) == [0, 0]


@pytest.mark.parametrize("work", FALLBACKS, ids=str)
def test_what_peers_do_not_read_nccl_adds(numbers: Found, work: Work) -> None:
    for large, odd, asked in of(numbers, work):
        assert "collectives of nccl: a part of 8448 bytes is above the capacity of 1024" in large
        assert "collectives of nccl" in odd
        assert "collectives of nccl: they were not asked for" in asked


@pytest.mark.parametrize("work", GRADIENTS, ids=str)
def test_gradients_are_those_of_whole_layers(numbers: Found, work: Work) -> None:
    assert of(numbers, work) == [2, 2]


@pytest.mark.parametrize("work", QUANTIZED, ids=str)
def test_quantized_layers_are_shared(numbers: Found, work: Work) -> None:
    for sums, want, columns, whole in of(numbers, work):
        assert equal(sums, want)
        assert equal(columns, whole)


def test_a_rank_without_its_peer_is_told(two: None) -> None:
    found = on_ranks(parallel_gpu.without_a_peer, 2, timeout=30, backend="nccl")
    # The one that was told may not live to say so: its process can use the GPU no more.
    assert found[0] in ("told", KILLED) or isinstance(found[0], BaseException)
    assert found[1] == "absent"
