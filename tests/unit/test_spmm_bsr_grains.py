"""A weight in other grains than its own: counted, laid out, walked, chosen and found again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import BSR
from hopsparse.ops.spmm_bsr import choose
from hopsparse.ops.spmm_bsr.choose import (
    DENSE,
    TILES,
    by_measurement,
    by_model,
    key_of,
    predicted_by_tile,
    versions,
)
from hopsparse.ops.spmm_bsr.fragments import Fragments, fragments_of
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.grains import (
    OF_FRAGMENTS,
    OF_STRIPS,
    PieceCounts,
    StripCounts,
    counts_of,
    digest,
    grain_of,
    grains_for,
    own_grains,
    stored,
)
from hopsparse.ops.spmm_bsr.kernel import deepest
from hopsparse.ops.spmm_bsr.ready import Ready, forget_decisions, layout_of
from hopsparse.ops.spmm_bsr.schedule import Problem
from hopsparse.ops.spmm_bsr.strips import Strips, strips_of
from hopsparse.ops.spmm_bsr.tuning import Pattern, named_candidates, tune_weight
from hopsparse.plan import TARGETS
from hopsparse.tune import Machine, Measured, Store
from tests.helpers.blocks import pattern
from tests.helpers.fragment_walk import Walker
from tests.helpers.strip_walk import walked

plan = import_module("hopsparse.ops.spmm_bsr.plan")
H200 = TARGETS["h200"]
MACHINE = Machine("NVIDIA H200", 132, "580.65.06")
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (48, 96), (128, 16)]
SHAPES = [(256, 384), (200, 328), (64, 16), (130, 1000)]


def blocked(out: int, k: int, block: tuple[int, int], kept: float = 0.4) -> Tensor:
    """Small integers in random blocks; no kept number is zero."""
    shape = -(-out // block[0]), -(-k // block[1])
    mask = (torch.rand(shape) < kept).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    numbers = torch.randint(1, 5, (out, k)) * (2 * torch.randint(0, 2, (out, k)) - 1)
    return (numbers * mask[:out, :k]).bfloat16()


def grouped(out: int, k: int, zeros: float) -> BSR:
    """Blocks of 16 that are kept by 64 x 64 together."""
    torch.manual_seed(0)
    kept = torch.rand(out // 64, k // 64) >= zeros
    wide = kept.repeat_interleave(4, 0).repeat_interleave(4, 1)
    row, column = wide.nonzero().unbind(1)
    counts = torch.bincount(row, minlength=out // 16)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    values = torch.zeros(1, dtype=torch.bfloat16).expand(len(column), 16, 16)
    return BSR((out, k), values, column.int(), indptr, (16, 16))


@pytest.mark.parametrize("grain", OF_STRIPS, ids=str)
@pytest.mark.parametrize("block", [*BLOCKS, (1, 16)], ids=str)
@pytest.mark.parametrize(("out", "k"), SHAPES)
def test_strips_of_any_grain_give_the_product(
    block: tuple[int, int], out: int, k: int, grain: tuple[int, int]
) -> None:
    torch.manual_seed(out + k)
    dense = blocked(out, k, block)
    w = BSR.from_dense(dense, block)
    strips = strips_of(w, grain[0] // 64, grain[1])
    x = torch.randint(-3, 4, (7, k)).bfloat16()
    config = deepest(strips.panels, 64, strips.width)
    assert grain_of(config) == grain
    y = walked(strips, strips.pack(w.values), x, out, config, grid=3)
    assert torch.equal(y, x.double() @ dense.double().T)


@pytest.mark.parametrize("grain", OF_FRAGMENTS, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("out", "k"), SHAPES)
def test_pieces_of_any_grain_give_the_product(
    block: tuple[int, int], out: int, k: int, grain: tuple[int, int]
) -> None:
    torch.manual_seed(out + k)
    dense = blocked(out, k, block)
    w = BSR.from_dense(dense, block)
    made = fragments_of(w, grain[0] // 16)
    x = torch.randint(-3, 4, (7, k)).bfloat16()
    config = FragmentConfig(made.height, 16, 2)
    assert grain_of(config) == grain
    y = Walker(made, made.pack(w.values), x, out, config).run(6)
    assert torch.equal(y, x.double() @ dense.double().T)


@pytest.mark.parametrize("block", [*BLOCKS, (8, 16)], ids=str)
@pytest.mark.parametrize(("out", "k"), SHAPES)
def test_counts_are_those_of_the_layouts(block: tuple[int, int], out: int, k: int) -> None:
    """Of every grain, without one being laid out."""
    torch.manual_seed(k)
    w = BSR.from_dense(blocked(out, k, block), block)
    for grain in grains_for(block):
        counts = counts_of(w, grain)
        if grain in OF_FRAGMENTS:
            made = fragments_of(w, grain[0] // 16)
            assert isinstance(counts, PieceCounts)
            assert (counts.pieces, counts.height) == (made.pieces, made.height)
            assert torch.equal(counts.counts, made.counts)
            assert torch.equal(counts.walked, made.walked)
        else:
            assert isinstance(counts, StripCounts)
            assert torch.equal(counts.lengths, strips_of(w, grain[0] // 64, grain[1]).lengths)


def test_what_is_stored_ends_with_the_matrix() -> None:
    for block in BLOCKS:
        w = BSR.from_dense(blocked(200, 328, block), block)
        assert stored(w) == int((w.to_dense() != 0).sum())


def test_grains_of_blocks() -> None:
    assert own_grains((16, 16)) == ((64, 16), (16, 16))
    assert own_grains((32, 32)) == ((64, 32), (32, 16))
    assert own_grains((128, 128)) == ((128, 64),)
    assert set(grains_for((128, 128))) == {*OF_STRIPS, *OF_FRAGMENTS}
    assert set(grains_for((8, 16))) == set(OF_STRIPS)  # no piece of 16 rows fits
    assert grains_for((16, 8)) == ()
    assert {grain_of(tile) for tile in TILES} == {*OF_STRIPS, *OF_FRAGMENTS}


@pytest.mark.parametrize(
    ("block", "zeros"), [(b, s) for b in (128, 64, 32, 16) for s in (0.8, 0.9)]
)
def test_random_blocks_run_in_their_own_grain(block: int, zeros: float) -> None:
    """Where dense loses, what was measured to be fastest is chosen as before."""
    w, problem = pattern(16384, 4096, block, zeros), Problem(2048, 16384, 4096)
    counts = {grain: counts_of(w, grain) for grain in grains_for(w.block)}
    found = by_model(counts, w.block, problem, "bfloat16", H200)
    assert grain_of(found.config) in own_grains(w.block)


def test_blocks_that_are_kept_together_run_as_larger_ones() -> None:
    w, problem = grouped(16384, 4096, 0.9), Problem(2048, 16384, 4096)
    counts = {grain: counts_of(w, grain) for grain in grains_for(w.block)}
    found = by_model(counts, w.block, problem, "bfloat16", H200)
    assert grain_of(found.config) == (64, 64)
    times = predicted_by_tile(counts, problem, H200)
    small = min(us for tile, us in times.items() if grain_of(tile) == (16, 16))
    # 64 x 64 and 90 %: 63.9 us were measured, where blocks of 16 take 185.4.
    assert small > 2.15 * found.kernel_us
    own = min(us for tile, us in times.items() if grain_of(tile) in own_grains(w.block))
    assert own > 1.7 * found.kernel_us


class TestReady:
    def made(self) -> BSR:
        torch.manual_seed(0)
        return BSR.from_dense(blocked(128, 128, (16, 16)), (16, 16))

    def test_each_grain_is_laid_out_once_and_follows_the_values(self) -> None:
        w = self.made()
        ready, kept = layout_of(w), []
        for grain in grains_for(w.block):
            layout, values = ready.take(w, grain)
            assert ready.take(w, grain) == (layout, values)
            assert isinstance(layout, Fragments if grain in OF_FRAGMENTS else Strips)
            kept.append(values)
        w.values.mul_(2)
        for grain, before in zip(grains_for(w.block), kept, strict=True):
            layout, values = ready.take(w, grain)
            assert values is before
            assert torch.equal(values, layout.pack(w.values))

    def test_only_what_is_asked_for_is_laid_out(self) -> None:
        ready = layout_of(self.made())
        ready.decide(Problem(64, 128, 128), "bfloat16", H200)
        assert ready.laid == {}

    def test_its_pattern_does_not_keep_the_values(self) -> None:
        w = self.made()
        assert layout_of(w).pattern.values.untyped_storage().nbytes() == 2
        assert digest(layout_of(w).pattern) == digest(w)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty one, which all look-ups of the test read."""
    made = Store(tmp_path)
    monkeypatch.setattr(Store, "default", classmethod(lambda cls: made))
    return made


