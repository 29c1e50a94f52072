"""The model of a tensor core's sums of 8-bit floats, against the same in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import floor, frexp, inf, nan

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.measure.fp8 import FRACTION_BITS, exponents, fp8_sums

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = {E4M3: -6, E5M2: -14}


def exponent(value: Fraction, least: int) -> int:
    """Of a value that is not zero, and is a float64; no lower than `least`."""
    return max(least, frexp(value)[1] - 1)


def cut(value: Fraction, step: Fraction) -> Fraction:
    """To a multiple of step, towards zero."""
    whole = floor(abs(value) / step) * step
    return whole if value >= 0 else -whole


def instruction(total: Fraction, x: Tensor, w: Tensor) -> Fraction:
    """One instruction, one addend after another."""
    addends = [(total, exponent(total, -126))] if total else []
    for a, b in zip(x, w, strict=True):
        left, right = Fraction(float(a)), Fraction(float(b))
        if left and right:
            top = exponent(left, LEAST[x.dtype]) + exponent(right, LEAST[w.dtype])
            addends.append((left * right, top))
    if not addends:
        return Fraction(0)
    step = Fraction(2) ** (max(top for _, top in addends) - FRACTION_BITS)
    found = sum((cut(value, step) for value, _ in addends), Fraction(0))
    if not found:
        return found
    return cut(found, Fraction(2) ** (exponent(found, -126) - FRACTION_BITS))


def slow_sum(x: Tensor, w: Tensor, columns: int, batch: int | None) -> float:
    total = torch.zeros(())
    for first in range(0, len(x), batch or len(x)):
        part = Fraction(0)
        for start in range(first, min(first + (batch or len(x)), len(x)), columns):
            part = instruction(part, x[start : start + columns], w[start : start + columns])
        total = total + float(part)  # In float32: 14 bits are.
    return float(total)


def numbers(shape: tuple[int, int], dtype: torch.dtype, spread: float) -> Tensor:
    """Of many sizes: zeros, subnormal numbers and the largest among them."""
    sizes = (torch.randn(shape) * spread).exp2()
    most = torch.finfo(dtype).max
    return (torch.randn(shape) * sizes).clamp(-most, most).to(dtype)


@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("columns", "batch"), [(64, None), (64, 128), (32, None), (32, 128)])
@pytest.mark.parametrize("spread", [0.0, 2.0, 6.0])
def test_it_is_the_sum_of_exact_fractions(
    x_dtype: torch.dtype, columns: int, batch: int | None, spread: float
) -> None:
    torch.manual_seed(columns + int(spread))
    x, w = numbers((4, 328), x_dtype, spread), numbers((5, 328), E4M3, spread)
    w.view(torch.uint8).view(5, -1, 4)[..., 1::2] = 0
    found = fp8_sums(x, w, columns=columns, batch=batch)
    expected = [[slow_sum(row, column, columns, batch) for column in w] for row in x]
    assert found.dtype == torch.float32
    assert found.tolist() == expected
    # Else this would be a test of exact sums.
    exact = x.double() @ w.double().T
    assert (found.double() != exact).any()


def test_small_products_beside_a_large_one_are_cut_towards_zero() -> None:
    x = torch.tensor([[256.0, 15.0, -15.0, 0.0], [256.0, 15.0, 15.0, 0.0]]).to(E4M3)
    w = torch.tensor([[256.0, 1.0, 0.0, 0.0], [-256.0, 1.0, 1.0, 1.0]]).to(E4M3)
    # A step is 2^16 / 2^13: each 15 counts 8.
    assert fp8_sums(x, w).tolist() == [[65544.0, -65536.0], [65544.0, -65520.0]]


def test_the_sum_so_far_takes_small_products_away_unless_it_is_promoted() -> None:
    x = torch.ones(1, 256).to(E4M3)
    x[0, 0] = 256.0
    w = torch.ones(1, 256).to(E4M3)
    w[0, 0] = 256.0
    # The step below 2^16 is 8: nothing of the ones is left in their instruction or those after it.
    assert fp8_sums(x, w).item() == 65536.0
    # Of 255 ones 127 are in the batch of the large one.
    assert fp8_sums(x, w, batch=128).item() == 65536.0 + 128


def test_zeros_do_not_count() -> None:
    """A zero has an exponent in its bits, but is no addend."""
    x = torch.tensor([[448.0, 2**-9, 0.0]]).to(E4M3)
    w = torch.tensor([[0.0, 2**-9, 448.0]]).to(E4M3)
    assert fp8_sums(x, w).item() == 2**-18
    assert fp8_sums(x, torch.zeros(2, 3).to(E4M3)).tolist() == [[0.0, 0.0]]


def test_any_shape_of_x_and_none_at_all() -> None:
    x, w = numbers((6, 70), E4M3, 1.0), numbers((3, 70), E4M3, 1.0)
    assert torch.equal(fp8_sums(x.view(2, 3, 70), w), fp8_sums(x, w).view(2, 3, 3))
    assert fp8_sums(x[:0], w).shape == (0, 3)
    assert fp8_sums(x[:, :0], w[:, :0]).tolist() == [[0.0] * 3] * 6


def test_rows_in_pieces_are_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = numbers((7, 128), E4M3, 3.0), numbers((3, 128), E4M3, 3.0)
    whole = fp8_sums(x, w)
    monkeypatch.setattr("hopsparse.measure.fp8._AT_ONCE", 2 * 3 * 64)
    assert torch.equal(fp8_sums(x, w), whole)


def test_nan_and_infinity_reach_their_sums_and_no_others() -> None:
    x = torch.tensor([[nan, 1.0], [inf, 1.0], [-inf, 1.0], [2.0, 1.0]]).to(E5M2)
    w = torch.tensor([[1.0, 1.0], [0.0, 1.0]]).to(E4M3)
    found = fp8_sums(x, w)
    assert found[:, 0].nan_to_num(nan=7.0, posinf=8.0, neginf=9.0).tolist() == [7, 8, 9, 3]
    assert found[:, 1].isnan().tolist() == [True, True, True, False]
    assert found[3].tolist() == [3.0, 1.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_exponents_of_all_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()]
    found = exponents(codes).tolist()
    for value, top in zip(codes.float().tolist(), found, strict=True):
        assert top == (exponent(Fraction(value), LEAST[dtype]) if value else -200)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 4).to(E4M3), {}),
        (torch.zeros(2, 4).to(E4M3), torch.zeros(2, 4, dtype=torch.int8), {}),
        (torch.zeros(2, 4).to(E4M3), torch.zeros(2, 5).to(E4M3), {}),
        (torch.zeros(2, 4).to(E4M3), torch.zeros(4).to(E4M3), {}),
        (torch.zeros(2, 4).to(E4M3), torch.zeros(2, 4).to(E4M3), {"batch": 96}),
        (torch.zeros(2, 4).to(E4M3), torch.zeros(2, 4).to(E4M3), {"batch": 0}),
        (torch.zeros(2, 4).to(E4M3), torch.zeros(2, 4).to(E4M3), {"columns": 0}),
    ],
)
def test_it_refuses(x: Tensor, w: Tensor, options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="fp8_sums"):
        fp8_sums(x, w, **options)  # type: ignore[arg-type]
