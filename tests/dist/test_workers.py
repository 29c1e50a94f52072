"""Operators in worker processes, as a DataLoader or a server starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The parent computes before it starts workers, so that a forked one has its caches. One thread:
# torch's pool of threads does not survive a fork, whatever is computed.
_PARENT = """
import multiprocessing, sys
import torch
from hopsparse.errors import ArgumentError
from hopsparse.formats import NM
from hopsparse.ops import pack_nm, spmm_nm

def product(seed):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randint(-3, 4, (64, 128), generator=generator).to(torch.bfloat16)
    x = torch.randint(-1, 2, (17, 128), generator=generator).to(torch.bfloat16)
    w = pack_nm(dense, select="magnitude")
    return spmm_nm(w, x, act="relu", out_dtype=torch.float32).tolist()

def refused(w):
    spmm_nm(w, torch.ones(3, 15))

if __name__ == "__main__":
    expected = [product(seed) for seed in range(4)]
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(product, range(4)) == expected)
        try:
            pool.apply(refused, (NM.from_dense(torch.zeros(8, 16)),))
        except ArgumentError as error:
            print(error.got)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_compute_what_their_parent_computes(method: str, tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(_PARENT)
    done = subprocess.run(
        [sys.executable, str(parent), method],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["True", "spmm_nm: x of shape [3, 15]"], done.stderr
