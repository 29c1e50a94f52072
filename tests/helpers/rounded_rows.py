"""Rows to quantise that hold every hard number, and what their codes may be."""

from __future__ import annotations

import torch
from torch import Tensor

from hopsparse.measure.error import gamma, gated_bound, rms_norm_bound
from hopsparse.ops.quantize_rows.reference import gated
from hopsparse.quant.grid import LARGEST, to_codes
from tests.helpers.matrices import bits

KINDS = ("int8", "fp8", "int4")
DTYPE_OF: dict[str, torch.dtype | str] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": "int4",
}
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """The same bits, NaN among them."""
    assert len(got) == len(want)
    for mine, other in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert mine.is_contiguous()
        assert torch.equal(bits(mine.cpu()), bits(other.cpu()))


def even(k: int, kind: str) -> int:
    """k, or the next that int4 can store."""
    return k + k % 2 if kind == "int4" else k


def hard_rows(rows: int, k: int, dtype: torch.dtype, kind: str) -> Tensor:
    """[rows, k]: row i is of kind i % 9, or all are random where there are few."""
    x = torch.randn(rows, k) * torch.logspace(-6, 4, rows).unsqueeze(1)
    largest = LARGEST[kind]
    steps = torch.randint(-2 * int(largest), 2 * int(largest) + 1, (rows, k)) / 2
    steps[:, 0] = largest
    tiny = torch.finfo(dtype).smallest_normal
    x[1::9] = steps[1::9] * 0.25  # halves of steps: ties
    x[2::9] = 0
    x[3::9, -1] = torch.nan
    x[4::9, k // 2] = torch.inf
    x[5::9] = x[5::9].sign() * tiny * torch.rand(x[5::9].shape)  # subnormal
    x[6::9] = -x[6::9].abs()
    x[7::9, 0] = -torch.inf
    x[8::9] = torch.finfo(dtype).max * torch.rand(x[8::9].shape)
    x = x.to(dtype)
    x[6::9, : k // 2] = -0.0
    return x


def exact_values(
    x: Tensor, norm: Tensor | None, eps: float, gate: str | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What is rounded, in float64, and its relative error in float32."""
    values = x.double()
    if residual is not None:
        values = (x.float() + residual.float()).double()  # a sum of two is the same everywhere
    if norm is not None:
        error = torch.tensor(rms_norm_bound(x.shape[-1]), dtype=torch.float64)
        return _norm64(values, norm, eps), error
    if gate is None:
        return values, torch.zeros((), dtype=torch.float64)
    gates = values.chunk(2, -1)[0] if gate == "halves" else values[..., ::2]
    return gated(values, gate), gated_bound(gates)


def assert_near(codes: Tensor, scales: Tensor, values: Tensor, error: Tensor, kind: str) -> None:
    """Scales, and codes that some number within the error of each value is rounded to.

    Args:
        codes: Of a row each, int4 unpacked.
        scales: [..., 1].
        values: Exact, float64.
        error: Relative error of the values, any shape that broadcasts.
        kind: One of `KINDS`.
    """
    ideal = values.abs().amax(-1, keepdim=True) / LARGEST[kind]
    # Of the largest value, and of the division by the largest code.
    of_scale = error.max() + gamma(2, torch.float32)
    assert ((scales.double() - ideal).abs() <= of_scale * ideal).all()
    ratio = values / ideal
    slack = ratio.abs() * (error + of_scale + gamma(4, torch.float32))
    one = torch.ones(1)
    least = to_codes((ratio - slack).float(), one, kind)
    most = to_codes((ratio + slack).float(), one, kind)
    found = codes.float()
    assert ((least <= found) & (found <= most)).all()


def _norm64(values: Tensor, norm: Tensor, eps: float) -> Tensor:
    mean = values.square().mean(-1, keepdim=True)
    return values * torch.rsqrt(mean + eps) * norm.double()
