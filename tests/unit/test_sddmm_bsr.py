"""Products sampled at blocks, and the gradients that are made of them, against dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats import BSR
from hopsparse.measure.error import product_bound
from hopsparse.ops import sddmm_bsr
from hopsparse.ops.spmm_bsr.sddmm import block_rows
from tests.helpers.blocks import blocked, small

CPU = torch.device("cpu")
# Ragged sides, and blocks of 8 of which block rows are filled up with free ones.
CASES = [((16, 16), 64, 96), ((32, 64), 200, 328), ((8, 8), 70, 50), ((128, 128), 130, 64)]


def mask_of(w: BSR) -> Tensor:
    """Where blocks are."""
    ones = torch.where(w.indices >= 0, 1.0, 0.0)[:, None, None].expand(w.values.shape)
    return BSR(w.shape, ones.contiguous(), w.indices, w.indptr, w.block).to_dense()


@pytest.mark.parametrize(("block", "m", "n"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_dense_product_at_the_blocks(
    block: tuple[int, int], m: int, n: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(m)
    pattern = BSR.from_dense(blocked(m, n, block, dtype, CPU), block)
    for depth in (0, 1, 37):
        a, b = small(m, depth, dtype, CPU), small(depth, n, dtype, CPU).T
        y = sddmm_bsr(pattern, a, b)
        assert (y.dtype, y.block) == (dtype, block)
        y.validate()  # padding and free blocks are zeros
        wanted = (a.double() @ b.double().T).to(dtype) * mask_of(pattern).to(dtype)
        assert torch.equal(y.to_dense(), wanted)


def test_random_numbers_stay_in_bound() -> None:
    torch.manual_seed(0)
    pattern = BSR.from_dense(blocked(96, 160, (32, 32), torch.bfloat16, CPU), (32, 32))
    a, b = torch.randn(96, 300).bfloat16(), torch.randn(160, 300).bfloat16()
    error = (sddmm_bsr(pattern, a, b).to_dense().double() - a.double() @ b.double().T).abs()
    bound = product_bound(a, b, torch.float32, torch.bfloat16)
    assert (error <= bound)[mask_of(pattern) > 0].all()


def test_gradients_are_those_of_the_masked_product() -> None:
    torch.manual_seed(1)
    pattern = BSR.from_dense(blocked(40, 72, (16, 16), torch.float32, CPU), (16, 16))
    a, b = (small(rows, 5, torch.float32, CPU).requires_grad_() for rows in (40, 72))
    weights = small(40, 72, torch.float32, CPU)
    upstream = sddmm_bsr(pattern, weights, torch.eye(72)).values
    (sddmm_bsr(pattern, a, b).values * upstream).sum().backward()
    found = a.grad, b.grad
    a.grad = b.grad = None
    ((a @ b.T) * mask_of(pattern) * weights).sum().backward()
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], a.grad)
    assert torch.equal(found[1], b.grad)


@pytest.mark.parametrize(("block", "out", "k"), [c for c in CASES if c[0] != (8, 8)], ids=str)
def test_the_gradient_of_a_weight_is_sampled_at_its_blocks(
    block: tuple[int, int], out: int, k: int
) -> None:
    """The operator as programs call it, whose backward pass never makes a dense gradient of w."""
    torch.manual_seed(out)
    w = BSR.from_dense(blocked(out, k, block, torch.float32, CPU), block)
    x = small(9, k, torch.float32, CPU).view(3, 3, k)
    values = w.values.clone().requires_grad_()
    sides, run = [out, *block], torch.ops.hopsparse.spmm_bsr.default
    y = run([values, w.indices, w.indptr], x, None, None, sides, "none", 0.5, torch.float32)
    upstream = small(9, out, torch.float32, CPU).view(3, 3, out)
    y.backward(upstream)
    dense = w.to_dense().requires_grad_()
    (0.5 * x @ dense.T).backward(upstream)
    assert values.grad is not None
    found = BSR(w.shape, values.grad, w.indices, w.indptr, block)
    assert torch.equal(found.to_dense(), dense.grad * (dense != 0))
    found.validate()


def test_torch_agrees_that_the_operator_is_well_formed() -> None:
    pattern = BSR.from_dense(blocked(40, 72, (16, 16), torch.float32, CPU), (16, 16))
    a, b = torch.randn(40, 5, requires_grad=True), torch.randn(72, 5, requires_grad=True)
    facts = (pattern.indices, pattern.indptr, [40, 72, 16, 16])
    torch.library.opcheck(torch.ops.hopsparse.sddmm_bsr.default, (a, b, *facts))


def test_block_rows() -> None:
    assert block_rows(torch.tensor([0, 0, 3, 4]), 4).tolist() == [1, 1, 1, 2]


def test_arguments_that_do_not_fit_are_refused() -> None:
    pattern = BSR.from_dense(torch.eye(32), (16, 16))
    for a, b, told in (
        (torch.ones(32, 5), torch.ones(5, 32), r"b \[5, 32\] for a pattern of \[32, 32\]"),
        (torch.ones(16, 5), torch.ones(32, 5), r"a \[16, 5\]"),
        (torch.ones(32, 5), torch.ones(32, 5).half(), "of both, on one device"),
        (torch.ones(32, 5).double(), torch.ones(32, 5).double(), "float32, bfloat16 or float16"),
    ):
        with pytest.raises(ArgumentError, match=told):
            sddmm_bsr(pattern, a, b)
    with pytest.raises(ArgumentError, match="a pattern of type Tensor"):
        sddmm_bsr(torch.eye(32), torch.ones(32, 5), torch.ones(32, 5))  # type: ignore[arg-type]
