"""Layers and inputs in 8-bit codes as measurements draw them: random ones, and small integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError
from .reference import random_24

#: The largest code of each dtype.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: What codes stand for: themselves; one number times each side's, known beforehand; or a number for
#: each out-feature times one for each token.
SCALINGS = ("none", "tensor", "rows")

# A static scale of x is known before x: what is beyond so many standard deviations is clipped.
_STATIC_DEVIATIONS = 5.0
# Magnitudes of x and w whose sums are exact however long k is: in int32, and in float32 what a
# batch of promoted sums, at most 128 of 7 x 7 below 2^13, is added in. Fast sums of random signs
# stay far below 2^14 up to k = 400,000: 7 standard deviations of 2.5 sqrt(k / 2).
_INTEGERS = {
    "exact": ((1, 2, 3), tuple(range(1, 128))),
    "promoted": ((3, 5, 7), (3, 5, 7)),
    "fast": ((1, 2), (1, 2)),
}


@dataclass(frozen=True)
class CodedWeight:
    """A weight in 8 bits.

    Attributes:
        codes: [out, k], int8 or float8_e4m3fn, zeros in place.
        scale: float32 [1] or [out, 1], what a code stands for; None: itself.
        input_scale: float32 [1], what a code of x stands for where that is known beforehand.
    """

    codes: Tensor
    scale: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device


@dataclass(frozen=True)
class CodedInput:
    """Inputs in 8 bits.

    Attributes:
        codes: [tokens, k].
        scale: float32 [tokens, 1], what a code stands for; None: see `CodedWeight.input_scale`.
    """

    codes: Tensor
    scale: Tensor | None = None


def random_weight(
    shape: tuple[int, int], dtype: torch.dtype, scaling: str, generator: torch.Generator
) -> CodedWeight:
    """Normal numbers, the two largest of four kept, in codes that reach the largest one.

    Args:
        shape: [out, k], k in whole groups of 4.
        dtype: int8 or float8_e4m3fn.
        scaling: One of `SCALINGS`.
        generator: Draws, on its device.

    Raises:
        ArgumentError: Another dtype or scaling.

    Example:
        >>> weight = random_weight((2, 8), torch.int8, "rows", torch.Generator().manual_seed(0))
        >>> weight.codes.abs().amax(1).tolist(), list(weight.scale.shape)
        ([127, 127], [2, 1])
    """
    check_codes(dtype, scaling)
    values = random_24(shape, torch.float32, generator)
    peaks = values.abs()
    scale = (peaks.amax(1, keepdim=True) if scaling == "rows" else peaks.amax().view(1)) / LARGEST[
        dtype
    ]
    codes = _as_codes(values / scale, dtype)
    if scaling == "none":
        return CodedWeight(codes)
    static = torch.full_like(scale, _STATIC_DEVIATIONS / LARGEST[dtype])
    return CodedWeight(codes, scale, static if scaling == "tensor" else None)


def random_input(
    shape: tuple[int, int], dtype: torch.dtype, scaling: str, generator: torch.Generator
) -> CodedInput:
    """Normal numbers in codes; as for `random_weight`, [tokens, k]."""
    check_codes(dtype, scaling)
    values = torch.randn(shape, generator=generator, device=generator.device)
    if scaling == "rows":
        scale = values.abs().amax(1, keepdim=True) / LARGEST[dtype]
        return CodedInput(_as_codes(values / scale, dtype), scale)
    return CodedInput(_as_codes(values * (LARGEST[dtype] / _STATIC_DEVIATIONS), dtype))


def check_codes(dtype: torch.dtype, scaling: str) -> None:
    """Refuse what no product of 8 bits has.

    Raises:
        ArgumentError: Another dtype or scaling.
    """
    if dtype not in LARGEST or scaling not in SCALINGS:
        raise ArgumentError(
            f"codes of {dtype}, scaling {scaling!r}",
            need=f"{' or '.join(map(str, LARGEST))}; {', '.join(SCALINGS)}",
            hint="torch.int8, 'rows'",
        )


def integer_weight(weight: CodedWeight, sums: str) -> CodedWeight:
    """Small integers where a weight is not zero, whose scales are powers of two.

    Args:
        weight: Gives the places, the dtype and the shapes of scales.
        sums: `exact`, `promoted` or `fast`: what is exact under them.

    Example:
        >>> codes = torch.tensor([[1, 0, 0, -9]], dtype=torch.int8)
        >>> integer_weight(CodedWeight(codes), "promoted").codes.sign().tolist()
        [[1, 0, 0, 1]]
    """
    kept = weight.codes.float() != 0
    codes = (_integers(weight.codes, 1, sums) * kept).to(weight.codes.dtype)
    return CodedWeight(codes, _powers(weight.scale, 3), _powers(weight.input_scale, 4))


def integer_input(x: CodedInput, sums: str) -> CodedInput:
    """Small integers for `integer_weight`; as many, in the dtype of x."""
    codes = _integers(x.codes, 0, sums).to(x.codes.dtype)
    return CodedInput(codes, _powers(x.scale, 5))


def _integers(like: Tensor, side: int, sums: str) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(6 + side)
    known = torch.tensor(_INTEGERS[sums][side], dtype=torch.int8, device=like.device)
    drawn = torch.randint(
        len(known), like.shape, generator=generator, device=like.device, dtype=torch.int16
    )
    values = known[drawn.int()]
    if sums == "promoted":
        return values
    signs = torch.randint(2, like.shape, generator=generator, device=like.device, dtype=torch.int8)
    return values * (2 * signs - 1)


def _powers(like: Tensor | None, seed: int) -> Tensor | None:
    if like is None:
        return None
    generator = torch.Generator(like.device).manual_seed(seed)
    drawn = torch.randint(-2, 3, like.shape, generator=generator, device=like.device)
    return torch.exp2(drawn.float())


def _as_codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    largest = LARGEST[dtype]
    if dtype == torch.int8:
        values = values.round()
    return values.clamp(-largest, largest).to(dtype)
