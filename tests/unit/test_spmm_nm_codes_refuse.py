"""Products of 8-bit and 4-bit codes: what is refused by name, and what torch may do to a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.errors import ArgumentError
from hopsparse.formats import CSR, NM, Quantized
from hopsparse.formats.scheme import parse_scheme
from hopsparse.nn import SparseLinear
from hopsparse.ops import (
    Scaling,
    interleave_gate_up,
    spmm_nm_int4,
    spmm_nm_scaled,
)
from hopsparse.ops._rows import rows_for_tma
from hopsparse.ops.spmm_nm.int4.ahead import prepare_int4
from hopsparse.ops.spmm_nm.int4.op import plan_int4
from hopsparse.ops.spmm_nm.kernel import Config, Numbers, check_numbers, spec_of_numbers
from hopsparse.ops.spmm_nm.plan import CANDIDATES
from hopsparse.ops.spmm_nm.scaled.ahead import prepare_scaled
from hopsparse.ops.spmm_nm.scaled.dispatch import Call, numbers_of
from hopsparse.ops.spmm_nm.scaled.op import plan_scaled
from hopsparse.ops.spmm_nm.scaled.plan import numbers_for
from hopsparse.quant import quantize_matrix

E4M3 = torch.float8_e4m3fn
OUT, K, TOKENS = 16, 272, 3


def kept(dtype: torch.dtype) -> Tensor:
    dense = torch.randint(-7, 8, (OUT, K)).to(torch.float32)
    dense.view(OUT, -1, 4)[..., 1::2] = 0
    return dense.to(dtype)


W8, WF = NM.from_dense(kept(torch.int8)), NM.from_dense(kept(E4M3))
W4 = quantize_matrix(kept(torch.bfloat16), "2:4+int4:128")
X8 = torch.randint(-8, 9, (TOKENS, K), dtype=torch.int8)
XF, XB = X8.to(E4M3), X8.to(torch.bfloat16)
Y = torch.zeros(TOKENS, OUT, dtype=torch.bfloat16)
SPARSE, ONES = X8.to_sparse(), torch.ones(2, 4).to(E4M3)
OF_8 = Config(2, 1, 64, 1, 2, bits=8)
OF_4 = Config(2, 1, 64, 1, 2, bits=8, four_bit_w=True)
FAR = {"out_dtype": torch.int8}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"x": None}, "x of type NoneType"),
        ({"x": X8.tolist()}, "x of type list"),
        ({"x": X8.numpy()}, "x of type ndarray"),
        ({"x": SPARSE}, "x of torch.int8 on cpu, torch.sparse_coo"),
        ({"scaling": 0.5}, "scaling of type float"),
        ({"scaling": None}, "scaling of type NoneType"),
        ({"scaling": Scaling(w=0.5)}, "scale of w of type float"),  # type: ignore[arg-type]
        ({"scaling": Scaling(x=0.5)}, "scale of x of type float"),  # type: ignore[arg-type]
        ({"scaling": Scaling(x=torch.tensor(0.5))}, r"scale of x \[\] of torch.float32"),
        ({"scaling": Scaling(out="a"), **FAR}, "scaling.out=a"),  # type: ignore[arg-type]
        ({"scaling": Scaling(out=torch.ones(2)), **FAR}, "scaling.out"),  # type: ignore[arg-type]
        ({"scaling": Scaling(out=float("inf")), **FAR}, "scaling.out=inf .*2.126"),
        ({"scaling": Scaling(out=1e-40), **FAR}, "scaling.out=1e-40"),
        ({"scaling": Scaling(out=10**400), **FAR}, "scaling.out=1000"),
        ({"bias": [0.0] * OUT}, "bias of type list"),
        ({"residual": 1.0}, "residual of type float"),
        ({"act": 0}, "act=0"),
        ({"act": ""}, "act=''"),
        ({"act": X8.numpy()}, "act=array"),
        ({"act": "swiglu", "residual": Y}, "swiglu with a residual. Required: no residual"),
        ({"w": W4}, "w of Quantized, int4:128 in nm.* Try: spmm_nm_int4"),
        (
            {"w": Quantized.of(W8, torch.ones(OUT, 1), parse_scheme("int8"), torch.bfloat16)},
            r"w of Quantized, int8 in nm.* Try: w.codes\(\), .*Scaling\(w=w.tensors\[.scales.\]\)",
        ),
        ({"config": "fast"}, "config of type str"),
        ({"config": OF_4}, "Required: a tile with bits=8, four_bit_w=False"),
        ({"w": WF, "x": XF.clone().requires_grad_()}, "requires a gradient"),
        (
            {
                "w": WF,
                "x": XF,
                "scaling": Scaling(w=torch.ones(OUT, 3)),
                "config": Config(2, 1, 64, 2, 2, bits=8),
            },
            "units=1",
        ),
    ],
)
def test_8_bits(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"w": W8, "x": X8} | changes
    with pytest.raises(ArgumentError, match=told):
        spmm_nm_scaled(**arguments)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"x": None}, "x of type NoneType"),
        ({"x": XB.to_sparse()}, "x of torch.bfloat16 on cpu, torch.sparse_coo"),
        ({"x": X8, "x_scale": 0.5}, "x_scale of type float"),
        ({"bias": [0.0] * OUT}, "bias of type list"),
        ({"residual": 1.0}, "residual of type float"),
        ({"act": 0}, "act=0"),
        ({"act": ""}, "act=''"),
        ({"config": "fast"}, "config of type str"),
        ({"config": CANDIDATES[5]}, "Required: a tile with bits=16, four_bit_w=True"),
        ({"config": OF_4}, "bits=8.* Required: a tile with bits=16, four_bit_w=True"),
        ({"x": X8, "config": Config(2, 1, 64, 2, 2, bits=8, four_bit_w=True)}, "units=1"),
    ],
)
def test_4_bits(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"w": W4, "x": XB} | changes
    with pytest.raises(ArgumentError, match=told):
        spmm_nm_int4(**arguments)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: plan_scaled(W8, XF), "x is torch.float8_e4m3fn"),
        (lambda: plan_scaled(W4, X8), "w of Quantized"),
        (lambda: plan_int4(W8, X8), "w of NM"),
        (lambda: plan_int4(W4, [1.0]), "x of type list"),
        (lambda: prepare_scaled(W4, 4), "w of Quantized"),
        (lambda: prepare_scaled(W8, 4, 0.5), "scaling of type float"),
        (lambda: prepare_scaled(W8, 2.5), "max_tokens=2.5"),
        (lambda: prepare_int4(W8, 4), "w of NM"),
        (lambda: prepare_int4(W4, "4"), "max_tokens='4'"),
        (lambda: prepare_int4(W4, 0), "max_tokens=0"),
        (lambda: prepare_scaled(W8, 4, act=""), "act=''"),
        (lambda: prepare_scaled(W8, 4, x_dtype=E4M3), "x_dtype=torch.float8_e4m3fn beside"),
        (lambda: prepare_int4(W4, 4, x_dtype="int8"), "x_dtype='int8' beside w of torch.bfloat16"),
        (lambda: SparseLinear(W4).prepare(0), "max_tokens=0"),
        (lambda: SparseLinear(CSR.from_dense(torch.eye(4))).prepare(2.5), "max_tokens=2.5"),
        (lambda: SparseLinear(CSR.from_dense(torch.eye(4))).plan([1.0]), "x of type list"),
    ],
)
def test_plans_and_preparations(call: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, E4M3, torch.int8], ids=str)
def test_infinity_stays_or_is_the_largest_code(dtype: torch.dtype) -> None:
    codes = dtype in (E4M3, torch.int8)
    largest = {E4M3: 448.0, torch.int8: 127.0}.get(dtype, torch.inf)
    scaling = Scaling(x=torch.tensor([[torch.inf], [-torch.inf]]), out=1.0 if codes else None)
    y = spmm_nm_scaled(NM.from_dense(torch.eye(4).to(E4M3)), ONES, scaling, out_dtype=dtype)
    assert y.tolist() == [[largest] * 4, [-largest] * 4]


@pytest.mark.parametrize("up", [[1.0], torch.zeros(8, dtype=torch.int8), torch.zeros(16)])
def test_gate_and_up_are_two_tensors_of_one_kind(up: Any) -> None:
    with pytest.raises(ArgumentError, match="interleave_gate_up: gate "):
        interleave_gate_up(torch.zeros(8), up)


def test_no_kernel_is_made_of_a_tile_for_other_numbers() -> None:
    """It would read values of 4 bits as bytes, or scale two groups by the scale of one."""
    numbers = Numbers("float8_e4m3fn", "float8_e4m3fn", "bfloat16", grouped=True)
    for config in (OF_4, Config(2, 1, 64, 2, 2, bits=8), Config(2, 1, 64, 1, 2)):
        with pytest.raises(ArgumentError, match="bits=8, four_bit_w=False, units=1"):
            spec_of_numbers(config, numbers, "none", False, False)
    check_numbers(OF_8, numbers)


@pytest.mark.parametrize("four_bit_w", [1, "yes", None])
def test_four_bit_w_is_yes_or_no(four_bit_w: Any) -> None:
    with pytest.raises(ArgumentError, match="four_bit_w, True or False"):
        Config(2, 1, 64, 1, 2, four_bit_w=four_bit_w)


def test_a_subclass_stays_one() -> None:
    class Named(Tensor):
        pass

    y = spmm_nm_scaled(W8, X8.as_subclass(Named))
    assert type(y) is Named
    assert torch.equal(y.as_subclass(Tensor), spmm_nm_scaled(W8, X8))


def test_vmap_and_tangents() -> None:
    batch, bias = torch.stack([X8, X8.flip(0)]), torch.zeros(OUT)
    y = torch.func.vmap(lambda x: spmm_nm_scaled(W8, x))(batch)
    assert torch.equal(y, spmm_nm_scaled(W8, batch))

    def shifted(b: Tensor) -> Tensor:
        return spmm_nm_scaled(W8, X8, bias=b, out_dtype=torch.float32)

    _, tangent = torch.func.jvp(shifted, (bias,), (torch.ones(OUT),))
    assert torch.equal(tangent, torch.ones(TOKENS, OUT))


class WithBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(OUT, dtype=torch.bfloat16))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return spmm_nm_int4(W4, x, bias=self.bias, residual=residual)


@pytest.mark.parametrize("compiled", [False, True])
def test_4_bit_weights_pass_gradients_to_x_and_bias(compiled: bool) -> None:
    layer, x = WithBias(), XB.clone().requires_grad_()
    run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    run(x).sum().backward()
    assert x.grad is not None
    assert layer.bias.grad is not None
    sums = W4.to_dense().double().sum(0).bfloat16()
    assert torch.equal(x.grad, sums.expand(TOKENS, K))
    assert torch.equal(layer.bias.grad, torch.full((OUT,), TOKENS, dtype=torch.bfloat16))
    residual = torch.zeros(TOKENS, OUT, dtype=torch.bfloat16, requires_grad=True)
    run(XB, residual).sum().backward()
    assert residual.grad is not None
    assert torch.equal(residual.grad, torch.ones_like(residual))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_refused_while_torch_traces_is_named(fullgraph: bool) -> None:
    torch._dynamo.reset()  # Code that broke a graph once is not traced again.
    run = torch.compile(lambda x: spmm_nm_scaled(W8, x), backend="eager", fullgraph=fullgraph)
    error = torch._dynamo.exc.Unsupported if fullgraph else ArgumentError
    with pytest.raises(error, match=r"spmm_nm_scaled: x of shape \[3, 8\]"):
        run(X8[:, :8])


@pytest.mark.parametrize("compiled", [False, True])
def test_4_bit_weights_pass_gradients_to_their_scales(compiled: bool) -> None:
    scales = W4.scales.clone().requires_grad_()
    w = W4.with_parts({**W4.parts(), "scales": scales})

    def call(x: Tensor) -> Tensor:
        return spmm_nm_int4(w, x, out_dtype=torch.float32)

    run: Any = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    run(X8).sum().backward()
    by_group = F.pad(W4.codes().to_dense().float() * X8.float().sum(0), (0, 3 * 128 - K))
    assert scales.grad is not None
    assert torch.equal(scales.grad.float(), by_group.view(OUT, 3, 128).sum(-1).to(scales.dtype))


def test_groups_of_scales_have_one_name() -> None:
    """Promoted or not, scales by group are added in float32: two names would compile it twice."""
    calls = [Call(sums, "none", None, torch.bfloat16) for sums in ("promoted", "fast")]
    promoted, fast = (numbers_of(E4M3, E4M3, call, 3) for call in calls)
    of_tiles = [numbers_for("float8_e4m3fn", sums, grouped=True) for sums in ("promoted", "fast")]
    assert promoted == fast == of_tiles[0] == of_tiles[1]
    assert (promoted.grouped, promoted.promoted) == (True, False)


@pytest.mark.parametrize(("pitch", "copied"), [(2**31 - 16, False), (2**31, True)])
def test_rows_of_4_bits_too_far_apart_are_copied(pitch: int, copied: bool) -> None:
    """The kernel counts from row to row in 32 bits."""
    x = torch.empty(2, pitch, dtype=torch.int8, device="meta")[:, :32]
    assert rows_for_tma(x, whole=True).stride(0) == (32 if copied else pitch)
