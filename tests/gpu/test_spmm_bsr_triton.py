"""The portable block-sparse kernel: on this GPU bit by bit or in bound, and compiled for others."""

from __future__ import annotations

import pytest
import torch

from hopsparse.errors import UnsupportedError
from hopsparse.formats import BSR, BSR24
from hopsparse.measure.error import finish_bound
from hopsparse.ops._call import ACTIVATIONS, apply_activation
from hopsparse.ops.spmm_bsr.triton import compiled_for, run, why_not
from tests.helpers.blocks import blocked, exact_product, small, two_four_inside

_AMD = 224  # in an ELF header, where 190 is CUDA


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "block", [(16, 16), (32, 32), (64, 64), (128, 128), (48, 96), (16, 128)], ids=str
)
def test_products_are_exact(
    block: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, out, k in ((1, 128, 64), (45, 200, 328), (0, 64, 64), (300, 512, 1024)):
        dense, x = blocked(out, k, block, dtype, device), small(tokens, k, dtype, device)
        y = run(BSR.from_dense(dense, block), x)
        assert torch.equal(y, exact_product(x, dense)), (tokens, out, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "block", [(16, 16), (32, 32), (64, 64), (128, 128), (48, 96), (16, 128)], ids=str
)
def test_products_of_two_four_blocks_are_exact(
    block: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, out, k in ((1, 128, 64), (45, 200, 328), (0, 64, 64), (300, 512, 1024)):
        dense = two_four_inside(blocked(out, k, block, dtype, device))
        x = small(tokens, k, dtype, device)
        y = run(BSR24.from_dense(dense, block), x)
        assert torch.equal(y, exact_product(x, dense)), (tokens, out, k)


@pytest.mark.parametrize("kind", [BSR, BSR24])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_epilogues(act: str, kind: type[BSR | BSR24], device: torch.device) -> None:
    dense = two_four_inside(blocked(200, 128, (32, 32), torch.bfloat16, device))
    x = small(45, 256, torch.bfloat16, device)[:, ::2]
    bias = torch.randn(200, device=device).bfloat16()
    residual = torch.randn(45, 200, device=device)
    y = run(
        kind.from_dense(dense, (32, 32)),
        x,
        bias,
        activation=act,
        alpha=0.125,
        residual=residual,
        out_dtype=torch.float32,
    )
    sums = 0.125 * (x.double() @ dense.double().T) + bias.double()
    expected = apply_activation(sums, act) + residual.double()
    bound = finish_bound(sums.abs(), expected, residual, torch.float32)
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("halved", [False, True])
def test_it_compiles_for_gfx942(
    block: int, dtype: torch.dtype, halved: bool, device: torch.device
) -> None:
    code = compiled_for("hip", "gfx942", 64, dtype, (block, block), halved=halved)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == _AMD


def test_blocks_that_it_cannot_multiply_are_refused(device: torch.device) -> None:
    w = BSR.from_dense(torch.ones(32, 32, device=device).half(), (8, 8))
    assert "8 x 8" in str(why_not(w))
    with pytest.raises(UnsupportedError, match="blocks are 8 x 8"):
        run(w, torch.ones(3, 32, device=device).half())
