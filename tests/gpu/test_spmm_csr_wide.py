"""33 to 512 tokens by unstructured weights of 16 bits: unpacked into the registers of wgmma."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.errors import UnsupportedError
from hopsparse.formats import CSR
from hopsparse.launch import capture
from hopsparse.measure.error import product_bound
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_csr
from hopsparse.ops.spmm_csr import plan
from hopsparse.ops.spmm_csr.packed import Packed, pack
from hopsparse.ops.spmm_csr.wide import CANDIDATES, Config, wide_specs
from hopsparse.ops.spmm_csr.wide_device import multiply_wide
from tests.helpers.edges import poison
from tests.helpers.prepared import refuse_to_compile
from tests.helpers.waiting import nothing_waits

DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
TILE = pytest.mark.parametrize("config", CANDIDATES, ids=lambda config: config.name)
TOKENS = (33, 64, 65, 100, 200, 256, 300, 512)


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(device: torch.device) -> None:
    """All kernels side by side, where calls would compile one after the other."""
    assert not any(built.error for built in KernelCache.default().compile_all(wide_specs()))


def weight(rows: int, k: int, density: float, dtype: torch.dtype) -> Tensor:
    """Integers; the second column of units has no values, and neither have the last rows."""
    dense = torch.randint(1, 3, (rows, k)).to(dtype) * (torch.rand(rows, k) < density)
    dense[torch.rand(rows, k) < 0.5] *= -1
    dense[:, 64:128] = 0
    dense[rows - rows // 8 :] = 0
    return dense


def packed(w: CSR) -> Packed:
    found = pack(w.indptr, w.indices, w.values, w.shape[1])
    assert found is not None
    return found


def integers(tokens: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, (tokens, k)).to(dtype)


def product(x: Tensor, dense: Tensor, bias: Tensor | None = None) -> Tensor:
    right = x.double() @ dense.double().T
    return (right if bias is None else right + bias.double()).to(x.dtype)


@DTYPE
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", [(512, 1024), (200, 1000), (71, 4161), (1, 65), (130, 7)])
def test_small_integers_are_exact(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, k = shape
    dense = weight(rows, k, 0.25, dtype)
    dense[0, 0] = 1
    w = CSR.from_dense(dense).to(device)
    x, bias = integers(tokens, k, dtype), torch.randint(-4, 5, (rows,)).to(dtype)
    poison((tokens, rows), dtype, device)
    got = spmm_csr(w, x.to(device), bias=bias.to(device))
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), product(x, dense, bias))
    if w.values.numel() >= 0.03 * rows * k:
        said = plan(w, x.to(device)).why
        assert said.startswith("wide")
        assert "predicted to take" in said


@DTYPE
@TILE
@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
def test_every_tile_and_room(
    density: float, config: Config, dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, rows, k in ((40, 130, 200), (300, 600, 2100), (513, 64, 64)):
        dense = weight(rows, k, density, dtype)
        w = packed(CSR.from_dense(dense).to(device))
        x = integers(tokens, k, dtype)
        poison((tokens, rows), dtype, device)
        got = multiply_wide(w, x.to(device), None, config)
        assert torch.equal(got.cpu(), product(x, dense))


@DTYPE
@pytest.mark.parametrize("density", [0.05, 0.2, 0.45, 1.0])
@pytest.mark.parametrize("shape", [(4096, 1000), (1000, 4100), (130, 28672)])
def test_random_numbers_stay_in_bound(
    shape: tuple[int, int], density: float, dtype: torch.dtype, device: torch.device
) -> None:
    dense = (torch.randn(shape) * (torch.rand(shape) < density)).to(dtype)
    w, right = CSR.from_dense(dense).to(device), dense.to(device).double()
    for tokens in (65, 256, 300):
        x = torch.randn(tokens, shape[1]).to(device, dtype)
        got = spmm_csr(w, x)
        bound = product_bound(x, dense.to(device), torch.float32, dtype)
        assert ((got.double() - x.double() @ right.T).abs() <= bound).all()
        for _ in range(3):
            assert torch.equal(spmm_csr(w, x), got)


@DTYPE
def test_tokens_of_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    dense = weight(200, 328, 0.2, dtype)
    w = CSR.from_dense(dense).to(device)
    whole = integers(400, 1000, dtype).to(device)
    odd = whole.flatten()[1 : 1 + 70 * 328].view(70, 328)
    for x in (
        *(whole[:70, :328], whole[::4, 8:336], whole[:70, 1:329], whole[:1, :328].expand(80, 328)),
        *(whole[:328, :90].T, whole[:70, :656:2], odd),
    ):
        assert torch.equal(spmm_csr(w, x).cpu(), product(x.cpu(), dense))


def test_numbers_that_are_not_finite_stay_in_their_token(device: torch.device) -> None:
    dense = weight(128, 192, 0.3, torch.bfloat16)
    w, x = CSR.from_dense(dense).to(device), integers(70, 192, torch.bfloat16)
    x[3] = torch.inf
    got = spmm_csr(w, x.to(device)).cpu()
    others = torch.arange(70) != 3
    assert torch.equal(got[others], product(x[others], dense))


def test_a_captured_product_is_that_of_the_capture(device: torch.device) -> None:
    dense = weight(512, 1024, 0.2, torch.bfloat16)
    w = CSR.from_dense(dense).to(device)
    for tokens in (65, 300):
        x = integers(tokens, 1024, torch.bfloat16).to(device)
        graph = capture(lambda x=x: spmm_csr(w, x))
        for _ in range(3):
            x.copy_(integers(tokens, 1024, torch.bfloat16))
            graph.outputs.fill_(torch.nan)
            graph.replay()
            assert torch.equal(graph.outputs.cpu(), product(x.cpu(), dense))


def test_what_comes_behind_and_ahead_waits(device: torch.device) -> None:
    """Tokens are written right ahead of the call, and what it gave is read right behind it."""
    dense = weight(512, 1024, 0.2, torch.float16)
    w = CSR.from_dense(dense).to(device)
    given = [integers(200, 1024, torch.float16).to(device) for _ in range(20)]
    x, found = torch.empty_like(given[0]), []
    for each in given:
        x.copy_(each)
        found.append(spmm_csr(w, x).clone())
        x.fill_(torch.nan)
    for each, got in zip(given, found, strict=True):
        assert torch.equal(got.cpu(), product(each.cpu(), dense))


def test_one_graph_under_torch_compile(device: torch.device) -> None:
    torch.compiler.reset()
    w = CSR.from_dense(weight(256, 512, 0.2, torch.bfloat16)).to(device)
    compiled = torch.compile(lambda x: spmm_csr(w, x), fullgraph=True)
    x = integers(100, 512, torch.bfloat16).to(device)
    assert torch.equal(compiled(x), spmm_csr(w, x))


def test_gradients_are_those_of_the_gathers(device: torch.device) -> None:
    w = CSR.from_dense(weight(256, 320, 0.2, torch.bfloat16)).to(device)
    x = integers(100, 320, torch.bfloat16).to(device).requires_grad_()
    spmm_csr(w, x).sum().backward()
    want = w.to_dense().double().sum(0).to(torch.bfloat16).expand(100, 320)
    assert torch.equal(x.grad, want)


def test_after_prepare_no_call_compiles_and_a_capture_needs_no_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = weight(384, 640, 0.2, torch.bfloat16)
    layer = SparseLinear(CSR.from_dense(dense).to(device)).requires_grad_(False)
    layer.keep_decoded = False
    layer.prepare(300)
    refuse_to_compile(monkeypatch)
    for tokens in (1, 20, 33, 65, 200, 300):
        x = integers(tokens, 640, torch.bfloat16).to(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y.cpu(), product(x.cpu(), dense))


def test_a_weight_that_is_new_is_refused_in_a_capture(device: torch.device) -> None:
    w = CSR.from_dense(weight(256, 320, 0.2, torch.bfloat16)).to(device)
    x = integers(100, 320, torch.bfloat16).to(device)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            spmm_csr(w, x)
        x.clone()


def test_a_later_call_waits_for_nothing(device: torch.device) -> None:
    w = CSR.from_dense(weight(256, 320, 0.2, torch.bfloat16)).to(device)
    x = integers(100, 320, torch.bfloat16).to(device)
    first = spmm_csr(w, x)
    with nothing_waits():
        second = spmm_csr(w, x)
    assert torch.equal(first, second)
