"""Weights in other grains than their own, and the tile search, on a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hopsparse.compiler import KernelCache
from hopsparse.formats import BSR
from hopsparse.launch import holding
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_bsr
from hopsparse.ops.spmm_bsr import plan as plan_of
from hopsparse.ops.spmm_bsr.choose import DENSE, TILES, Tile, versions
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.grains import OF_FRAGMENTS, OF_STRIPS, grain_of, grains_for
from hopsparse.ops.spmm_bsr.ready import layout_of
from hopsparse.ops.spmm_bsr.tuning import named_candidates, tune_weight
from hopsparse.plan import TARGETS
from hopsparse.tune import Machine
from tests.helpers.blocks import blocked, exact_product, small

plan = import_module("hopsparse.ops.spmm_bsr.plan")
GRAINS = (*OF_STRIPS, *OF_FRAGMENTS)
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (48, 96), (16, 64)]
SHAPES = [(256, 512, 256), (130, 264, 328), (1, 128, 64), (70, 70, 2064)]


def tile_of(grain: tuple[int, int]) -> Tile:
    """One tile of a grain."""
    return next(tile for tile in TILES if grain_of(tile) == grain)


@pytest.fixture(scope="module", autouse=True)
def kernels(device: torch.device) -> None:
    """All that this file runs but the tuner, compiled side by side before the first test."""
    tiles, names = [tile_of(grain) for grain in GRAINS], ("bfloat16", "float16")
    specs = [plan.spec_of(tile, out, each) for tile in tiles for each in names for out in (64, 70)]
    for built in KernelCache.default().compile_all(dict.fromkeys(specs)):
        if built.error is not None:
            raise built.error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grain", GRAINS, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_grain_of_every_block_is_exact(
    block: tuple[int, int], grain: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(tokens)
        dense = blocked(out, k, block, dtype, device)
        x = small(tokens, k, dtype, device)
        y = spmm_bsr(BSR.from_dense(dense, block), x, config=tile_of(grain))
        assert torch.equal(y, exact_product(x, dense)), (tokens, out, k)


def test_low_blocks_run_in_every_grain_of_strips(device: torch.device) -> None:
    dense = blocked(200, 328, (8, 16), torch.bfloat16, device)
    w, x = BSR.from_dense(dense, (8, 16)), small(33, 328, torch.bfloat16, device)
    for grain in grains_for((8, 16)):
        assert torch.equal(spmm_bsr(w, x, config=tile_of(grain)), exact_product(x, dense))


@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_a_graph_follows_the_values_in_every_grain(
    grain: tuple[int, int], device: torch.device
) -> None:
    dense = blocked(256, 256, (32, 32), torch.bfloat16, device)
    w, x = BSR.from_dense(dense, (32, 32)), small(64, 256, torch.bfloat16, device)
    spmm_bsr(w, x, config=tile_of(grain))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with holding() as found, torch.cuda.graph(graph):
        y = spmm_bsr(w, x, config=tile_of(grain))
    assert len(found) == 1
    w.values.mul_(2)
    layout_of(w).take(w, grain)  # as the next call outside the graph does
    graph.replay()
    assert torch.equal(y, 2 * exact_product(x, dense))


def together(out: int, k: int, device: torch.device) -> BSR:
    """Blocks of 16, kept by 64 x 64."""
    return BSR.from_dense(blocked(out, k, (64, 64), torch.bfloat16, device, kept=0.1), (16, 16))


def test_the_search_finds_a_grain_and_what_runs_is_what_it_found(
    here: Machine, device: torch.device
) -> None:
    w, fixed = together(1024, 1024, device), FragmentConfig(1, 128, 2)
    layer, x = SparseLinear(w), small(100, 1024, torch.bfloat16, device)
    want = exact_product(x, w.to_dense())
    assert torch.equal(spmm_bsr(w, x), want)  # decided before anything was measured
    ranking = tune_weight(w, 100, few=6, also=[fixed])
    assert ranking.failed == {}
    assert ranking.unmeasured == ()
    assert all(each.error == "" for each in ranking.measured.values())
    names = named_candidates(
        w, plan.Problem(128, 1024, 1024), TARGETS["h200"], few=6, also=[fixed]
    ).by_name
    assert set(ranking.timed) == set(names)
    assert {grain_of(tile) for tile in names.values() if tile is not None} > {(16, 16)}

    best = versions("bfloat16")[next(name for name in ranking.order if name != DENSE)]
    told = plan_of(w, x).describe()
    assert f"tile {best.name} measured" in told
    assert "predicted" in plan_of(w, small(129, 1024, torch.bfloat16, device)).describe()
    assert torch.equal(spmm_bsr(w, x), want)
    again = BSR(w.shape, w.values.clone(), w.indices.clone(), w.indptr.clone(), w.block)
    assert plan_of(again, x).describe() == told  # another weight of the pattern
    assert torch.equal(layer(x), want)

    second = tune_weight(w, 70, few=6, also=[fixed])
    assert second.timed == ()
    assert second.measured == ranking.measured


def test_a_prepared_layer_has_the_tuned_grain(here: Machine, device: torch.device) -> None:
    w = together(512, 512, device)
    tune_weight(w, 64, few=3)
    layer = SparseLinear(w)
    layer.prepare(64)
    x = small(64, 512, torch.bfloat16, device)
    assert torch.equal(layer(x), exact_product(x, w.to_dense()))
