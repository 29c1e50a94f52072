"""The layout and the schedule of the kernel of small blocks, walked on the CPU as it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats import BSR
from hopsparse.ops.spmm_bsr.fragments import SLAB, SLOTS, fragments_of, height_of
from hopsparse.ops.spmm_bsr.fragments_cost import predicted_us, rows_of_x
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.ready import layout_of, ready_fragments, takes_fragments
from hopsparse.ops.spmm_bsr.schedule import Problem
from tests.helpers.blocks import pattern
from tests.helpers.fragment_walk import LANE, Walker

BLOCKS = [(16, 16), (32, 32), (16, 64), (48, 96), (32, 16), (64, 64)]


def blocked(out: int, k: int, block: tuple[int, int], kept: float = 0.4) -> Tensor:
    """Small integers in random blocks; no kept number is zero."""
    shape = -(-out // block[0]), -(-k // block[1])
    mask = (torch.rand(shape) < kept).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    numbers = torch.randint(1, 5, (out, k)) * (2 * torch.randint(0, 2, (out, k)) - 1)
    return (numbers * mask[:out, :k]).bfloat16()


def walk(dense: Tensor, block: tuple[int, int], x: Tensor, tokens: int, cluster: int) -> Tensor:
    w = BSR.from_dense(dense, block)
    made = fragments_of(w)
    config = FragmentConfig(made.height, tokens, cluster)
    return Walker(made, made.pack(w.values), x, len(dense), config).run(6)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("out", "k", "tokens", "tile"),
    [(264, 328, 40, 32), (70, 130, 7, 16), (600, 144, 33, 32), (16, 16, 1, 16)],
)
def test_a_walk_gives_the_product(
    block: tuple[int, int], out: int, k: int, tokens: int, tile: int, cluster: int
) -> None:
    torch.manual_seed(out + k)
    dense = blocked(out, k, block)
    x = torch.randint(-3, 4, (tokens, k)).bfloat16()
    y = walk(dense, block, x, tile, cluster)
    assert torch.equal(y, x.double() @ dense.double().T)


@pytest.mark.parametrize(("block", "tile"), [((16, 16), 128), ((32, 32), 64)])
def test_the_widest_tiles_of_many_tokens(block: tuple[int, int], tile: int) -> None:
    torch.manual_seed(0)
    dense, x = blocked(96, 272, block), torch.randint(-3, 4, (200, 272)).bfloat16()
    assert torch.equal(walk(dense, block, x, tile, 2), x.double() @ dense.double().T)


def test_a_slot_of_many_pieces() -> None:
    """More than the words that lanes hold at a time, twice over."""
    dense, x = blocked(16, 1600, (16, 16), 1.0), torch.randint(-3, 4, (5, 1600)).bfloat16()
    assert torch.equal(walk(dense, (16, 16), x, 16, 1), x.double() @ dense.double().T)


@pytest.mark.parametrize("block", [(16, 16), (32, 32)], ids=str)
def test_nothing_stored_is_zeros_and_no_slab(block: tuple[int, int]) -> None:
    dense, x = torch.zeros(300, 300).bfloat16(), torch.ones(9, 300).bfloat16()
    made = fragments_of(BSR.from_dense(dense, block))
    assert (made.pieces, made.slabs.numel(), made.counts.sum()) == (0, 0, 0)
    assert torch.equal(walk(dense, block, x, 16, 2), torch.zeros(9, 300).double())


def test_slabs_without_blocks_are_left_out() -> None:
    dense = torch.zeros(32, 6 * SLAB).bfloat16()
    dense[:, 2 * SLAB : 2 * SLAB + 16] = 1
    dense[16:, 5 * SLAB + 112 : 5 * SLAB + 128] = 2
    made = fragments_of(BSR.from_dense(dense, (16, 16)))
    assert made.slabs.tolist() == [2, 5]
    assert sorted(made.words.tolist()) == [0, 0, 1 * 8 + 7]
    assert made.pairs.tolist() == [[0, 0, 2, 0]]


def test_every_piece_is_in_the_slot_of_its_rows_in_the_order_of_k() -> None:
    torch.manual_seed(3)
    dense = blocked(700, 900, (16, 16), 0.3)
    made = fragments_of(BSR.from_dense(dense, (16, 16)))
    seen = 0
    for pair, first, count, _ in made.pairs.tolist():
        slabs = made.slabs[first : first + count].tolist()
        assert slabs == sorted(set(slabs))
        for row, begin, end, _ in made.slots[pair].view(-1, 4).tolist():
            words = made.words[begin:end].tolist()
            columns = [slabs[word // 8] * SLAB + word % 8 * 16 for word in words]
            held = dense[row : row + 16].abs().sum(0).float() if row < 700 else torch.zeros(900)
            expected = [at for at in range(0, 900, 16) if held[at : at + 16].sum() > 0]
            assert columns == expected
            seen += len(words)
    assert seen == made.pieces


@pytest.mark.parametrize("block", [16, 32])
def test_quarters_of_an_sm_have_alike_pieces(block: int) -> None:
    """The busiest has less than the twentieth over the mean that the cost model counts on."""
    made = fragments_of(pattern(8192, 4096, block, 0.9))
    pieces = (made.slots[..., 2] - made.slots[..., 1]).view(-1, 4, 4)
    of_quarter = pieces.sum(1).double()
    assert (of_quarter.amax(1) / of_quarter.mean(1)).mean() < 1.05
    assert sorted(made.slots[0, 0, :, 0].tolist()) == [block * i for i in range(SLOTS)]


def test_values_keep_their_bits() -> None:
    values = torch.full((1, 32, 32), 0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    w = BSR.from_dense(values[0], (32, 32))
    assert (fragments_of(w).pack(w.values).view(torch.int16) == 0x7FC1).all()


@pytest.mark.parametrize("height", [1, 2])
def test_no_two_lanes_meet_in_a_bank(height: int) -> None:
    """Eight rows of a matrix, which one phase moves, are 128 different bytes modulo 128."""
    dense = torch.zeros(32, 16).bfloat16()
    made = fragments_of(BSR.from_dense(dense, (16 * height, 16)))
    walker = Walker(
        made,
        made.pack(torch.zeros(0, 16 * height, 16).bfloat16()),
        torch.zeros(1, 16),
        32,
        FragmentConfig(height, 64, 1),
    )
    for word in range(8):
        x = walker.lane_in_box ^ (word % 4 * 32)
        for matrix in range(4):
            rows = x[8 * matrix : 8 * matrix + 8]
            assert len(set((rows % 128 // 16).tolist())) == 8
    stored = walker.chunk_address(LANE // 16 * 8 + LANE % 8, LANE // 8 % 2)
    read = walker.chunk_address(LANE // (2 * height), LANE % (2 * height))
    for phase in (*np.split(stored, 4), *np.split(read, 4)):
        assert len(set((phase % 128 // 16).tolist())) == 8


@pytest.mark.parametrize(
    ("block", "height"),
    [((16, 16), 1), ((32, 32), 2), ((48, 16), 1), ((8, 16), None), ((16, 8), None)],
)
def test_heights(block: tuple[int, int], height: int | None) -> None:
    assert height_of(block) == height


def test_rows_that_a_block_loads() -> None:
    config = FragmentConfig(1, 128, 2)
    assert [rows_of_x(config, n) for n in (1, 17, 100, 128, 900)] == [8, 16, 56, 64, 64]


class TestReady:
    def made(self) -> BSR:
        torch.manual_seed(0)
        return BSR.from_dense(blocked(128, 128, (16, 16)), (16, 16))

    def test_it_is_made_once_and_apart_from_strips(self) -> None:
        w = self.made()
        again = w.from_parts(w.shape, w.parts(), w.attributes())
        assert ready_fragments(w)[1] is ready_fragments(again)[1]
        assert layout_of(w).values is None

    def test_changed_values_are_laid_out_again_in_the_same_place(self) -> None:
        w = self.made()
        fragments, before = ready_fragments(w)
        w.values.mul_(2)
        again, after = ready_fragments(w)
        assert (fragments is again, before is after) == (True, True)
        assert torch.equal(after, fragments.pack(w.values))

    @pytest.mark.parametrize(
        ("block", "takes"), [((16, 16), True), ((64, 32), True), ((128, 64), False)], ids=str
    )
    def test_it_is_for_blocks_that_strips_fill_up(
        self, block: tuple[int, int], takes: bool
    ) -> None:
        assert takes_fragments(block) is takes
        made = layout_of(BSR.from_dense(blocked(128, 128, block), block))
        assert (made.fragments is not None) is takes


class TestPredictions:
    def test_they_rise_with_what_is_kept(self) -> None:
        made = [fragments_of(pattern(4096, 4096, 16, s)) for s in (0.95, 0.9, 0.8, 0.5)]
        times = [
            predicted_us(FragmentConfig(1, 128, 2), w, Problem(2048, 4096, 4096), 132) for w in made
        ]
        assert times == sorted(times)
        assert times[-1] > 3 * times[0]

    def test_two_blocks_load_x_for_each_other(self) -> None:
        w, problem = fragments_of(pattern(16384, 4096, 16, 0.9)), Problem(2048, 16384, 4096)
        alone, together = (predicted_us(FragmentConfig(1, 128, n), w, problem, 132) for n in (1, 2))
        assert together == pytest.approx(185.4 / 208.0 * alone, rel=0.02)  # as measured


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ((3, 16, 1), "slots of 16 or 32 rows"),
        ((1, 24, 1), "steps of 16, up to 128"),
        ((2, 128, 1), "up to 64"),
        ((1, 16, 4), "clusters of 1 or 2"),
        ((0, 16, 1), "positive whole numbers"),
    ],
)
def test_tiles_that_no_block_can_have(fields: tuple[int, ...], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        FragmentConfig(*fields)
