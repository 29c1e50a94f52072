"""The block-sparse kernel on a GPU: every tile, epilogue and input, bit by bit or in bound."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hopsparse.compiler import KernelCache
from hopsparse.errors import ArgumentError
from hopsparse.formats import BSR
from hopsparse.measure.error import finish_bound, product_bound
from hopsparse.ops import spmm_bsr
from hopsparse.ops._call import ACTIVATIONS, apply_activation
from hopsparse.ops.spmm_bsr.device import Epilogue, launch_for
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.kernel import Config, deepest
from hopsparse.ops.spmm_bsr.plan import CANDIDATES, Problem, spec_of
from hopsparse.ops.spmm_bsr.ready import ready
from hopsparse.ops.spmm_bsr.strips import panels_of, width_of
from tests.helpers.blocks import blocked, exact_product, small

plan = import_module("hopsparse.ops.spmm_bsr.plan")
DTYPES = (torch.bfloat16, torch.float16)
TILES = [pytest.param(config, id=config.name) for config in CANDIDATES]
BLOCKS = {(2, 64): (128, 128), (1, 64): (64, 64), (1, 32): (32, 32), (1, 16): (16, 16)}
# tokens, out, k: one tile exactly; ragged on all sides; one token; less than a tile; several rounds
# of every tile; a step that is not full; rows of y that are no whole lines; no tokens; more tokens
# than stay in L2 together.
SHAPES = [
    (256, 256, 256),
    (2049, 264, 328),
    (1, 128, 64),
    (7, 72, 464),
    (130, 4096, 512),
    (33, 200, 4160),
    (70, 70, 2064),
    (0, 64, 64),
    (4500, 512, 128),
]


@pytest.fixture(scope="module", autouse=True)
def kernels(device: torch.device) -> None:
    """All that this file runs, compiled side by side before the first test."""
    names = ("bfloat16", "float16")
    specs = [spec_of(c, out, each) for c in CANDIDATES for each in names for out in (64, 70)]
    for config in (deepest(1, 64, 64), deepest(1, 64, 16)):
        for out in (192, 70):
            for kind in ("bfloat16", "float32"):
                specs += [
                    spec_of(config, out, names[0], out_dtype=kind, activation=act, residual=True)
                    for act in ACTIVATIONS
                ]
    for built in KernelCache.default().compile_all(dict.fromkeys(specs)):
        if built.error is not None:
            raise built.error


def block_of(config: Config) -> tuple[int, int]:
    return BLOCKS[config.panels, config.width]


@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tile_is_exact(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(tokens)
        dense = blocked(out, k, block_of(config), dtype, device)
        x = small(tokens, k, dtype, device)
        y = spmm_bsr(BSR.from_dense(dense, block_of(config)), x, config=config)
        assert torch.equal(y, exact_product(x, dense)), (tokens, out, k)


@pytest.mark.parametrize("config", TILES)
def test_every_element_is_written_and_nothing_else(config: Config, device: torch.device) -> None:
    """Into the middle of a buffer of NaN, by blocks whose shared memory held NaN before."""
    for tokens, out, k in ((100, 136, 192), (70, 70, 128), (3, 64, 64)):
        dense = blocked(out, k, block_of(config), torch.bfloat16, device)
        w = BSR.from_dense(dense, block_of(config))
        spmm_bsr(w, torch.full((300, k), float("nan"), device=device).bfloat16(), config=config)
        x = small(tokens, k, torch.bfloat16, device)
        guard = 64 * out
        buffer = torch.full((tokens * out + 2 * guard,), float("nan"), device=device).bfloat16()
        y = buffer[guard:-guard].view(tokens, out)
        made = ready(w)
        problem, strips = Problem(tokens, out, k), made[0].lengths.numel()
        launch = launch_for(problem, strips, x.dtype, Epilogue(x.dtype), 0, config)
        launch(made, x, y)
        assert torch.equal(y, exact_product(x, dense))
        assert buffer[:guard].isnan().all()
        assert buffer[-guard:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", TILES)
def test_random_numbers_stay_in_bound(
    config: Config, dtype: torch.dtype, device: torch.device
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
    "block", [(64, 32), (16, 64), (128, 16), (48, 96), (1, 16), (256, 64), (200, 32)], ids=str
)
def test_blocks_of_any_sides(block: tuple[int, int], device: torch.device) -> None:
    dense = blocked(400, 656, block, torch.bfloat16, device)
    x = small(45, 656, torch.bfloat16, device)
    width = width_of(block)
    assert width is not None
    for config in plan.candidates(panels_of(block), width):
        y = spmm_bsr(BSR.from_dense(dense, block), x, config=config)
        assert torch.equal(y, exact_product(x, dense)), config


@pytest.mark.parametrize("tokens", [0, 1, 7, 130, 2049])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_empty_full_and_nothing(block: int, tokens: int, device: torch.device) -> None:
    """An odd number of blocks along k; a weight of zeros; one block row alone, the last."""
    out, k = 5 * block, 7 * block
    x = small(tokens, k, torch.bfloat16, device)
    nothing = torch.zeros(out, k, device=device).bfloat16()
    bias = torch.arange(out, device=device).bfloat16()
    config = deepest(panels_of((block, block)), 64, min(block, 64))
    y = spmm_bsr(BSR.from_dense(nothing, (block, block)), x, bias=bias, config=config)
    assert torch.equal(y, bias.expand(tokens, out))
    one = nothing.clone()
    one[-block:] = torch.randint(1, 4, (block, k), device=device).bfloat16()
    y = spmm_bsr(BSR.from_dense(one, (block, block)), x, config=config)
    assert torch.equal(y, exact_product(x, one))


def test_strips_of_very_different_length(device: torch.device) -> None:
    """More items than blocks, so that every block passes over items of all lengths."""
    torch.manual_seed(0)
    lengths = (64 / torch.arange(1, 257) ** 0.7).ceil()[torch.randperm(256)]
    mask = (torch.arange(64)[None] < lengths[:, None]).to(device)
    mask = mask.repeat_interleave(64, 0).repeat_interleave(64, 1)
    dense = (torch.randint(-3, 4, mask.shape, device=device) * mask).bfloat16()
    x, w = small(1000, 4096, torch.bfloat16, device), BSR.from_dense(dense, (64, 64))
    for config in plan.candidates(1, 64):
        assert torch.equal(spmm_bsr(w, x, config=config), exact_product(x, dense)), config


@pytest.mark.parametrize("width", [64, 16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("out", [192, 70], ids=["lines", "direct"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_epilogues(
    act: str, out: int, out_dtype: torch.dtype | None, width: int, device: torch.device
) -> None:
    """Against the chain in float64, which may differ by the roundings of the sum and of the end."""
    torch.manual_seed(out)
    dense = blocked(out, 128, (width, width), torch.bfloat16, device)
    x = small(45, 128, torch.bfloat16, device)
    bias = torch.randn(out, device=device).bfloat16()
    kind = out_dtype or torch.bfloat16
    # One number into its storage: contiguous, and not where 16 bytes begin.
    residual = torch.randn(45 * out + 1, device=device).to(kind)[1:].view(45, out)
    y = spmm_bsr(
        BSR.from_dense(dense, (width, width)),
        x,
        bias=bias,
        act=None if act == "none" else act,
        alpha=0.125,
        residual=residual,
        out_dtype=out_dtype,
        config=deepest(1, 64, width),
    )
    assert y.dtype == kind
    sums = 0.125 * (x.double() @ dense.double().T) + bias.double()
    expected = apply_activation(sums, act) + residual.double()
    bound = finish_bound(sums.abs(), expected, residual, kind)  # alpha times an integer is exact
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("view", ["transpose", "columns", "expand", "offset", "batch", "vector"])
def test_any_strides(view: str, device: torch.device) -> None:
    k = 256
    dense = blocked(256, k, (64, 64), torch.float16, device, largest=1)
    source = torch.randint(-1, 2, (2 * k + 3, 3 * k), device=device).half()
    x = {
        "transpose": source[:k, :9].T,
        "columns": source[:7, k + 1 : 2 * k + 1],
        "expand": source[:1, :k].expand(5, k),
        "offset": source.flatten()[13 : 13 + 4 * k].view(4, k),
        "batch": source.as_strided((2, 3, 5, k), (11, 7, 3 * k, 1), 2),
        "vector": source[0, ::3],
    }[view]
    y = spmm_bsr(BSR.from_dense(dense, (64, 64)), x, config=deepest(1, 16, 64))
    assert torch.equal(y, exact_product(x, dense))


@pytest.mark.parametrize("block", [16, 64, 128])
def test_runs_are_bitwise_the_same(block: int, device: torch.device) -> None:
    mask = blocked(4096, 4096, (block, block), torch.bfloat16, device) != 0
    w = BSR.from_dense((torch.randn(4096, 4096, device=device) * mask).bfloat16(), (block, block))
    x = torch.randn(2048, 4096, device=device).bfloat16()
    config = plan.candidates(panels_of(w.block), min(block, 64))[0]
    first = spmm_bsr(w, x, config=config)
    assert all(torch.equal(spmm_bsr(w, x, config=config), first) for _ in range(20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, device: torch.device) -> None:
    dense = blocked(96, 128, (16, 16), dtype, device)
    stored = BSR.from_dense(dense, (16, 16))
    values = stored.values.clone().requires_grad_()
    w = BSR(stored.shape, values, stored.indices, stored.indptr, stored.block)
    x = torch.randn(2, 5, 128, device=device).to(dtype).requires_grad_()
    bias = torch.randn(96, device=device).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, 96, device=device).to(dtype)
    spmm_bsr(w, x, bias=bias).backward(upstream)
    flat_x, flat_up = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    bound = product_bound(flat_up, dense.T, torch.float32, dtype)
    error = x.grad.flatten(0, 1).double() - flat_up.double() @ dense.double()
    assert (error.abs() <= bound).all()
    bound = product_bound(torch.ones(1, 10, device=device), flat_up.T, torch.float32, dtype)
    assert ((bias.grad.double() - flat_up.double().sum(0)).abs() <= bound).all()
    grad = BSR(w.shape, values.grad, w.indices, w.indptr, w.block).to_dense()
    mask = dense != 0
    bound = product_bound(flat_up.T, flat_x.T, torch.float32, dtype)
    error = grad.double() - (flat_up.double().T @ flat_x.double()) * mask
    assert not grad[~mask].any()
    assert (error.abs() <= bound).all()


def test_trained_values_are_seen_by_the_next_call(device: torch.device) -> None:
    dense = blocked(128, 128, (64, 64), torch.bfloat16, device)
    w, x = BSR.from_dense(dense, (64, 64)), small(9, 128, torch.bfloat16, device)
    config = deepest(1, 16, 64)
    spmm_bsr(w, x, config=config)
    w.values.mul_(2)
    assert torch.equal(spmm_bsr(w, x, config=config), exact_product(x, 2 * dense))


def test_a_gradient_takes_the_epilogue_apart(device: torch.device) -> None:
    dense = blocked(64, 64, (32, 32), torch.float16, device, largest=1)
    x = torch.randint(-1, 2, (9, 64), device=device).half().requires_grad_()
    residual = torch.randint(-2, 3, (9, 64), device=device).half().requires_grad_()
    y = spmm_bsr(BSR.from_dense(dense, (32, 32)), x, act="relu", residual=residual)
    sums = x.detach().double() @ dense.double().T
    assert torch.equal(y.detach().double(), sums.relu() + residual.detach().double())
    y.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    assert torch.equal(x.grad.double(), (sums > 0).double() @ dense.double())


def test_torch_agrees_that_the_operator_is_well_formed(device: torch.device) -> None:
    w = BSR.from_dense(blocked(64, 64, (16, 16), torch.bfloat16, device), (16, 16))
    x = torch.randint(-1, 2, (8, 64), device=device).bfloat16()
    parts = [w.values, w.indices, w.indptr]
    for facts in ((None, None, [64, 16, 16], "none"), (x[0], x, [64, 16, 16], "silu")):
        arguments = (parts, x, *facts, 1.0, torch.bfloat16)
        torch.library.opcheck(torch.ops.hopsparse.spmm_bsr.default, arguments)


def test_a_tile_that_blocks_cannot_run_is_refused(device: torch.device) -> None:
    w = BSR.from_dense(blocked(64, 64, (8, 16), torch.bfloat16, device), (8, 16))
    with pytest.raises(ArgumentError, match="of cells of 16 x 16, for blocks of 8 x 16"):
        spmm_bsr(w, small(9, 64, torch.bfloat16, device), config=FragmentConfig(1, 64, 1))


def test_transforms_run_dense_and_are_right(device: torch.device) -> None:
    dense = blocked(64, 64, (16, 16), torch.bfloat16, device)
    w, x = BSR.from_dense(dense, (16, 16)), small(15, 64, torch.bfloat16, device).view(3, 5, 64)
    assert torch.equal(torch.vmap(lambda x: spmm_bsr(w, x))(x), exact_product(x, dense))
