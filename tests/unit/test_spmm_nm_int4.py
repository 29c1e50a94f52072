"""The product with a weight of 4 bits as it is defined, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.formats import NM, Quantized
from hopsparse.formats.scheme import parse_scheme
from hopsparse.measure.error import finish_bound
from hopsparse.ops import spmm_nm_int4
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.int4.op import plan_int4
from hopsparse.ops.spmm_nm.int4.plan import choose_int4
from hopsparse.ops.spmm_nm.kernel import Config, Numbers
from hopsparse.ops.spmm_nm.plan import CANDIDATES, four_bit
from tests.helpers.operators import Operators

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
OUT, K, TOKENS = 24, 272, 5


def weight(scheme: str = "int4:64", dtype: torch.dtype = BF16, out: int = OUT) -> Quantized:
    """Random codes, all from -8 to 7, with scales that are powers of two."""
    form = parse_scheme(scheme)
    dense = torch.randint(-8, 8, (out, K), dtype=torch.int8)
    dense.view(out, -1, 4)[..., ::2] = 0
    groups = -(-K // form.group) if form.group else 1
    scales = 2.0 ** torch.randint(-3, 4, (out, groups))
    stored = BF16 if form.group else torch.float32
    return Quantized.of(NM.from_dense(dense), scales.to(stored), form, dtype)


@pytest.mark.parametrize("scheme", ["int4:0", "int4:32", "int4:64", "int4:128"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_it_is_the_product_with_the_decoded_weight(scheme: str, dtype: torch.dtype) -> None:
    w, x = weight(scheme, dtype), torch.randint(-3, 4, (2, TOKENS, K)).to(dtype)
    bias, residual = torch.randn(OUT), torch.randn(2, TOKENS, OUT)
    y = spmm_nm_int4(w, x, bias=bias, act="relu", residual=residual, out_dtype=torch.float32)
    product = x.double() @ w.to_dense().double().T  # exact in float32
    right = (product + bias.double()).relu() + residual.double()
    bound = finish_bound(product.abs() + bias.double().abs(), right, residual, torch.float32)
    assert ((y.double() - right).abs() <= bound).all()
    assert torch.equal(spmm_nm_int4(w, x), product.to(dtype))


@pytest.mark.parametrize("x_dtype", [torch.int8, E4M3], ids=str)
def test_codes_of_x_are_scaled_with_those_of_w(x_dtype: torch.dtype) -> None:
    w, x = weight("int4:128/int8"), torch.randint(-8, 9, (TOKENS, K)).to(x_dtype)
    for scale in (torch.tensor([0.25]), 2.0 ** torch.randint(-3, 4, (TOKENS, 1))):
        y = spmm_nm_int4(w, x, scale, out_dtype=torch.float32)
        right = x.double() @ w.to_dense(torch.float32).double().T * scale.double()
        assert torch.equal(y.double(), right)
    assert spmm_nm_int4(w, x[:0]).shape == (0, OUT)
    assert spmm_nm_int4(w, x).dtype == BF16


def test_gradients_of_x_pass_through_the_decoded_weight() -> None:
    w, x = weight(), torch.randn(TOKENS, K).bfloat16().requires_grad_()
    spmm_nm_int4(w, x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, w.to_dense().float().sum(0).bfloat16().expand(TOKENS, K))


def test_under_torch_compile_it_is_one_operator() -> None:
    w, x = weight(), torch.randn(TOKENS, K).bfloat16()
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    made = torch.compile(lambda x: spmm_nm_int4(w, x, act="silu"), backend=backend, fullgraph=True)
    assert torch.equal(made(x), spmm_nm_int4(w, x, act="silu"))
    assert seen == ["hopsparse.spmm_nm_int4.default"]


def test_who_records_operators_sees_one() -> None:
    w, x = weight(), torch.randn(TOKENS, K).bfloat16()
    expected = spmm_nm_int4(w, x)
    with Operators() as seen:
        y = spmm_nm_int4(w, x)
    assert torch.equal(y, expected)
    assert seen.names == ["hopsparse.spmm_nm_int4.default"]


def test_gradients_pass_a_compiled_call() -> None:
    w = weight()
    tensors = [torch.randn(TOKENS, K).bfloat16(), torch.randn(OUT).bfloat16()]
    found = []
    for run in (
        lambda x, bias: spmm_nm_int4(w, x, bias=bias),
        torch.compile(
            lambda x, bias: spmm_nm_int4(w, x, bias=bias), backend="aot_eager", fullgraph=True
        ),
    ):
        x, bias = (each.clone().requires_grad_() for each in tensors)
        run(x, bias).sum().backward()
        found.append((x.grad, bias.grad))
    assert None not in found[0]
    assert all(map(torch.equal, *found))


def test_the_plan_says_reference() -> None:
    x = torch.randn(TOKENS, K).bfloat16()
    assert "x is on the CPU" in plan_int4(weight(), x).describe()


W, X = weight(), torch.ones(TOKENS, K, dtype=BF16)
CODES = X.to(torch.int8)


def other(codes: Any) -> Quantized:
    return Quantized.of(NM.from_dense(codes), torch.ones(2, 1), parse_scheme("int8"), BF16)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"w": X}, "w of Tensor"),
        ({"w": other(torch.zeros(2, 4, dtype=torch.int8))}, "w of int8 in nm"),
        ({"x": X.float()}, "x is torch.float32 .*bfloat16 or torch.int8 or torch.float8_e4m3fn"),
        ({"x": X.half()}, "x is torch.float16"),
        ({"x": X[:, 1:]}, r"x of shape \[5, 271\]"),
        ({"x_scale": torch.ones(1)}, "x_scale beside x of torch.bfloat16"),
        ({"x": CODES, "x_scale": torch.ones(TOKENS)}, r"x_scale \[5\]"),
        ({"x": CODES, "x_scale": torch.ones(1).double()}, "x_scale .* of torch.float64"),
        ({"act": "swish"}, "act='swish'"),
        ({"act": "swiglu"}, "act='swiglu'"),
        ({"out_dtype": torch.float16}, "out_dtype=torch.float16 for x of torch.bfloat16"),
        ({"x": CODES, "out_dtype": torch.int32}, "out_dtype=torch.int32"),
        ({"bias": torch.ones(OUT)}, "bias .* of torch.float32"),
        ({"bias": torch.ones(OUT - 1, dtype=BF16)}, r"bias \[23\]"),
        ({"residual": torch.ones(TOKENS, OUT)}, "residual .* of torch.float32"),
        ({"config": CANDIDATES[0]}, "a tile with bits=16, four_bit_w=True"),
        ({"x": CODES, "config": four_bit(Numbers("int4", "bfloat16", "bfloat16"))[0]}, "bits=8"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"w": W, "x": X} | changes
    with pytest.raises(ArgumentError, match=told):
        spmm_nm_int4(**arguments)


@pytest.mark.parametrize("x", ["bfloat16", "int8"])
@pytest.mark.parametrize("tokens", [1, 16, 100, 384, 4096, 100_000])
def test_there_is_a_tile_for_every_problem(x: str, tokens: int) -> None:
    numbers = Numbers("int4", x, "bfloat16", grouped=x == "int8")
    for out, k in ((1, 1), (576, 576), (4096, 14336), (28672, 4096)):
        config = choose_int4(Problem(tokens, out, k), numbers, 132)
        assert config in four_bit(numbers)
        assert config.four_bit_w
        assert config.columns == 128 or not numbers.grouped


def test_a_stage_is_smaller_than_one_of_wide_values() -> None:
    wide = Config(2, 1, 64, 2, 2)
    four = Config(2, 1, 64, 2, 2, four_bit_w=True)
    assert wide.stage_bytes - four.stage_bytes == 2 * 2 * (4096 - 1024)
    assert four.most_stages > wide.most_stages
    with pytest.raises(ArgumentError, match="whole steps"):
        Config(2, 1, 64, 1, 2, 1, 2, four_bit_w=True)


def test_three_bits_a_weight() -> None:
    dense = torch.zeros(64, 1024, dtype=torch.int8)
    w = Quantized.of(
        NM.from_dense(dense), torch.ones(64, 8, dtype=BF16), parse_scheme("int4:128"), BF16
    )
    bits = 8 * sum(w.tensors[part].nbytes for part in ("values", "meta")) / dense.numel()
    assert bits == 3
