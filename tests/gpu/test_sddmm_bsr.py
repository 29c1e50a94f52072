"""Products sampled at blocks on a GPU: the Triton kernel, the gradient it is, and code for AMD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.formats import BSR
from hopsparse.measure.error import product_bound
from hopsparse.ops import sddmm_bsr, spmm_bsr
from tests.helpers.blocks import blocked, small

_AMD = 224  # in an ELF header, where 190 is CUDA
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (48, 96), (16, 128)]


def few(m: int, n: int, block: tuple[int, int], dtype: torch.dtype, device: torch.device) -> BSR:
    """Blocks of which less than half are kept, so that the kernel runs."""
    return BSR.from_dense(blocked(m, n, block, dtype, device, kept=0.1), block)


def mask_of(w: BSR) -> Tensor:
    ones = torch.where(w.indices >= 0, 1.0, 0.0)[:, None, None].expand(w.values.shape)
    return BSR(w.shape, ones.contiguous(), w.indices, w.indptr, w.block).to_dense()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_products_are_exact_and_nothing_is_written_outside(
    block: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    for m, n, depth in ((1024, 640, 300), (1000, 1040, 45), (2048, 512, 1)):
        torch.manual_seed(m)
        pattern = few(m, n, block, dtype, device)
        a, b = small(m, depth, dtype, device), small(depth, n, dtype, device).T
        torch.full_like(pattern.values, float("nan"))  # where the allocator likely puts the result
        y = sddmm_bsr(pattern, a, b)
        y.validate()
        wanted = (a.double() @ b.double().T).to(dtype) * mask_of(pattern).to(dtype)
        assert torch.equal(y.to_dense(), wanted), (m, n, depth)


def test_random_numbers_stay_in_bound(device: torch.device) -> None:
    torch.manual_seed(0)
    pattern = few(512, 1024, (64, 64), torch.bfloat16, device)
    a, b = (torch.randn(side, 2048, device=device).bfloat16() for side in (512, 1024))
    error = (sddmm_bsr(pattern, a, b).to_dense().double() - a.double() @ b.double().T).abs()
    bound = product_bound(a, b, torch.float32, torch.bfloat16)
    assert (error <= bound)[mask_of(pattern) > 0].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (48, 96)], ids=str)
def test_the_gradient_of_a_weight_is_exact(
    block: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(1)
    w, x = few(576, 960, block, dtype, device), small(100, 960, dtype, device)
    x.requires_grad_()
    values = w.values.clone().requires_grad_()
    y = spmm_bsr(BSR(w.shape, values, w.indices, w.indptr, block), x)
    upstream = small(100, 576, dtype, device)
    y.backward(upstream)
    dense = w.to_dense()
    assert values.grad is not None
    found = BSR(w.shape, values.grad, w.indices, w.indptr, block).to_dense()
    wanted = (upstream.double().T @ x.detach().double()).to(dtype) * (dense != 0)
    assert torch.equal(found, wanted)
    assert torch.equal(x.grad, (upstream.double() @ dense.double()).to(dtype))


def test_torch_agrees_that_the_operator_is_well_formed(device: torch.device) -> None:
    pattern = few(512, 512, (32, 32), torch.float32, device)
    a, b = (torch.randn(512, 8, device=device, requires_grad=True) for _ in range(2))
    facts = (pattern.indices, pattern.indptr, [512, 512, 32, 32])
    torch.library.opcheck(torch.ops.hopsparse.sddmm_bsr.default, (a, b, *facts))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles_for_gfx942(block: int, dtype: torch.dtype, device: torch.device) -> None:
    from hopsparse.ops.spmm_bsr.sddmm_triton import compiled_for

    code = compiled_for("hip", "gfx942", 64, dtype, (block, block))
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == _AMD
