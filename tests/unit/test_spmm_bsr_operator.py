"""spmm_bsr where nothing of it needs a GPU: epilogues, refusals, schema, shapes, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import BSR
from hopsparse.measure.error import finish_bound
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_bsr
from hopsparse.ops._call import ACTIVATIONS, apply_activation
from hopsparse.ops._rows import rows_for_tma
from hopsparse.ops.spmm_bsr import dispatch, kernel, op
from hopsparse.ops.spmm_bsr.ahead import classes, prepare
from hopsparse.ops.spmm_bsr.kernel import Config, deepest
from hopsparse.ops.spmm_bsr.op import plan, plan_kept, why_no_kernel
from hopsparse.ops.spmm_bsr.ready import class_of, ready


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, BSR, Tensor, Tensor]:
    torch.manual_seed(0)
    dense = torch.randn(48, 64) * (torch.rand(3, 4) < 0.5).repeat_interleave(
        16, 0
    ).repeat_interleave(16, 1)
    x, bias = torch.randn(2, 5, 64, dtype=dtype), torch.randn(48, dtype=dtype)
    return dense.to(dtype), BSR.from_dense(dense.to(dtype), (16, 16)), x, bias


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_epilogues(act: str, out_dtype: torch.dtype) -> None:
    """Against float64; with integers the sums are exact, so only the end rounds."""
    dense, _, _, bias = operands(torch.bfloat16)
    dense, x = dense.sign(), torch.randint(-2, 3, (5, 64)).bfloat16()
    residual = torch.randn(5, 48).to(out_dtype)
    y = spmm_bsr(
        BSR.from_dense(dense, (16, 16)),
        x,
        bias=bias,
        act=None if act == "none" else act,
        alpha=0.125,
        residual=residual,
        out_dtype=out_dtype,
    )
    assert y.dtype == out_dtype
    sums = 0.125 * (x.double() @ dense.double().T) + bias.double()
    expected = apply_activation(sums, act) + residual.double()
    assert (
        (y.double() - expected).abs() <= finish_bound(sums.abs(), expected, residual, out_dtype)
    ).all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"act": "swish"}, "act='swish'. Required: one of relu, gelu, gelu_tanh, silu, or None"),
        ({"out_dtype": torch.int8}, "out_dtype=torch.int8. Required: torch.float16, as x is"),
        ({"residual": torch.zeros(8).half()}, r"residual \[8\] of torch.float16"),
        ({"residual": 0}, "residual of type int. Required: a tensor"),
        ({"bias": [0.0] * 16}, "bias of type list. Required: a tensor"),
        ({"residual": torch.zeros(3, 16)}, r"residual \[3, 16\] of torch.float32 on cpu"),
        ({"bias": torch.zeros(1, 16).half()}, r"bias of shape \[1, 16\]. Required: \[16\]"),
        ({"bias": torch.zeros(16)}, "bias is torch.float32 on cpu. Required: torch.float16"),
        ({"config": (1, 64, 16, 4)}, "config of type tuple. Required: a Config"),
        ({"alpha": torch.ones(())}, "alpha of type Tensor. Required: a number"),
    ],
)
def test_what_means_nothing_is_refused(arguments: dict[str, Any], told: str) -> None:
    w = BSR.from_dense(torch.zeros(16, 16).half(), (16, 16))
    with pytest.raises(ArgumentError, match=told) as caught:
        spmm_bsr(w, torch.ones(3, 16).half(), **arguments)
    assert caught.value.got.startswith("spmm_bsr: ")
    assert caught.value.hint


def test_broken_parts_are_refused_before_any_work() -> None:
    w = BSR.from_dense(torch.ones(32, 32).half(), (16, 16))
    broken = BSR(w.shape, w.values[:3], w.indices, w.indptr, w.block)
    with pytest.raises(FormatError, match="part 'indices'"):
        spmm_bsr(broken, torch.ones(3, 32).half())


def test_a_tile_is_taken_where_none_runs() -> None:
    dense, w, x, _ = operands()
    torch.testing.assert_close(spmm_bsr(w, x, config=deepest(1, 64, 16)), x @ dense.T)


def parts_of(w: BSR) -> list[Tensor]:
    return [w.values, w.indices, w.indptr]


def test_the_operator_keeps_the_rules_of_torch() -> None:
    _, w, x, bias = operands()
    arguments = (x.requires_grad_(), bias, None, [48, 16, 16], "none", 0.5, torch.float32)
    torch.library.opcheck(torch.ops.hopsparse.spmm_bsr.default, (parts_of(w), *arguments))


@pytest.mark.parametrize("has_residual", [False, True])
def test_gradients_of_all_that_is_trained(has_residual: bool) -> None:
    dense, w, x, bias = operands()
    residual = torch.randn(2, 5, 48, requires_grad=True) if has_residual else None
    w.values.requires_grad_(), x.requires_grad_(), bias.requires_grad_()
    y = dispatch.traced(w, x, bias, residual, "silu", 0.5, torch.float32)
    y.square().sum().backward()  # type: ignore[no-untyped-call]

    weight = dense.clone().requires_grad_()
    inputs = [t.detach().requires_grad_() for t in (x, bias)]
    y = F.silu(0.5 * inputs[0] @ weight.T + inputs[1])
    (y if residual is None else y + residual.detach()).square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close([x.grad, bias.grad], [t.grad for t in inputs])
    assert weight.grad is not None
    kept = BSR.from_dense(torch.where(dense != 0, weight.grad, 0.0), (16, 16))
    torch.testing.assert_close(w.values.grad, kept.values)


def test_a_fused_epilogue_has_no_gradient_and_says_so() -> None:
    _, w, x, _ = operands()
    for activation, residual in (("relu", None), ("none", torch.ones(2, 5, 48))):
        facts = (residual, [48, 16, 16], activation, 1.0, torch.float32)
        with pytest.raises(UnsupportedError, match="a gradient through a fused epilogue"):
            torch.ops.hopsparse.spmm_bsr.default(parts_of(w), x.requires_grad_(), None, *facts)


def test_a_layout_is_found_again_behind_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept by the tensor of the values, which torch has to pass on as it is."""
    _, w, x, _ = operands(torch.bfloat16)
    w.values.requires_grad_()
    made, seen = ready(w)[1], []

    def spy(parts: Sequence[Tensor], sides: Sequence[int], x: Tensor) -> BSR:
        seen.append(ready(BSR((48, 64), *parts, (16, 16)))[1] is made)
        return w

    monkeypatch.setattr(dispatch, "_matrix", spy)
    dispatch.traced(w, x, None, None, "none", 1, torch.bfloat16)
    with torch.no_grad():
        dispatch.traced(w, x, None, None, "none", 1, torch.bfloat16)
    assert seen == [True, True]


