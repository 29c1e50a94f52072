"""What no format accepts, and what it says: the first bad place, the rule, the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hopsparse.errors import ArgumentError, FormatError, HopsparseError
from hopsparse.formats import (
    BSR,
    CSC,
    CSR,
    FORMATS,
    HYB,
    NM,
    Bitmask,
    NMPattern,
    convert,
    format_named,
)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def refused(matrix, *words: str) -> None:
    with pytest.raises(FormatError) as caught:
        matrix.validate()
    said(caught.value, *words)


def said(error: HopsparseError, *words: str) -> None:
    assert error.got
    assert error.need
    assert error.hint
    for word in words:
        assert word in str(error), str(error)


CSR_3X4 = CSR((3, 4), torch.ones(4), ints(0, 2, 1, 3), ints(0, 2, 2, 4))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("dense", "word"),
    [
        (torch.zeros(0, 4), "[0, 4]"),
        (torch.zeros(4, 0), "[4, 0]"),
        (torch.zeros(4), "2-D"),
        (torch.zeros(2, 2, 2), "2-D"),
        (torch.zeros(2, 4, dtype=torch.float64), "float64"),
        (torch.zeros(2, 4, dtype=torch.bool), "bool"),
        (torch.zeros(2, 4, device="meta"), "meta device"),
        (torch.eye(4).to_sparse_coo(), "layout sparse_coo"),
        (torch.nested.nested_tensor([torch.zeros(4, 4)], layout=torch.jagged), "layout nested"),
        ([[1.0, 0.0]], "a list"),
        (None, "a NoneType"),
    ],
)
def test_dense_that_no_format_stores(fmt, dense, word):
    with pytest.raises(FormatError) as caught:
        FORMATS[fmt].from_dense(dense)
    said(caught.value, word)


def test_csr_without_columns():
    """cases.md line 6: shape (3, 0) with crow [0, 3, 3, 3]."""
    matrix = CSR((3, 0), torch.ones(3), ints(0, 1, 2), ints(0, 3, 3, 3))
    refused(matrix, "matrix of shape [3, 0]", "at least one row and one column")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indptr": ints(0, 2, 1, 4)}, ["falls from 2 to 1", "never decreases"]),
        ({"indptr": ints(0, 2, 2, 3)}, ["from 0 to 3", "from 0 to the 4 stored entries"]),
        ({"indptr": ints(1, 2, 2, 4)}, ["from 1 to 4"]),
        ({"indptr": ints(0, 2, 4)}, ["'indptr' is torch.int32 [3]", "[4]"]),
        ({"indptr": torch.tensor([0, 2, 2, 4])}, ["torch.int64 [4]", "torch.int32 [4]"]),
        ({"indices": ints(0, 4, 1, 3)}, ["row 0 has column 4 at entry 1", "from 0 to 3"]),
        ({"indices": ints(0, 2, -1, 3)}, ["row 2 has column -1 at entry 2"]),
        ({"indices": ints(0, 2, 3, 3)}, ["row 2 has column 3 repeated at entry 3", "rising"]),
        ({"indices": ints(2, 0, 1, 3)}, ["row 0 has column 0 out of order at entry 1"]),
        ({"indices": ints(0, 2, 1)}, ["'indices' is torch.int32 [3]"]),
        ({"values": torch.ones(4, dtype=torch.float64)}, ["torch.float64"]),
        ({"indices": torch.empty(4, dtype=torch.int32, device="meta")}, ["on meta", "one device"]),
        ({"shape": (-3, 4)}, ["[-3, 4]"]),
    ],
)
def test_malformed_csr(change, words):
    CSR_3X4.validate()
    refused(replace(CSR_3X4, **change), *words)


def test_malformed_csc_speaks_of_columns():
    matrix = CSC((4, 3), torch.ones(4), ints(0, 2, 1, 4), ints(0, 2, 2, 4))
    refused(matrix, "column 2 has row 4 at entry 3", "rows from 0 to 3")


def test_foreign_csr_is_checked():
    CSR_3X4.to_torch()  # torch says once in a process that sparse CSR is in beta; here, unheard
    bad = torch.sparse_csr_tensor(
        torch.tensor([0, 2]),
        torch.tensor([1, 2**40]),
        torch.ones(2),
        size=(1, 3),
        check_invariants=False,
    )
    with pytest.raises(FormatError) as caught:
        CSR.from_torch(bad)
    said(caught.value, "row 0 has column 1099511627776 at entry 1")
    for tensor in (torch.eye(3), torch.eye(3).to_sparse_coo()):
        with pytest.raises(ArgumentError) as refusal:
            CSR.from_torch(tensor)
        said(refusal.value, "torch.sparse_csr", "CSR.from_dense")


BSR_RAGGED = BSR.from_dense(torch.ones(20, 40, dtype=torch.float16), (16, 16))
BSR_SMALL = BSR.from_dense(torch.ones(8, 8, dtype=torch.float16), (4, 4))


def poked(tensor: torch.Tensor, where: tuple[int, ...], value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[where] = value
    return tensor


@pytest.mark.parametrize(
    ("matrix", "change", "words"),
    [
        (BSR_RAGGED, {"indptr": ints(0, 4, 3)}, ["falls from 4 to 3"]),
        (BSR_RAGGED, {"indptr": ints(0, 3, 5)}, ["from 0 to 5", "6 stored"]),
        (BSR_RAGGED, {"indices": ints(0, 1, 3, 0, 1, 2)}, ["block row 0 has block column 3"]),
        (BSR_RAGGED, {"indices": ints(0, 1, 2, 0, 0, 2)}, ["block row 1", "column 0 after 0"]),
        (BSR_RAGGED, {"block": (16, 32)}, ["'values'", "[6, 16, 32]"]),
        (BSR_RAGGED, {"block": (0, 16)}, ["block of [0, 16]", "positive"]),
        (
            BSR_RAGGED,
            {"values": poked(BSR_RAGGED.values, (2, 3, 8), 1)},
            ["block 2 (block row 0, block column 2)", "outside [20, 40]"],
        ),
        (
            BSR_RAGGED,
            {"values": poked(BSR_RAGGED.values, (4, 4, 0), -0.0)},
            ["block 4 (block row 1, block column 1)", "all bits"],
        ),
        (BSR_SMALL, {"indptr": ints(0, 2, 8)}, ["block row 1 starts at block 2", "128 bytes"]),
        (BSR_SMALL, {"indices": ints(0, -1, 1, -1, 0, 1, -1, -1)}, ["column 1 after -1"]),
        (
            BSR_SMALL,
            {"indices": ints(-1, -1, -1, -1, 0, 1, -1, -1)},
            ["block row 0 has 4 free blocks from block 0"],
        ),
        (BSR_SMALL, {"indices": ints(0, 1, -1, -1, 0, -2, -1, -1)}, ["block column -2"]),
        (
            BSR_SMALL,
            {"values": poked(BSR_SMALL.values, (3, 0, 0), 1)},
            ["block 3 (block row 0, block column -1)"],
        ),
    ],
)
def test_malformed_bsr(matrix, change, words):
    matrix.validate()
    refused(replace(matrix, **change), *words)


HYB_3X4 = HYB(
    (3, 4),
    torch.tensor([[1.0, 2, 0], [3, 4, 0]]),
    torch.tensor([[0, 1, -1], [2, 2, -1]], dtype=torch.int32),
    torch.ones(1),
    ints(1),
    ints(3),
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ell_indices": poked(HYB_3X4.ell_indices, (1, 0), 4)}, ["row 0 has column 4", "slot 1"]),
        ({"ell_indices": poked(HYB_3X4.ell_indices, (1, 0), -2)}, ["column -2", "-1 in a free"]),
        ({"ell_indices": poked(HYB_3X4.ell_indices, (1, 0), 0)}, ["row 0 has column 0 after 0"]),
        ({"ell_indices": poked(HYB_3X4.ell_indices, (1, 2), 0)}, ["row 2 has column 0 after -1"]),
        ({"ell_values": poked(HYB_3X4.ell_values, (1, 2), 5)}, ["row 2", "free ELL slot 1"]),
        ({"tail_rows": ints(3)}, ["tail entry 0 is row 3", "inside [3, 4]"]),
        ({"tail_cols": ints(4)}, ["tail entry 0 is row 1, column 4"]),
        ({"tail_cols": ints(1)}, ["tail entry 0 (row 1, column 1)", "column 2"]),
        ({"tail_rows": ints(2)}, ["a full ELL row before its tail"]),
        (
            {"tail_rows": ints(1, 1), "tail_cols": ints(3, 3), "tail_values": torch.ones(2)},
            ["tail entry 1 is row 1, column 3, after row 1, column 3", "none repeated"],
        ),
        ({"tail_rows": ints(1, 1)}, ["'tail_rows'", "[1]"]),
    ],
)
def test_malformed_hyb(change, words):
    HYB_3X4.validate()
    refused(replace(HYB_3X4, **change), *words)


MASK_2X10 = Bitmask.from_dense(torch.eye(2, 10))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": poked(MASK_2X10.mask, (1, 0), 3)}, ["3 bits set, for 2 values"]),
        ({"mask": poked(MASK_2X10.mask, (1, 1), 4)}, ["row 1", "byte 4", "last column, 9"]),
        ({"mask": MASK_2X10.mask[:, :1]}, ["'mask' is torch.uint8 [2, 1]", "[2, 2]"]),
        ({"values": torch.ones(3)}, ["2 bits set, for 3 values"]),
    ],
)
def test_malformed_bitmask(change, words):
    MASK_2X10.validate()
    refused(replace(MASK_2X10, **change), *words)


@pytest.mark.parametrize(
    ("fmt", "options", "words"),
    [
        ("ellpack", {}, ["'ellpack'", "nm, bsr, bsr24, csr, csc, hyb, bitmask"]),
        ("csr", {"pattern": "2:4"}, ["pattern 2:4 for format 'csr'"]),
        ("bitmask", {"pattern": "2:4"}, ["pattern 2:4 for format 'bitmask'"]),
        ("nm", {"block": (16, 16)}, ["block (16, 16) for format 'nm'"]),
        ("nm", {"pattern": "block:4x4"}, ["block:4x4:0.5", "N:M"]),
    ],
)
def test_convert_refuses(fmt, options, words):
    with pytest.raises(ArgumentError) as caught:
        convert(CSR_3X4, fmt, **options)
    said(caught.value, *words)


def test_convert_to_nm_names_the_group():
    with pytest.raises(FormatError) as caught:
        convert(CSR.from_dense(torch.ones(2, 8)), "nm")
    said(caught.value, "row 0, group 0 (columns 0 to 3) holds 4", "magnitude")


@pytest.mark.parametrize(
    ("fmt", "attributes", "word"),
    [
        ("csr", {}, "'nnz' is None"),
        ("csr", {"nnz": -1}, "'nnz' is -1"),
        ("csr", {"nnz": True}, "'nnz' is True"),
        ("bsr", {"block": "16", "blocks": 1}, "'block' is '16'"),
        ("bsr", {"block": "0x16", "blocks": 1}, "'block' is '0x16'"),
        ("hyb", {"width": 1.5, "tail": 0}, "'width' is 1.5"),
        ("bitmask", {"nnz": "3"}, "'nnz' is '3'"),
    ],
)
def test_attributes_that_are_none(fmt, attributes, word):
    with pytest.raises(FormatError) as caught:
        format_named(fmt).part_specs((16, 16), torch.float16, attributes)
    said(caught.value, word)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_view_of_negated_numbers_is_stored_as_it_reads(fmt):
    dense = torch._neg_view(torch.eye(8))
    assert torch.equal(FORMATS[fmt].from_dense(dense).to_dense(), -torch.eye(8))


def test_a_pattern_as_text():
    assert NM.from_dense(torch.eye(8), "4:6").pattern == NMPattern(4, 6)
    for pattern in (None, 2, "unstructured:0.5"):
        with pytest.raises(ArgumentError, match="N:M"):
            NM.from_dense(torch.eye(8), pattern)


@pytest.mark.parametrize(
    "block", ["2x2", 4, (1.5, 2), (2,), (True, 2), (10**6, 10**6), (2, 10**12)]
)
def test_blocks_that_are_none(block):
    with pytest.raises(FormatError, match="block of"):
        convert(CSR_3X4, "bsr", block=block)
    with pytest.raises(FormatError, match="block of"):
        BSR.from_dense(torch.eye(4), block)


def test_only_matrices_are_converted():
    for args in ((torch.eye(4), "nm"), (CSR_3X4, ["nm"]), (CSR_3X4, None)):
        with pytest.raises(ArgumentError):
            convert(*args)


@pytest.mark.parametrize("nnz", [-1, 3.0, True, None])
def test_a_count_that_is_none(nnz):
    with pytest.raises(FormatError, match="'nnz'"):
        CSR.from_parts((3, 4), CSR_3X4.parts(), {"nnz": nnz})


@pytest.mark.parametrize("shape", [(3.0, 4), (True, 4), (-1, 4)])
def test_a_shape_that_is_none(shape):
    refused(replace(CSR_3X4, shape=shape), "whole numbers")
