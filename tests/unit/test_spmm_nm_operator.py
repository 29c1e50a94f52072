"""The torch operator behind spmm_nm, where nothing of it needs a GPU: schema, shapes, gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from hopsparse.errors import UnsupportedError
from hopsparse.formats import NM
from hopsparse.ops import spmm_nm
from hopsparse.ops.spmm_nm.op import is_plain, is_transformed, plan, run_kernel, why_no_kernel


def operands() -> tuple[torch.Tensor, NM, torch.Tensor, torch.Tensor]:
    dense = torch.randn(48, 64)
    dense.view(-1, 4)[:, 1:3] = 0.0
    x, bias = torch.randn(2, 5, 64, requires_grad=True), torch.randn(48, requires_grad=True)
    return dense, NM.from_dense(dense), x, bias


def test_the_operator_keeps_the_rules_of_torch() -> None:
    _, w, x, bias = operands()
    arguments = ([w.values, w.meta], x, bias, None, 48, "none", 0.5, torch.float32)
    torch.library.opcheck(torch.ops.hopsparse.spmm_nm.default, arguments)


def test_swiglu_folds_rows_and_has_gradients() -> None:
    dense, w, x, bias = operands()
    plain = x.detach(), bias.detach()
    arguments = ([w.values, w.meta], *plain, None, 48, "swiglu", 0.5, torch.float32)
    torch.library.opcheck(torch.ops.hopsparse.spmm_nm.default, arguments)
    gate, up = (F.linear(x, dense, bias).view(2, 5, 3, 2, 8)[..., i, :] for i in (0, 1))
    right = (F.silu(gate) * up).flatten(-2)
    y = spmm_nm(w, x, bias=bias, act="swiglu")
    torch.testing.assert_close(y, right)
    found, wanted = (torch.autograd.grad(each.sum(), x)[0] for each in (y, right))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("has_residual", [False, True])
def test_gradients_of_all_that_is_trained(has_residual: bool) -> None:
    dense, w, x, bias = operands()
    residual = torch.randn(2, 5, 48, requires_grad=True) if has_residual else None
    w.values.requires_grad_()
    run_kernel(w, x, bias, residual, "silu", 0.5).square().sum().backward()  # type: ignore[no-untyped-call]

    weight = dense.clone().requires_grad_()
    inputs = [t.detach().requires_grad_() for t in (x, bias)]
    y = F.silu(0.5 * inputs[0] @ weight.T + inputs[1])
    (y if residual is None else y + residual.detach()).square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close([x.grad, bias.grad], [t.grad for t in inputs])
    assert weight.grad is not None
    kept = NM.from_dense(torch.where(dense != 0, weight.grad, 0.0))
    torch.testing.assert_close(w.values.grad, kept.values)


def test_a_fused_epilogue_has_no_gradient_and_says_so() -> None:
    """As in a program that was exported for inference, and is trained."""
    _, w, x, _ = operands()
    for activation, residual in (("relu", None), ("none", torch.ones(2, 5, 48))):
        facts = (residual, 48, activation, 1.0, torch.float32)
        with pytest.raises(UnsupportedError, match="a gradient through a fused epilogue"):
            torch.ops.hopsparse.spmm_nm.default([w.values, w.meta], x, None, *facts)


def test_transforms_are_noticed_and_the_kernel_left_alone() -> None:
    """Under them a tensor has no memory of its own, or a tangent that a kernel would drop."""
    dense, w, x, _ = operands()
    seen: list[bool] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed())
        return spmm_nm(w, x)

    x, tangent = x.detach(), torch.randn(x.shape)
    torch.testing.assert_close(torch.vmap(product)(x), x @ dense.T)
    grad = torch.func.grad(lambda x: product(x).sum())(x)
    torch.testing.assert_close(grad, dense.sum(0).expand_as(x))
    _, moved = torch.func.jvp(product, (x,), (tangent,))
    torch.testing.assert_close(moved, tangent @ dense.T)
    with forward_ad.dual_level():
        y = product(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, tangent @ dense.T)
    assert seen == [True] * 4
    assert not is_transformed()


def test_a_plan_names_the_device_that_has_no_kernel() -> None:
    _, w, x, _ = operands()
    found = plan(w.to(torch.device("meta")), x.to("meta"))
    assert (found.name, found.why.split(";")[0]) == ("dense", "x is on meta")
    assert why_no_kernel(w, x) == "x is on the CPU"


def test_importing_the_package_registers_it() -> None:
    """So that a program exported on a GPU loads where none of its names is used."""
    program = "import torch, hopsparse; print(torch.ops.hopsparse.spmm_nm.default)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "hopsparse.spmm_nm.default", done.stderr


def test_a_call_that_is_recorded_goes_through_the_operator() -> None:
    """A launch past it would leave an empty result in the record."""
    _, w, x, _ = operands()
    x = x.detach()
    graph = make_fx(lambda x: run_kernel(w, x, None))(x).graph
    assert torch.ops.hopsparse.spmm_nm.default in [node.target for node in graph.nodes]
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        traced = torch.jit.trace(lambda x: run_kernel(w, x, None), (x,), check_trace=False)
    assert "hopsparse::spmm_nm" in str(traced.inlined_graph)


def test_what_torch_follows_is_not_plain() -> None:
    x = torch.ones(2, 2)
    assert is_plain(x)
    with FlopCounterMode(display=False):
        assert not is_plain(x)
    assert is_plain(x)


def test_transforms_are_seen_though_their_tensors_look_plain() -> None:
    """torch has no rule of the operator for them: a tangent would be lost without a word."""
    x, seen = torch.ones(2, 2), []

    def spy(x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        seen.append(is_transformed())
        return x.sum()

    torch.func.vmap(spy)(x)
    torch.func.grad(spy)(x)
    torch.func.jvp(spy, (x,), (x,))
    with forward_ad.dual_level():
        spy(forward_ad.make_dual(x, x))
    spy(x)
    assert seen == [True] * 4 + [False]
