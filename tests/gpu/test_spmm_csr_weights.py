"""Unstructured weights by few tokens: on tensor cores, by gathers, and decoded."""

from __future__ import annotations

import pytest
import torch

from hopsparse.compiler import KernelCache
from hopsparse.errors import UnsupportedError
from hopsparse.formats import CSR
from hopsparse.launch import capture
from hopsparse.measure.error import product_bound
from hopsparse.nn import SparseLinear
from hopsparse.ops import COMPUTE_DTYPES, Case, spmm_csr
from hopsparse.ops.spmm_csr import dispatch, layers, plan
from hopsparse.ops.spmm_csr.plan import every_spec
from tests.helpers.edges import few, poison
from tests.helpers.prepared import refuse_to_compile
from tests.helpers.products import CASES, dense_weight
from tests.helpers.waiting import nothing_waits

DTYPE = pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(device: torch.device) -> None:
    """All kernels side by side, where calls would compile one after the other."""
    assert not any(built.error for built in KernelCache.default().compile_all(every_spec()))


def half_weight() -> CSR:
    """Half of its values are zero, and are not stored."""
    return CSR.from_dense(dense_weight(CASES["spmm_csr"].EDGE[1], torch.float16, exact=True))


@DTYPE
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 31, 64, 65, 200])
@pytest.mark.parametrize("case", CASES["spmm_csr"].EDGE, ids=lambda case: case.name)
def test_a_weight(case: Case, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    dense = dense_weight(case, dtype, exact=True).clamp(-1, 1)
    w = CSR.from_dense(dense).to(device)
    x = few(w.shape[1], tokens, w.shape[1], dtype).T
    bias = torch.randint(-4, 5, (w.shape[0],)).to(dtype)
    poison((tokens, w.shape[0]), dtype, device)
    got = spmm_csr(w, x.to(device), bias=bias.to(device))
    assert got.is_contiguous()
    assert torch.equal(got.cpu().double(), x.double() @ dense.double().T + bias.double())
    dense_part = w.values.numel() / (w.shape[0] * w.shape[1])
    said = plan(w, x.to(device)).why
    packed = dtype != torch.float32 and dense_part >= dispatch.TILE_DENSITY
    kind = "tiles" if tokens <= dispatch.TILE_TOKENS else "wide"
    assert said.startswith(kind if packed else "multiply")
    assert ("packed once and kept" in said) == packed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("density", [0.06, 0.2, 0.45, 1.0])
@pytest.mark.parametrize("shape", [(64, 64), (4096, 1000), (1000, 4100), (130, 28672)])
def test_packed_weights_stay_in_bound(
    shape: tuple[int, int], density: float, dtype: torch.dtype, device: torch.device
) -> None:
    dense = (torch.randn(shape) * (torch.rand(shape) < density)).to(dtype)
    w = CSR.from_dense(dense).to(device)
    for tokens in (1, 16, 33):
        x = torch.randn(tokens, shape[1]).to(dtype)
        got = spmm_csr(w, x.to(device))
        kind = "tiles" if tokens <= dispatch.TILE_TOKENS else "wide"
        assert plan(w, x.to(device)).why.startswith(kind)
        bound = product_bound(x, dense, torch.float32, dtype)
        error = (got.cpu().double() - x.double() @ dense.double().T).abs()
        assert (error <= bound).all()
        for _ in range(3):
            assert torch.equal(spmm_csr(w, x.to(device)), got)


def test_a_packed_weight_follows_its_values(device: torch.device) -> None:
    w = half_weight().to(device)
    x = torch.ones(2, w.shape[1], device=device).half()
    first = spmm_csr(w, x)
    w.values.mul_(2)
    assert torch.equal(spmm_csr(w, x), 2 * first)
    trained = CSR(w.shape, w.values.clone().requires_grad_(), w.indices, w.indptr)
    assert plan(trained, x).why.startswith("multiply")
    y = spmm_csr(trained, x)
    assert torch.equal(y, 2 * first)
    y.sum().backward()
    assert torch.equal(trained.values.grad, torch.full_like(w.values, 2))


def test_a_repeated_column_is_not_packed(device: torch.device) -> None:
    ends, columns = torch.tensor([0, 2, 3]).int(), torch.tensor([1, 1, 0]).int()
    w = CSR((2, 3), torch.tensor([1.0, 2.0, 4.0]).half(), columns, ends).to(device)
    x = torch.tensor([[1.0, 3.0, 7.0]]).half().to(device)
    for _ in range(2):
        assert spmm_csr(w, x).tolist() == [[9.0, 4.0]]
    assert plan(w, x).why.startswith("multiply")


def test_a_weight_is_one_graph_under_torch_compile(device: torch.device) -> None:
    torch.compiler.reset()
    for dtype in (torch.float32, torch.float16):
        w = CSR.from_dense(dense_weight(CASES["spmm_csr"].EDGE[1], dtype, exact=True)).to(device)
        x = torch.randint(-1, 2, (6, w.shape[1]), device=device).to(dtype)
        compiled = torch.compile(lambda x, w=w: spmm_csr(w, x), fullgraph=True)
        assert torch.equal(compiled(x), spmm_csr(w, x))


def test_a_captured_weight_is_that_of_the_capture(device: torch.device) -> None:
    w = half_weight().to(device)
    x = torch.ones(5, w.shape[1], device=device).half()
    graph = capture(lambda: spmm_csr(w, x))
    x.copy_(torch.randint(-1, 2, x.shape))
    want = spmm_csr(w, x)
    w.values.mul_(2)
    assert torch.equal(spmm_csr(w, x), 2 * want)  # packed anew
    graph.replay()
    assert torch.equal(graph.outputs, want)


class TestLayers:
    """Of 16384 x 4096, the smallest shape that layers run in tiles."""

    def layer(self, device: torch.device, kept: float = 0.1) -> SparseLinear:
        torch.manual_seed(0)
        shape = (layers.ROWS, layers.COLUMNS)
        dense = torch.randint(1, 3, shape, device=device).bfloat16()
        dense *= torch.rand(shape, device=device) < kept
        bias = torch.randint(-4, 5, shape[:1], device=device).bfloat16()
        return SparseLinear(CSR.from_dense(dense), bias).requires_grad_(False)

    def tokens(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.randint(-2, 3, (count, layers.COLUMNS), device=device).bfloat16()

    @pytest.mark.parametrize("kept", [0.04, 0.2])
    def test_few_tokens_are_those_of_the_operator(self, kept: float, device: torch.device) -> None:
        layer = self.layer(device, kept)
        for count in (1, 3, 8, 9, 16):
            x = self.tokens(count, device)
            assert torch.equal(layer(x), spmm_csr(layer.matrix, x, bias=layer.bias))
            said = layer.plan(x)
            assert said.name == "kernel"
            assert "measured to be faster than dense up to 16 tokens" in said.why
            assert "packed once and kept" in said.why
        x = self.tokens(16, device)
        want = x.double() @ layer.to_dense().double().T + layer.bias.double()
        assert torch.equal(layer(x), want.bfloat16())
        assert layer._kept_weight() is None
        assert layer.plan(self.tokens(17, device)).name == "dense"
        layer(self.tokens(17, device))
        assert layer._kept_weight() is not None

    def test_more_values_and_other_shapes_run_dense(self, device: torch.device) -> None:
        assert self.layer(device, 0.3).plan(self.tokens(1, device)).name == "dense"
        small = SparseLinear(CSR.from_dense(torch.eye(4096, device=device).bfloat16()))
        assert small.plan(self.tokens(1, device)).name == "dense"

    def test_a_capture_reads_what_it_was_and_a_call_what_it_is(self, device: torch.device) -> None:
        layer, x = self.layer(device), self.tokens(5, device)
        graph = capture(lambda: layer(x))
        x.copy_(self.tokens(5, device))
        want = layer(x)
        layer.values.neg_()
        layer.bias.neg_()
        assert torch.equal(layer(x), -want)
        layer.bias.neg_()
        graph.replay()
        assert torch.equal(graph.outputs, want)

    def test_after_one_call_captures_of_all_counts_need_no_kernel(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = self.layer(device)
        layer.prepare(16)
        refuse_to_compile(monkeypatch)
        for count in (1, 8, 16):
            x = self.tokens(count, device)
            want = spmm_csr(layer.matrix, x, bias=layer.bias)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            y.zero_()
            graph.replay()
            assert torch.equal(y, want)

    def test_a_first_call_in_a_capture_is_refused_or_dense(self, device: torch.device) -> None:
        layer, x = self.layer(device), self.tokens(4, device)
        x[:, 32:] = 0  # sums that are exact in 16 bits, however the dense product adds them
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
                layer(x)
            x.clone()
        layer(self.tokens(64, device))  # decoded, not packed
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, layer(x))

    def test_a_later_call_waits_for_nothing(self, device: torch.device) -> None:
        layer, x = self.layer(device), self.tokens(2, device)
        first = layer(x)
        with nothing_waits():
            second = layer(x)
        assert torch.equal(first, second)
