"""Operators in worker processes, as a DataLoader or a server starts them."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.formats import NM
from hopsparse.ops import pack_nm, spmm_nm


def product(seed: int) -> list[list[float]]:
    """Of small integers, so that it is the same however many threads a process has."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randint(-3, 4, (64, 128), generator=generator).to(torch.bfloat16)
    x = torch.randint(-1, 2, (17, 128), generator=generator).to(torch.bfloat16)
    w = pack_nm(dense, select="magnitude")
    result: list[list[float]] = spmm_nm(w, x, act="relu", out_dtype=torch.float32).tolist()
    return result


def refused(w: NM) -> tuple[int, ...]:
    spmm_nm(w, torch.ones(3, 15))
    return w.shape


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_compute_what_their_parent_computes(method: str) -> None:
    """The parent has computed before, so that a forked child has its caches and no threads."""
    expected = [product(seed) for seed in range(4)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(product, range(4)).get(timeout=120) == expected
        w = NM.from_dense(torch.zeros(8, 16))
        with pytest.raises(ArgumentError, match=r"x of shape \[3, 15\]"):
            pool.apply_async(refused, (w,)).get(timeout=120)
