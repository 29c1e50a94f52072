"""Products with a CSR matrix on the CPU: against float64, in every format, with their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import CSC, CSR, HYB, SparseMatrix, convert
from hopsparse.measure.error import product_bound
from hopsparse.ops import COMPUTE_DTYPES, csr_matmul, sddmm_csr, spmm_csr
from hopsparse.ops.spmm_csr import dispatch, op, plan_matmul
from tests.helpers.edges import SHAPES, counts_matrix, disordered, exact

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")

SHAPE = pytest.mark.parametrize("name", SHAPES)
FORMS: dict[str, Callable[[CSR], SparseMatrix | Tensor]] = {
    "csr": lambda a: a,
    "csc": lambda a: convert(a, "csc"),
    "hyb": lambda a: convert(a, "hyb"),
    "torch csr, 32 bits": lambda a: torch_csr(a, torch.int32),
    "torch csr, 64 bits": lambda a: torch_csr(a, torch.int64),
    "torch csc": lambda a: torch_csr(a, torch.int64).to_sparse_csc(),
}


def torch_csr(a: CSR, dtype: torch.dtype) -> Tensor:
    return torch.sparse_csr_tensor(
        a.indptr.to(dtype), a.indices.to(dtype), a.values, size=a.shape, check_invariants=True
    )


@SHAPE
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_small_integers_are_exact(name: str, dtype: torch.dtype) -> None:
    a = counts_matrix(*SHAPES[name], dtype)
    # Few columns count, so that sums fit the 8 bits of bfloat16.
    kept = torch.rand(a.shape[1], 1) < 20 / max(20, max(SHAPES[name][0]))
    x = (torch.randint(-1, 2, (a.shape[1], 7)) * kept).to(dtype)
    want = exact(a, x)
    assert want.abs().max() <= 256
    got = csr_matmul(a, x)
    assert got.dtype == dtype
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_random_numbers_stay_in_bound(dtype: torch.dtype) -> None:
    a = counts_matrix(*SHAPES["one huge row"], dtype)
    x, u = torch.randn(a.shape[1], 33).to(dtype), torch.randn(a.shape[0], 33).to(dtype)
    bound = product_bound(x.T, a.to_dense(), torch.float32, dtype).T
    assert ((csr_matmul(a, x).double() - exact(a, x)).abs() <= bound).all()
    row = torch.repeat_interleave(a.indptr.diff())
    bound = product_bound(u, x, torch.float32, dtype)[row, a.indices]
    want = (u[row].double() * x[a.indices].double()).sum(1)
    assert ((sddmm_csr(a, u, x).double() - want).abs() <= bound).all()


@SHAPE
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_matrix_gives_the_same(form: str, name: str) -> None:
    a = counts_matrix(*SHAPES[name])
    x = torch.randint(-4, 5, (a.shape[1], 3)).float()
    stored = FORMS[form](a)
    for _ in range(2):  # new, and known
        assert torch.equal(csr_matmul(stored, x).double(), exact(a, x))
    assert plan_matmul(stored, x).name == "reference"


def test_indices_of_torch_are_used_in_place_and_known_again() -> None:
    a = torch_csr(counts_matrix(*SHAPES["short rows"]), torch.int64)
    csr_matmul(a, torch.ones(a.shape[1], 1))
    found = dispatch._PATTERNS.find((a.crow_indices(), a.col_indices()), a.shape[1])
    assert found is not None
    assert dispatch.pattern_of(a.crow_indices(), a.col_indices(), a.shape[1]) is found


def test_entries_may_repeat_in_any_order() -> None:
    indptr, indices = disordered(60, 2000)
    assert (indices.diff() < 0).any()
    values = torch.randint(-2, 3, (2000,)).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = torch.sparse_csr_tensor(indptr, indices, values, size=(60, 60), check_invariants=False)
    row, x = torch.repeat_interleave(indptr.diff()), torch.randint(-3, 4, (60, 5)).float()
    dense = torch.zeros(60, 60).index_put_((row, indices.long()), values, accumulate=True)
    x.requires_grad_()
    y = csr_matmul(a, x)
    y.sum().backward()
    assert torch.equal(y, dense @ x)
    assert torch.equal(x.grad, dense.T @ torch.ones(60, 5))
    assert torch.equal(sddmm_csr(a, x.detach(), x.detach()), (x @ x.T).detach()[row, indices])


@pytest.mark.parametrize("view", ["transpose", "columns", "expand", "offset", "one feature"])
def test_any_strides(view: str) -> None:
    a = counts_matrix(*SHAPES["short rows"])
    k = a.shape[1]
    source = torch.randint(-3, 4, (3 * k, k)).float()
    x = {
        "transpose": source[:9].T,
        "columns": source[:k, 5:22],
        "expand": source[:1, :8].expand(k, 8),
        "offset": source.flatten()[3 : 3 + 4 * k].view(k, 4),
        "one feature": source[::3, 7:8],
    }[view]
    assert torch.equal(csr_matmul(a, x).double(), exact(a, x))


def test_indices_of_any_strides() -> None:
    a = counts_matrix(*SHAPES["short rows"])
    apart = torch.stack((a.indices, a.indices.flip(0)), 1)[:, 0]
    x = torch.randint(-3, 4, (a.shape[1], 4)).float()
    spread = CSR(a.shape, a.values, apart, a.indptr)
    assert torch.equal(csr_matmul(spread, x), csr_matmul(a, x))
    assert torch.equal(
        dispatch.csr_matmul_t(a.indptr, apart, a.values, x[:1].expand(333, 4), 200),
        dispatch.csr_matmul_t(a.indptr, a.indices, a.values, x[:1].expand(333, 4), 200),
    )


def test_values_of_one_number_for_all() -> None:
    a = counts_matrix(*SHAPES["short rows"])
    ones = torch.ones(1).expand(a.values.numel())
    x = torch.randint(-3, 4, (a.shape[1], 4)).float()
    expanded = CSR(a.shape, ones, a.indices, a.indptr)
    assert torch.equal(csr_matmul(expanded, x).double(), exact(expanded, x))
    assert torch.equal(csr_matmul(a, x, values=ones), csr_matmul(expanded, x))


@pytest.mark.parametrize(("rows", "k", "features"), [*product((0, 3), (0, 4), (0, 2))])
def test_sides_without_anything(rows: int, k: int, features: int) -> None:
    indices = torch.zeros(0, dtype=torch.int64)
    pointers = torch.zeros(rows + 1, dtype=torch.int64)
    a = torch.sparse_csr_tensor(
        pointers, indices, torch.zeros(0), size=(rows, k), check_invariants=False
    )
    y = csr_matmul(a, torch.ones(k, features))
    assert (y.shape, bool(y.any())) == ((rows, features), False)
    assert sddmm_csr(a, torch.ones(rows, features), torch.ones(k, features)).shape == (0,)


class TestGradients:
    a = counts_matrix([0, 3, 0, 1, 5, 2], 5, torch.float64)

    @pytest.mark.parametrize("turned", [False, True])
    def test_of_a_product(self, turned: bool) -> None:
        parts = (self.a.indptr, self.a.indices)
        values = self.a.values.clone().requires_grad_()
        shape = self.a.shape
        x = torch.randn(shape[0 if turned else 1], 3, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(shape[0], dtype=torch.float64, requires_grad=True)

        def run(values: Tensor, x: Tensor, bias: Tensor) -> Tensor:
            if turned:
                return dispatch.csr_matmul_t(*parts, values, x, shape[1]) + bias.sum()
            return dispatch.csr_matmul(*parts, values, x, bias)

        assert torch.autograd.gradcheck(run, (values, x, bias))
        assert torch.autograd.gradgradcheck(run, (values, x, bias))

    def test_of_dot_products(self) -> None:
        u = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
        x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        stored = torch_csr(self.a, torch.int64)
        assert torch.autograd.gradcheck(lambda u, x: sddmm_csr(stored, u, x), (u, x))
        assert torch.autograd.gradgradcheck(lambda u, x: sddmm_csr(stored, u, x), (u, x))

    def test_reach_the_values_of_a_torch_tensor(self) -> None:
        dense = torch_csr(self.a, torch.int64).to_dense()
        stored = dense.to_sparse_csr().requires_grad_()  # of CSC torch can add no gradient up
        x, up = torch.randn(5, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
        csr_matmul(stored, x).backward(up)
        want = (up @ x.T) * (dense != 0)
        assert torch.allclose(stored.grad.to_dense(), want, rtol=0, atol=1e-12)

    def test_reach_the_values_of_columns(self) -> None:
        a = convert(counts_matrix([0, 3, 1], 5), "csc")
        assert isinstance(a, CSC)
        values = a.values.clone().requires_grad_()
        x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
        csr_matmul(a, x, values=values).sum().backward()
        column = torch.repeat_interleave(a.indptr.diff())
        assert torch.equal(values.grad, x[column, 0])

    def test_of_16_bits_stay_in_bound(self) -> None:
        a = counts_matrix(*SHAPES["short rows"], torch.bfloat16)
        dense, up = a.to_dense(), torch.randn(a.shape[0], 24).bfloat16()
        x = torch.randn(a.shape[1], 24).bfloat16().requires_grad_()
        values = a.values.clone().requires_grad_()
        csr_matmul(a, x, values=values).backward(up)
        bound = product_bound(up.T, dense.T, torch.float32, torch.bfloat16).T
        assert ((x.grad.double() - dense.double().T @ up.double()).abs() <= bound).all()
        row, column = torch.repeat_interleave(a.indptr.diff()), a.indices.long()
        bound = product_bound(up, x.detach(), torch.float32, torch.bfloat16)[row, column]
        want = (up.double() @ x.detach().double().T)[row, column]
        assert ((values.grad.double() - want).abs() <= bound).all()

    def test_of_hyb_values_are_refused(self) -> None:
        a = convert(counts_matrix([2, 1], 4), "hyb")
        trained = a.with_parts({**a.parts(), "ell_values": a.ell_values.clone().requires_grad_()})
        with pytest.raises(UnsupportedError, match="values of HYB that require a gradient"):
            csr_matmul(trained, torch.ones(4, 1))


def test_torch_agrees_that_the_operators_are_well_formed() -> None:
    a = counts_matrix(*SHAPES["short rows"])
    parts, values = (a.indptr, a.indices), a.values.clone().requires_grad_()
    x = torch.randn(a.shape[1], 3, requires_grad=True)
    u = torch.randn(a.shape[0], 3, requires_grad=True)
    bias = torch.randn(a.shape[0], requires_grad=True)
    ops = torch.ops.hopsparse
    torch.library.opcheck(ops.csr_matmul.default, (*parts, values, x, bias))
    torch.library.opcheck(ops.csr_matmul.default, (*parts, values, x, None))
    torch.library.opcheck(ops.csr_matmul_t.default, (*parts, values, u, a.shape[1]))
    tokens = torch.randn(3, a.shape[1], requires_grad=True)
    torch.library.opcheck(ops.spmm_csr.default, (*parts, values, tokens, bias, True))
    torch.library.opcheck(ops.sddmm_csr.default, (*parts, u, x))


def test_one_graph_under_torch_compile() -> None:
    torch.compiler.reset()
    a, x = counts_matrix(*SHAPES["short rows"]), torch.randn(200, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return csr_matmul(a, x).relu()

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, layer(x))
    (grad,) = torch.autograd.grad(got.sum(), x)
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(grad, want)


def test_hyb_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HYB] = []
    monkeypatch.setattr(op, "convert", lambda a, to: asked.append(a) or convert(a, to))
    a = convert(counts_matrix([2, 1], 4), "hyb")
    for _ in range(3):
        csr_matmul(a, torch.ones(4, 1))
    assert len(asked) == 1


class TestRefusals:
    a = counts_matrix([1, 2, 0], 4)

    @pytest.mark.parametrize(
        ("x", "told"),
        [
            (
                torch.ones(3, 2),
                r"x \[3, 2\] of .* Required: \[4, features\], a row for each column",
            ),
            (torch.ones(4), r"x \[4\] of .* Try: x.unsqueeze\(1\)"),
            (torch.ones(4, 2).to_sparse(), "torch.sparse_coo"),
            (torch.ones(4, 2).half(), r"float16 on cpu\. Required: torch\.float32 on cpu"),
            (torch.ones(4, 2, device="meta"), "on meta"),
            (3.0, "x of type float"),
        ],
    )
    def test_features_that_do_not_fit(self, x: Tensor, told: str) -> None:
        with pytest.raises(ArgumentError, match=told):
            csr_matmul(self.a, x)

    def test_what_is_no_tensor(self) -> None:
        with pytest.raises(ArgumentError, match="spmm_csr: x of type list. Required: a tensor"):
            spmm_csr(self.a, [1.0] * 4)
        with pytest.raises(ArgumentError, match="spmm_csr: bias of type float"):
            spmm_csr(self.a, torch.ones(1, 4), bias=1.0)

    @pytest.mark.parametrize(
        "a", [torch.eye(4), torch.eye(4).to_sparse(), None, torch.eye(4).expand(2, 4, 4)]
    )
    def test_other_matrices(self, a: Tensor) -> None:
        with pytest.raises(ArgumentError, match=r"csr_matmul: a matrix .* Required: a CSR, CSC"):
            csr_matmul(a, torch.ones(4, 1))

    def test_integers(self) -> None:
        a = CSR(self.a.shape, self.a.values.to(torch.int8), self.a.indices, self.a.indptr)
        with pytest.raises(UnsupportedError, match=r"x of torch\.int8"):
            csr_matmul(a, torch.ones(4, 1, dtype=torch.int8))

    @pytest.mark.parametrize("values", [torch.ones(4), torch.ones(3, 1), torch.ones(3).to_sparse()])
    def test_values_that_do_not_fit(self, values: Tensor) -> None:
        with pytest.raises(ArgumentError, match="values .* Required: \\[3\\] on cpu"):
            csr_matmul(self.a, torch.ones(4, 1), values=values)

    def test_sides_of_dot_products(self) -> None:
        with pytest.raises(ArgumentError, match=r"u \[4, 2\].* a row for each row of a"):
            sddmm_csr(self.a, torch.ones(4, 2), torch.ones(4, 2))
        with pytest.raises(ArgumentError, match="as many features in both"):
            sddmm_csr(self.a, torch.ones(3, 2), torch.ones(4, 3))
        with pytest.raises(ArgumentError, match="not stored by rows"):
            sddmm_csr(convert(self.a, "csc"), torch.ones(3, 2), torch.ones(4, 2))

    def test_parts_of_another_shape(self) -> None:
        a = CSR((5, 4), self.a.values, self.a.indices, self.a.indptr)
        with pytest.raises(FormatError, match="part 'indptr'"):
            csr_matmul(a, torch.ones(4, 1))

    def test_a_matrix_without_columns_that_has_entries(self) -> None:
        pointers, indices = torch.tensor([0, 3, 3, 3]), torch.zeros(3, dtype=torch.int64)
        a = torch.sparse_csr_tensor(
            pointers, indices, torch.ones(3), size=(3, 0), check_invariants=False
        )
        with pytest.raises(FormatError, match="row 0 has column 0 at entry 0"):
            csr_matmul(a, torch.ones(0, 2))

    def test_indices_that_form_no_matrix(self) -> None:
        indices = torch.tensor([0, 1, 7], dtype=torch.int32)
        a = CSR(self.a.shape, self.a.values, indices, self.a.indptr)
        for run in (csr_matmul, lambda a, x: sddmm_csr(a, torch.ones(3, 1), x)):
            with pytest.raises(FormatError, match="column 7 at entry 2.* columns from 0 to 3"):
                run(a, torch.ones(4, 1))

    def test_a_new_matrix_in_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from types import SimpleNamespace

        monkeypatch.setattr(dispatch, "is_capturing", lambda device: True)
        on_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
        with pytest.raises(UnsupportedError, match="same call once before the capture"):
            dispatch.refuse_in_capture(on_gpu)  # type: ignore[arg-type]


def test_the_plan_of_the_package_stays_a_function_when_kernels_are_loaded() -> None:
    import_module("hopsparse.ops.spmm_csr.device")
    package = import_module("hopsparse.ops.spmm_csr")
    assert package.plan is op.plan
