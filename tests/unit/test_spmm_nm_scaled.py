"""The 8-bit product as it is defined, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.formats.quantized import pack_nibbles
from hopsparse.measure.error import gated_bound
from hopsparse.ops import Scaling, interleave_gate_up, spmm_nm_scaled
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.kernel import Config, Numbers, spec_of_numbers
from hopsparse.ops.spmm_nm.plan import CANDIDATES, eight_bit
from hopsparse.ops.spmm_nm.scaled.op import plan_scaled
from hopsparse.ops.spmm_nm.scaled.plan import choose_scaled
from tests.helpers.operators import Operators

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT, K, TOKENS = 24, 272, 5


def codes(shape: tuple[int, ...], dtype: torch.dtype, largest: int) -> Tensor:
    return torch.randint(-largest, largest + 1, shape).to(dtype)


def weight(dtype: torch.dtype, largest: int = 8) -> NM:
    dense = codes((OUT, K), dtype, largest).float()
    dense.view(OUT, -1, 4)[..., ::2] = 0
    return NM.from_dense(dense.to(dtype))


def exact(w: NM, x: Tensor) -> Tensor:
    return x.double() @ w.to_dense().double().T


def test_sums_of_int8_are_exact_at_their_ends() -> None:
    dense = torch.zeros(1, 65536, dtype=torch.int8)
    dense.view(1, -1, 4)[..., :2] = -128
    x = torch.full((1, 65536), -128, dtype=torch.int8)
    y = spmm_nm_scaled(NM.from_dense(dense), x, out_dtype=torch.int32)
    assert y.tolist() == [[32768 * 128 * 128]]


@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=str)
def test_floats_of_8_bits_are_multiplied_and_scaled(x_dtype: torch.dtype) -> None:
    w, x = weight(E4M3), codes((2, TOKENS, K), x_dtype, 4)
    scaling = Scaling(
        w=2.0 ** torch.randint(-3, 4, (OUT, 1)), x=2.0 ** torch.randint(-3, 4, (2, TOKENS, 1))
    )
    bias, residual = (torch.randint(-9, 10, shape).float() for shape in ((OUT,), (2, TOKENS, OUT)))
    y = spmm_nm_scaled(
        w, x, scaling, bias=bias, act="relu", residual=residual, out_dtype=torch.float32
    )
    assert scaling.w is not None
    assert scaling.x is not None
    scales = scaling.w.double().T * scaling.x.double()
    assert torch.equal(
        y.double(), (exact(w, x) * scales + bias.double()).relu() + residual.double()
    )


@pytest.mark.parametrize("k", [272, 34])
def test_x_of_4_bits_is_two_codes_a_byte(k: int) -> None:
    wide = torch.randint(-8, 8, (2, TOKENS, k), dtype=torch.int8)
    wide[0, 0] = -8
    x = pack_nibbles(wide).view(torch.int8).view(2, TOKENS, k // 2)
    dense = codes((OUT, k), E4M3, 8).float()
    dense[:, 1::2] = 0
    w = NM.from_dense(dense.to(E4M3))
    scale = 2.0 ** torch.randint(-3, 4, (2, TOKENS, 1))
    y = spmm_nm_scaled(w, x, Scaling(x=scale), out_dtype=torch.float32)
    assert torch.equal(y.double(), exact(w, wide) * scale.double())
    made = torch.compile(
        lambda x: spmm_nm_scaled(w, x, Scaling(x=scale), out_dtype=torch.float32),
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(made(x), y)


def test_rows_of_int8_whose_sums_may_leave_int32_are_refused() -> None:
    """Those of one column more keep two of the last columns, too: the sum would be 2^31."""
    most = 2**18 - 4
    dense = torch.zeros(1, most + 3, dtype=torch.int8)
    dense[:, 0::4] = dense[:, 1::4] = -128
    x = torch.full((1, most + 3), -128, dtype=torch.int8)
    y = spmm_nm_scaled(NM.from_dense(dense[:, :most]), x[:, :most], out_dtype=torch.int32)
    assert y.tolist() == [[2**31 - 2**15]]
    for k in (most + 1, most + 3):
        with pytest.raises(UnsupportedError, match=f"int8 rows of {k}"):
            spmm_nm_scaled(NM.from_dense(dense[:, :k]), x[:, :k])


def test_each_group_of_128_columns_has_its_scale() -> None:
    w, x = weight(E4M3), codes((TOKENS, K), E4M3, 4)
    scale = 2.0 ** torch.randint(-3, 4, (OUT, 3))
    y = spmm_nm_scaled(w, x, Scaling(w=scale), out_dtype=torch.float32)
    wide = w.to_dense().double() * scale.double().repeat_interleave(128, 1)[:, :K]
    assert torch.equal(y.double(), x.double() @ wide.T)


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.int8, [127, -127, 0, 2, 0]), (E4M3, [448, -448, None, 2.5, 0])]
)
def test_a_result_in_8_bits_is_the_nearest_and_saturates(
    dtype: torch.dtype, values: list[float | None]
) -> None:
    w = NM.from_dense(torch.tensor([[1.0, 0, 0, 0]]).to(E4M3))
    x = torch.zeros(5, 4)
    x[:, 0] = torch.tensor([400.0, -400.0, float("nan"), 1.25, 0.0])
    y = spmm_nm_scaled(w, x.to(E4M3), Scaling(out=0.5), out_dtype=dtype)
    found = [None if v != v else v for v in y.float().flatten().tolist()]
    assert found == values


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_nan_and_infinity_of_scales_reach_the_result(dtype: torch.dtype) -> None:
    w, x = weight(dtype), torch.ones(2, K).to(dtype)
    y = spmm_nm_scaled(w, x, Scaling(x=torch.tensor([[float("nan")], [1.0]])))
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


def test_transposed_and_strided_x_is_taken() -> None:
    w, x = weight(torch.int8), codes((K, TOKENS), torch.int8, 8)
    y = spmm_nm_scaled(w, x.T, out_dtype=torch.int32)
    assert torch.equal(y.double(), exact(w, x.T))
    assert spmm_nm_scaled(w, x.T[:0]).shape == (0, OUT)


def test_swiglu_folds_gate_and_up() -> None:
    gate, up = codes((16, K), torch.int8, 8), codes((16, K), torch.int8, 8)
    for each in (gate, up):
        each.view(16, -1, 4)[..., 1::2] = 0
    x, scale = codes((3, TOKENS, K), torch.int8, 8), 2.0 ** torch.randint(-9, -5, (2, 16))
    bias = torch.randint(-9, 10, (2, 16)) / 8
    y = spmm_nm_scaled(
        NM.from_dense(interleave_gate_up(gate, up)),
        x,
        Scaling(w=interleave_gate_up(*scale)),
        bias=interleave_gate_up(*bias),
        act="swiglu",
        out_dtype=torch.float32,
    )
    sums = (x.double() @ each.double().T for each in (gate, up))
    left, right = (s * factor + term for s, factor, term in zip(sums, scale, bias, strict=True))
    expected = torch.nn.functional.silu(left) * right
    assert y.shape == (3, TOKENS, 16)
    # Both sides are exact in float32, so only the gate rounds.
    assert ((y.double() - expected).abs() <= gated_bound(left) * expected.abs()).all()


def test_the_plan_says_reference() -> None:
    assert "reference" in plan_scaled(weight(E4M3), codes((TOKENS, K), E4M3, 4)).describe()


W, X = weight(torch.int8), codes((TOKENS, K), torch.int8, 8)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"w": NM.from_dense(torch.zeros(4, 4))}, "w of torch.float32"),
        ({"w": X}, "w of Tensor"),
        ({"x": X.float()}, "x is torch.float32"),
        ({"x": X.to(E4M3)}, "x is torch.float8_e4m3fn"),
        ({"x": X[:, 1:]}, r"x of shape \[5, 271\]"),
        ({"w": weight(E4M3)}, r"x of shape \[5, 272\], int4 codes two a byte.* / 2\]"),
        ({"scaling": Scaling(w=torch.ones(OUT - 1))}, "scale of w"),
        ({"scaling": Scaling(w=torch.ones(OUT, 3))}, "scale of w"),
        ({"scaling": Scaling(w=ONE.double())}, "scale of w .* of torch.float64"),
        ({"scaling": Scaling(x=torch.ones(TOKENS))}, "scale of x"),
        ({"scaling": Scaling(sums="exact")}, "sums='exact'"),
        ({"act": "swish"}, "act='swish'"),
        ({"act": "swiglu"}, "swiglu of 24 rows"),
        ({"out_dtype": torch.float64}, "out_dtype=torch.float64"),
        ({"out_dtype": torch.int8}, "scaling.out=None for torch.int8"),
        ({"scaling": Scaling(out=1.0)}, "scaling.out=1.0 for torch.bfloat16"),
        ({"scaling": Scaling(out=0.0), "out_dtype": torch.int8}, "scaling.out=0.0"),
        ({"scaling": Scaling(out=float("nan")), "out_dtype": torch.int8}, "scaling.out=nan"),
        ({"scaling": Scaling(out=cast(Any, ONE)), "out_dtype": torch.int8}, "scaling.out=tensor"),
        ({"scaling": Scaling(w=ONE), "out_dtype": torch.int32}, "a result of int32"),
        ({"act": "relu", "out_dtype": torch.int32}, "a result of int32"),
        ({"bias": torch.ones(OUT)}, "bias .* of torch.float32"),
        ({"bias": torch.ones(OUT - 1).bfloat16()}, r"bias \[23\]"),
        ({"residual": torch.ones(TOKENS, OUT)}, "residual"),
        ({"scaling": Scaling(w=ONE.clone().requires_grad_())}, "requires a gradient"),
        ({"config": CANDIDATES[0]}, "bits=16.* Required: a tile with bits=8"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"w": W, "x": X} | changes
    with pytest.raises(ArgumentError, match=told):
        spmm_nm_scaled(**arguments)


@pytest.mark.parametrize("sums", [{}, {"promoted": True}, {"grouped": True}], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 100, 384, 4096, 100_000])
def test_there_is_a_tile_for_every_problem(sums: dict[str, bool], tokens: int) -> None:
    numbers = Numbers("float8_e4m3fn", "float8_e4m3fn", "bfloat16", **sums)
    for out, k in ((1, 1), (576, 576), (4096, 14336), (28672, 4096)):
        config = choose_scaled(Problem(tokens, out, k), numbers, 132)
        assert config in eight_bit(numbers)
        assert config.bits == 8
        assert config.columns == 128 if numbers.grouped else config.columns % 128 == 0


def test_under_torch_compile_it_is_one_operator() -> None:
    w, x = weight(torch.int8), codes((TOKENS, K), torch.int8, 8)
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    scale = torch.rand(TOKENS, 1)
    made = torch.compile(
        lambda x: spmm_nm_scaled(w, x, Scaling(x=scale)), backend=backend, fullgraph=True
    )
    assert torch.equal(made(x), spmm_nm_scaled(w, x, Scaling(x=scale)))
    assert seen == ["hopsparse.spmm_nm_scaled.default"]


def test_who_records_operators_sees_one_and_transforms_see_through_it() -> None:
    w, x = weight(torch.int8), codes((2, TOKENS, K), torch.int8, 8)
    expected = spmm_nm_scaled(w, x)
    with Operators() as seen:
        y = spmm_nm_scaled(w, x)
    assert torch.equal(y, expected)
    assert seen.names == ["hopsparse.spmm_nm_scaled.default"]
    assert torch.equal(torch.vmap(lambda x: spmm_nm_scaled(w, x))(x), expected)


FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("tile", "numbers", "told"),
    [
        ({"units": 2}, {"grouped": True}, "units=1"),  # of two groups, with one scale
        ({"units": 3}, {"promoted": True}, "units=1 or 2"),  # more columns than a bound counts
        ({"units": 3}, {"x": "int4"}, "units=1 or 2 or 4"),  # rows of other places in the swizzle
        ({"bits": 16}, {}, "bits=8, four_bit_w=False"),
        ({"four_bit_w": True}, {}, "bits=8, four_bit_w=False"),
        ({"units": 2}, {"w": "int4", "x": "bfloat16"}, "bits=16, four_bit_w=True"),
    ],
    ids=str,
)
def test_a_tile_of_other_numbers_is_refused(
    tile: dict[str, Any], numbers: dict[str, Any], told: str
) -> None:
    right = Config(2, 1, 64, 1, 2, bits=8)
    assert spec_of_numbers(right, Numbers(FP8, FP8, "bfloat16"), "none", False, False)
    config, other = replace(right, **tile), replace(Numbers(FP8, FP8, "bfloat16"), **numbers)
    with pytest.raises(ArgumentError, match=told):
        spec_of_numbers(config, other, "none", False, False)


@pytest.mark.parametrize(("pattern", "k"), [("6:8", 174768), ("4:6", 196608)])
def test_rows_that_keep_more_than_half_leave_int32_earlier(pattern: str, k: int) -> None:
    w = NM.from_dense(torch.zeros(1, k, dtype=torch.int8), NMPattern(*map(int, pattern.split(":"))))
    with pytest.raises(UnsupportedError, match=f"int8 rows of {k}"):
        spmm_nm_scaled(w, torch.zeros(1, k, dtype=torch.int8))


def test_swiglu_of_no_token_is_empty() -> None:
    w = NM.from_dense(torch.zeros(16, 8, dtype=torch.int8))
    assert spmm_nm_scaled(w, torch.zeros(0, 8, dtype=torch.int8), act="swiglu").shape == (0, 8)
