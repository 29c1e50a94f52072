"""Layers that two GPUs share: peers' memory read by kernels, under NCCL's process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.test_comm import equal
from tests.helpers import parallel_gpu, parallel_ranks
from tests.helpers.ranks import KILLED, on_ranks

# A kernel that waits for its peer fails after 15 s, a collective after 30.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _two(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def on_gpus(*given: Any) -> list[Any]:
    work, *others = given
    found = on_ranks(work, 2, *others, timeout=30, backend="nccl")
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert not isinstance(each, str) or each != KILLED
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "tokens"),
    [
        ("2:4", torch.bfloat16, 16),
        ("2:4", torch.float16, 1),
        ("2:4", torch.bfloat16, 257),
        ("dense", torch.bfloat16, 17),
    ],
    ids=str,
)
def test_shared_layers_compute_what_whole_ones_do(
    kind: str, dtype: torch.dtype, tokens: int
) -> None:
    for told in on_gpus(parallel_gpu.layers, kind, dtype, tokens):
        assert all("by the kernel that reads peers' memory" in each for each in told)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_those_of_the_reference_bit_for_bit(dtype: torch.dtype) -> None:
    assert min(on_gpus(parallel_gpu.bits, dtype)) > 10**6


def test_columns_come_side_by_side() -> None:
    assert min(on_gpus(parallel_gpu.columns)) > 10**6


@pytest.mark.parametrize("early", [False, True], ids=["in turn", "early"])
@pytest.mark.parametrize("calls", [1, 2, 5])
def test_graphs_may_be_replayed(calls: int, early: bool) -> None:
    for starts in on_gpus(parallel_gpu.replayed, calls, early):
        assert (starts > 0) == early


def test_many_calls_keep_apart() -> None:
    assert on_gpus(parallel_gpu.many, 3000) == [0, 0]


def test_what_peers_do_not_read_nccl_adds() -> None:
    for large, odd, asked in on_gpus(parallel_gpu.fallbacks):
        assert "collectives of nccl: a part of 8448 bytes is above the capacity of 1024" in large
        assert "collectives of nccl" in odd
        assert "collectives of nccl: they were not asked for" in asked


def test_gradients_are_those_of_whole_layers() -> None:
    on_gpus(parallel_gpu.gradients)


@pytest.mark.parametrize("form", ["2:4+fp8/fp8", "2:4+int8/int8", "2:4+int4:64"])
def test_quantized_layers_are_shared(form: str) -> None:
    for sums, want, columns, whole in on_gpus(parallel_ranks.quantized, form, "cuda"):
        assert equal(sums, want)
        assert equal(columns, whole)


def test_a_rank_without_its_peer_is_told() -> None:
    found = on_ranks(parallel_gpu.without_a_peer, 2, timeout=30, backend="nccl")
    # The one that was told may not live to say so: its process can use the GPU no more.
    assert found[0] in ("told", KILLED) or isinstance(found[0], BaseException)
    assert found[1] == "absent"
