"""Counting is compared with counting in another way, and with matrices whose answer is known."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import CSR, FORMATS, NM, convert
from hopsparse.formats.exchange import MOST_ENTRIES, MOST_SIDE, check_size
from hopsparse.measure.structure import (
    analyse,
    cell_counts,
    column_order,
    strips,
)
from hopsparse.plan import BLOCK_SIDES, Structure
from hopsparse.quant import quantize_matrix
from tests.helpers.patterns import (
    banded,
    blocks,
    power_law_rows,
    scattered,
    shuffled_columns,
    two_four,
)

sides = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 31, 64, 65, 127, 129, 260])


def of(dense: Tensor) -> Structure:
    return analyse(CSR.from_dense(dense))


def tiles(live: Tensor, side: int) -> Tensor:
    """Non-zeros of each block [block rows, block cols], by padding and reshaping."""
    rows, cols = live.shape
    padded = F.pad(live.long(), (0, -cols % side, 0, -rows % side))
    return padded.view(-(-rows // side), side, -(-cols // side), side).sum((1, 3))


@given(rows=sides, cols=sides, density=st.sampled_from([0, 0.02, 0.3, 1]), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_the_dense_matrix(
    rows: int, cols: int, density: float, seed: int
) -> None:
    live = scattered(rows, cols, density, seed).bool()
    found = of(live.float())
    assert (found.shape, found.nnz) == ((rows, cols), int(live.sum()))
    for lines, axis in ((found.rows, 1), (found.cols, 0)):
        counts = live.sum(axis)
        assert (lines.least, lines.most) == (int(counts.min()), int(counts.max()))
        assert lines.empty == int((counts == 0).sum())
        for first, last, many in lines.histogram:
            assert many == int(((counts >= first) & (counts <= last)).sum())
        assert sum(many for *_, many in lines.histogram) == len(counts)
    for block in found.blocks:
        held = tiles(live, block.side) > 0
        assert (block.kept, block.total) == (int(held.sum()), held.numel())
        assert block.most == int(held.sum(1).max())
    excess = (F.pad(live.long(), (0, -cols % 4)).view(rows, -1, 4).sum(2) - 2).clamp(min=0)
    assert found.two_four.excess == int(excess.sum())
    assert found.two_four.groups_over == int((excess > 0).sum())
    over = (excess > 0).nonzero()
    assert found.two_four.first == (tuple(over[0].tolist()) if len(over) else None)
    row, col = live.nonzero().unbind(1)
    offset = col - row
    spread = found.diagonals
    assert spread.occupied == len(offset.unique())
    assert spread.on_main == int((offset == 0).sum())
    assert spread.below == max([0, *(-offset).tolist()])
    assert spread.above == max([0, *offset.tolist()])
    distances = sorted(offset.abs().tolist())
    if distances:
        inside = sum(distance <= spread.within for distance in distances)
        nearer = sum(distance < spread.within for distance in distances)
        assert nearer < 0.9 * len(distances) <= inside


def test_strips_cut_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many strips give what one gives, block rows and all."""
    dense = scattered(700, 300, 0.1)
    whole = of(dense)
    monkeypatch.setattr(strips, "_STRIP_ENTRIES", 500)
    assert len(list(strips.strips(CSR.from_dense(dense)))) > 3
    assert of(dense) == whole


def test_diagonal() -> None:
    found = of(torch.eye(256))
    assert found.looks() == "diagonal"
    assert found.diagonals.occupied == 1
    assert [found.block(side).kept for side in BLOCK_SIDES] == [32, 16, 8, 4, 2]
    assert found.block(8).fill == 1 / 8
    assert found.two_four.fits
    assert found.rows.variation == 0


def test_band() -> None:
    found = of(banded(512, below=3, above=5))
    assert found.looks() == "banded"
    assert (found.diagonals.below, found.diagonals.above, found.diagonals.occupied) == (3, 5, 9)
    # Eight of the nine hold 88.9 %.
    assert found.diagonals.within == 5


