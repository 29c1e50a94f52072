"""The 2:4 kernel on a GPU: every tile, epilogue and kind of input, bit by bit or in bound."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.measure.error import finish_bound, gated_bound, product_bound, unit_roundoff
from hopsparse.nn import SparseLinear
from hopsparse.ops import interleave_gate_up, spmm_nm
from hopsparse.ops.spmm_nm import op
from hopsparse.ops.spmm_nm.device import Epilogue, launch_for
from hopsparse.ops.spmm_nm.kernel import ACTIVATIONS, Config
from hopsparse.ops.spmm_nm.plan import CANDIDATES, Problem, tiles
from hopsparse.ops.spmm_nm.reference import apply_activation
from hopsparse.prune import magnitude
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16)
# No candidate has both: blocks that share a tile, and blocks that share tokens or weights.
MIXED = (Config(2, 1, 128, 2, 4, 2, 1, 2), Config(2, 1, 64, 2, 6, 1, 2, 2))
TILES = [pytest.param(config, id=config.name) for config in (*CANDIDATES, *MIXED)]
# tokens, out, k: one tile exactly; ragged on all sides; one token; less than a tile; several waves
# of every tile; an odd number of units; rows of y that TMA cannot store.
SHAPES = [
    (256, 256, 256),
    (513, 1032, 1096),
    (1, 64, 64),
    (300, 72, 448),
    (1000, 2048, 512),
    (33, 200, 4160),
    (70, 70, 2064),
]


def two_four(
    out: int, k: int, dtype: torch.dtype, device: torch.device, largest: int = 3
) -> Tensor:
    """Integers, two of every four columns; all pairs of columns occur."""
    dense = torch.randint(-largest, largest + 1, (out, k), device=device)
    rank = torch.rand(out, -(-k // 4), 4, device=device).argsort(-1)
    return (dense * (rank < 2).flatten(1)[:, :k]).to(dtype)


def exact_product(x: Tensor, dense: Tensor) -> Tensor:
    """Of small integers: exact in float32, rounded once."""
    assert x.float().abs().max() * dense.float().abs().max() * x.shape[-1] < 2**24
    return (x.double() @ dense.double().T).to(x.dtype)


@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tile_is_exact(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(tokens)
        dense = two_four(out, k, dtype, device)
        x = torch.randint(-2, 3, (tokens, k), device=device).to(dtype)
        y = spmm_nm(NM.from_dense(dense), x, config=config)
        assert torch.equal(y, exact_product(x, dense)), (tokens, out, k)


@pytest.mark.parametrize("config", TILES)
def test_every_element_is_written_and_nothing_else(config: Config, device: torch.device) -> None:
    """Into the middle of a buffer of NaN."""
    for tokens, out, k in ((100, 136, 192), (70, 70, 128)):
        w = NM.from_dense(two_four(out, k, torch.bfloat16, device))
        x = torch.randint(-2, 3, (tokens, k), device=device).bfloat16()
        guard = 64 * out
        buffer = torch.full((tokens * out + 2 * guard,), float("nan"), device=device).bfloat16()
        y = buffer[guard:-guard].view(tokens, out)
        launch = launch_for(
            Problem(tokens, out, k), torch.bfloat16, Epilogue(torch.bfloat16), 0, config
        )
        launch(w.values, w.meta, x, y, bias=None, residual=None, alpha=1.0)
        assert not y.isnan().any()
        assert buffer[:guard].isnan().all()
        assert buffer[-guard:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", TILES)
def test_random_numbers_stay_in_bound(
    config: Config, dtype: torch.dtype, device: torch.device
) -> None:
    dense = magnitude(torch.randn(320, 1088, device=device), NMPattern(2, 4)).to(dtype)
    x, bias = torch.randn(77, 1088, device=device).to(dtype), torch.randn(320, device=device)
    y = spmm_nm(NM.from_dense(dense), x, bias=bias.to(dtype), config=config)
    expected = x.double() @ dense.double().T + bias.to(dtype).double()
    bound = product_bound(x, dense, torch.float32, dtype, bias.to(dtype))
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("out", [192, 70], ids=["tma", "direct"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_epilogues(act: str, out: int, out_dtype: torch.dtype | None, device: torch.device) -> None:
    """Against the chain in float64, which may differ by the roundings of the sum and of the end."""
    torch.manual_seed(out)
    dense = two_four(out, 128, torch.bfloat16, device)
    x = torch.randint(-2, 3, (45, 128), device=device).bfloat16()
    bias = torch.randn(out, device=device).bfloat16()
    kind = out_dtype or torch.bfloat16
    # One number into its storage: contiguous, and not where 16 bytes begin.
    residual = torch.randn(45 * out + 1, device=device).to(kind)[1:].view(45, out)
    y = spmm_nm(
        NM.from_dense(dense),
        x,
        bias=bias,
        act=None if act == "none" else act,
        alpha=0.125,
        residual=residual,
        out_dtype=out_dtype,
    )
    assert y.dtype == kind
    sums = 0.125 * (x.double() @ dense.double().T) + bias.double()
    expected = apply_activation(sums, act) + residual.double()
    bound = finish_bound(sums.abs(), expected, residual, kind)  # alpha times an integer is exact
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("config", [*tiles("swiglu"), *MIXED], ids=lambda config: config.name)
def test_swiglu_folds_gate_and_up(
    config: Config, out_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Half as many results: whole lines, ragged ones, and rows that start off 16 bytes."""
    for tokens, half, k in [(256, 256, 512), (101, 144, 640), (1, 8, 64), (33, 1032, 256)]:
        parts = [two_four(half, k, torch.bfloat16, device) for _ in range(2)]
        x = torch.randint(-2, 3, (tokens, k), device=device).bfloat16()
        w = NM.from_dense(interleave_gate_up(*parts))
        y = spmm_nm(w, x, act="swiglu", alpha=1 / 16, out_dtype=out_dtype, config=config)
        assert y.shape == (tokens, half)
        gate, up = (x.double() @ part.double().T / 16 for part in parts)  # exact in float32
        right = torch.nn.functional.silu(gate) * up
        slack = gated_bound(gate) * right.abs()
        end = unit_roundoff(y.dtype) * (right.abs() + slack) + torch.finfo(y.dtype).tiny
        assert ((y.double() - right).abs() <= slack + end).all()


