"""Sums of 8-bit floats of any size: the kernel against the model of the tensor cores, bit for bit.

The model is published for the dense instruction. That the sparse one adds the 32 products that it
keeps of 64 columns in the same way is what these tests find out.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.formats import NM
from hopsparse.measure.fp8 import fp8_sums
from hopsparse.ops import Scaling, spmm_nm_scaled
from hopsparse.ops.spmm_nm.kernel import Config, Numbers
from hopsparse.ops.spmm_nm.plan import eight_bit

FP8, E4M3, E5M2 = "float8_e4m3fn", torch.float8_e4m3fn, torch.float8_e5m2
# Blocks that share k add their parts in float32, which is another sum.
FAST = [c for c in eight_bit(Numbers(FP8, FP8, "float32")) if c.cluster_k == 1]
PROMOTED = [c for c in eight_bit(Numbers(FP8, FP8, "float32", promoted=True)) if c.cluster_k == 1]


def numbers(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of many sizes, so that sums lose much; zeros and subnormal numbers among them."""
    sizes = (2 * torch.randn(shape, device=device)).exp2()
    most = torch.finfo(dtype).max
    return (torch.randn(shape, device=device) * sizes).clamp(-most, most).to(dtype)


def two_four(out: int, k: int, device: torch.device) -> Tensor:
    dense = numbers((out, k), E4M3, device)
    rank = torch.rand(out, k // 4, 4, device=device).argsort(-1)
    return (dense.float() * (rank < 2).flatten(1)).to(E4M3)


@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("config", FAST[::3], ids=lambda config: config.name)
def test_fast_sums_are_those_of_the_model(
    config: Config, x_dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(config.tokens)
    x, w = numbers((96, 1168), x_dtype, device), two_four(136, 1168, device)
    scaling = Scaling(sums="fast")
    y = spmm_nm_scaled(NM.from_dense(w), x, scaling, out_dtype=torch.float32, config=config)
    expected = fp8_sums(x, w)
    assert (expected.double() != x.double() @ w.double().T).any()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("config", PROMOTED[::3], ids=lambda config: config.name)
def test_promoted_sums_are_those_of_the_model(config: Config, device: torch.device) -> None:
    torch.manual_seed(config.tokens)
    x, w = numbers((96, 1168), E4M3, device), two_four(136, 1168, device)
    y = spmm_nm_scaled(NM.from_dense(w), x, out_dtype=torch.float32, config=config)
    assert torch.equal(y, fp8_sums(x, w, batch=config.columns))