@pytest.mark.parametrize("side", [16, 32, 64, 128])
def test_blocks_of_one_side(side: int) -> None:
    found = of(blocks((6, 8), side, share=0.25))
    assert found.looks() == "blocks"
    assert found.natural_side() == side
    assert (found.block(side).kept, found.block(side).total) == (12, 48)
    assert found.block(side).fill == 1
    assert found.block(side).density == 0.25
    assert found.block(8).kept == 12 * (side // 8) ** 2


def test_power_law() -> None:
    found = of(power_law_rows(512, 512))
    assert found.looks() == "power law"
    assert (found.rows.least, found.rows.most) == (1, 512)
    counts = (512 // (torch.arange(512) + 1)).clamp(min=1).double()
    variation = counts.std(correction=0) / counts.mean()
    assert found.rows.variation == pytest.approx(float(variation))
    assert found.rows.variation > 1


def test_exact_two_four() -> None:
    found = of(two_four(64, 128))
    assert found.looks() == "2:4"
    assert found.two_four.share == found.reordered.fit.share == 1
    assert found.reordered.how == "natural"


def test_shuffled_two_four_is_found_again() -> None:
    dense = shuffled_columns(two_four(256, 256))
    matrix = CSR.from_dense(dense)
    found = analyse(matrix)
    assert found.two_four.share < 0.9
    assert found.reordered.how == "matched"
    assert found.reordered.fit.fits
    counts = dense.long()
    order, again = column_order(
        matrix, found.two_four, counts.sum(1).numpy(), counts.sum(0).numpy()
    )
    assert again == found.reordered
    assert sorted(order.tolist()) == list(range(256))
    # The packer takes what the search promises.
    assert torch.equal(NM.from_dense(dense[:, order]).to_dense(), dense[:, order])


def test_heavy_columns_are_dealt_apart() -> None:
    """Two full columns side by side in each of two groups of three, beside empty ones."""
    dense = torch.zeros(32, 16)
    dense[:, :3] = dense[:, 4:7] = 1
    found = of(dense)
    assert found.two_four.excess == 64
    assert found.reordered.how == "dealt"
    assert found.reordered.fit.fits


def test_what_no_order_can_hold_is_said() -> None:
    found = of(torch.ones(8, 16))
    assert found.reordered.at_most == found.reordered.fit.share == found.two_four.share == 0.5
    assert found.two_four.first == (0, 0)
    assert found.looks() == "dense"


@given(cols=st.integers(8, 40), density=st.sampled_from([0.2, 0.5, 0.8]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_an_order_is_a_permutation_and_never_worse(cols: int, density: float, seed: int) -> None:
    dense = scattered(24, cols, density, seed)
    matrix, found = CSR.from_dense(dense), of(dense)
    counts = dense.long()
    order, reordered = column_order(
        matrix, found.two_four, counts.sum(1).numpy(), counts.sum(0).numpy()
    )
    assert sorted(order.tolist()) == list(range(cols))
    assert of(dense[:, order]).two_four == reordered.fit
    assert found.two_four.share <= reordered.fit.share <= reordered.at_most
    whole = cols - cols % 4
    assert order[whole:].tolist() == list(range(whole, cols))


def test_wide_matrices_are_only_dealt() -> None:
    dense = torch.zeros(4, 5000)
    dense[:, :3] = 1
    found = of(dense)
    assert found.reordered.how == "dealt"
    wide = of(torch.ones(2, 5000))
    assert wide.reordered.how == "natural"
    assert "4096" in wide.reordered.note


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (5, 7)])
def test_empty_and_thin_matrices(shape: tuple[int, int]) -> None:
    found = of(torch.zeros(shape))
    assert (found.looks(), found.nnz, found.density) == ("empty", 0, 0)
    assert (found.rows.variation, found.rows.empty) == (0, shape[0])
    assert all(block.kept == 0 and block.fill == 0 for block in found.blocks)
    assert found.two_four.fits
    full = of(torch.ones(shape))
    assert full.density == 1
    json.dumps(full.to_json(), allow_nan=False)


@pytest.mark.parametrize("fmt", sorted(set(FORMATS)))
def test_every_format_has_the_same_structure(fmt: str) -> None:
    dense = two_four(48, 64)
    assert analyse(FORMATS[fmt].from_dense(dense)) == of(dense)


def test_quantized_codes_are_counted() -> None:
    dense = two_four(16, 64).bfloat16()
    assert analyse(quantize_matrix(dense, "2:4+int8")) == of(dense.float())


def test_stored_zeros_are_no_entries() -> None:
    stored = CSR.from_dense(torch.ones(2, 8))
    values = stored.values.clone()
    values[1], values[3] = 0.0, -0.0
    with_zeros = CSR(stored.shape, values, stored.indices, stored.indptr)
    found = analyse(with_zeros)
    assert (found.nnz, found.rows.least) == (14, 6)
    assert convert(with_zeros, "csr") is with_zeros


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Tensor"):
        analyse(torch.ones(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=str(MOST_SIDE)):
        check_size((1, MOST_SIDE + 1), 0)
    with pytest.raises(UnsupportedError, match=str(MOST_ENTRIES)):
        check_size((1 << 20, 1 << 20), MOST_ENTRIES + 1)
    bad = CSR((1, 2), torch.ones(1), torch.tensor([5]).int(), torch.tensor([0, 1]).int())
    with pytest.raises(FormatError, match="column 5"):
        analyse(bad)


@given(rows=sides, cols=sides, cells=st.sampled_from([1, 3, 8, 64]))
@settings(max_examples=30, deadline=None)
def test_cells_hold_every_entry(rows: int, cols: int, cells: int) -> None:
    dense = scattered(rows, cols, 0.4, seed=3)
    counts, full = cell_counts(CSR.from_dense(dense), cells)
    assert counts.shape == (min(cells, rows), min(cells, cols))
    assert counts.sum() == dense.sum()
    # A full matrix fills every cell, however its sides are cut.
    assert (cell_counts(CSR.from_dense(torch.ones(rows, cols)), cells)[1] == 1).all()
    assert ((full >= 0) & (full <= 1)).all()