@pytest.mark.parametrize("view", ["transpose", "columns", "expand", "offset", "batch", "vector"])
def test_any_strides(view: str, device: torch.device) -> None:
    k = 256
    dense = two_four(256, k, torch.float16, device, largest=1)
    source = torch.randint(-1, 2, (2 * k + 3, 3 * k), device=device).half()
    x = {
        "transpose": source[:k, :9].T,
        "columns": source[:7, k + 1 : 2 * k + 1],
        "expand": source[:1, :k].expand(5, k),
        "offset": source.flatten()[13 : 13 + 4 * k].view(4, k),
        "batch": source.as_strided((2, 3, 5, k), (11, 7, 3 * k, 1), 2),
        "vector": source[0, ::3],
    }[view]
    y = spmm_nm(NM.from_dense(dense), x)
    assert torch.equal(y, exact_product(x, dense))


@pytest.mark.parametrize("tokens", [1, 3, 7, 17])
def test_few_tokens_copy_nothing(tokens: int, device: torch.device) -> None:
    w = NM.from_dense(two_four(4096, 4096, torch.bfloat16, device))
    x = torch.randint(-2, 3, (tokens, 4096), device=device).bfloat16()
    spmm_nm(w, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = spmm_nm(w, x)
    assert torch.cuda.max_memory_allocated() - before <= y.numel() * 2 + 512


def test_bias_runs_along_out_features(device: torch.device) -> None:
    w = NM.from_dense(torch.zeros(64, 64, device=device).bfloat16())
    bias = torch.arange(64, device=device).bfloat16()
    y = spmm_nm(w, torch.ones(5, 64, device=device).bfloat16(), bias=bias)
    assert torch.equal(y, bias.expand(5, 64))


def test_minus_zero_and_empty_groups(device: torch.device) -> None:
    dense = two_four(64, 128, torch.bfloat16, device)
    dense[dense == 0] = -0.0
    dense[:, :32] = -0.0
    x = torch.randint(-2, 3, (5, 128), device=device).bfloat16()
    assert torch.equal(spmm_nm(NM.from_dense(dense), x), exact_product(x, dense))


def test_no_tokens(device: torch.device) -> None:
    w = NM.from_dense(torch.ones(8, 16, device=device).bfloat16() * 0)
    assert spmm_nm(w, torch.ones(3, 0, 16, device=device).bfloat16()).shape == (3, 0, 8)


def test_runs_are_bitwise_the_same(device: torch.device) -> None:
    dense = magnitude(torch.randn(4096, 4096, device=device), NMPattern(2, 4)).bfloat16()
    w, x = NM.from_dense(dense), torch.randn(2048, 4096, device=device).bfloat16()
    first = spmm_nm(w, x)
    assert all(torch.equal(spmm_nm(w, x), first) for _ in range(20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, device: torch.device) -> None:
    dense = two_four(96, 128, dtype, device)
    packed = NM.from_dense(dense)
    values = packed.values.clone().requires_grad_()
    w = NM(packed.shape, values, packed.meta, packed.pattern)
    x = torch.randn(2, 5, 128, device=device).to(dtype).requires_grad_()
    bias = torch.randn(96, device=device).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, 96, device=device).to(dtype)
    spmm_nm(w, x, bias=bias).backward(upstream)
    flat_x, flat_up = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    bound = product_bound(flat_up, dense.T, torch.float32, dtype)
    error = x.grad.flatten(0, 1).double() - flat_up.double() @ dense.double()
    assert (error.abs() <= bound).all()
    bound = product_bound(torch.ones(1, 10, device=device), flat_up.T, torch.float32, dtype)
    assert ((bias.grad.double() - flat_up.double().sum(0)).abs() <= bound).all()
    grad = NM(packed.shape, values.grad, packed.meta, packed.pattern).to_dense()
    mask = dense != 0
    bound = product_bound(flat_up.T, flat_x.T, torch.float32, dtype)
    error = grad.double() - (flat_up.double().T @ flat_x.double()) * mask
    assert not grad[~mask].any()
    assert (error.abs() <= bound).all()


def test_a_gradient_takes_the_epilogue_apart(device: torch.device) -> None:
    dense = two_four(64, 64, torch.float16, device, largest=1)
    x = torch.randint(-1, 2, (9, 64), device=device).half().requires_grad_()
    residual = torch.randint(-2, 3, (9, 64), device=device).half().requires_grad_()
    y = spmm_nm(NM.from_dense(dense), x, act="relu", residual=residual)
    sums = x.detach().double() @ dense.double().T
    assert torch.equal(y.detach().double(), sums.relu() + residual.detach().double())
    y.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    assert torch.equal(x.grad.double(), (sums > 0).double() @ dense.double())


def test_torch_agrees_that_the_operator_is_well_formed(device: torch.device) -> None:
    w = NM.from_dense(two_four(64, 64, torch.bfloat16, device))
    x = torch.randint(-1, 2, (8, 64), device=device).bfloat16()
    spmm_nm(w, x.clone().requires_grad_())
    for facts in ((None, None, 64, "none", 1.0), (x[0], x, 64, "silu", 0.5)):
        arguments = ([w.values, w.meta], x, *facts, torch.bfloat16)
        torch.library.opcheck(torch.ops.hopsparse.spmm_nm.default, arguments)


def mlp(device: torch.device) -> nn.Sequential:
    layers = []
    for out, k in ((512, 256), (256, 512)):
        linear = nn.Linear(k, out, device=device).bfloat16().requires_grad_(False)
        linear.weight.copy_(magnitude(linear.weight, NMPattern(2, 4)))
        layers += [SparseLinear.from_linear(linear), nn.GELU()]
    return nn.Sequential(*layers)


def test_compiles_to_one_graph_for_any_number_of_tokens(device: torch.device) -> None:
    model = mlp(device)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    for tokens in (5, 17, 64, 100, 333):
        x = torch.randn(tokens, 256, device=device).bfloat16()
        assert torch.equal(compiled(x), model(x))
    assert len(graphs) <= 2  # the first shape, then any


def test_module_copies_saves_and_names_its_kernel(device: torch.device) -> None:
    layer = mlp(torch.device("cpu"))[0]
    moved = copy.deepcopy(layer).to(device)
    x = torch.randint(-1, 2, (5, 256), device=device).bfloat16()
    assert moved.plan(x).name == "kernel"
    assert "wgmma.sp" in moved.plan(x).describe()
    before = torch.cuda.memory_allocated()
    y = moved(x)
    assert torch.cuda.memory_allocated() - before <= y.numel() * 2 + 512  # nothing is decoded
    loaded = SparseLinear.empty((512, 256), torch.bfloat16, "nm", {"pattern": "2:4"}, bias=True)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded.to(device)(x), y)
    with pytest.raises(ArgumentError, match="bfloat16"):
        moved(x.float())


