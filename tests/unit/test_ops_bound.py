"""The error bound holds where it must, and is not so wide that it hides anything."""

from __future__ import annotations

import pytest
import torch

from hopsparse.measure.error import gamma, product_bound, unit_roundoff


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
