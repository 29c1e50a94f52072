"""Blocks with 2:4 inside: bytes as docs/formats.md has them, refusals, conversions, products."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError, FormatError
from hopsparse.formats import BSR, BSR24, CSR, NMPattern, Quantized, convert, parse_scheme
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_bsr
from hopsparse.ops.spmm_bsr import plan
from hopsparse.prune import magnitude
from hopsparse.quant import weight_scales
from tests.helpers import matrices as mk
from tests.helpers.blocks import blocked, exact_product, small, two_four_inside

CPU = torch.device("cpu")
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32), (8, 32), (256, 8))


def weight(out: int, k: int, block: tuple[int, int], dtype: torch.dtype = torch.float16) -> Tensor:
    torch.manual_seed(0)
    return two_four_inside(blocked(out, k, block, dtype, CPU))


@given(st.sampled_from(BLOCKS), mk.dtypes, mk.shapes, st.integers(0, 2), mk.seeds)
@settings(deadline=None, max_examples=100)
def test_round_trip(block, dtype, shape, n, seed):
    if any(side > max(1024, limit) for side, limit in zip(block, shape, strict=True)):
        return
    dense = mk.random_nm(shape, NMPattern(2, 4), dtype, seed, n=n)
    matrix = BSR24.from_dense(dense, block)
    matrix.validate()
    mk.assert_same(matrix.to_dense(), dense)
    blocks = matrix.to_blocks()
    blocks.validate()
    for part, tensor in BSR.from_dense(dense, block).parts().items():
        assert torch.equal(mk.bits(blocks.parts()[part]), mk.bits(tensor)), part
    again = BSR24.from_blocks(blocks)
    for part, tensor in matrix.parts().items():
        assert torch.equal(mk.bits(again.parts()[part]), mk.bits(tensor)), part


def test_the_decoder_of_the_page_reads_it() -> None:
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    section = page.split("## bsr24:")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    room: dict[str, object] = {"np": np}
    exec(found[1], room)
    decode = room["decode"]
    assert callable(decode)
    for shape, block in (((70, 130), (16, 16)), ((64, 256), (32, 64)), ((130, 68), (128, 32))):
        dense = weight(*shape, block)
        w = BSR24.from_dense(dense, block)
        parts = [
            part.view(torch.int16) if part is w.values else part for part in w.parts().values()
        ]
        read = decode(*(part.numpy() for part in parts), *shape)
        assert np.array_equal(read, (dense + 0).view(torch.int16).numpy())  # without -0.0


def test_it_takes_nine_sixteenths_of_the_blocks() -> None:
    dense = weight(512, 512, (64, 64), torch.bfloat16)
    blocks = BSR.from_dense(dense, (64, 64))
    places = blocks.indices.nbytes + blocks.indptr.nbytes
    assert 16 * (BSR24.from_blocks(blocks).nbytes - places) == 9 * (blocks.nbytes - places)


@pytest.mark.parametrize("block", [(16, 8), (16, 12), (4, 4), (0, 16), (16, 16, 16), 16])
def test_sides_without_whole_lines_are_refused(block: object) -> None:
    with pytest.raises(FormatError, match="columns a multiple of 8, rows times columns"):
        BSR24.from_dense(torch.eye(32), block)  # type: ignore[arg-type]


def test_a_full_group_is_named_by_its_place_in_the_matrix() -> None:
    dense = weight(96, 96, (32, 32))
    dense[71, 68:71] = 1.0
    told = r"row 71, group 17 \(columns 68 to 71\) holds (3|4) non-zeros"
    with pytest.raises(FormatError, match=told):
        BSR24.from_dense(dense)
    with pytest.raises(FormatError, match=told):
        convert(BSR.from_dense(dense), "bsr24")


W = BSR24.from_dense(weight(48, 40, (16, 16)), (16, 16))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"nibbles": W.nibbles.clone().index_fill_(0, torch.tensor([1]), 0x44 ^ 0x40)},
            r"\[0, 0\]",
        ),
        ({"nibbles": W.nibbles[:, :, :1]}, "part 'nibbles'"),
        ({"values": W.values.float()[:, :, :7]}, "part 'values'"),
        ({"indices": W.indices.clone().index_fill_(0, torch.tensor([2]), 3)}, "block column 3"),
        ({"indices": W.indices.clone().index_fill_(0, torch.tensor([1]), -1)}, "rising|free block"),
        ({"indptr": W.indptr.flip(0)}, "indptr falls"),
        # Columns 40 to 47 of the third block column are outside.
        ({"values": torch.ones_like(W.values)}, "values outside"),
        ({"block": (8, 16)}, "rows times columns"),
    ],
)
def test_damage_is_found(change: dict[str, object], told: str) -> None:
    W.validate()
    with pytest.raises(FormatError, match=told):
        replace(W, **change).validate()  # type: ignore[arg-type]


def test_conversions_keep_the_block_and_share_its_places() -> None:
    blocks = BSR.from_dense(weight(64, 128, (16, 32)), (16, 32))
    halved = convert(blocks, "bsr24")
    assert isinstance(halved, BSR24)
    assert halved.block == (16, 32)
    assert halved.indices is blocks.indices
    assert convert(halved, "bsr24") is halved
    back = convert(halved, "bsr")
    assert isinstance(back, BSR)
    assert back.indptr is blocks.indptr
    assert torch.equal(back.values, blocks.values)
    other = convert(halved, "bsr24", block=(64, 64))
    assert isinstance(other, BSR24)
    assert other.block == (64, 64)
    with pytest.raises(ArgumentError, match="Required: bsr or bsr24"):
        convert(halved, "csr", block=(16, 16))


def test_codes_of_a_scheme_are_stored_in_it() -> None:
    scheme = parse_scheme("int4:32")
    dense = torch.randn(32, 64)
    dense = magnitude(dense, NMPattern(2, 4))
    codes = (dense * 3).round().clamp(-7, 7).to(torch.int8)
    scales = weight_scales(dense, scheme).bfloat16()
    stored = Quantized.of(convert(CSR.from_dense(codes), "bsr24"), scales, scheme, torch.float32)
    stored.validate()
    assert torch.equal(stored.codes().to_dense(), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (128, 64)], ids=str)
def test_products_are_exact(block: tuple[int, int], dtype: torch.dtype) -> None:
    dense = weight(200, 328, block, dtype)
    w, x = BSR24.from_dense(dense, block), small(45, 328, dtype, CPU)
    assert torch.equal(spmm_bsr(w, x), exact_product(x, dense))
    y = spmm_bsr(w, x, act="relu", alpha=2, residual=torch.ones(45, 200, dtype=dtype))
    assert torch.equal(y, (exact_product(2 * x, dense).relu() + 1))
    assert "w is decoded at every call" in plan(w, x).why
    layer = SparseLinear(w)
    assert torch.equal(layer(x), exact_product(x, dense))
    assert layer.plan(x).op == "spmm_bsr"


def test_kept_values_train() -> None:
    dense = weight(32, 48, (16, 16), torch.float32)
    w = BSR24.from_dense(dense, (16, 16))
    w.values.requires_grad_(True)
    x, grad = torch.randn(5, 48), torch.randn(5, 32)
    spmm_bsr(w, x).backward(grad)
    found = w.values.grad
    assert found is not None
    expected = BSR24.from_parts(w.shape, {**w.parts(), "values": found}, w.attributes()).to_dense()
    torch.testing.assert_close(expected, (grad.T @ x) * (dense != 0))


def test_it_is_one_graph_under_compile() -> None:
    w = BSR24.from_dense(weight(32, 48, (16, 16), torch.float32), (16, 16))
    compiled = torch.compile(lambda x: spmm_bsr(w, x), fullgraph=True, backend="eager")
    x = torch.randn(3, 48)
    torch.testing.assert_close(compiled(x), spmm_bsr(w, x))
