"""The kernel of small blocks on a GPU: every tile, epilogue and input, bit by bit or in bound."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hopsparse.compiler import KernelCache
from hopsparse.formats import BSR
from hopsparse.measure.error import finish_bound, product_bound
from hopsparse.ops import spmm_bsr
from hopsparse.ops._call import ACTIVATIONS, apply_activation
from hopsparse.ops.spmm_bsr.fragments_device import fragment_launch_for
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.launching import Epilogue
from hopsparse.ops.spmm_bsr.ready import ready_fragments
from hopsparse.ops.spmm_bsr.schedule import Problem
from tests.helpers.blocks import blocked, exact_product, small

plan = import_module("hopsparse.ops.spmm_bsr.plan")
DTYPES = (torch.bfloat16, torch.float16)
# The narrowest tiles too: one piece of 16 tokens alone, by one block and by two.
NARROW = (FragmentConfig(1, 16, 1), FragmentConfig(1, 32, 2), FragmentConfig(2, 16, 2))
CONFIGS = (*plan.FRAGMENT_CANDIDATES, *NARROW)
TILES = [pytest.param(config, id=config.name) for config in CONFIGS]
EPILOGUES = (FragmentConfig(1, 64, 1), FragmentConfig(2, 64, 2))
# tokens, out, k: one tile exactly; ragged on all sides; one token; less than a tile, and less than
# the half of one that a block of a cluster loads; several rounds; a slab that is not full; rows of
# y that are no whole lines; no tokens; a strip without its other one; many pieces in a slot.
SHAPES = [
    (128, 512, 256),
    (2049, 264, 328),
    (1, 128, 64),
    (7, 72, 464),
    (70, 1040, 336),
    (1300, 4096, 512),
    (33, 200, 4160),
    (70, 70, 2064),
    (0, 64, 64),
    (300, 16, 16),
]


@pytest.fixture(scope="module", autouse=True)
def kernels(device: torch.device) -> None:
    """All that this file runs, compiled side by side before the first test."""
    names = ("bfloat16", "float16")
    specs = [plan.spec_of(c, out, each) for c in CONFIGS for each in names for out in (64, 70)]
    for config in EPILOGUES:
        for out in (192, 70):
            for kind in ("bfloat16", "float32"):
                facts = {"out_dtype": kind, "residual": True}
                specs += [
                    plan.spec_of(config, out, names[0], activation=act, **facts)
                    for act in ACTIVATIONS
                ]
    for built in KernelCache.default().compile_all(dict.fromkeys(specs)):
        if built.error is not None:
            raise built.error


def block_of(config: FragmentConfig) -> tuple[int, int]:
    return (16 * config.height, 16 * config.height)


@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tile_is_exact(
    config: FragmentConfig, dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(tokens)
        dense = blocked(out, k, block_of(config), dtype, device)
        x = small(tokens, k, dtype, device)
        y = spmm_bsr(BSR.from_dense(dense, block_of(config)), x, config=config)
        assert torch.equal(y, exact_product(x, dense)), (tokens, out, k)


@pytest.mark.parametrize("config", TILES)
def test_every_element_is_written_and_nothing_else(
    config: FragmentConfig, device: torch.device
) -> None:
    """Into the middle of a buffer of NaN, by blocks whose shared memory held NaN before."""
    for tokens, out, k in ((100, 136, 192), (70, 70, 128), (3, 64, 64), (260, 1032, 144)):
        dense = blocked(out, k, block_of(config), torch.bfloat16, device)
        w = BSR.from_dense(dense, block_of(config))
        spmm_bsr(w, torch.full((300, k), float("nan"), device=device).bfloat16(), config=config)
        x = small(tokens, k, torch.bfloat16, device)
        guard = 64 * out
        buffer = torch.full((tokens * out + 2 * guard,), float("nan"), device=device).bfloat16()
        y = buffer[guard:-guard].view(tokens, out)
        made = ready_fragments(w)
        problem, pairs = Problem(tokens, out, k), len(made[0].pairs)
        launch = fragment_launch_for(problem, pairs, x.dtype, Epilogue(x.dtype), 0, config)
        launch(made, x, y)
        assert torch.equal(y, exact_product(x, dense))
        assert buffer[:guard].isnan().all()
        assert buffer[-guard:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", TILES)
def test_random_numbers_stay_in_bound(
    config: FragmentConfig, dtype: torch.dtype, device: torch.device
) -> None:
    block = block_of(config)
    mask = blocked(320, 1088, block, dtype, device) != 0
    dense = (torch.randn(320, 1088, device=device) * mask).to(dtype)
    x, bias = torch.randn(77, 1088, device=device).to(dtype), torch.randn(320, device=device)
    y = spmm_bsr(BSR.from_dense(dense, block), x, bias=bias.to(dtype), config=config)
    expected = x.double() @ dense.double().T + bias.to(dtype).double()
    bound = product_bound(x, dense, torch.float32, dtype, bias.to(dtype))
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "block", [(16, 64), (32, 16), (48, 96), (64, 32), (64, 48), (256, 16)], ids=str
)
def test_blocks_of_any_sides(block: tuple[int, int], device: torch.device) -> None:
    dense = blocked(400, 656, block, torch.bfloat16, device)
    x, w = small(145, 656, torch.bfloat16, device), BSR.from_dense(dense, block)
    for config in plan.fragment_candidates(ready_fragments(w)[0].height):
        assert torch.equal(spmm_bsr(w, x, config=config), exact_product(x, dense)), config


@pytest.mark.parametrize("tokens", [1, 130, 2049])
@pytest.mark.parametrize("config", TILES)
def test_empty_full_and_nothing(config: FragmentConfig, tokens: int, device: torch.device) -> None:
    """A weight of zeros, whose slots walk no slab; one row of blocks alone, the last."""
    side = 16 * config.height
    out, k = 35 * side, 7 * side
    x = small(tokens, k, torch.bfloat16, device)
    nothing = torch.zeros(out, k, device=device).bfloat16()
    bias = torch.arange(out, device=device).bfloat16()
    y = spmm_bsr(BSR.from_dense(nothing, (side, side)), x, bias=bias, config=config)
    assert torch.equal(y, bias.expand(tokens, out))
    one = nothing.clone()
    one[-side:] = torch.randint(1, 4, (side, k), device=device).bfloat16()
    y = spmm_bsr(BSR.from_dense(one, (side, side)), x, config=config)
    assert torch.equal(y, exact_product(x, one))


@pytest.mark.parametrize("config", TILES)
def test_slots_of_very_different_length(config: FragmentConfig, device: torch.device) -> None:
    """Warps of one block that run ahead of others as far as the ring lets them."""
    torch.manual_seed(0)
    side = 16 * config.height
    rows, columns = 4096 // side, 4096 // side
    lengths = (columns / torch.arange(1, rows + 1) ** 0.7).ceil()[torch.randperm(rows)]
    mask = (torch.arange(columns)[None] < lengths[:, None]).to(device)
    mask = mask.repeat_interleave(side, 0).repeat_interleave(side, 1)
    dense = (torch.randint(-3, 4, mask.shape, device=device) * mask).bfloat16()
    x, w = small(700, 4096, torch.bfloat16, device), BSR.from_dense(dense, (side, side))
    assert torch.equal(spmm_bsr(w, x, config=config), exact_product(x, dense))


@pytest.mark.parametrize("config", EPILOGUES, ids=lambda config: config.name)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("out", [192, 70], ids=["lines", "direct"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_epilogues(
    act: str,
    out: int,
    out_dtype: torch.dtype | None,
    config: FragmentConfig,
    device: torch.device,
) -> None:
    """Against the chain in float64, which may differ by the roundings of the sum and of the end."""
    torch.manual_seed(out)
    dense = blocked(out, 160, block_of(config), torch.bfloat16, device)
    x = small(75, 160, torch.bfloat16, device)
    bias = torch.randn(out, device=device).bfloat16()
    kind = out_dtype or torch.bfloat16
    # One number into its storage: contiguous, and not where 16 bytes begin.
    residual = torch.randn(75 * out + 1, device=device).to(kind)[1:].view(75, out)
    y = spmm_bsr(
        BSR.from_dense(dense, block_of(config)),
        x,
        bias=bias,
        act=None if act == "none" else act,
        alpha=0.125,
        residual=residual,
        out_dtype=out_dtype,
        config=config,
    )
    assert y.dtype == kind
    sums = 0.125 * (x.double() @ dense.double().T) + bias.double()
    expected = apply_activation(sums, act) + residual.double()
    bound = finish_bound(sums.abs(), expected, residual, kind)  # alpha times an integer is exact
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("view", ["transpose", "columns", "expand", "offset", "batch"])
def test_any_strides(view: str, device: torch.device) -> None:
    k = 256
    dense = blocked(256, k, (16, 16), torch.float16, device, largest=1)
    source = torch.randint(-1, 2, (2 * k + 3, 3 * k), device=device).half()
    x = {
        "transpose": source[:k, :9].T,
        "columns": source[:7, k + 1 : 2 * k + 1],
        "expand": source[:1, :k].expand(5, k),
        "offset": source.flatten()[13 : 13 + 4 * k].view(4, k),
        "batch": source.as_strided((2, 3, 5, k), (11, 7, 3 * k, 1), 2),
    }[view]
    y = spmm_bsr(BSR.from_dense(dense, (16, 16)), x, config=FragmentConfig(1, 64, 1))
    assert torch.equal(y, exact_product(x, dense))


@pytest.mark.parametrize("block", [16, 32])
def test_runs_are_bitwise_the_same(block: int, device: torch.device) -> None:
    mask = blocked(4096, 4096, (block, block), torch.bfloat16, device) != 0
    w = BSR.from_dense((torch.randn(4096, 4096, device=device) * mask).bfloat16(), (block, block))
    x = torch.randn(2048, 4096, device=device).bfloat16()
    config = plan.fragment_candidates(block // 16)[0]
    first = spmm_bsr(w, x, config=config)
    assert all(torch.equal(spmm_bsr(w, x, config=config), first) for _ in range(20))


def test_trained_values_are_seen_by_the_next_call(device: torch.device) -> None:
    dense = blocked(128, 128, (16, 16), torch.bfloat16, device)
    w, x = BSR.from_dense(dense, (16, 16)), small(9, 128, torch.bfloat16, device)
    config = FragmentConfig(1, 64, 1)
    spmm_bsr(w, x, config=config)
    w.values.mul_(2)
    assert torch.equal(spmm_bsr(w, x, config=config), exact_product(x, 2 * dense))


def test_a_graph_goes_on_to_read_the_layout(device: torch.device) -> None:
    dense = blocked(256, 256, (16, 16), torch.bfloat16, device, largest=1)
    w, x = BSR.from_dense(dense, (16, 16)), small(64, 256, torch.bfloat16, device)
    config = FragmentConfig(1, 64, 1)
    spmm_bsr(w, x, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = spmm_bsr(w, x, config=config)
    x.copy_(small(64, 256, torch.bfloat16, device))
    w.values.mul_(2)
    spmm_bsr(w, x, config=config)  # which lays the values out again, where they were
    graph.replay()
    assert torch.equal(y, exact_product(x, 2 * dense))


@pytest.mark.parametrize(("block", "kept"), [(16, 0.1), (16, 0.2), (32, 0.2)])
def test_plans_choose_it_and_it_is_right(block: int, kept: float, device: torch.device) -> None:
    sides = (block, block)
    dense = blocked(16384, 4096, sides, torch.bfloat16, device, kept=kept, largest=1)
    w, x = BSR.from_dense(dense, sides), small(2048, 4096, torch.bfloat16, device)
    told = plan_of(w, x)
    assert "runs kernel: mma.sync, tile mma_" in told
    assert torch.equal(spmm_bsr(w, x), exact_product(x, dense))


def plan_of(w: BSR, x: torch.Tensor) -> str:
    from hopsparse.ops.spmm_bsr.op import plan as planned

    return planned(w, x).describe()
