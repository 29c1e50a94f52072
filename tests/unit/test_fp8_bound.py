"""The bounds of 8-bit products, against an instruction's arithmetic computed step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.measure.codes import integer_input, integer_weight, random_input, random_weight
from hopsparse.measure.error import (
    PROMOTED_COLUMNS,
    fp8_sum_bound,
    grouped_sum_bound,
    product_bound,
    scaled_bound,
    unit_roundoff,
)

E4M3 = torch.float8_e4m3fn


def cut(values: Tensor, exponent: Tensor) -> Tensor:
    """What is left of values 13 bits below an exponent, cut towards zero."""
    return (values * 2.0 ** (13 - exponent)).trunc() / 2.0 ** (13 - exponent)


def exponents(values: Tensor, least: int = -40) -> Tensor:
    return torch.where(values == 0, -40, values.abs().log2().floor().clamp(min=least))


def tensor_core(x: Tensor, w: Tensor, batch: int | None, columns: int = 64) -> Tensor:
    """One instruction after another, in float64, which holds every step of it exactly."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for first in range(0, x.shape[1], batch or x.shape[1]):
        ends = min(first + (batch or x.shape[1]), x.shape[1])
        running = torch.zeros_like(total)
        for start in range(first, ends, columns):
            at = slice(start, min(start + columns, ends))
            products = x[:, None, at].double() * w[None, :, at].double()
            # Subnormal E4M3 numbers have the exponent of the least normal ones.
            of_x, of_w = (exponents(each.double(), -6) for each in (x[:, at], w[:, at]))
            pairs = of_x[:, None] + of_w[None, :]
            largest = torch.maximum(pairs.amax(-1), exponents(running))
            added = cut(products, largest.unsqueeze(-1)).sum(-1) + cut(running, largest)
            running = cut(added, exponents(added))
        total = (total + running).float().double()
    return total


def operands(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    weight = random_weight((24, k), E4M3, "none", generator).codes
    return random_input((16, k), E4M3, "none", generator).codes, weight


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_sums_of_tensor_cores_are_within_their_bound(k: int) -> None:
    x, w = operands(k)
    exact = x.double() @ w.double().T
    for batch in (None, 128, PROMOTED_COLUMNS):
        off = (tensor_core(x, w, batch) - exact).abs()
        bound = fp8_sum_bound(x, w, batch=None if batch is None else PROMOTED_COLUMNS)
        assert (off <= bound).all()
        assert off.any() or k == 64


def test_fast_sums_of_one_sign_are_off_by_more_than_float32_may_be() -> None:
    """Else there would be no need for a bound of their own."""
    x, w = operands(8192)
    x, w = x.float().abs(), w.float().abs()
    off = (tensor_core(x, w, None) - x.double() @ w.double().T).abs()
    assert (off > product_bound(x, w, torch.float32, torch.float32)).any()


def test_a_slice_of_k_that_is_missing_is_beyond_the_bound_of_promoted_sums() -> None:
    x, w = operands(8192)
    exact = x.double() @ w.double().T
    less = x[:, 256:].double() @ w[:, 256:].double().T
    assert ((less - exact).abs() > fp8_sum_bound(x, w, batch=PROMOTED_COLUMNS)).any()


def test_no_result_at_all_is_beyond_the_bound_of_fast_sums() -> None:
    x, w = operands(16384)
    assert ((x.double() @ w.double().T).abs() > fp8_sum_bound(x, w)).any()


def test_promoted_sums_have_the_smaller_bound() -> None:
    x, w = operands(4096)
    assert (fp8_sum_bound(x, w, batch=PROMOTED_COLUMNS) < fp8_sum_bound(x, w)).all()


@pytest.mark.parametrize(("sums", "batch"), [("fast", None), ("promoted", 128), ("promoted", 256)])
def test_small_integers_are_exact_in_a_tensor_core(sums: str, batch: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    w = integer_weight(random_weight((24, 4096), E4M3, "none", generator), sums).codes
    x = integer_input(random_input((16, 4096), E4M3, "none", generator), sums).codes
    assert torch.equal(tensor_core(x, w, batch), x.double() @ w.double().T)


def test_integers_of_promoted_sums_tell_fast_ones_even_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    w = integer_weight(random_weight((24, 4096), E4M3, "none", generator), "promoted").codes
    x = integer_input(random_input((16, 4096), E4M3, "none", generator), "promoted").codes
    fast, exact = tensor_core(x, w, None), x.double() @ w.double().T
    assert not torch.equal(fast.bfloat16(), exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("k", [128, 2068])
def test_sums_of_groups_are_within_their_bound(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x = random_input((16, k), dtype, "rows", generator).codes.float()
    kept = torch.rand(24, k, generator=generator) < 0.5
    # As steps of 2^-9, which is what an E4M3 product multiplies.
    w = torch.randint(-8, 8, (24, k), generator=generator) * kept / 512
    scales = torch.rand(24, -(-k // 128), generator=generator)
    total, exact = torch.zeros(16, 24), torch.zeros(16, 24, dtype=torch.float64)
    for index, first in enumerate(range(0, k, 128)):
        at = slice(first, first + 128)
        whole = x[:, at].double() @ w[:, at].double().T
        sums = tensor_core(x[:, at], w[:, at], None) if dtype == E4M3 else whole
        total += sums.float() * scales[:, index]
        exact += whole * scales[:, index].double()
    bound = grouped_sum_bound(x, w, scales, 128, floats=dtype == E4M3)
    off = (total.double() - exact).abs()
    assert (off <= bound).all()
    assert off.any()
    # Floats that are cut are beyond the bound of integers; a group that is left out is beyond both.
    integers = grouped_sum_bound(x, w, scales, 128, floats=False)
    assert (off <= integers).all() == (dtype == torch.int8)
    if k > 128:
        less = exact - (x[:, :128].double() @ w[:, :128].double().T) * scales[:, 0].double()
        assert ((less - exact).abs() > bound).any()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("roundings", [1, 2])
def test_scaled_integers_are_within_their_bound(out_dtype: torch.dtype, roundings: int) -> None:
    sums = torch.randint(-(2**30), 2**30, (64, 64), dtype=torch.int32)
    rows, columns = torch.rand(64, 1) / 2**20, torch.rand(64) / 4
    if roundings == 1:
        y = (sums.float() * columns * rows).to(out_dtype)
    else:
        y = ((sums.float() * columns / 2**20).to(out_dtype).float() * (rows * 2**20)).to(out_dtype)
    exact, scale = sums.double(), rows.double() * columns.double()
    off = (y.double() - exact * scale).abs()
    bound = scaled_bound(exact, torch.zeros(1), scale, out_dtype, roundings)
    assert (off <= bound).all()
    # No tighter than rounding to the nearest can be, and no looser than a few units.
    assert (off > unit_roundoff(out_dtype) / 4 * (exact * scale).abs()).any()
    assert (
        bound <= 8 * unit_roundoff(out_dtype) * (exact * scale).abs() + 1e-30
    ).double().mean() > 0.9


def test_an_error_of_the_sums_is_scaled_too_and_another_integer_is_wrong() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert scaled_bound(one, one / 8, one * 2, torch.bfloat16) > 0.25
    assert scaled_bound(one, 0 * one, one, torch.int32) < 1
