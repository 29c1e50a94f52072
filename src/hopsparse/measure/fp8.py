"""What Hopper's tensor cores make of a sum of 8-bit floats: a model of their arithmetic.

One instruction adds 32 products and its accumulator at once. Each is shifted right until it has the
exponent of the largest, and what falls below 13 bits of fraction there is cut off, towards zero;
the sum is exact, and is cut to 14 significant bits again. Of that,
- "aligning 32 mantissa products by right-shifting based on the maximum exponent", 14 bits of each,
  and 14 bits of what is accumulated, are in section 3.5.2 of DeepSeek-V3 (arXiv:2412.19437);
- 13 bits of fraction, cutting towards zero, exponents that are sums of those of the factors, and
  that the dense instruction does the same to the bit, are in MMA-Sim (arXiv:2511.10909).

Neither looked at the sparse instruction: that its 64 columns are the 32 products that 2:4 keeps of
them is an assumption. A product with zero changes nothing here, so columns are counted as in the
dense weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ArgumentError

#: Bits behind the leading one that a tensor core keeps below the largest exponent.
FRACTION_BITS = 13
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
# The exponent of zero: below that of every product, and 2^-_NOTHING is still a float32.
_NOTHING = -100
# Products in flight at once: 64 MiB for each of the few tensors that are made of them.
_AT_ONCE = 2**24


def fp8_sums(x: Tensor, w: Tensor, *, columns: int = 64, batch: int | None = None) -> Tensor:
    """`x @ w.T` as one instruction after another adds it, or batches of them in float32.

    Bit for bit what the model in this module's docstring says, on any device. A sum that holds NaN
    or infinity is what float64 makes of it.

    Args:
        x: [..., k], float8_e4m3fn or float8_e5m2.
        w: [out, k], as x; a sparse weight with its zeros.
        columns: Of one instruction: 64 for 2:4 and 1:4, 32 for a dense weight.
        batch: Columns whose sum leaves the tensor cores to be added in float32, a multiple of
            `columns`: promoted sums. None leaves everything there: fast ones.

    Returns:
        float32 [..., out], before any scale.

    Raises:
        ArgumentError: Other dtypes or shapes, or a batch of less than whole instructions.

    Example:
        Beside 2^16 only multiples of 8 are left.

        >>> x = torch.tensor([[256.0, 15.0]]).to(torch.float8_e4m3fn)
        >>> fp8_sums(x, torch.tensor([[256.0, 1.0]]).to(torch.float8_e4m3fn))
        tensor([[65544.]])
    """
    _check(x, w, columns, batch)
    k = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), k)
    sums = torch.zeros(len(rows), len(w), device=x.device)
    for first in range(0, k, batch or max(k, 1)):
        part = torch.zeros_like(sums)
        for start in range(first, min(first + (batch or k), k), columns):
            ends = slice(start, start + columns)
            part = _instruction(part, rows[:, ends], w[:, ends])
        sums += part
    plain = rows.double() @ w.double().T
    sums = torch.where(plain.isfinite(), sums, plain.float())
    return sums.view(*x.shape[:-1], len(w))


def exponents(values: Tensor) -> Tensor:
    """int32: of zero below all others; subnormal numbers have the least of their type.

    Example:
        >>> exponents(torch.tensor([448.0, 1.0, 2**-9, 0.0]).to(torch.float8_e4m3fn)).tolist()
        [8, 0, -6, -200]
    """
    least = int(math.log2(torch.finfo(values.dtype).smallest_normal))
    wide = values.float()
    found = (wide.frexp().exponent - 1).clamp_(min=least)
    return found.masked_fill_(wide == 0, 2 * _NOTHING)


def _instruction(sums: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """[rows, out] + x [rows, columns] @ w.T [columns, out], a few rows at a time."""
    x_parts, w_parts = (x.float(), exponents(x)), (w.float(), exponents(w))
    step = max(1, _AT_ONCE // max(1, w.numel()))
    return torch.cat(
        [
            _add(sums[at : at + step], [part[at : at + step, None] for part in x_parts], w_parts)
            for at in range(0, len(x), step)
        ]
        or [sums]
    )


def _add(sums: Tensor, x: list[Tensor], w: tuple[Tensor, Tensor]) -> Tensor:
    products = x[0] * w[0]  # Exact: 4 bits times 4 bits.
    # A zero factor takes the sum of both below _NOTHING, whatever the other one is.
    largest = torch.maximum((x[1] + w[1]).amax(-1), exponents(sums)).clamp_(min=_NOTHING)
    scale = torch.ldexp(torch.ones_like(sums), FRACTION_BITS - largest)
    # At most 33 addends of 15 bits: exact.
    total = (products * scale.unsqueeze(-1)).trunc_().sum(-1) + (sums * scale).trunc_()
    mask = -(1 << (23 - FRACTION_BITS))
    return total.div_(scale).view(torch.int32).bitwise_and_(mask).view(torch.float32)


def _check(x: Tensor, w: Tensor, columns: int, batch: int | None) -> None:
    if x.dtype not in _FLOATS or w.dtype not in _FLOATS:
        raise ArgumentError(
            f"fp8_sums: x of {x.dtype}, w of {w.dtype}",
            need=" or ".join(map(str, _FLOATS)),
            hint="ops.quantize_rows(x, torch.float8_e4m3fn)",
        )
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ArgumentError(
            f"fp8_sums: x {list(x.shape)}, w {list(w.shape)}",
            need="[..., k] and [out, k]",
            hint="the weight with its zeros: w.to_dense()",
        )
    if columns < 1 or (batch is not None and (batch < columns or batch % columns)):
        raise ArgumentError(
            f"fp8_sums: a batch of {batch} columns, {columns} an instruction",
            need="whole instructions",
            hint="columns=64, batch=128",
        )
