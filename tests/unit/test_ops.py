"""Every operator against float64, over its own cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hopsparse
from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import CSR, NM, NMPattern, SparseMatrix
from hopsparse.measure.error import product_bound
from hopsparse.ops import COMPUTE_DTYPES, OPS, Case, _product, decompress
from hopsparse.ops._product import check_capture
from tests.helpers.products import CASES, OPERATORS, SMALL, SMALL_IDS, dense_weight, run, store


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), SMALL, ids=SMALL_IDS)
def test_small_integers_are_exact(op: str, case: Case, dtype: torch.dtype) -> None:
    # Sparse enough that sums of products of -1, 0, 1 fit the 8-bit significand of bfloat16.
    dense = dense_weight(case, dtype, exact=True).clamp(-1, 1)
    x = (torch.randint(-1, 2, (case.tokens, case.k)) * (torch.rand(case.k) < 100 / case.k)).to(
        dtype
    )
    bias = torch.randint(-4, 5, (case.out,)).to(dtype)
    expected = x.double() @ dense.double().T + bias.double()
    assert expected.numel() == 0 or expected.abs().max() <= 256
    result = run(op, store(op, case, dense), x, bias)
    assert result.dtype == dtype
    assert result.shape == (case.tokens, case.out)
    assert torch.equal(result.double(), expected)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), SMALL, ids=SMALL_IDS)
def test_random_numbers_stay_in_bound(op: str, case: Case, dtype: torch.dtype) -> None:
    dense = dense_weight(case, dtype, exact=False)
    x, bias = torch.randn(case.tokens, case.k).to(dtype), torch.randn(case.out).to(dtype)
    result = run(op, store(op, case, dense), x, bias)
    expected = x.double() @ dense.double().T + bias.double()
    bound = product_bound(x, dense, torch.float32, dtype, bias)
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", ["transpose", "columns", "expand", "offset", "batch", "vector"])
def test_any_strides_and_leading_dimensions(op: str, view: str) -> None:
    case = CASES[op].SMOKE[0]
    k = case.k
    dense = dense_weight(case, torch.float16, exact=True).clamp(-1, 1)
    source = torch.randint(-1, 2, (2 * k + 3, 3 * k)).to(torch.float16)
    x = {
        "transpose": source[:k, :9].T,
        "columns": source[:7, k + 1 : 2 * k + 1],
        "expand": source[:1, :k].expand(5, k),
        "offset": source.flatten()[13 : 13 + 4 * k].view(4, k),
        "batch": source.as_strided((2, 3, 5, k), (11, 7, 3 * k, 1), 2),
        "vector": source[0, ::3],
    }[view]
    expected = x.double() @ dense.double().T
    assert torch.equal(run(op, store(op, case, dense), x).double(), expected)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(op: str) -> None:
    case = CASES[op].SMOKE[0]
    w = store(op, case, dense_weight(case, torch.float32, exact=True))
    for shape in ((0, case.k), (3, 0, case.k)):
        assert run(op, w, torch.ones(shape)).shape == (*shape[:-1], case.out)


@pytest.mark.parametrize("op", OPS)
def test_nothing_stored_gives_zeros(op: str) -> None:
    case = CASES[op].SMOKE[0]
    w = store(op, case, torch.zeros(case.out, case.k))
    assert not run(op, w, torch.ones(2, case.k)).any()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(op: str, dtype: torch.dtype) -> None:
    case = Case("grad", 5, 96, 96, CASES[op].EDGE[-1].pattern)
    dense = dense_weight(case, dtype, exact=False)
    w = store(op, case, dense)
    x = torch.randn(2, case.tokens, case.k).to(dtype).requires_grad_()
    bias = torch.randn(case.out).to(dtype).requires_grad_()
    values = w.values.clone().requires_grad_()  # type: ignore[attr-defined]
    trained = w.from_parts(w.shape, {**w.parts(), "values": values}, w.attributes())
    upstream = torch.randn(2, case.tokens, case.out).to(dtype)
    run(op, trained, x, bias).backward(upstream)

    flat_x, flat_up = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    bound = product_bound(flat_up, dense.T, torch.float32, dtype)
    error = x.grad.flatten(0, 1).double() - flat_up.double() @ dense.double()
    assert (error.abs() <= bound).all()
    bound = product_bound(torch.ones(1, len(flat_up)), flat_up.T, torch.float32, dtype)
    assert ((bias.grad.double() - flat_up.double().sum(0)).abs() <= bound).all()
    # The gradient of kept values, laid out as a matrix: that of the dense weight, masked.
    grad = w.from_parts(w.shape, {**w.parts(), "values": values.grad}, w.attributes()).to_dense()
    mask = dense != 0
    bound = product_bound(flat_up.T, flat_x.T, torch.float32, dtype)
    error = grad.double() - (flat_up.double().T @ flat_x.double()) * mask
    assert not grad[~mask].any()
    assert (error.abs() <= bound).all()


def test_torch_agrees_that_the_operator_is_well_formed() -> None:
    for pattern in (NMPattern(2, 4), NMPattern(6, 8)):
        w = NM.from_dense(torch.zeros(64, 64), pattern)
        parts = [w.values.requires_grad_(), w.meta]
        facts = ("nm", 64, 64, repr(w.attributes()))
        torch.library.opcheck(torch.ops.hopsparse.decompress.default, (parts, *facts))


def test_the_first_call_does_not_import_dynamo() -> None:
    """It takes 2 to 3 seconds, which a process that compiles nothing should not wait for."""
    program = (
        "import sys, torch; from hopsparse.formats import BSR; "
        "from hopsparse.ops import decompress; decompress(BSR.from_dense(torch.eye(32), (16, 16)));"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_gradient_of_a_gradient_is_refused() -> None:
    w = CSR.from_dense(torch.eye(4))
    values = w.values.clone().requires_grad_()
    trained = w.from_parts(w.shape, {**w.parts(), "values": values}, w.attributes())
    upstream = torch.ones(4, 4, requires_grad=True)
    (first,) = torch.autograd.grad(decompress(trained), values, upstream, create_graph=True)
    with pytest.raises(UnsupportedError, match="a gradient of a gradient"):
        first.sum().backward()


@pytest.mark.parametrize("fmt", ["csr", "nm"])
def test_values_beyond_int16_places_get_their_gradient(fmt: str) -> None:
    dense = torch.zeros(300, 512, dtype=torch.bfloat16)
    dense[:, ::2] = 1
    w = NM.from_dense(dense) if fmt == "nm" else CSR.from_dense(dense)
    values = w.values.clone().requires_grad_()
    trained = w.from_parts(w.shape, {**w.parts(), "values": values}, w.attributes())
    weight = torch.arange(dense.numel()).view(dense.shape).remainder(251).to(torch.bfloat16)
    decompress(trained).backward(weight)
    grad = w.from_parts(w.shape, {**w.parts(), "values": values.grad}, w.attributes())
    assert torch.equal(grad.to_dense(), weight * dense)


class TestRefusals:
    w = NM.from_dense(torch.zeros(8, 16))

    def test_wrong_k(self) -> None:
        with pytest.raises(ArgumentError, match=r"x of shape \[3, 12\]\. Required: \[\.\.\., 16\]"):
            run("spmm_nm", self.w, torch.ones(3, 12))

    def test_scalar(self) -> None:
        with pytest.raises(ArgumentError, match=r"x of shape \[\]"):
            run("spmm_nm", self.w, torch.tensor(1.0))

    def test_wrong_dtype(self) -> None:
        with pytest.raises(ArgumentError, match=r"x is torch\.float16 on cpu\. Required: torch\.f"):
            run("spmm_nm", self.w, torch.ones(3, 16, dtype=torch.float16))

    def test_wrong_device(self) -> None:
        with pytest.raises(ArgumentError, match=r"x is torch\.float32 on meta"):
            run("spmm_nm", self.w, torch.ones(3, 16, device="meta"))

    def test_bias_of_tokens_length(self) -> None:
        with pytest.raises(ArgumentError, match=r"bias of shape \[3\]\. Required: \[8\]"):
            run("spmm_nm", self.w, torch.ones(3, 16), torch.ones(3))

    def test_other_format(self) -> None:
        with pytest.raises(ArgumentError, match="weight of type CSR"):
            run("spmm_nm", CSR.from_dense(torch.ones(8, 16)), torch.ones(3, 16))

    def test_eight_bit_values(self) -> None:
        w = NM.from_dense(torch.zeros(8, 16, dtype=torch.int8))
        with pytest.raises(UnsupportedError, match=r"values of torch\.int8"):
            run("spmm_nm", w, torch.ones(3, 16, dtype=torch.int8))

    def test_metadata_without_columns(self) -> None:
        empty = NM((8, 16), self.w.values, self.w.meta[:, :0], NMPattern(2, 4))
        with pytest.raises(FormatError, match="part 'meta'"):
            run("spmm_nm", empty, torch.ones(3, 16))


@pytest.mark.parametrize("op", OPS)
def test_the_name_of_an_operator_is_its_function(op: str) -> None:
    """In this process after its folder was imported, and in a fresh one before."""
    function = getattr(hopsparse.ops, op)
    assert function is OPERATORS[op].__dict__[op]
    case = CASES[op].SMOKE[0]
    w, x = store(op, case, torch.ones(case.out, case.k) * 0), torch.ones(2, case.k)
    assert function(w, x, bias=torch.ones(case.out)).unique().tolist() == [1]
    program = (
        "import importlib\n"
        f"cases = importlib.import_module('hopsparse.ops.{op}.cases')\n"
        f"from hopsparse.ops.{op} import op, reference\n"
        f"from hopsparse.ops import {op}\n"
        f"print({op} is op.{op}, len(cases.SMOKE) > 0, callable(reference.{op}))\n"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.strip() == "True True True"


@pytest.mark.parametrize("op", OPS)
def test_every_operator_has_its_page(op: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "ops" / f"{op}.md"
    assert page.read_text(encoding="utf-8").startswith(f"# {op}\n")


def test_decoding_is_refused_in_a_capture_before_it_touches_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a GPU would answer; the gpu tier captures in earnest.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    w = CSR.from_dense(torch.ones(4, 4))
    check_capture(w, "warm up")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), name="csr")
    with pytest.raises(UnsupportedError, match="csr weight to decode while .* warm up"):
        check_capture(on_gpu, "warm up")  # type: ignore[arg-type]


@pytest.mark.parametrize("op", OPS)
def test_an_operator_asks_before_it_decodes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N:M decodes without a count from the GPU; the refusal of the others crosses torch intact."""
    case = CASES[op].SMOKE[0]
    w = store(op, case, torch.zeros(case.out, case.k))

    def refuse(w: SparseMatrix, hint: str) -> None:
        raise UnsupportedError(w.name, need="no capture", hint=hint)

    monkeypatch.setattr(_product, "check_capture", refuse)
    if op == "spmm_nm":
        assert not run(op, w, torch.ones(1, case.k)).any()
        return
    with pytest.raises(UnsupportedError, match="SparseLinear, called once before the capture"):
        run(op, w, torch.ones(1, case.k))


@pytest.mark.parametrize("op", OPS)
def test_plans_are_named(op: str) -> None:
    case = CASES[op].SMOKE[0]
    w = store(op, case, torch.zeros(case.out, case.k))
    plan = OPERATORS[op].plan(w, torch.ones(1, case.k))
    assert plan.describe() == f"{op} runs reference: x is on the CPU; w is decoded at every call"
    assert OPERATORS[op].plan(w, torch.ones(1, case.k, device="meta")).name == "dense"


@pytest.mark.parametrize("op", OPS)
def test_cases_have_distinct_names(op: str) -> None:
    cases = CASES[op].SMOKE + CASES[op].EDGE + CASES[op].MODEL
    assert len({case.name for case in cases}) == len(cases)
    assert {1, 3, 7, 17} <= {case.tokens for case in CASES[op].EDGE}
    assert {4160, 2064} <= {case.k for case in CASES[op].EDGE}