class TestTuned:
    def ready(self) -> Ready:
        torch.manual_seed(0)
        w = BSR.from_dense(blocked(512, 512, (16, 16), 0.1), (16, 16))
        self.w = w  # Layouts live as long as the values.
        return layout_of(w)

    def test_the_fastest_that_was_measured_runs_for_its_pattern_and_class(
        self, store: Store
    ) -> None:
        ready, problem = self.ready(), Problem(100, 512, 512)
        first = ready.decide(problem, "bfloat16", H200, MACHINE)
        assert not first.measured
        other = next(tile for tile in TILES if grain_of(tile) == (64, 32))
        (name,) = versions("bfloat16", [other])
        key = key_of(ready.digest, problem, "bfloat16", MACHINE)
        store.put(key, {name: Measured(4.0, 4.0, 4.0), DENSE: Measured(5.0, 5.0, 5.0)})
        assert ready.decide(problem, "bfloat16", H200, MACHINE) is first
        forget_decisions()
        found = ready.decide(problem, "bfloat16", H200, MACHINE)
        assert (found.config, found.kernel_us, found.dense_us) == (other, 4.0, 5.0)
        assert found.uses_kernel(kept=True)
        assert found.why(kept=True) == f"tile {other.name} measured 4.0 us, dense 5.0"
        for tokens, tuned in ((65, True), (128, True), (64, False), (129, False)):
            there = ready.decide(Problem(tokens, 512, 512), "bfloat16", H200, MACHINE)
            assert there.measured is tuned

    def test_dense_runs_where_it_was_measured_to_win(self, store: Store) -> None:
        ready, problem = self.ready(), Problem(100, 512, 512)
        (name,) = versions("bfloat16", TILES[:1])
        key = key_of(ready.digest, problem, "bfloat16", MACHINE)
        store.put(key, {name: Measured(6.0, 6.0, 6.0), DENSE: Measured(5.0, 5.0, 5.0)})
        found = ready.decide(problem, "bfloat16", H200, MACHINE)
        assert not found.uses_kernel(kept=True)
        assert found.uses_kernel(kept=False)  # decoding takes longer than that

    def test_another_pattern_finds_nothing(self, store: Store) -> None:
        problem = Problem(100, 512, 512)
        (name,) = versions("bfloat16", TILES[:1])
        store.put(
            key_of(self.ready().digest, problem, "bfloat16", MACHINE),
            {name: Measured(6.0, 6.0, 6.0)},
        )
        torch.manual_seed(1)
        w = BSR.from_dense(blocked(512, 512, (16, 16), 0.1), (16, 16))
        assert by_measurement(digest(w), problem, "bfloat16", MACHINE, H200) is None
        found = by_measurement(self.ready().digest, problem, "bfloat16", MACHINE, H200)
        assert found is not None
        assert found.dense_us == plan.dense_us(problem, "bfloat16", H200)

    def test_names_tell_all_tiles_apart(self) -> None:
        assert len(versions("bfloat16")) == len(TILES) == len({tile.name for tile in TILES})
        assert choose.versions("float16").keys().isdisjoint(versions("bfloat16"))


