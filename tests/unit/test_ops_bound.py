"""The error bound holds where it must, and is not so wide that it hides anything."""

from __future__ import annotations

import pytest
import torch

from hopsparse.measure.error import (
    gamma,
    product_bound,
    rounded_bound,
    swiglu_bound,
    unit_roundoff,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bound_covers_rounding_and_rejects_a_wrong_entry(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 256).to(dtype), torch.randn(32, 256).to(dtype)
    exact = x.double() @ w.double().T
    bound = product_bound(x, w, torch.float32, dtype)
    assert ((x.float() @ w.float().T).to(dtype).double() - exact).abs().le(bound).all()
    swapped = w[:, torch.tensor([1, 0, *range(2, 256)])]
    wrong = (x.double() @ swapped.double().T - exact).abs()
    assert (wrong > bound).any(0).all()  # one of the tokens gives each row of w away


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_missing_term_is_noticed(dtype: torch.dtype) -> None:
    # Of 64 ones the bound is 64 u and a little, a quarter of one term in bfloat16.
    x, w = torch.ones(3, 64, dtype=dtype), torch.ones(2, 64, dtype=dtype)
    bound = product_bound(x, w, torch.float32, dtype)
    assert (bound < 1).all()
    shorter = x[:, :63].double() @ w[:, :63].double().T
    assert ((shorter - 64).abs() > bound).all()


def test_exact_inputs_leave_only_the_output_rounding() -> None:
    one = torch.ones(1, 1)
    bound = product_bound(one, one, torch.float64, torch.bfloat16)
    assert bound.item() == pytest.approx(unit_roundoff(torch.bfloat16))


def test_gamma_gives_up_where_no_digit_is_left() -> None:
    assert gamma(512, torch.bfloat16) == float("inf")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_nearest_code_is_within_its_bound_and_the_next_is_not(dtype: torch.dtype) -> None:
    largest = 127 if dtype == torch.int8 else 448
    values = torch.linspace(-largest, largest, 100_003, dtype=torch.float64)
    values = torch.cat([values, torch.linspace(-0.1, 0.1, 10_001, dtype=torch.float64)])
    floats = values.float()
    codes = (floats.round() if dtype == torch.int8 else floats).to(dtype)
    bound = rounded_bound(values, dtype)
    assert ((values - codes.double()).abs() <= bound).all()
    # Where a value is a code, no other code is within it; but at a power of two the one towards
    # zero, half as far as the other one.
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()].unique()
    single = torch.frexp(every).mantissa.abs() != 0.5
    bound = rounded_bound(every, dtype)
    assert (every.diff() > bound[:-1])[single[:-1]].all()
    assert (every.diff() > bound[1:])[single[1:]].all()


def test_swiglu_of_sides_that_are_off_is_within_its_bound() -> None:
    torch.manual_seed(0)
    gate, up = 6 * torch.randn(2, 4096).double()
    off = 2.0 ** torch.randint(-20, -3, (2, 4096)).double()
    right = torch.nn.functional.silu(gate) * up
    signs = torch.randint(0, 2, (2, 4096)) * 2 - 1
    moved = [side + sign * each for side, sign, each in zip((gate, up), signs, off, strict=True)]
    y = torch.nn.functional.silu(moved[0].float()) * moved[1].float()
    bound = swiglu_bound(gate, up, off[0], off[1])
    assert ((y.double() - right).abs() <= bound).all()
    # It grows with what the sides are off by, and is nothing much without.
    assert (bound > swiglu_bound(gate, up, 0 * off[0], 0 * off[1])).all()
    tight = swiglu_bound(gate, up, 0 * off[0], 0 * off[1])
    assert (tight <= 1e-5 * (right.abs() + 1e-30)).all()
