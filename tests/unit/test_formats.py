"""Every format returns what it was given, and turns into every other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopsparse.formats import (
    BSR,
    CSC,
    CSR,
    FORMATS,
    HYB,
    NM,
    VALUE_DTYPES,
    Bitmask,
    NMPattern,
    SparseMatrix,
    convert,
    nonzero_mask,
    parse_pattern,
    storage_for,
)
from hopsparse.formats.bsr import blocks_per_line
from hopsparse.formats.csr import transposed
from hopsparse.formats.hyb import ell_width
from tests.helpers import matrices as mk

ANY = (CSR, CSC, HYB, Bitmask)
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32), (1, 16), (4, 4), (3, 5))


@given(st.sampled_from(ANY), mk.dtypes, mk.shapes, mk.densities, mk.layouts, mk.seeds)
@settings(deadline=None, max_examples=150)
def test_round_trip(kind, dtype, shape, density, layout, seed):
    dense = mk.random_dense(shape, dtype, density, layout, seed)
    matrix = kind.from_dense(dense)
    matrix.validate()
    mk.assert_same(matrix.to_dense(), dense)
    assert matrix.nnz == int((dense.double() != 0).sum())


@given(st.sampled_from(BLOCKS), mk.dtypes, mk.shapes, mk.densities, mk.layouts, mk.seeds)
@settings(deadline=None, max_examples=100)
def test_bsr_round_trip(block, dtype, shape, density, layout, seed):
    dense = mk.random_dense(shape, dtype, density, layout, seed)
    matrix = BSR.from_dense(dense, block)
    matrix.validate()
    mk.assert_same(matrix.to_dense(), dense)
    starts = matrix.indptr.long() * block[0] * block[1] * dtype.itemsize
    assert not (starts % 128).any()


@given(st.sampled_from(["1:4", "2:4", "4:6", "6:8"]), mk.dtypes, mk.shapes, mk.layouts, mk.seeds)
@settings(deadline=None, max_examples=60)
def test_nm_round_trip_of_any_strides(text, dtype, shape, layout, seed):
    pattern = parse_pattern(text)
    dense = mk.random_nm(shape, pattern, dtype, seed)
    if layout == "transpose":
        dense = dense.T.contiguous().T
    elif layout == "expand":
        dense = dense[:1].expand(*shape)
    elif layout == "column slice":
        dense = torch.stack((dense, dense), dim=-1)[..., 1]
    elif layout == "offset view":
        dense = torch.cat((dense, dense))[shape[0] :]
    matrix = NM.from_dense(dense, pattern)
    matrix.validate()
    mk.assert_same(matrix.to_dense(), dense)


@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from(list(FORMATS)),
    mk.dtypes,
    mk.shapes,
    mk.seeds,
)
@settings(deadline=None, max_examples=150)
def test_every_format_becomes_every_other(source, target, dtype, shape, seed):
    dense = mk.random_nm(shape, NMPattern(2, 4), dtype, seed)
    matrix = convert(CSR.from_dense(dense), source)
    result = convert(matrix, target)
    result.validate()
    assert result.name == target
    mk.assert_same(result.to_dense(), dense)


@pytest.mark.parametrize("target", ["csr", "csc", "hyb"])
@pytest.mark.parametrize("source", ["csr", "csc", "hyb"])
def test_graph_sized_matrices_convert_without_a_dense_copy(source, target):
    """Dense, this matrix would take 4 TB: a dense step anywhere would fail."""
    shape = (1_000_000, 1_000_000)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(shape[0] * shape[1], (3000,), generator=generator).unique()
    row, col = keys // shape[1], keys % shape[1]
    indptr = torch.zeros(shape[0] + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    base = CSR(shape, torch.rand(len(keys)), col.to(torch.int32), indptr)
    matrix = convert(convert(convert(base, source), target), "csr")
    matrix.validate()
    for part, tensor in base.parts().items():
        assert torch.equal(matrix.parts()[part], tensor), part


def test_transposed_agrees_with_from_dense():
    dense = mk.random_dense((65, 33), torch.float8_e5m2, 0.3, "plain", 5)
    for matrix, expected in (
        (transposed(CSR.from_dense(dense)), CSC.from_dense(dense)),
        (transposed(CSC.from_dense(dense)), CSR.from_dense(dense)),
    ):
        assert type(matrix) is type(expected)
        for part, tensor in expected.parts().items():
            assert torch.equal(mk.bits(matrix.parts()[part]), mk.bits(tensor)), part


def test_convert_shares_and_keeps():
    csr = CSR.from_dense(torch.eye(40))
    assert convert(csr, "csr") is csr
    mask = convert(csr, "bitmask")
    assert mask.values.data_ptr() == csr.values.data_ptr()
    nm = NM.from_dense(torch.eye(40), NMPattern(6, 8))
    assert convert(nm, "nm") is nm
    assert convert(nm, "nm", pattern="2:4").attributes() == {"pattern": "2:4"}
    bsr = convert(csr, "bsr", block=(16, 32))
    assert bsr.attributes() == {"block": "16x32", "blocks": 3}
    assert convert(bsr, "bsr") is bsr


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_matrix(fmt, dtype):
    dense = torch.zeros(5, 12).to(dtype)
    matrix = FORMATS[fmt].from_dense(dense)
    matrix.validate()
    assert (matrix.nnz, matrix.density) == (0, 0)
    mk.assert_same(matrix.to_dense(), dense)


@pytest.mark.parametrize("fmt", FORMATS)
def test_special_floats_survive_and_negative_zero_does_not(fmt):
    tiny = torch.finfo(torch.bfloat16).smallest_normal / 4
    row = [float("nan"), 0, float("inf"), -0.0, -float("inf"), tiny, -0.0, 0]
    dense = torch.tensor([row], dtype=torch.bfloat16)
    matrix = FORMATS[fmt].from_dense(dense)
    mk.assert_same(matrix.to_dense(), dense)
    assert matrix.nnz == 4


def test_flushing_denormals_does_not_lose_them():
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush denormals")
    try:
        dense = torch.tensor([[1, 0, 0, -1]], dtype=torch.int32).view(torch.float32)
        assert nonzero_mask(dense).tolist() == [[True, False, False, True]]
        assert torch.equal(mk.bits(CSR.from_dense(dense).to_dense()), mk.bits(dense))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("fmt", FORMATS)
def test_matrices_are_frozen_and_map(fmt):
    matrix = FORMATS[fmt].from_dense(torch.eye(8, dtype=torch.float16))
    with pytest.raises(FrozenInstanceError):
        matrix.shape = (1, 1)
    copy = matrix.map_parts(torch.clone)
    copy.validate()
    assert isinstance(copy, SparseMatrix)
    assert copy.nbytes == matrix.nbytes == sum(p.nbytes for p in matrix.parts().values())
    specs = matrix.part_specs(matrix.shape, matrix.dtype, matrix.attributes())
    assert {p: (tuple(t.shape), t.dtype) for p, t in matrix.parts().items()} == specs
    again = type(matrix).from_parts(matrix.shape, matrix.parts(), matrix.attributes())
    assert torch.equal(again.to_dense(), matrix.to_dense())


def test_bsr_block_rows_of_every_kind():
    dense = torch.zeros(64, 80)  # block 16: five block columns, an odd number
    dense[16:32] = 1  # a full block row between empty ones
    dense[50, 79] = 2
    matrix = BSR.from_dense(dense, (16, 16))
    assert matrix.indptr.tolist() == [0, 0, 5, 5, 6]
    assert matrix.indices.tolist() == [0, 1, 2, 3, 4, 4]
    assert torch.equal(matrix.to_dense(), dense)


def test_bsr_lines():
    assert [blocks_per_line((16, 16), size) for size in (1, 2, 4)] == [1, 1, 1]
    assert [blocks_per_line((3, 5), size) for size in (1, 2, 4)] == [128, 64, 32]
    small = BSR.from_dense(torch.ones(4, 4, dtype=torch.float16), (4, 4))
    assert small.indices.tolist() == [0, -1, -1, -1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from([1, 2, 4]))
@settings(deadline=None)
def test_ell_width_stores_the_fewest_bytes(counts, size):
    def stored(width: int) -> int:
        tail = sum(max(0, count - width) for count in counts)
        return len(counts) * width * (size + 4) + tail * (size + 8)

    best = min(range(10), key=lambda width: (stored(width), width))
    assert ell_width(torch.tensor(counts), size) == best


def test_hyb_layout():
    matrix = HYB.from_dense(torch.tensor([[1.0, 0, 0], [0, 2, 0], [3, 4, 5]]))
    assert matrix.ell_values.tolist() == [[1, 2, 3]]
    assert (matrix.tail_rows.tolist(), matrix.tail_cols.tolist()) == ([2, 2], [1, 2])
    assert matrix.row_counts().tolist() == [1, 1, 3]


def test_bitmask_may_store_zeros():
    """What sparse-24-bitmask files hold: two bits a group, also where there is one non-zero."""
    read = Bitmask((1, 8), torch.tensor([9.0, 0, 0, 0]), torch.tensor([[202]], dtype=torch.uint8))
    read.validate()
    assert read.to_dense().tolist() == [[0, 9, 0, 0, 0, 0, 0, 0]]


def test_csr_to_and_from_torch_shares_memory():
    csr = CSR.from_dense(torch.tensor([[0.0, 5.0], [7.0, 0.0]]))
    there = csr.to_torch()
    assert torch.equal(there.to_dense(), csr.to_dense())
    back = CSR.from_torch(there)
    for part, tensor in csr.parts().items():
        assert back.parts()[part].data_ptr() == tensor.data_ptr(), part
    wide = CSR.from_torch(csr.to_dense().to_sparse_csr())  # int64 indices
    assert wide.indices.dtype == wide.indptr.dtype == torch.int32
    assert torch.equal(wide.to_dense(), csr.to_dense())


def test_csr_to_torch_warns_of_nothing():
    """In a process of its own: torch warns once in each."""
    code = """