class TestCandidates:
    def test_the_models_choice_is_first_and_dense_second(self) -> None:
        w, problem = grouped(4096, 4096, 0.9), Problem(2048, 4096, 4096)
        found = named_candidates(w, problem, H200, few=5)
        tiles = [tile for tile in found.by_name.values() if tile is not None]
        assert list(found.by_name.values())[:2] == [found.choice, None]
        assert len(tiles) == len(found.predicted_us) == 5
        assert grain_of(found.choice) == (64, 64)
        times = list(found.predicted_us.values())
        assert max(times) <= 2.5 * min(times)

    def test_a_fixed_tile_is_timed_beside_them(self) -> None:
        w, fixed = pattern(4096, 4096, 64, 0.9), FragmentConfig(1, 128, 2)
        found = named_candidates(w, Problem(2048, 4096, 4096), H200, few=1, also=[fixed])
        assert list(found.by_name.values()) == [found.choice, None, fixed]

    def test_what_cannot_be_tuned_is_refused(self) -> None:
        w = BSR.from_dense(torch.eye(64).bfloat16(), (8, 8))
        with pytest.raises(UnsupportedError, match="blocks of a multiple of 16 columns"):
            named_candidates(w, Problem(16, 64, 64), H200)
        w = BSR.from_dense(torch.eye(64).bfloat16(), (16, 16))
        with pytest.raises(ArgumentError, match="few=0"):
            named_candidates(w, Problem(16, 64, 64), H200, few=0)
        with pytest.raises(UnsupportedError, match="bfloat16 or float16 on an H100 or H200"):
            tune_weight(w, 16)

    def test_whole_numbers_keep_the_pattern_and_are_exact(self) -> None:
        torch.manual_seed(0)
        w = BSR.from_dense(blocked(100, 200, (32, 32)), (32, 32))
        made = Pattern(w, 5)
        made.whole.validate()  # padding is zero
        assert (made.whole.values != 0).any()
        exact = made.whole_x.double() @ made.whole.to_dense().double().T
        assert torch.equal(made._whole_product, exact.bfloat16())
