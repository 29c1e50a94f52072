"""Rounding in training: bit for bit the plain formula, in few passes, once for a shared input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hopsparse.formats import Scheme, parse_scheme
from hopsparse.quant import (
    SharedInput,
    expand_scales,
    fake_inputs,
    fake_weight,
    input_scales,
    round_to,
    round_weight,
    to_codes,
    weight_scales,
)
from hopsparse.quant.grid import _squared_errors

LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
LEAST = {"int8": -127.0, "fp8": -448.0, "int4": -8.0}
# Half a step beyond the codes of either end.
LIMITS = {"int8": (-127.5, 127.5), "fp8": (-464.0, 464.0), "int4": (-8.5, 7.5)}
KINDS = sorted(LARGEST)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")
# What moves no number.
FREE = {"view", "expand", "unsqueeze", "slice", "detach", "alias", "new_empty_strided"}


class Operators(TorchDispatchMode):
    """Counts what runs below autograd, views aside: what a device would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.ran[name] += 1
        return func(*args, **(kwargs or {}))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Rounded, times the scale, with a mask and the difference of a value to itself."""
    low, high = LIMITS[kind]
    scaled = values.detach().float() / scales
    codes = scaled if kind == "fp8" else scaled.round()
    codes = codes.clamp(LEAST[kind], LARGEST[kind])
    if kind == "fp8":
        codes = codes.to(torch.float8_e4m3fn).float()
    rounded = ((codes + 0.0) * scales).to(values.dtype)
    passing = values * ((scaled >= low) & (scaled <= high)).to(values.dtype)
    return rounded + (passing - passing.detach())


def assert_same(
    faked: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], values: Tensor
) -> Tensor:
    """Results agree bit by bit and gradients as numbers, NaN with NaN; returns the gradient."""
    found, grads = [], []
    upstream = random(*values.shape, seed=9, dtype=values.dtype)
    for function in (faked, expected):
        leaf = values.clone().requires_grad_()
        result = function(leaf)
        assert result.dtype == values.dtype
        result.backward(upstream)
        assert leaf.grad is not None
        found.append(result.detach())
        grads.append(leaf.grad)
    one, other = found
    assert torch.equal(one.isnan(), other.isnan())
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    number = ~one.isnan()
    assert torch.equal(one[number].view(bits), other[number].view(bits))
    assert torch.equal(grads[0], grads[1])
    # Without a graph the numbers are the same.
    with torch.no_grad():
        assert torch.equal(faked(values).nan_to_num(), one.nan_to_num())
    return grads[0]


def edges(kind: str) -> Tensor:
    """Limits, the numbers next to them, special ones, and zeros of both signs."""
    ends = torch.tensor(LIMITS[kind])
    away = torch.tensor([-INF, INF])
    beyond, within = torch.nextafter(ends, away), torch.nextafter(ends, -away)
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.3, -0.3, 1e30, -1e30])
    return torch.cat([ends, beyond, within, special])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_static_inputs_are_those_of_the_plain_formula(kind: str, dtype: torch.dtype) -> None:
    scheme = Scheme("int8", 0, kind, static=True)
    scale = torch.tensor([0.01])
    x = random(3, 5, 40, dtype=dtype) * LARGEST[kind] * 0.01
    x[0, 1, 2:5] = torch.tensor([NAN, INF, -INF], dtype=dtype)
    grad = assert_same(
        lambda each: fake_inputs(each, scheme, scale), lambda each: plain(each, scale, kind), x
    )
    assert 0.05 < float((grad == 0).float().mean()) < 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_limits_the_gradient_stops_where_it_should(kind: str) -> None:
    values = edges(kind).view(1, -1)
    scheme = Scheme(kind, 0, kind, static=True)
    ones = torch.ones(1)
    expected = [True, True, False, False, True, True]
    for faked in (
        lambda each: fake_inputs(each, scheme, ones),
        lambda each: fake_weight(each, scheme, ones.view(1, 1)),
    ):
        grad = assert_same(faked, lambda each: plain(each, ones, kind), values)
        assert (grad[0, :6] != 0).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_inputs_are_those_of_the_plain_formula(kind: str, dtype: torch.dtype) -> None:
    scheme = Scheme("int8", 0, kind)
    x = random(3, 5, 40, dtype=dtype) * 7
    x[0, 0] = 0.0
    x[0, 1] = -0.0
    grad = assert_same(
        lambda each: fake_inputs(each, scheme),
        lambda each: plain(each, input_scales(each.detach(), scheme), kind),
        x,
    )
    assert torch.equal(grad, random(3, 5, 40, seed=9, dtype=dtype))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_token_without_a_scale_is_nan_and_passes_its_gradient(value: float) -> None:
    x = random(2, 8)
    x[1, 3] = value
    x.requires_grad_()
    faked = fake_inputs(x, Scheme("int8", 0, "int8"))
    assert faked.isnan().any(-1).tolist() == [False, True]
    assert bool(faked[1].isnan().all())
    faked.backward(random(2, 8, seed=9))
    assert x.grad is not None
    assert torch.equal(x.grad, random(2, 8, seed=9))


@pytest.mark.parametrize("k", [128, 70])
@pytest.mark.parametrize("text", ["int8", "int8:32", "fp8", "fp8:64", "int4:0", "int4:32"])
def test_weights_are_those_of_the_plain_formula(text: str, k: int) -> None:
    """Also where the weight has moved since its scales were chosen."""
    scheme = parse_scheme(text)
    weight = random(6, k)
    weight[:, ::2] = 0.0
    weight[2] = 0.0
    scales = weight_scales(weight, scheme)
    moved = weight * 1.4
    for values in (weight, moved, moved.bfloat16(), moved.t().contiguous().t()):
        grad = assert_same(
            lambda each: fake_weight(each, scheme, scales),
            lambda each: plain(each, expand_scales(scales, k, scheme), scheme.weights),
            values,
        )
    assert bool((grad == 0).any())
    assert torch.equal(
        fake_weight(moved, scheme, scales),
        round_to(moved, expand_scales(scales, k, scheme), scheme.weights),
    )
    assert torch.equal(fake_weight(moved, scheme, scales), round_weight(moved, scheme, scales))
    moved[0, 1] = INF
    assert bool(fake_weight(moved, scheme, scales)[0, 1].isnan())


def kept_for_backward(function: Callable[[], Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return kept


def test_no_tensor_is_made_to_be_kept_for_backward() -> None:
    x = random(4, 64).requires_grad_()
    scale, scales = torch.ones(1), torch.ones(4, 2)
    assert kept_for_backward(lambda: fake_inputs(x, Scheme("int8", 0, "int8"))) == []
    for made in (
        kept_for_backward(lambda: fake_inputs(x, Scheme("int8", 0, "int8", True), scale)),
        kept_for_backward(lambda: fake_weight(x, Scheme("int4", 32), scales)),
    ):
        there = {each.untyped_storage().data_ptr() for each in (x, scale, scales)}
        assert {each.untyped_storage().data_ptr() for each in made} <= there


@pytest.mark.parametrize("text", ["int8", "int4:32"])
def test_passes_over_a_tensor_are_few(text: str) -> None:
    scheme = parse_scheme(text)
    weight = random(8, 64).requires_grad_()
    scales = weight_scales(weight.detach(), scheme)
    upstream = torch.ones(8, 64)
    with Operators() as operators:
        fake_weight(weight, scheme, scales).backward(upstream)
    assert operators.ran.total() <= 8, operators.ran
    x = random(8, 64).requires_grad_()
    with Operators() as operators:
        fake_inputs(x, Scheme("int8", 0, "int8")).backward(upstream)
    # The tenth copies the gradient to the leaf.
    assert operators.ran.total() <= 10, operators.ran


def test_what_layers_share_is_made_once() -> None:
    shared, made = SharedInput(), []

    def make(x: Tensor) -> Tensor:
        made.append(x)
        return x * 2

    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        without = shared.of(x, "a", make)
    first = shared.of(x, "a", make)
    assert first.requires_grad
    assert not without.requires_grad
    assert shared.of(x, "a", make) is first
    assert shared.of(x, "b", make) is not first
    assert len(made) == 3
    with torch.no_grad():
        x.add_(1)
    assert torch.equal(shared.of(x, "a", make), torch.full((3,), 4.0))
    other = torch.ones(3, requires_grad=True)
    assert shared.of(other, "a", make) is not first
    again = shared.of(other, "a", make)
    shared.clear()
    assert shared.of(other, "a", make) is not again


def test_arithmetic_finds_the_nearest_8_bit_float() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()].unique()
    halves = (numbers[1:] + numbers[:-1]) / 2
    away = torch.full_like(halves, INF)
    values = torch.cat(
        [
            numbers,
            halves,
            torch.nextafter(halves, away),
            torch.nextafter(halves, -away),
            random(10000) * 100,
            random(10000, seed=1) * 0.01,
            torch.tensor([NAN, 0.0, -0.0, 1e-40, 448.0, -448.0]),
        ]
    )
    found = to_codes(values, torch.ones(1), "fp8")
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(nan=1e3), expected.nan_to_num(nan=1e3))


@pytest.mark.parametrize("k", [128, 70])
def test_scales_of_four_bits_are_the_first_of_least_error(k: int) -> None:
    scheme, weight = Scheme("int4", 64), random(5, k)
    weight[1] = 0.0
    weight[:, ::3] = 0.0
    for importance in (None, random(k, seed=3).square()):
        found = weight_scales(weight, scheme, importance)
        cost = torch.ones(k) if importance is None else importance
        for row in range(5):
            for group, part in enumerate(weight[row].split(64)):
                peak = part.abs().max() / 7
                tried = [(peak * (1 - step / 40)).bfloat16().float() for step in range(16)]
                costs = cost.split(64)[group]
                errors = [
                    ((round_to(part, scale, "int4") - part).double() ** 2 * costs).sum()
                    if float(peak)
                    else torch.tensor(0.0)
                    for scale in tried
                ]
                least = min(range(16), key=lambda index: float(errors[index]))
                expected = tried[least] if float(peak) else torch.tensor(1.0)
                assert float(found[row, group]) == float(expected)


def test_candidates_tried_together_have_the_errors_of_each() -> None:
    values, candidates = random(6, 3, 32), random(16, 6, 3, seed=1).abs() + 0.1
    for cost in (None, random(1, 3, 32, seed=2).square()):
        alone = _squared_errors(values, candidates, cost, 1)
        for at_once in (5, 16, 99):
            assert torch.equal(_squared_errors(values, candidates, cost, at_once), alone)