import torch
from hopsparse.formats import CSR
assert CSR.from_dense(torch.eye(3)).to_torch().layout == torch.sparse_csr
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "shape", "fmt"),
    [
        ("2:4", (64, 64), "nm"),
        ("1:4", (64, 37), "nm"),
        ("3:4", (64, 64), "bitmask"),
        ("4:6", (64, 64), "nm"),
        ("6:8", (64, 64), "nm"),
        ("4:8", (64, 64), "bitmask"),
        ("2:5", (64, 64), "bitmask"),
        ("30:32", (64, 64), "bitmask"),
        ("unstructured:0.5", (64, 64), "bitmask"),
        ("block:32x32", (64, 96), "bsr"),
        ("block:32x32", (64, 65), "bitmask"),
        ("block:16x32", (64, 64), "bitmask"),
        ("block:8x8", (64, 64), "bitmask"),
    ],
)
def test_storage_for(text, shape, fmt):
    assert storage_for(parse_pattern(text), shape) == fmt


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_repr_is_one_line(fmt: str) -> None:
    matrix = convert(FORMATS["csr"].from_dense(torch.eye(64)), fmt)
    text = repr(matrix)
    assert text.startswith(f"{type(matrix).__name__}(64 x 64, ")
    assert text.endswith(f"float32, {matrix.nbytes} bytes)")
    assert "\n" not in text
