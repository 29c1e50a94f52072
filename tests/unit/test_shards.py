"""Pieces of packed weights: the bits of packing each piece, whatever the pattern and the sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopsparse.errors import ArgumentError
from hopsparse.formats import (
    CSR,
    NM,
    Quantized,
    SparseMatrix,
    bounds_of,
    columns_of,
    parse_form,
    parse_pattern,
    rows_of,
    whole_columns,
)
from hopsparse.formats.shards import WHOLE_ROWS, whole_columns_of
from hopsparse.parallel.symmetric import Slots
from hopsparse.quant import quantize_matrix
from tests.helpers import matrices as mk

PATTERNS = ("1:4", "2:4", "4:6", "4:8", "6:8", "8:10")
FORMS = ("2:4+int8", "2:4+fp8", "2:4+int4:64", "2:4+int4:32", "6:8+int4:128", "2:4+int8/int8")


def same(one: SparseMatrix, other: SparseMatrix) -> None:
    """Bit by bit, and laid out as a format must be."""
    assert one.shape == other.shape
    assert one.attributes() == other.attributes()
    for name, part in other.parts().items():
        assert torch.equal(mk.bits(one.parts()[name]), mk.bits(part)), name
        assert one.parts()[name].is_contiguous()
    one.validate()


@given(
    st.sampled_from(PATTERNS),
    mk.dtypes,
    st.sampled_from([(64, 1), (65, 70), (200, 12), (130, 520), (320, 391)]),
    st.sampled_from([1, 2, 3, 4]),
    mk.seeds,
)
@settings(deadline=None, max_examples=60)
def test_a_piece_is_what_packing_it_gives(text, dtype, shape, ranks, seed):
    pattern = parse_pattern(text)
    dense = mk.random_nm(shape, pattern, dtype, seed, n=1 + seed % pattern.n)
    whole = NM.from_dense(dense, pattern)
    for cut, length, unit in (
        (rows_of, shape[0], WHOLE_ROWS),
        (columns_of, shape[1], whole_columns(pattern)),
    ):
        count = min(ranks, -(-length // unit))
        for start, stop in pairwise(bounds_of(length, count, unit)):
            piece = dense[start:stop] if cut is rows_of else dense[:, start:stop]
            same(cut(whole, start, stop), NM.from_dense(piece, pattern))


@pytest.mark.parametrize("form", FORMS)
def test_a_piece_of_codes_is_what_packing_its_codes_gives(form):
    parsed = parse_form(form)
    shape = (200, 648)
    kept = mk.random_nm(shape, parsed.pattern, torch.float32, 3) != 0
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * kept
    whole = quantize_matrix(dense, parsed)
    codes, group = whole.codes().to_dense(), whole.scheme.group
    for cut, length, unit in (
        (rows_of, shape[0], WHOLE_ROWS),
        (columns_of, shape[1], whole_columns_of(whole)),
    ):
        for start, stop in pairwise(bounds_of(length, 3, unit)):
            rows = cut is rows_of
            piece = codes[start:stop] if rows else codes[:, start:stop]
            scales = whole.scales
            if rows:
                scales = scales[start:stop]
            elif group:
                scales = scales[:, start // group : -(-stop // group)]
            packed = NM.from_dense(piece, parsed.pattern)
            found = cut(whole, start, stop)
            same(found, Quantized.of(packed, scales, whole.scheme, whole.dtype, whole.input_scale))
            dense_piece = whole.to_dense()[start:stop] if rows else whole.to_dense()[:, start:stop]
            assert torch.equal(found.to_dense(), dense_piece)


def test_rows_share_memory_and_columns_do_not():
    whole = NM.from_dense(torch.eye(128))
    assert rows_of(whole, 64, 128).values.data_ptr() == whole.values[1].data_ptr()
    assert columns_of(whole, 0, 128).values.data_ptr() != whole.values.data_ptr()


@given(st.integers(1, 5000), st.integers(1, 9), st.sampled_from([1, 8, 48, 64, 128]))
def test_bounds_are_as_equal_as_they_can_be(length, ranks, whole):
    if -(-length // whole) < ranks:
        with pytest.raises(ArgumentError, match="a side of"):
            bounds_of(length, ranks, whole)
        return
    bounds = bounds_of(length, ranks, whole)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, length, ranks)
    assert min(sizes) > 0
    assert all(start % whole == 0 for start in bounds[:-1])
    units = [-(-size // whole) for size in sizes]
    assert units == sorted(units, reverse=True)
    assert units[0] - units[-1] <= 1


def test_what_is_no_matrix_and_pieces_of_nothing_are_refused():
    for cut in (rows_of, columns_of):
        with pytest.raises(ArgumentError, match="a str matrix to cut"):
            cut("weight", 0, 64)
    with pytest.raises(ArgumentError, match="a side of 100"):
        bounds_of(100, 2, 0)


def test_what_is_not_packed_apart_is_refused():
    whole = NM.from_dense(torch.eye(200, 200))
    for cut, start, stop in (
        (rows_of, 32, 128),
        (rows_of, 0, 100),
        (columns_of, 64, 130),
        (columns_of, 64, 64),
        (columns_of, 128, 256),
        (rows_of, -64, 64),
    ):
        with pytest.raises(ArgumentError, match="multiple of 64"):
            cut(whole, start, stop)
    for matrix in (CSR.from_dense(torch.eye(64)), quantize_matrix(torch.eye(64), "dense+int8")):
        with pytest.raises(ArgumentError, match="to cut"):
            rows_of(matrix, 0, 64)


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(1, 4), min_size=1)), max_size=30))
def test_no_slot_is_written_while_peers_may_read_it(events):
    """Eager calls and replays of graphs of some calls, in any order: what follows one another."""
    slots, graphs, ran, number = Slots(), [], [], 0
    for event in events:
        if event is None:
            ran.append(slots.next(None))
            continue
        for calls in event:
            number += 1
            graphs.append([slots.next(number) for _ in range(calls)])
        # The last two graphs are replayed, one of them twice.
        for graph in (*graphs[-2:], graphs[-1]):
            ran += graph
    for (before, drained), (after, _) in pairwise(ran):
        assert drained or before != after
