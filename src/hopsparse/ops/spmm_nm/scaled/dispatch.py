"""spmm_nm_scaled as torch sees it, and as it is on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....formats.nm import NM
from ....formats.pattern import NMPattern, parse_pattern
from ....formats.quantized import unpack_nibbles
from ..dispatch import LIBRARY
from ..kernel import Config, Numbers, fold_of
from ..op import is_recorded
from ..reference import apply_activation

Pair = tuple[Tensor | None, Tensor | None]
GROUP = 128  # columns that share a scale of w, where a row has several


@dataclass(frozen=True)
class Call:
    """All of a call but its tensors.

    Attributes:
        sums: `promoted` or `fast`.
        activation: One of `kernel.ACTIVATIONS`.
        out_scale: What a code of an 8-bit result stands for.
        out_dtype: Of the result.
        config: The tile; None chooses one.
    """

    sums: str
    activation: str
    out_scale: float | None
    out_dtype: torch.dtype
    config: Config | None = None


def scaled(w: NM, x: Tensor, scales: Pair, added: Pair, call: Call) -> Tensor:
    """The product of arguments that were checked.

    Args:
        w: [out, k] of codes.
        x: [..., k] of codes.
        scales: Of w and of x.
        added: Bias and residual.
        call: The rest.
    """
    if is_recorded(w.values, w.meta, x, *scales, *added):
        made: Tensor = _spmm_nm_scaled(
            [w.values, w.meta],
            x,
            [*scales, *added],
            w.shape[0],
            str(w.pattern),
            [call.sums, call.activation],
            call.out_scale,
            call.out_dtype,
        )
        return made
    return _chosen(w, x, scales, added, call)


def reference(w: NM, x: Tensor, scales: Pair, added: Pair, call: Call) -> Tensor:
    """In float32, but for sums of integers, which are exact."""
    dense, (w_scale, x_scale), (bias, residual) = w.to_dense(), scales, added
    k = w.shape[1]
    if four_bits(w.dtype, x.dtype):
        x = unpack_nibbles(x.contiguous().view(torch.uint8), (*x.shape[:-1], k))
    if w_scale is not None and w_scale.ndim == 2 and w_scale.shape[1] > 1:
        wide = dense.float() * w_scale.repeat_interleave(GROUP, dim=1)[:, :k]
        y, w_scale = F.linear(x.float(), wide), None
    elif w.dtype == torch.int8:  # Exact in float64, and faster than integers.
        sums = F.linear(x.double(), dense.double())
        if call.out_dtype == torch.int32:
            return sums.to(torch.int32)
        y = sums.float()
    else:
        y = F.linear(x.float(), dense.float())
    if w_scale is not None:
        y = y * w_scale.reshape(-1)
    if x_scale is not None:
        y = y * x_scale
    if bias is not None:
        y = y + bias.float()
    y = apply_activation(y, call.activation)
    if residual is not None:
        y = y + residual.float()
    return to_out(y, call)


def four_bits(w: torch.dtype, x: torch.dtype) -> bool:
    """Whether codes of x have 4 bits, two a byte: int8 beside a weight of E4M3."""
    return w == torch.float8_e4m3fn and x == torch.int8


def numbers_of(w: torch.dtype, x: torch.dtype, call: Call, groups: int) -> Numbers:
    """What a call computes with; of so many scales a row of w, 0 if all rows share one."""
    of_w, of_x, of_y = (str(each).removeprefix("torch.") for each in (w, x, call.out_dtype))
    of_x = "int4" if four_bits(w, x) else of_x
    grouped = groups > 1  # Groups are promoted whatever is asked for.
    promoted = w is not torch.int8 and call.sums == "promoted" and not grouped
    return Numbers(of_w, of_x, of_y, promoted, grouped)


def groups_of_scale(scale: Tensor | None, out: int) -> int:
    """Scales of a row of w; 0 where all rows share one."""
    return 0 if scale is None or scale.numel() == 1 else scale.numel() // out


def to_out(y: Tensor, call: Call) -> Tensor:
    """Values in the dtype of the result; codes are the nearest, and saturate."""
    if call.out_scale is not None:
        y = y * torch.tensor(1 / call.out_scale, dtype=torch.float32)
        if call.out_dtype == torch.int8:
            return y.nan_to_num(nan=0.0).round().clamp(-127, 127).to(torch.int8)
        y = y.clamp(-448, 448)
    return y.to(call.out_dtype)


def _chosen(w: NM, x: Tensor, scales: Pair, added: Pair, call: Call) -> Tensor:
    from .op import why_no_kernel

    if why_no_kernel(w, x) is not None:
        return reference(w, x, scales, added, call)
    # Here, because a process on the CPU needs neither a compiler nor a driver.
    from .device import run

    return run(w, x, scales, added, call)


def _run(
    parts: Sequence[Tensor],
    x: Tensor,
    terms: Sequence[Tensor | None],
    out: int,
    pattern: str,
    words: Sequence[str],
    out_scale: float | None,
    out_dtype: torch.dtype,
) -> Tensor:
    values, meta = parts
    w_scale, x_scale, bias, residual = terms
    found = parse_pattern(pattern)
    assert isinstance(found, NMPattern)
    k = x.shape[-1] * (2 if four_bits(values.dtype, x.dtype) else 1)
    w = NM((out, k), values, meta, found)
    call = Call(words[0], words[1], out_scale, out_dtype)
    return _chosen(w, x, (w_scale, x_scale), (bias, residual), call)


def _result(
    parts: Sequence[Tensor],
    x: Tensor,
    terms: Sequence[Tensor | None],
    out: int,
    pattern: str,
    words: Sequence[str],
    out_scale: float | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out // fold_of(words[1])), dtype=out_dtype)


LIBRARY.define(
    "spmm_nm_scaled(Tensor[] parts, Tensor x, Tensor?[] terms, SymInt out, str pattern, "
    "str[] words, float? out_scale, ScalarType out_dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
for _device in ("CUDA", "CPU"):
    LIBRARY.impl("spmm_nm_scaled", _run, _device)
torch.library.register_fake("hopsparse::spmm_nm_scaled", _result, lib=LIBRARY)
_spmm_nm_scaled: Any = torch.ops.hopsparse.spmm_nm_scaled.default