def test_a_compiled_call_is_the_operator_for_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is a kernel: here it is the operator's CPU side that runs."""
    dense, w, _, bias = operands()
    monkeypatch.setattr(op, "why_no_kernel", lambda w, x: None)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: spmm_bsr(w, x, bias=bias, act="silu"), fullgraph=True, backend=count
    )
    for tokens in (5, 17, 64, 100, 333):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(compiled(x), F.silu(x @ dense.T + bias))
    assert len(graphs) <= 2  # the first shape, then any
    for graph in graphs:
        targets = [node.target for node in graph.graph.nodes]
        assert torch.ops.hopsparse.spmm_bsr.default in targets


def test_plans_name_what_keeps_the_kernel_from_running() -> None:
    _, w, x, _ = operands()
    assert plan(w, x).name == plan_kept(w, x).name == "reference"
    found = plan(w.to(torch.device("meta")), x.to("meta"))
    assert (found.name, found.why.split(";")[0]) == ("dense", "x is on meta")
    assert why_no_kernel(w, x) == "x is on the CPU"
    layer = SparseLinear(w)
    assert "decoded once and kept, 12288 bytes" in layer.plan(x).describe()


def test_nothing_is_prepared_on_the_cpu_but_what_is_decoded() -> None:
    dense, w, x, _ = operands()
    assert prepare(w, 8) is False
    layer = SparseLinear(w)
    layer.prepare(8)
    assert layer._kept_weight() is not None
    torch.testing.assert_close(layer(x), x @ dense.T)


def test_sparse_activations_are_the_same_product_with_the_sides_exchanged() -> None:
    x, w, _, _ = operands()
    weight = torch.randn(32, 64)
    torch.testing.assert_close(spmm_bsr(w, weight).T, x @ weight.T)


def test_a_layer_trains_its_blocks() -> None:
    dense, w, x, _ = operands()
    layer = SparseLinear(w)
    values = nn.Parameter(layer.values)
    del layer.values
    layer.register_parameter("values", values)
    layer(x).sum().backward()
    expected = (dense != 0) * x.flatten(0, 1).sum(0)
    grad = BSR(w.shape, values.grad, w.indices, w.indptr, w.block)  # type: ignore[arg-type]
    torch.testing.assert_close(grad.to_dense(), expected)


def test_classes_of_tokens_are_few_and_whole() -> None:
    found = list(classes(32768))
    assert found[:2] == [16, 32]
    assert found[-1] == 32768
    assert len(found) <= 48
    assert all(class_of(each) == each for each in found)


def ones(*sizes: int) -> Tensor:
    return torch.ones(sizes, dtype=torch.float16)


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (ones(3, 64), False),
        (ones(3, 72)[:, :64], False),
        (ones(3, 66)[:, :64], True),
        (ones(64, 3).T, True),
        (ones(3 * 64 + 1)[1:].view(3, 64), True),
        (ones(1, 64).expand(3, 64), True),
        (ones(1, 60), False),
        (ones(2, 60), True),
        (ones(60), False),
        (ones(2, 3, 64), False),
    ],
)
def test_rows_are_copied_only_where_the_copy_engine_could_not_read_them(
    x: Tensor, copied: bool
) -> None:
    rows = rows_for_tma(x)
    assert torch.equal(rows, x.reshape(-1, x.shape[-1]))
    assert rows.stride(1) == 1
    assert rows.stride(0) % 8 == 0
    assert (rows.data_ptr() != x.data_ptr()) is copied


def test_the_activations_of_the_kernel_are_those_of_the_reference() -> None:
    assert kernel.ACTIVATIONS == ACTIVATIONS
    assert Config(1, 16, 16, 2).name == "64x16x4x16_s2"
