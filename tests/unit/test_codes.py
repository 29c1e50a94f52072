from __future__ import annotations

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.measure.codes import (
    LARGEST,
    SCALINGS,
    CodedInput,
    CodedWeight,
    check_codes,
    integer_input,
    integer_weight,
    random_input,
    random_weight,
)
from hopsparse.measure.reference import random_24

DTYPES = tuple(LARGEST)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_random_weight_is_a_rounded_random_24(dtype: torch.dtype, scaling: str) -> None:
    weight = random_weight((48, 64), dtype, scaling, generator())
    right = random_24((48, 64), torch.float32, generator())
    peak = right.abs().amax(1, keepdim=True) if scaling == "rows" else right.abs().amax()
    step = peak / LARGEST[dtype]
    assert weight.codes.dtype == dtype
    assert (weight.codes.float().abs().amax(1) == LARGEST[dtype]).any()
    assert ((weight.codes.float().view(48, -1, 4) != 0).sum(-1) <= 2).all()
    # Half a step of int8, half a unit in the last place of E4M3, or of its subnormals.
    off = (weight.codes.float() * step - right).abs()
    half = step / 2 if dtype == torch.int8 else torch.maximum(right.abs() / 16, step * 2**-10)
    assert (off <= half * (1 + 2**-20)).all()
    shapes = {"none": None, "tensor": (1,), "rows": (48, 1)}
    found = None if weight.scale is None else tuple(weight.scale.shape)
    assert found == shapes[scaling]
    assert (weight.input_scale is not None) == (scaling == "tensor")
    if weight.scale is not None:
        assert torch.equal(weight.scale.view(-1), step.view(-1))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_inputs_have_scales_of_their_own_only_by_rows(
    dtype: torch.dtype, scaling: str
) -> None:
    x = random_input((33, 64), dtype, scaling, generator())
    assert (x.codes.dtype, tuple(x.codes.shape)) == (dtype, (33, 64))
    values = torch.randn(33, 64, generator=generator())
    if scaling == "rows":
        assert x.scale is not None
        assert torch.equal(x.scale, values.abs().amax(1, keepdim=True) / LARGEST[dtype])
        assert (x.codes.float().abs().amax(1) == LARGEST[dtype]).all()
    else:
        assert x.scale is None
    assert (x.codes.float() != 0).float().mean() > 0.95


@pytest.mark.parametrize("sums", ["exact", "promoted", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_integers_keep_places_and_shapes_and_their_scales_are_powers_of_two(
    sums: str, scaling: str
) -> None:
    dtype = torch.int8 if sums == "exact" else torch.float8_e4m3fn
    weight = random_weight((48, 64), dtype, scaling, generator())
    x = random_input((33, 64), dtype, scaling, generator())
    whole, inputs = integer_weight(weight, sums), integer_input(x, sums)
    assert torch.equal(whole.codes.float() != 0, weight.codes.float() != 0)
    assert (inputs.codes.float() != 0).all()
    assert (inputs.codes.float() < 0).any() == (sums != "promoted")
    pairs = (
        (whole.scale, weight.scale),
        (whole.input_scale, weight.input_scale),
        (inputs.scale, x.scale),
    )
    for made, like in pairs:
        assert (made is None) == (like is None)
        if made is not None and like is not None:
            assert made.shape == like.shape
            assert (made.log2() == made.log2().round()).all()


def test_integers_of_both_sides_differ_and_are_the_same_every_time() -> None:
    weight = CodedWeight(torch.ones(64, 64).to(torch.float8_e4m3fn))
    x = CodedInput(torch.ones(64, 64).to(torch.float8_e4m3fn))
    first, again = integer_weight(weight, "promoted"), integer_weight(weight, "promoted")
    assert torch.equal(first.codes.float(), again.codes.float())
    assert not torch.equal(first.codes.float(), integer_input(x, "promoted").codes.float())


@pytest.mark.parametrize(
    ("dtype", "scaling"), [(torch.int16, "none"), (torch.float8_e5m2, "rows"), (torch.int8, "row")]
)
def test_what_no_product_has_is_refused(dtype: torch.dtype, scaling: str) -> None:
    with pytest.raises(ArgumentError, match="none, tensor, rows"):
        check_codes(dtype, scaling)
    with pytest.raises(ArgumentError):
        random_weight((4, 4), dtype, scaling, generator())
