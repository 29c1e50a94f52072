"""Kernels over CSR matrices: exact where numbers are small, else in bound, the same each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.errors import FormatError, UnsupportedError
from hopsparse.formats import CSR, convert
from hopsparse.launch import capture
from hopsparse.measure.error import product_bound
from hopsparse.ops import COMPUTE_DTYPES, csr_matmul, sddmm_csr
from hopsparse.ops.spmm_csr import dispatch, plan, plan_matmul
from hopsparse.ops.spmm_csr.plan import every_spec
from tests.helpers.edges import SHAPES, counts_matrix, disordered, exact, few, poison

# torch says once in a process what it leaves unchecked, also where a call asks for the checks.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CS. tensor support:UserWarning", "ignore:Sparse invariant checks:UserWarning"
)
SHAPE = pytest.mark.parametrize("name", SHAPES)
DTYPE = pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
# Every team, whole and in part: 16 bytes are 4 or 8 features.
FEATURES = (1, 3, 8, 16, 20, 24, 47, 64, 96, 128, 256, 512, 640)


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(device: torch.device) -> None:
    """All kernels side by side, where calls would compile one after the other."""
    assert not any(built.error for built in KernelCache.default().compile_all(every_spec()))


def torch_csr(a: CSR, dtype: torch.dtype) -> Tensor:
    parts = (a.indptr.to(dtype), a.indices.to(dtype), a.values)
    return torch.sparse_csr_tensor(*parts, size=a.shape, check_invariants=True)


@SHAPE
@DTYPE
def test_small_integers_are_exact(name: str, dtype: torch.dtype, device: torch.device) -> None:
    a = counts_matrix(*SHAPES[name], dtype)
    on_gpu = a.to(device)
    others = [
        *(torch_csr(on_gpu, wide) for wide in (torch.int32, torch.int64)),
        *(convert(a, other).to(device) for other in ("csc", "hyb")),
    ]
    for features in FEATURES:
        x = few(a.shape[1], features, max(SHAPES[name][0]), dtype)
        poison((a.shape[0], features), dtype, device)
        got = csr_matmul(on_gpu, x.to(device))
        assert torch.equal(got.cpu().double(), exact(a, x)), features
        for other in others:
            assert torch.equal(csr_matmul(other, x.to(device)), got)


@SHAPE
@DTYPE
def test_small_dot_products_are_exact(name: str, dtype: torch.dtype, device: torch.device) -> None:
    a = counts_matrix(*SHAPES[name], dtype)
    row, column = torch.repeat_interleave(a.indptr.diff()), a.indices.long()
    for features in FEATURES:
        u = torch.randint(-1, 2, (a.shape[0], features)).to(dtype)
        x = few(features, a.shape[1], features, dtype).T.contiguous()
        want = (u[row].double() * x[column].double()).sum(1)
        for wide in (torch.int32, torch.int64):
            poison((a.values.numel(),), dtype, device)
            stored = torch_csr(a.to(device), wide)
            got = sddmm_csr(stored, u.to(device), x.to(device))
            assert torch.equal(got.cpu().double(), want), features


@SHAPE
@DTYPE
def test_random_numbers_stay_in_bound(name: str, dtype: torch.dtype, device: torch.device) -> None:
    a = counts_matrix(*SHAPES[name], dtype)
    for features in (7, 64, 200):
        x, u = torch.randn(a.shape[1], features).to(dtype), torch.randn(a.shape[0], features)
        u = u.to(dtype)
        bound = product_bound(x.T, a.to_dense(), torch.float32, dtype).T
        got = csr_matmul(a.to(device), x.to(device)).cpu()
        assert ((got.double() - exact(a, x)).abs() <= bound).all()
        at = (torch.repeat_interleave(a.indptr.diff()), a.indices.long())
        bound = product_bound(u, x, torch.float32, dtype)[at]
        dots = sddmm_csr(a.to(device), u.to(device), x.to(device)).cpu()
        assert ((dots.double() - (u.double() @ x.double().T)[at]).abs() <= bound).all()


@DTYPE
@pytest.mark.parametrize("layout", ["transposed", "columns", "expanded", "off by one", "far rows"])
def test_strides_and_starts_do_not_matter(
    layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    a = counts_matrix(*SHAPES["short rows"], dtype)
    k, x = a.shape[1], few(a.shape[1], 64, 1, dtype)
    frame = torch.full((k, 200), float("nan"), dtype=dtype, device=device)
    on_gpu = x.to(device)
    laid = {
        "transposed": lambda: on_gpu.T.contiguous().T,
        "columns": lambda: frame[:, 3:67].copy_(on_gpu),
        "expanded": lambda: on_gpu[:1].expand(k, 64),
        "off by one": lambda: frame.flatten()[1 : 1 + x.numel()].view(k, 64).copy_(on_gpu),
        "far rows": lambda: frame[:, 8:72].copy_(on_gpu),
    }[layout]()
    same = laid.cpu().contiguous()
    assert torch.equal(csr_matmul(a.to(device), laid).cpu().double(), exact(a, same))
    u = torch.ones(a.shape[0], 64, dtype=dtype, device=device)
    want = sddmm_csr(a, u.cpu(), same)
    assert torch.equal(sddmm_csr(a.to(device), u, laid).cpu(), want)


def test_indices_of_any_strides(device: torch.device) -> None:
    a = counts_matrix(*SHAPES["short rows"]).to(device)
    apart = torch.stack((a.indices, a.indices.flip(0)), 1)[:, 0]
    x = torch.randint(-3, 4, (a.shape[1], 4), device=device).float()
    spread = CSR(a.shape, a.values, apart, a.indptr)
    assert torch.equal(csr_matmul(spread, x), csr_matmul(a, x))
    assert torch.equal(
        sddmm_csr(spread, x[:1].expand(333, 4), x), sddmm_csr(a, x[:1].expand(333, 4), x)
    )


def test_values_of_one_number_for_all(device: torch.device) -> None:
    a = counts_matrix(*SHAPES["one huge row"]).to(device)
    ones, x = torch.ones(1, device=device).expand(a.values.numel()), torch.ones(4000, 8).to(device)
    assert torch.equal(csr_matmul(a, x, values=ones)[:, 0], a.row_counts().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [64, 256])
def test_a_power_law_graph(features: int, dtype: torch.dtype, device: torch.device) -> None:
    indptr, indices = disordered(50_000, 300_000)
    assert indptr.diff().max() > 500
    values = torch.randint(0, 2, (300_000,)).to(dtype)
    a = CSR((50_000, 50_000), values, indices, indptr)
    # Non-negative sums below 257, in bfloat16 too.
    x = (torch.rand(50_000, features) < 0.02).to(dtype)
    want = csr_matmul(a, x)
    assert want.max() <= 256
    moved = a.to(device)
    poison((50_000, features), dtype, device)
    assert torch.equal(csr_matmul(moved, x.to(device)).cpu(), want)
    turned = dispatch.csr_matmul_t(indptr, indices, values, x, 50_000)
    got = dispatch.csr_matmul_t(moved.indptr, moved.indices, moved.values, x.to(device), 50_000)
    assert torch.equal(got.cpu(), turned)
    dots = sddmm_csr(moved, x.to(device), x.to(device))
    assert torch.equal(dots.cpu(), sddmm_csr(a, x, x))


@DTYPE
def test_runs_do_not_differ(dtype: torch.dtype, device: torch.device) -> None:
    indptr, indices = (each.to(device) for each in disordered(20_000, 500_000))
    values = torch.randn(500_000, device=device).to(dtype)
    x = torch.randn(20_000, 100, device=device).to(dtype)
    known = [
        csr_matmul(CSR((20_000, 20_000), values, indices, indptr), x),
        dispatch.csr_matmul_t(indptr, indices, values, x, 20_000),
        dispatch.sddmm_csr(indptr, indices, x, x),
    ]
    for _ in range(3):
        # Other memory, and indices that are new.
        parts = [each.clone() for each in (indptr, indices, values, x)]
        again = [
            dispatch.csr_matmul(*parts, None),
            dispatch.csr_matmul_t(*parts, 20_000),
            dispatch.sddmm_csr(parts[0], parts[1], parts[3], parts[3]),
        ]
        for mine, other in zip(again, known, strict=True):
            assert torch.equal(mine, other)


@DTYPE
def test_gradients_are_those_of_the_cpu(dtype: torch.dtype, device: torch.device) -> None:
    a = counts_matrix(*SHAPES["huge rows together"], dtype)
    x, up = few(1000, 24, 900, dtype), few(9, 24, 24, dtype)

    def gradients(where: torch.device | str) -> list[Tensor]:
        moved = a.to(where)
        leaves = [moved.values.clone().requires_grad_(), x.to(where).requires_grad_()]
        csr_matmul(moved, leaves[1], values=leaves[0]).backward(up.to(where))
        return [leaf.grad.cpu() for leaf in leaves]

    for mine, other in zip(gradients(device), gradients("cpu"), strict=True):
        assert torch.equal(mine, other)


def test_gradients_reach_the_values_of_a_torch_tensor(device: torch.device) -> None:
    dense = counts_matrix(*SHAPES["short rows"]).to_dense()
    stored = dense.to(device).to_sparse_csr().requires_grad_()
    x = few(200, 16, 1, torch.float32)
    csr_matmul(stored, x.to(device)).sum().backward()
    want = x.sum(1) * (dense != 0)
    assert torch.equal(stored.grad.to_dense().cpu(), want)


def test_what_runs_is_named(device: torch.device) -> None:
    a = counts_matrix(*SHAPES["short rows"], torch.bfloat16).to(device)
    x = torch.ones(200, 64, device=device).bfloat16()
    said = plan_matmul(a, x).describe()
    assert "runs kernel: multiply bfloat16, 8 lanes of 16 bytes, 32-bit pointers" in said
    assert "32 lanes of a feature" in plan_matmul(a, x[:, 3:50]).describe()
    assert plan(a, x.T.repeat(9, 1)).name == "dense"


def test_a_captured_call_reads_what_is_there_when_it_is_replayed(device: torch.device) -> None:
    a = counts_matrix(*SHAPES["one huge row"]).to(device)
    x = torch.randn(4000, 32, device=device)
    up = torch.randn(41, 32, device=device)
    parts = (a.indptr, a.indices, a.values)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        return (
            csr_matmul(a, x),
            dispatch.csr_matmul_t(*parts, up, 4000),
            sddmm_csr(a, up, x),
        )

    graph = capture(step)
    x.copy_(torch.randn(4000, 32))
    up.copy_(torch.randn(41, 32))
    a.values.copy_(torch.randn(a.values.numel()))
    graph.replay()
    for mine, other in zip(graph.outputs, step(), strict=True):
        assert torch.equal(mine, other)


def test_a_new_matrix_in_a_capture_is_refused_and_the_capture_goes_on(device: torch.device) -> None:
    a, x = counts_matrix(*SHAPES["short rows"]).to(device), torch.ones(200, 8, device=device)
    doubled = x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="same call once before the capture"):
            csr_matmul(a, x)
        after = x * 2
    after.fill_(0)
    graph.replay()
    assert torch.equal(after, doubled)


def test_runs_on_the_stream_of_torch(device: torch.device) -> None:
    a, x = counts_matrix(*SHAPES["one huge row"]).to(device), torch.randn(4000, 64, device=device)
    want = csr_matmul(a, x)
    target, slow = torch.zeros_like(x), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(20):
            slow = slow @ slow
        target.copy_(x)  # late: any other stream still sees zeros
        got = csr_matmul(a, target)
    torch.cuda.synchronize()
    assert torch.equal(got, want)


def test_torch_compile_sees_one_operator(device: torch.device) -> None:
    torch.compiler.reset()
    a = counts_matrix(*SHAPES["short rows"]).to(device)
    x = torch.randn(200, 8, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: csr_matmul(a, x), fullgraph=True)
    assert torch.equal(compiled(x), csr_matmul(a, x))
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    (want,) = torch.autograd.grad(csr_matmul(a, x).sum(), x)
    assert torch.equal(grad, want)


@pytest.mark.parametrize("shape", [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_nothing_gives_zeros(shape: tuple[int, int, int], device: torch.device) -> None:
    rows, k, features = shape
    pointers = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    values = torch.zeros(0, device=device)
    a = torch.sparse_csr_tensor(pointers, empty, values, size=(rows, k), check_invariants=False)
    poison((rows, features), torch.float32, device)
    y = csr_matmul(a, torch.ones(k, features, device=device))
    assert (y.shape, bool(y.any())) == ((rows, features), False)


def test_indices_that_form_no_matrix_are_refused_before_a_launch(device: torch.device) -> None:
    a = counts_matrix([1, 2, 0], 4).to(device)
    wrong = CSR(a.shape, a.values, a.indices.clone().fill_(4), a.indptr)
    with pytest.raises(FormatError, match="column 4 at entry 0"):
        csr_matmul(wrong, torch.ones(4, 8, device=device))
    torch.cuda.synchronize()


def test_entries_beyond_32_bits(device: torch.device) -> None:
    """More than 2^31 entries, so 64-bit pointers beside 32-bit columns, and 4 GiB of values."""
    nnz, k = 2**31 + 11, 5
    bounds = torch.tensor([0, 7, 7, 2**31 + 1, nnz], device=device)
    columns = torch.zeros(nnz, dtype=torch.int32, device=device)
    values = torch.zeros(nnz, dtype=torch.bfloat16, device=device)
    marks = torch.tensor([0, 6, 7, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**31 + 1, nnz - 1])
    columns[marks.to(device)] = (torch.arange(9, device=device) % k).to(torch.int32)
    values[marks.to(device)] = 1
    x = torch.arange(1, k + 1, device=device).unsqueeze(1) * torch.ones(1, 16, device=device)
    y = csr_matmul(CSR((4, k), values, columns, bounds), x.bfloat16())
    # Marks have columns 0 to 8 modulo 5; x of a column is the column and one.
    assert y[:, 0].tolist() == [1 + 2, 0, 3 + 4 + 5 + 1 + 2, 3 + 4]
    assert torch.equal(y, y[:, :1].expand(4, 16))
    dots = dispatch.sddmm_csr(bounds, columns, y, x.bfloat16())
    expected = (y[torch.tensor([0, 0, 2, 2, 2, 2, 2, 3, 3])] * x[torch.arange(9) % k]).sum(1)
    assert torch.equal(dots[marks.to(device)].float(), expected.bfloat16().float())
