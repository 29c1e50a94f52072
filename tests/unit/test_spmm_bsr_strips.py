"""The layout and the schedule of the block-sparse kernel, walked on the CPU as the kernel does."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, FormatError
from hopsparse.formats import BSR
from hopsparse.ops.spmm_bsr.kernel import Config, deepest, stores_directly
from hopsparse.ops.spmm_bsr.ready import layout_of, ready
from hopsparse.ops.spmm_bsr.schedule import (
    Problem,
    blocks,
    items,
    loads,
    predicted_us,
    rows_of_x,
)
from hopsparse.ops.spmm_bsr.strips import panels_of, strips_of, width_of
from hopsparse.plan import TARGETS
from tests.helpers.strip_walk import unswizzled, walked

plan = import_module("hopsparse.ops.spmm_bsr.plan")
H200 = TARGETS["h200"]
BLOCKS = [
    (16, 16),
    (32, 32),
    (64, 64),
    (128, 128),
    (64, 32),
    (16, 64),
    (128, 16),
    (48, 96),
    (1, 16),
]


def blocked(out: int, k: int, block: tuple[int, int], kept: float = 0.4) -> Tensor:
    """Small integers in random blocks; no kept number is zero."""
    shape = -(-out // block[0]), -(-k // block[1])
    mask = (torch.rand(shape) < kept).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    numbers = torch.randint(1, 5, (out, k)) * (2 * torch.randint(0, 2, (out, k)) - 1)
    return (numbers * mask[:out, :k]).bfloat16()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("out", "k"), [(256, 384), (200, 328), (64, 16), (130, 1000)])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_a_walk_gives_the_product(block: tuple[int, int], out: int, k: int, tokens: int) -> None:
    torch.manual_seed(out + k)
    dense = blocked(out, k, block)
    w = BSR.from_dense(dense, block)
    strips = strips_of(w)
    x = torch.randint(-3, 4, (tokens, k)).bfloat16()
    config = deepest(strips.panels, 64, strips.width)
    y = walked(strips, strips.pack(w.values), x, out, config, grid=3)
    assert torch.equal(y, x.double() @ dense.double().T)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_only_kept_places_are_read(block: tuple[int, int]) -> None:
    """As many as the strips of the weight have, and each once, in rising order."""
    torch.manual_seed(1)
    dense = blocked(300, 520, block, 0.2)
    w = BSR.from_dense(dense, block)
    strips = strips_of(w)
    rows, width = strips.rows, strips.width
    padded = torch.zeros(-(-300 // rows) * rows, -(-520 // width) * width)
    padded[:300, :520] = dense
    held = padded.view(-1, rows, padded.shape[1] // width, width).abs().sum((1, 3)) > 0
    for strip, first, count, _ in strips.table.tolist():
        expected = (held[strip].nonzero()[:, 0] * width).tolist()
        found = strips.columns[first : first + count].flatten().tolist()
        assert found[: len(expected)] == expected
        assert count == max(1, -(-len(expected) * width // 64))
    # Rows past the last are not stored; columns past it are, up to the end of a place.
    assert int((dense != 0).sum()) <= strips.kept <= strips.steps * rows * 64


def test_lower_blocks_share_their_places() -> None:
    """Two blocks of 32 in the same columns are one place, in different ones two."""
    dense = torch.zeros(64, 128, dtype=torch.bfloat16)
    dense[:32, :32], dense[32:, :32], dense[:32, 64:96] = 1, 2, 3
    strips = strips_of(BSR.from_dense(dense, (32, 32)))
    assert strips.columns.tolist() == [[0, 64]]
    assert strips.filled == 3 / 4


@pytest.mark.parametrize("block", [(16, 16), (128, 128)], ids=str)
def test_nothing_stored_is_a_step_of_zeros(block: tuple[int, int]) -> None:
    w = BSR.from_dense(torch.zeros(256, 256, dtype=torch.float16), block)
    strips = strips_of(w)
    assert strips.lengths.tolist() == [1] * (256 // strips.rows)
    assert strips.kept == 0
    assert not strips.pack(w.values).any()


def test_long_strips_come_first_and_equal_ones_in_order() -> None:
    dense = torch.zeros(256, 512, dtype=torch.bfloat16)
    dense[128:192] = 1  # a full row; an empty one behind it
    dense[:128, :64] = 1
    strips = strips_of(BSR.from_dense(dense, (64, 64)))
    assert strips.table.tolist() == [[2, 2, 8, 0], [0, 0, 1, 0], [1, 1, 1, 0], [3, 10, 1, 0]]


def test_chunks_lie_where_a_swizzle_of_128_bytes_has_them() -> None:
    dense = torch.arange(64 * 64).view(64, 64).remainder(251).add(1).bfloat16()
    w = BSR.from_dense(dense, (64, 64))
    (packed,) = strips_of(w).pack(w.values)
    # Row 3: its first 16 bytes are the fourth of the line.
    assert torch.equal(packed[3, 24:32], dense[3, :8])
    assert torch.equal(unswizzled(packed[None])[0], dense)


def test_values_keep_their_bits() -> None:
    """Also those of a NaN; a negative zero is stored as zero."""
    values = torch.full((1, 64, 64), 0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    w = BSR.from_dense(values[0], (64, 64))
    assert (strips_of(w).pack(w.values).view(torch.int16) == 0x7FC1).all()


@pytest.mark.parametrize(
    ("block", "width", "panels"),
    [
        ((16, 16), 16, 1),
        ((32, 32), 32, 1),
        ((256, 64), 64, 2),
        ((128, 32), 32, 1),
        ((8, 8), None, 1),
    ],
)
def test_what_blocks_are_gathered_in(
    block: tuple[int, int], width: int | None, panels: int
) -> None:
    assert (width_of(block), panels_of(block)) == (width, panels)


class TestReady:
    def made(self) -> BSR:
        torch.manual_seed(0)
        return BSR.from_dense(blocked(128, 128, (32, 32)), (32, 32))

    def test_it_is_made_once(self) -> None:
        w = self.made()
        again = w.from_parts(w.shape, w.parts(), w.attributes())
        assert layout_of(w) is layout_of(again)
        assert layout_of(w).values is None
        assert ready(w)[1] is ready(again)[1]

    def test_changed_values_are_laid_out_again_in_the_same_place(self) -> None:
        w = self.made()
        strips, before = ready(w)
        w.values.mul_(2)
        again, after = ready(w)
        assert (strips is again, before is after) == (True, True)
        assert torch.equal(after, strips.pack(w.values))

    def test_changed_columns_are_seen(self) -> None:
        w = self.made()
        strips, _ = ready(w)
        w.indices.add_(0)
        assert ready(w)[0] is not strips
        w.indices.copy_(w.indices.flip(0))
        with pytest.raises(FormatError, match="Required: rising block columns"):
            ready(w)

    def test_it_goes_with_the_values(self) -> None:
        from hopsparse.ops.spmm_bsr import ready as module

        w = self.made()
        ready(w)
        count = len(module._KNOWN)
        del w
        assert len(module._KNOWN) == count - 1


class TestSchedule:
    @pytest.mark.parametrize(("strips", "tiles", "group"), [(3, 5, 2), (1, 1, 1), (7, 4, 4)])
    def test_every_item_comes_once(self, strips: int, tiles: int, group: int) -> None:
        ranks, tile = items(strips, tiles, group)
        pairs = set(zip(ranks.tolist(), tile.tolist(), strict=True))
        assert pairs == {(rank, at) for rank in range(strips) for at in range(tiles)}
        assert ranks.numel() == strips * tiles

    def test_blocks_are_dealt_to_forth_and_back(self) -> None:
        assert blocks(10, 4).tolist() == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1]

    def test_uneven_strips_are_dealt_evenly(self) -> None:
        """Lengths of a power law: no block has a tenth more steps than the mean."""
        lengths = (256 / torch.arange(1, 513) ** 0.5).long()
        steps, each = loads(lengths, deepest(1, 256, 64), 4096, 132)
        assert int(steps.sum()) == int(lengths.sum()) * 16
        assert int(each.sum()) == 512 * 16
        assert steps.max() <= 1.1 * steps.double().mean()

    def test_predictions_rise_with_what_is_kept(self) -> None:
        problem, config = Problem(2048, 16384, 4096), deepest(1, 256, 64)
        times = [predicted_us(config, torch.full((256,), n), problem, 132) for n in (6, 13, 32, 64)]
        assert times == sorted(times)
        assert times[-1] > 5 * times[0]

    def test_one_long_strip_is_what_a_product_waits_for(self) -> None:
        problem, config = Problem(16, 8448, 65536), deepest(1, 16, 64)
        uneven = torch.tensor([1024] + [1] * 131)
        even = torch.full((132,), 9)
        assert predicted_us(config, uneven, problem, 132) > 10 * predicted_us(
            config, even, problem, 132
        )

    def test_few_tokens_are_loaded_alone(self) -> None:
        assert [rows_of_x(deepest(1, 64, 64), n) for n in (1, 8, 9, 64, 900)] == [8, 8, 16, 64, 64]


def decision(kept: float, block: int, tokens: int) -> plan.Decision:  # type: ignore[name-defined]
    torch.manual_seed(0)
    mask = torch.rand(4096 // block, 4096 // block) < kept
    dense = mask.repeat_interleave(block, 0).repeat_interleave(block, 1).bfloat16()
    strips = strips_of(BSR.from_dense(dense, (block, block)))
    known = plan.candidates(strips.panels, strips.width)
    return plan.decide(strips.lengths, known, Problem(tokens, 4096, 4096), "bfloat16", H200)


@pytest.mark.parametrize(
    ("kept", "block", "runs"),
    [(0.1, 64, True), (0.5, 128, True), (1.0, 64, False), (0.5, 16, False)],
)
def test_dense_runs_where_it_is_not_clearly_slower(kept: float, block: int, runs: bool) -> None:
    found = decision(kept, block, 4096)
    assert found.uses_kernel(kept=True) is runs
    assert (1.1 * found.kernel_us <= found.dense_us) is runs
    assert found.uses_kernel(kept=False) or not runs


def test_a_decision_says_its_times() -> None:
    found = decision(0.1, 64, 4096)
    assert found.config.name in found.why(kept=True)
    assert "to decode w" in found.why(kept=False)
    assert "to decode w" not in found.why(kept=True)


def test_wide_tiles_are_for_many_tokens() -> None:
    assert decision(0.2, 64, 4096).config.tokens > decision(0.2, 64, 1).config.tokens


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ((1, 24, 64, 2), "steps of 16"),
        ((1, 64, 48, 2), "a width of 64, 32, 16"),
        ((1, 64, 64, 1), "a stage to fill"),
        ((2, 256, 64, 2), "at most 256 tokens for all panels"),
        ((1, 256, 64, 6), "shared memory"),
        ((0, 16, 64, 2), "positive whole numbers"),
    ],
)
def test_tiles_that_no_block_can_have(fields: tuple[int, ...], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        Config(*fields)


def test_no_tile_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no tile"):
        plan.decide(torch.ones(1), [], Problem(1, 1, 1), "bfloat16", H200)


def test_problems_have_sizes() -> None:
    with pytest.raises(ArgumentError, match="whole numbers above 0"):
        Problem(0, 1, 1)


def test_every_kernel_is_listed_once() -> None:
    specs = plan.every_spec()
    assert len({spec.name for spec in specs}) == len(specs)
    assert stores_directly(70, "bfloat16")
    assert not stores_directly(72, "float16")
    assert plan.spec_of(plan.CANDIDATES[0], 70, "bfloat16").name.endswith("direct")


def test_every_block_size_has_tiles() -> None:
    for block in BLOCKS:
        width = width_of(block)
        assert width is not None
        assert plan.candidates(panels_of(block), width)
