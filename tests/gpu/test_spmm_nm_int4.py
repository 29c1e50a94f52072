"""The product with a weight of 4 bits on an H100 or H200."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.formats import NM, NMPattern, Quantized
from hopsparse.formats.scheme import parse_scheme
from hopsparse.measure.error import finish_bound, product_bound
from hopsparse.ops import spmm_nm_int4
from hopsparse.ops.spmm_nm.int4.op import plan_int4
from hopsparse.ops.spmm_nm.kernel import ACTIVATIONS, Config, Numbers
from hopsparse.ops.spmm_nm.plan import four_bit
from hopsparse.ops.spmm_nm.reference import apply_activation
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# tokens, out, k: whole tiles; ragged on all sides; one token; several waves; an odd number of
# steps; groups that end within a stage.
SHAPES = [
    (256, 256, 512),
    (513, 1032, 1168),
    (1, 64, 128),
    (384, 520, 704),
    (1000, 2048, 512),
    (33, 200, 4160),
    (70, 70, 2068),
]
HALVES = Numbers("int4", "bfloat16", "bfloat16")
CODES = Numbers("int4", "int8", "bfloat16", grouped=True)
TILES = [pytest.param(config, id=config.name) for config in four_bit(HALVES)]
TILES_OF_CODES = [pytest.param(config, id=config.name) for config in four_bit(CODES)]


def weight(out: int, k: int, scheme: str, dtype: torch.dtype, device: torch.device) -> Quantized:
    """All codes from -8 to 7, all pairs of columns; scales are powers of two, so all is exact."""
    form = parse_scheme(scheme)
    dense = torch.randint(-8, 8, (out, k), device=device)
    rank = torch.rand(out, -(-k // 4), 4, device=device).argsort(-1)
    codes = (dense * (rank < 2).flatten(1)[:, :k]).to(torch.int8)
    scales = 2.0 ** torch.randint(-1, 2, (out, -(-k // form.group)), device=device)
    return Quantized.of(NM.from_dense(codes), scales.to(BF16), form, dtype)


def exact(x: Tensor, w: Quantized) -> Tensor:
    return x.double() @ w.to_dense(torch.float32).double().T


@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize(("scheme", "dtype"), [("int4:64", BF16), ("int4:128", F16)])
def test_every_tile_is_exact(
    config: Config, scheme: str, dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(tokens)
        w = weight(out, k, scheme, dtype, device)
        x = torch.randint(-2, 3, (tokens, k), device=device).to(dtype)
        y = spmm_nm_int4(w, x, out_dtype=torch.float32, config=config)
        assert torch.equal(y.double(), exact(x, w)), (tokens, out, k)


@pytest.mark.parametrize("config", TILES[::3])
def test_groups_of_32_columns(config: Config, device: torch.device) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(out)
        w = weight(out, k, "int4:32", BF16, device)
        x = torch.randint(-2, 3, (tokens, k), device=device).bfloat16()
        assert torch.equal(spmm_nm_int4(w, x, config=config), exact(x, w).bfloat16())


@pytest.mark.parametrize("config", TILES_OF_CODES)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_every_tile_of_codes_is_exact(
    config: Config, dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, out, k in SHAPES:
        torch.manual_seed(k)
        w = weight(out, k, "int4:128/int8", BF16, device)
        x = torch.randint(-2, 3, (tokens, k), device=device).to(dtype)
        scale = 2.0 ** torch.randint(-1, 2, (tokens, 1), device=device)
        y = spmm_nm_int4(w, x, scale, out_dtype=torch.float32, config=config)
        assert torch.equal(y.double(), exact(x, w) * scale.double()), (tokens, out, k)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_code_in_every_place(dtype: torch.dtype, device: torch.device) -> None:
    """One token a column of w, each with a scale that rounds: bit for bit what it decodes to."""
    out, k = 64, 256
    codes = (torch.arange(out)[:, None] + torch.arange(k)) % 16 - 8
    codes = codes.to(torch.int8)
    for kept in ([0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]):
        dense = torch.zeros_like(codes)
        dense.view(out, -1, 4)[..., kept] = codes.view(out, -1, 4)[..., kept]
        scales = (torch.rand(out, 8) + 0.5).to(BF16) * 2.0**-18
        w = Quantized.of(NM.from_dense(dense), scales, parse_scheme("int4:32"), dtype).to(device)
        y = spmm_nm_int4(w, torch.eye(k, device=device).to(dtype))
        assert torch.equal(y.T, w.to_dense())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("scheme", ["int4:32", "int4:64", "int4:128"])
def test_random_numbers_stay_in_bound(
    scheme: str, dtype: torch.dtype, device: torch.device
) -> None:
    dense = magnitude(torch.randn(320, 1088).to(dtype), NMPattern(2, 4))
    w = quantize_matrix(dense, f"2:4+{scheme}").to(device)
    x, bias = torch.randn(77, 1088, device=device).to(dtype), torch.randn(320, device=device)
    y = spmm_nm_int4(w, x, bias=bias.to(dtype))
    decoded = w.to_dense()
    expected = x.double() @ decoded.double().T + bias.to(dtype).double()
    bound = product_bound(x, decoded, torch.float32, dtype, bias.to(dtype))
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("x_dtype", [BF16, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_epilogues(act: str, x_dtype: torch.dtype, device: torch.device) -> None:
    tokens, out, k = 45, 136, 256
    w = weight(out, k, "int4:128/int8", BF16, device)
    x = torch.randint(-2, 3, (tokens, k), device=device).to(x_dtype)
    scale = None if x_dtype == BF16 else torch.rand(tokens, 1, device=device) / 16
    for dtype in (BF16, torch.float32):
        bias = torch.randn(out, device=device).to(dtype)
        residual = torch.randn(tokens, out, device=device).to(dtype)
        y = spmm_nm_int4(
            w,
            x,
            scale,
            bias=bias,
            act=act if act != "none" else None,
            residual=residual,
            out_dtype=dtype,
        )
        product = exact(x, w) * (1 if scale is None else scale.double())
        right = apply_activation(product + bias.double(), act) + residual.double()
        bound = finish_bound(product.abs() + bias.double().abs(), right, residual, dtype)
        assert ((y.double() - right).abs() <= bound).all()


def test_strided_transposed_and_no_tokens(device: torch.device) -> None:
    w = weight(72, 260, "int4:64", BF16, device)
    for x in (
        torch.randint(-2, 3, (260, 9), device=device).bfloat16().T,
        torch.randint(-2, 3, (9, 300), device=device).bfloat16()[:, 7:267],
        torch.randint(-2, 3, (2, 3, 260), device=device).bfloat16(),
        torch.randint(-2, 3, (260,), device=device).bfloat16(),
    ):
        y = spmm_nm_int4(w, x, out_dtype=torch.float32)
        assert torch.equal(y.double(), exact(x, w))
    assert spmm_nm_int4(w, x[:0].view(0, 260)).shape == (0, 72)


def test_every_element_is_written(device: torch.device) -> None:
    """Memory that was full of other bits before is handed out for the result."""
    w = weight(136, 256, "int4:64", BF16, device)
    x = torch.randint(-2, 3, (100, 256), device=device).bfloat16()
    first = spmm_nm_int4(w, x)
    poison = torch.full_like(first, 77)
    del poison
    assert torch.equal(first, spmm_nm_int4(w, x))


def test_a_graph_captures_it(device: torch.device) -> None:
    w = weight(256, 512, "int4:64", BF16, device)
    x = torch.randint(-2, 3, (40, 512), device=device).bfloat16()
    expected = spmm_nm_int4(w, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = spmm_nm_int4(w, x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    x.mul_(2)
    graph.replay()
    assert torch.equal(y, 2 * expected)


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_what_is_added_gets_its_gradient(name: str, device: torch.device) -> None:
    w = weight(72, 256, "int4:64", BF16, device)
    x = torch.randint(-2, 3, (9, 256), device=device).bfloat16()
    shape = (72,) if name == "bias" else (9, 72)
    added = torch.zeros(shape, dtype=BF16, device=device).requires_grad_()
    bias, residual = (added, None) if name == "bias" else (None, added)
    y = spmm_nm_int4(w, x, bias=bias, residual=residual)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert added.grad is not None
    assert (added.grad == (9 if name == "bias" else 1)).all()


@pytest.mark.parametrize("x_dtype", [BF16, torch.int8], ids=str)
def test_scales_of_w_get_their_gradient(x_dtype: torch.dtype, device: torch.device) -> None:
    w = weight(72, 256, "int4:128", BF16, device)
    scales = w.scales.clone().requires_grad_()
    learns = w.with_parts(w.parts() | {"scales": scales})
    x = torch.ones(9, 256, dtype=x_dtype, device=device)
    assert "gradient" in plan_int4(learns, x).describe()
    y = spmm_nm_int4(learns, x, out_dtype=torch.float32)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert scales.grad is not None
    sums = 9 * w.codes().to_dense().float().view(72, 2, 128).sum(-1)
    assert torch.equal(scales.grad, sums.to(scales.dtype))


def test_parts_that_are_not_contiguous_are_decoded(device: torch.device) -> None:
    w = weight(72, 256, "int4:64", BF16, device)
    x = torch.randint(-2, 3, (9, 256), device=device).bfloat16()
    by_column = w.with_parts(w.parts() | {"scales": w.scales.T.contiguous().T})
    assert "not contiguous" in plan_int4(by_column, x).describe()
    y, decoded = spmm_nm_int4(by_column, x), w.to_dense()
    bound = product_bound(x, decoded, torch.float32, BF16)
    assert ((y.double() - exact(x, w)).abs() <= bound).all()


def test_what_has_no_kernel_is_decoded(device: torch.device) -> None:
    dense = magnitude(torch.randn(64, 256).bfloat16(), NMPattern(2, 4))
    x = torch.randn(5, 256, device=device).bfloat16()
    by_row = quantize_matrix(dense, "2:4+int4:0").to(device)
    assert "no scale for each 32 or 64 or 128" in plan_int4(by_row, x).describe()
    y = spmm_nm_int4(by_row, x)
    decoded = by_row.to_dense()
    bound = product_bound(x, decoded, torch.float32, BF16)
    assert ((y.double() - x.double() @ decoded.double().T).abs() <= bound).all()

    w, codes = weight(64, 256, "int4:64/int8", BF16, device), (x * 16).to(torch.int8)
    assert "no scale for each 128" in plan_int4(w, codes).describe()
    y = spmm_nm_int4(w, codes, out_dtype=torch.float32)
    assert torch.equal(y.double(), exact(codes, w))
    assert "kernel" in plan_int4(w, x).describe()
    assert "gradient" in plan_int4(w, x.clone().requires_grad_()).describe()
