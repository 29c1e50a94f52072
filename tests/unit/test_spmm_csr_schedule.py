"""How a CSR matrix is cut, and that teams which follow the cuts compute the product."""

from __future__ import annotations

import gc

import pytest
import torch

from hopsparse.errors import ArgumentError, FormatError
from hopsparse.formats import CSR
from hopsparse.ops.spmm_csr.pattern import Patterns
from hopsparse.ops.spmm_csr.plan import (
    TEAMS,
    Team,
    blocks_for,
    combine_spec,
    every_spec,
    spec_for,
    team_for,
)
from hopsparse.ops.spmm_csr.schedule import MOST_PARTS, cut, items_for
from tests.helpers.csr_walk import Walk
from tests.helpers.edges import SHAPES, counts_matrix, disordered

SHAPE = pytest.mark.parametrize("name", SHAPES)


@SHAPE
@pytest.mark.parametrize("items", [1, 5, 32])
def test_teams_that_follow_the_cuts_compute_the_product(name: str, items: int) -> None:
    a = counts_matrix(*SHAPES[name])
    x = torch.randint(-3, 4, (a.shape[1],)).float()
    expected = (a.to_dense().double() @ x.double()).float()
    for team in (TEAMS[0], TEAMS[2], TEAMS[4], TEAMS[5]):
        for batch in (4, 8):
            walk = Walk(cut(a.indptr, items), a.indptr, a.indices, a.values)
            assert torch.equal(walk.multiply(x, team, batch), expected)


def test_a_power_law_graph_is_walked() -> None:
    indptr, indices = disordered(700, 9000)
    values, x = torch.randint(-1, 2, (9000,)).float(), torch.randint(-1, 2, (700,)).float()
    walk = Walk(cut(indptr, 32), indptr, indices, values)
    row = torch.repeat_interleave(indptr.diff())
    expected = torch.zeros(700).index_add_(0, row, values * x[indices])
    assert torch.equal(walk.multiply(x, TEAMS[2]), expected)


@SHAPE
@pytest.mark.parametrize("items", [3, 32, 128])
def test_no_span_is_more_than_two_stretches(name: str, items: int) -> None:
    a = counts_matrix(*SHAPES[name])
    schedule = cut(a.indptr, items)
    walk = Walk(schedule, a.indptr, a.indices, a.values)
    entries = [walk.entries_of(span) for span in range(schedule.count)]
    rows = (walk.row[1:] - walk.row[:-1]).tolist()
    of_rows = [n + r for n, r, slot in zip(entries, rows, walk.slot, strict=False) if slot < 0]
    assert max(of_rows, default=0) <= 2 * items
    assert max(entries) <= 2 * items
    assert sum(entries) == a.values.numel()
    # Parts of a row differ by one entry a part at most, and none is empty.
    assert all(n > 0 for n, slot in zip(entries, walk.slot, strict=False) if slot >= 0)


def test_a_row_has_a_bounded_number_of_parts() -> None:
    indptr = torch.tensor([0, 1, 1 + 40 * MOST_PARTS + 3, 2 + 40 * MOST_PARTS + 3])
    schedule = cut(indptr, 32)
    assert schedule.cuts.shape == (1, 4)
    assert schedule.slots <= MOST_PARTS
    lengths = schedule.spans[:, 0].diff()
    assert lengths.sum() == indptr[-1]
    assert int(lengths.min()) > 0
    assert int(lengths.max()) == 41


def test_entries_beyond_32_bits_are_counted() -> None:
    many = 3 * 2**31
    schedule = cut(torch.tensor([0, 5, 5 + many, 5 + many + 2]), 128)
    assert schedule.spans[-1, 0] == many + 7
    assert schedule.cuts[0].tolist() == [1, 0, schedule.slots, 0]
    assert (schedule.spans[:, 0].diff() < 2**32).all()


def test_stretches_are_longer_where_there_is_more_of_them() -> None:
    assert [items_for(rows, 20 * rows) for rows in (10, 20_000, 200_000)] == [32, 64, 128]


def test_teams_hold_a_row_where_one_can() -> None:
    for features, itemsize in ((16, 2), (64, 2), (256, 4), (512, 2)):
        team = team_for(features, itemsize, vector=True)
        assert team.tile(itemsize) >= features or team == Team(32, True)
        assert team.lanes == 2 or team.tile(itemsize) < 2 * features
    assert team_for(3, 4, vector=False) == Team(8, False)
    assert blocks_for(Team(32, True), 5) == 2


def test_kernels_that_do_not_exist_are_refused() -> None:
    assert len({spec.name for spec in every_spec()}) == len(every_spec())
    with pytest.raises(ArgumentError, match="indices of \\(4, 8\\) bytes"):
        spec_for("multiply", "bfloat16", TEAMS[0], (4, 8))
    with pytest.raises(ArgumentError, match="float64"):
        combine_spec("float64")


class TestPatterns:
    def test_are_found_by_memory_and_forgotten_with_it(self) -> None:
        known = Patterns()
        a = CSR.from_dense(torch.eye(9))
        parts = (a.indptr, a.indices)
        made = known.keep(known.make(*parts, 9), parts, 9)
        del parts
        # Another object with the same memory, as torch's own accessors give.
        assert known.find((a.indptr.view(-1), a.indices.detach()), 9) is made
        assert known.find((a.indptr, a.indices), 10) is None
        assert known.find((a.indptr, a.indices.clone()), 9) is None
        del a
        gc.collect()
        b = CSR.from_dense(torch.eye(4))
        known.keep(known.make(b.indptr, b.indices, 4), (b.indptr, b.indices), 4)
        assert len(known) == 1

    def test_do_not_outlive_a_change_of_the_indices(self) -> None:
        known = Patterns()
        a = CSR.from_dense(torch.eye(9))
        parts = (a.indptr, a.indices)
        known.keep(known.make(*parts, 9), parts, 9)
        a.indices[0] = 5
        assert known.find((a.indptr, a.indices), 9) is None
        again = known.keep(known.make(*parts, 9), parts, 9)
        assert known.find((a.indptr, a.indices), 9) is again
        assert len(known) == 1

    def test_transposed_twice_is_the_matrix(self) -> None:
        a = counts_matrix(*SHAPES["short rows"])
        pattern = Patterns().make(a.indptr, a.indices, a.shape[1])
        across = pattern.transpose(a.indptr, a.indices)
        assert pattern.transposed is None  # Whoever waits for the device keeps it.
        turned = CSR(
            (a.shape[1], a.shape[0]), a.values[across.order], across.indices, across.indptr
        )
        turned.validate()
        assert torch.equal(turned.to_dense(), a.to_dense().T)

    @pytest.mark.parametrize(
        ("indptr", "indices", "told"),
        [
            ([0, 2, 1, 3], [0, 1, 2], "falls from 2 to 1 at 1"),
            ([0, 1, 2, 4], [0, 1, 2], "runs from 0 to 4"),
            ([0, 3, 3, 3], [0, 1, 3], "row 0 has column 3 at entry 2"),
            ([0, 1, 3, 3], [0, 1, -1], "row 1 has column -1 at entry 2"),
        ],
    )
    def test_indices_that_form_no_matrix(
        self, indptr: list[int], indices: list[int], told: str
    ) -> None:
        with pytest.raises(FormatError, match=told):
            Patterns().make(torch.tensor(indptr), torch.tensor(indices), 3)
