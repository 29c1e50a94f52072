"""Gradients over NCCL, between two GPUs: the bits that gloo gives, and no wait of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.test_comm import all_equal, equal
from tests.helpers import comm_gpu
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _two(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def on_gpus(*given: Any) -> list[Any]:
    work, *others = given
    return on_ranks(work, 2, *others, timeout=120, backend="nccl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"remainder": "int4"},
        {"remainder": "int3.5", "every": 2},
        {"remainder": "sign", "warmup": 2},
        {"remainder": None, "momentum": 0.5},
    ],
    ids=str,
)
def test_nccl_gives_the_bits_of_gloo(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"k": 0.01, "dense_below": 100, **options}
    over_nccl = on_gpus(comm_gpu.means, "cuda", options, dtype)
    over_gloo = on_ranks(comm_gpu.means, 2, "cpu", options, dtype)
    for one, other in zip(over_nccl, over_gloo, strict=True):
        assert all(equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("bucket_mb", [25.0, 0.001])
def test_replicas_under_ddp_stay_equal(bucket_mb: float) -> None:
    assert all_equal(on_gpus(comm_gpu.trained, "cuda", bucket_mb))


def test_buckets_do_not_matter() -> None:
    one, many = (on_gpus(comm_gpu.trained, "cuda", mb)[0] for mb in (25.0, 0.001))
    assert all_equal([one, many])


def test_the_host_does_not_wait() -> None:
    assert on_gpus(comm_gpu.without_waiting) == [4, 4]


def test_shards_of_fsdp_stay_equal() -> None:
    assert all_equal(on_gpus(comm_gpu.sharded))
