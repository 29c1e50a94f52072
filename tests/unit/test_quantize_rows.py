"""quantize_rows on the CPU: what `hopsparse.quant` says, in codes; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import Scheme
from hopsparse.formats.quantized import unpack_nibbles
from hopsparse.ops import quantize_rows
from hopsparse.ops.quantize_rows import cases, plan
from hopsparse.quant import input_scales, round_inputs
from hopsparse.quant.grid import LARGEST, round_to
from tests.helpers.rounded_rows import (
    DTYPE_OF,
    INPUTS,
    KINDS,
    assert_near,
    assert_same,
    even,
    exact_values,
    hard_rows,
)

SMALL = [case for case in cases.EDGE if case.rows * case.k < 30_000]
NAN, INF = float("nan"), float("inf")


def scheme_of(kind: str, static: bool = False) -> Scheme:
    return Scheme("int8", 0, kind, static)


def unpacked(codes: Tensor, kind: str) -> Tensor:
    if kind != "int4":
        return codes
    return unpack_nibbles(codes, (*codes.shape[:-1], 2 * codes.shape[-1]))


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_that_inputs_are_rounded_by(
    kind: str, dtype: torch.dtype
) -> None:
    x = torch.randn(3, 5, 40).to(dtype)
    codes, scales = quantize_rows(x, DTYPE_OF[kind])
    assert torch.equal(scales, input_scales(x, scheme_of(kind)))
    rounded = unpacked(codes, kind).float() * scales
    assert torch.equal(rounded, round_to(x, scales, kind))
    assert torch.equal(rounded.to(dtype), round_inputs(x, scheme_of(kind)))
    assert (unpacked(codes, kind).float().abs().amax(-1) == LARGEST[kind]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_scale_clips(kind: str) -> None:
    x, scale = torch.randn(4, 40) * 1000, torch.tensor([0.5])
    codes, scales = quantize_rows(x, DTYPE_OF[kind], scale=scale)
    assert torch.equal(scales, torch.full((4, 1), 0.5))
    rounded = unpacked(codes, kind).float() * scales
    assert torch.equal(rounded, round_inputs(x, scheme_of(kind, True), scale))
    least = -8 if kind == "int4" else -LARGEST[kind]
    assert unpacked(codes, kind).float().aminmax() == (least, LARGEST[kind])


def test_int8_never_reaches_minus_128() -> None:
    x = torch.tensor([[-128.0, -127.5, -1e30, 128.0]])
    codes, _ = quantize_rows(x, torch.int8, scale=torch.ones(1))
    assert codes.tolist() == [[-127, -127, -127, 127]]


def test_halves_go_to_even_and_zero_has_no_sign() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -0.0, -2.5]])
    assert quantize_rows(x, torch.int8)[0].tolist() == [[127, 0, 2, 0, 0, -2]]
    codes, _ = quantize_rows(torch.tensor([[448.0, -0.0, -1e-9]]), torch.float8_e4m3fn)
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0, 0]]


def test_two_codes_share_a_byte_the_earlier_one_low() -> None:
    codes, _ = quantize_rows(torch.tensor([[7.0, -1.0, 2.0, 3.0]]), "int4")
    assert codes.dtype == torch.int8
    assert codes.view(torch.uint8).tolist() == [[0xF7, 0x32]]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_has_no_scale(kind: str, value: float) -> None:
    x = torch.randn(3, 8)
    x[1, 5] = value
    codes, scales = quantize_rows(x, DTYPE_OF[kind])
    assert scales.isnan().flatten().tolist() == [False, True, False]
    assert codes.view(torch.uint8)[1].unique().tolist() == [0x7F if kind == "fp8" else 0]
    alone = quantize_rows(x[::2], DTYPE_OF[kind])
    assert_same((codes[::2].contiguous(), scales[::2].contiguous()), alone)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", KINDS)
def test_a_static_scale_hides_nothing(kind: str, value: float) -> None:
    x = torch.full((2, 4), 3.0)
    x[1, 2] = value
    codes, scales = quantize_rows(x, DTYPE_OF[kind], scale=torch.ones(1))
    if kind == "fp8":
        assert scales.tolist() == [[1.0], [1.0]]
        assert codes.float().isnan().tolist() == [[False] * 4, [False, False, True, False]]
    else:
        assert scales.isnan().tolist() == [[False], [True]]
        assert (codes[1] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF])
@pytest.mark.parametrize("kind", KINDS)
def test_a_static_scale_that_is_none_is_nan(kind: str, scale: float) -> None:
    _, scales = quantize_rows(torch.ones(2, 4), DTYPE_OF[kind], scale=torch.tensor([scale]))
    assert scales.isnan().all()


def test_zeros_and_numbers_too_small_to_divide_have_scale_1() -> None:
    x = torch.tensor([[0.0, -0.0], [1e-45, 0.0]])
    codes, scales = quantize_rows(x, torch.int8)
    assert codes.tolist() == [[0, 0], [0, 0]]
    assert scales.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_were_rounded_far_are_clipped(kind: str) -> None:
    """A subnormal scale may be half as large as it should be."""
    x = torch.tensor([[1.4 * LARGEST[kind] * 2.0**-149, 2.0**-149]])
    codes, scales = quantize_rows(x, DTYPE_OF[kind])
    assert scales.tolist() == [[2.0**-149]]
    assert unpacked(codes, kind).float().tolist() == [[LARGEST[kind], 1.0]]


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_norm_a_residual_and_a_gate_come_first(
    case: cases.Case, kind: str, dtype: torch.dtype
) -> None:
    k = even(case.k, kind)
    x, residual = torch.randn(case.rows, k).to(dtype), torch.randn(case.rows, k).to(dtype)
    norm, both = torch.randn(k).to(dtype), torch.randn(case.rows, 2 * k).to(dtype)
    for tensor, options in (
        (x, {"norm": norm, "eps": 1e-5}),
        (x, {"norm": norm, "residual": residual}),
        (both, {"gate": "halves"}),
        (both, {"gate": "interleaved"}),
    ):
        codes, scales, *sums = quantize_rows(tensor, DTYPE_OF[kind], **options)  # type: ignore[arg-type]
        asked = {"norm": None, "eps": 1e-6, "gate": None, "residual": None, **options}
        values, error = exact_values(tensor, **asked)  # type: ignore[arg-type]
        assert_near(unpacked(codes, kind), scales, values, error, kind)
        assert len(sums) == ("residual" in options)
        for each in sums:
            assert torch.equal(each, (x.float() + residual.float()).to(dtype))


def test_what_is_normalised_is_the_sum_before_it_is_rounded() -> None:
    x, residual = torch.tensor([[256.0, 256.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    _, scales, sums = quantize_rows(
        x, torch.int8, norm=torch.ones(2).bfloat16(), eps=0.0, residual=residual
    )
    assert sums.tolist() == [[256.0, 256.0]]  # 257 needs 9 bits
    assert scales.item() * 127 > 1.001


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_gives_nothing(kind: str, shape: tuple[int, ...]) -> None:
    codes, scales = quantize_rows(torch.zeros(shape), DTYPE_OF[kind])
    assert codes.shape == (*shape[:-1], shape[-1] // (2 if kind == "int4" else 1))
    assert torch.equal(scales, torch.ones(*shape[:-1], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind: str) -> None:
    x = torch.randn(6, 10)
    got = quantize_rows(x.T.contiguous().T, DTYPE_OF[kind])
    assert_same(got, quantize_rows(x, DTYPE_OF[kind]))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": torch.tensor([0.25])},
    {"norm": torch.ones(8)},
    {"norm": torch.ones(8), "residual": torch.ones(2, 3, 8)},
    {"gate": "halves"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("kind", KINDS)
def test_torch_sees_one_operator(kind: str, options: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 8)
    asked = {"scale": None, "norm": None, "eps": 1e-6, "gate": None, "residual": None, **options}
    arguments = (x, kind, *asked.values())
    torch.library.opcheck(torch.ops.hopsparse.quantize_rows.default, arguments)
    torch.compiler.reset()  # it compiles one function at most 8 times
    compiled = torch.compile(quantize_rows, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x, DTYPE_OF[kind], **options), quantize_rows(x, DTYPE_OF[kind], **options))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_can_be_mapped(kind: str) -> None:
    x, residual, norm = torch.randn(4, 3, 8), torch.randn(4, 8), torch.randn(8)

    def one(each: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return quantize_rows(each, DTYPE_OF[kind], norm=norm, residual=other)

    mapped = torch.func.vmap(one, in_dims=(1, None))(x, residual)
    rows = x.transpose(0, 1)
    want = quantize_rows(rows, DTYPE_OF[kind], norm=norm, residual=residual.expand(3, 4, 8))
    assert_same(mapped, want)


def test_a_norm_for_each_row_of_a_map_is_refused() -> None:
    mapped = torch.func.vmap(lambda x, norm: quantize_rows(x, torch.int8, norm=norm))
    with pytest.raises(UnsupportedError, match="vmap over the weights of the norm"):
        mapped(torch.ones(2, 3, 8), torch.ones(2, 8))


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (torch.ones(2, 4), {"dtype": torch.uint8}, "dtype=torch.uint8"),
        (torch.ones(2, 4), {"dtype": "fp8"}, "dtype='fp8'"),
        (torch.ones(2, 4), {"dtype": [8]}, "dtype=\\[8\\]"),
        (torch.ones(2, 4).double(), {}, "float64"),
        (torch.ones(2, 4).int(), {}, "int32"),
        (torch.tensor(1.0), {}, r"x \[\]"),
        (torch.ones(2, 3), {"dtype": "int4"}, "multiple of 2"),
        (torch.ones(2, 3), {"gate": "halves"}, "multiple of 2"),
        (torch.ones(2, 6), {"dtype": "int4", "gate": "interleaved"}, "multiple of 4"),
        (torch.ones(2, 4), {"gate": "silu"}, "gate='silu'"),
        (torch.ones(2, 4), {"scale": torch.tensor(1.0)}, r"scale \[\]"),
        (torch.ones(2, 4), {"scale": torch.ones(1).double()}, "float64"),
        (torch.ones(2, 4), {"norm": torch.ones(3)}, r"norm \[3\]"),
        (torch.ones(2, 4), {"norm": torch.ones(4).half()}, r"norm \[4\] of torch.float16"),
        (torch.ones(2, 4), {"residual": torch.ones(2, 4)}, "residual without a norm"),
        (
            torch.ones(2, 4),
            {"norm": torch.ones(4), "residual": torch.ones(4)},
            r"residual \[4\]",
        ),
        (torch.ones(2, 4), {"norm": torch.ones(2), "gate": "halves"}, "a norm and gate"),
        (torch.ones(2, 4), {"norm": torch.ones(4), "eps": "1"}, "eps of type str"),
    ],
)
def test_refuses(x: Tensor, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        quantize_rows(x, **{"dtype": torch.int8, **options})


def test_there_is_no_gradient() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="fake_inputs"):
        quantize_rows(x, torch.int8)
    norm = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(UnsupportedError, match="gradient"):
        quantize_rows(x.detach(), torch.int8, norm=norm)
    with torch.no_grad():
        codes, _ = quantize_rows(x, torch.int8, norm=norm)
    assert (codes == 127).all()


def test_a_tangent_is_not_dropped() -> None:
    x = torch.ones(2, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(UnsupportedError, match="gradient"), torch.no_grad():
            quantize_rows(dual, torch.int8)
        assert (quantize_rows(x, torch.int8)[0] == 127).all()


def test_the_rows_of_the_tests_are_hard() -> None:
    x = hard_rows(18, 64, torch.bfloat16, "int8")
    assert x.isnan().any()
    assert x.isinf().any()
    assert ((x != 0) & (x.abs() < torch.finfo(torch.bfloat16).smallest_normal)).any()
    _, scales = quantize_rows(x, torch.int8)
    assert scales.isnan().sum() == 6
    assert ((x.float() / scales).frac().abs() == 0.5).any()


@pytest.mark.parametrize("case", cases.EDGE + cases.MODEL, ids=lambda case: case.name)
def test_a_team_keeps_a_row_or_reads_it_again(case: cases.Case) -> None:
    shape = plan.shape_for(case.k, vector=case.k % 8 == 0)
    assert shape.longest >= case.k or shape == plan.REREADING
    assert shape.threads % shape.team == 0
    rows_of_a_block = shape.threads // shape.team
    blocks = plan.blocks_for(shape, case.rows)
    assert (blocks - 1) * rows_of_a_block < case.rows <= blocks * rows_of_a_block


def test_rows_off_16_bytes_are_read_again() -> None:
    assert plan.shape_for(4096, vector=False) == plan.REREADING
    assert plan.shape_for(28672, vector=True) in plan.KEEPING
    assert plan.shape_for(28680, vector=True) == plan.REREADING


def test_specs_are_named_and_listed() -> None:
    specs = plan.every_spec()
    assert len({spec.name for spec in specs}) == len(specs) == len(set(specs))
    assert plan.spec_for("float16", "fp8", "norm", plan.REREADING) in specs


@pytest.mark.parametrize(
    "chosen",
    [
        ("float64", "int8", "plain", plan.REREADING),
        ("bfloat16", "int2", "plain", plan.REREADING),
        ("bfloat16", "int8", "plain", plan.Shape(64, 64, 1)),
    ],
)
def test_there_is_no_kernel_for(chosen: Any) -> None:
    with pytest.raises(ArgumentError, match="quantize_rows kernel"):
        plan.spec_for(*chosen)


@pytest.mark.parametrize("k", [1, 7, 64])
def test_codes_of_int4_may_be_spelled_as_numbers_of_e4m3(k: int) -> None:
    x = torch.randn(5, k)
    x[1], x[2, -1], x[3] = 0, torch.nan, -0.0
    for options in ({}, {"scale": torch.tensor([0.25])}):
        codes, scales = quantize_rows(x, "int4_in_e4m3", **options)
        assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, x.shape)
        even = torch.nn.functional.pad(x, (0, k % 2))
        packed, same = quantize_rows(even, "int4", **options)
        right = unpack_nibbles(packed.view(torch.uint8), tuple(even.shape))[:, :k]
        assert torch.equal(codes.float(), right.float())
        assert not codes.float().signbit()[codes.float() == 0].any()
        assert torch.equal(scales, same) or torch.equal(scales.isnan(), same.isnan())