def test_a_planned_call_waits_for_nothing(device: torch.device) -> None:
    layer = mlp(device)[0]
    x = torch.randn(5, 256, device=device).bfloat16()
    first = layer(x)
    with nothing_waits():
        second = layer(x)
    assert torch.equal(first, second)


def test_a_cold_capture_is_refused_and_goes_on(device: torch.device) -> None:
    w = NM.from_dense(two_four(128, 128, torch.float16, device))
    x = torch.ones(5, 128, device=device).half()
    doubled = x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            spmm_nm(w, x, act="gelu_tanh", config=CANDIDATES[5])
        after = x * 2
    after.fill_(0)
    graph.replay()
    assert torch.equal(after, doubled)


def test_replayed_graph_follows_its_inputs(device: torch.device) -> None:
    dense = two_four(256, 256, torch.bfloat16, device)
    w, x = NM.from_dense(dense), torch.zeros(40, 256, device=device).bfloat16()
    spmm_nm(w, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = spmm_nm(w, x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randint(-2, 3, x.shape))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, exact_product(x, dense))


def test_streams_and_the_kernel_that_other_dtypes_get(device: torch.device) -> None:
    dense = two_four(64, 64, torch.bfloat16, device)
    x = torch.randint(-2, 3, (9, 64), device=device).bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = spmm_nm(NM.from_dense(dense), x)
    side.synchronize()
    assert torch.equal(y, exact_product(x, dense))
    wide = NM.from_dense(dense.float())
    assert op.plan(wide, x.float()).name == "dense"
    assert torch.equal(spmm_nm(wide, x.float()), x.float() @ dense.float().T)


def test_transforms_run_dense_and_are_right(device: torch.device) -> None:
    dense = two_four(64, 64, torch.bfloat16, device)
    w = NM.from_dense(dense)
    x = torch.randint(-2, 3, (3, 5, 64), device=device).bfloat16()
    spmm_nm(w, x)  # The kernel is there: only the transform keeps it from running.
    y = exact_product(x, dense)
    assert torch.equal(torch.func.vmap(lambda x: spmm_nm(w, x))(x), y)
    found, tangent = torch.func.jvp(lambda x: spmm_nm(w, x), (x,), (2 * x,))
    assert torch.equal(found, y)
    assert torch.equal(tangent, 2 * y)
    slope = torch.func.grad(lambda x: spmm_nm(w, x).sum())(x)
    assert torch.equal(slope, dense.sum(0).expand_as(x))


def test_a_call_that_is_recorded_is_not_lost(device: torch.device) -> None:
    dense = two_four(64, 64, torch.bfloat16, device)
    w = NM.from_dense(dense)
    x = torch.randint(-2, 3, (5, 64), device=device).bfloat16()
    graph = make_fx(lambda x: spmm_nm(w, x))(x)
    assert torch.equal(graph(2 * x), exact_product(2 * x, dense))
