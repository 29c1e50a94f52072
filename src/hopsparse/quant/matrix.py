"""From a weight to what is stored: codes in the format of its pattern, and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, FormatError
from ..formats import (
    BlockPattern,
    Form,
    NMPattern,
    Pattern,
    Quantized,
    Scheme,
    SparseMatrix,
    format_named,
    parse_form,
    storage_for,
)
from .grid import code_dtype, expand_scales, groups_of, scale_dtype, to_codes, weight_scales

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def store_matrix(weight: Tensor, pattern: Pattern | None) -> SparseMatrix:
    """Store a weight that obeys `pattern` in the format that checkpoints use for it.

    Args:
        weight: [out, k], any dtype that formats store; nothing is pruned.
        pattern: None keeps every entry.

    Raises:
        FormatError: The weight breaks the pattern.

    Example:
        >>> store_matrix(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), NMPattern(2, 4)).name
        'nm'
    """
    if pattern is None:
        return format_named("dense").from_dense(weight)
    kind = format_named(storage_for(pattern, (weight.shape[0], weight.shape[1])))
    if kind.name == "nm":
        assert isinstance(pattern, NMPattern)
        return kind.from_dense(weight, pattern)  # type: ignore[call-arg]
    if kind.name == "bsr":
        assert isinstance(pattern, BlockPattern)
        return kind.from_dense(weight, (pattern.rows, pattern.cols))  # type: ignore[call-arg]
    return kind.from_dense(weight)


def quantize_matrix(
    weight: Tensor,
    form: Form | str,
    scales: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    input_scale: Tensor | None = None,
) -> Quantized:
    """Round a weight under the scheme of `form`, and store it.

    A weight that lies on the grid of `scales` already keeps its codes exactly, also after it was
    rounded to bfloat16 or float16.

    Args:
        weight: [out, k], float32, bfloat16 or float16, finite; its zeros obey the pattern.
        form: A pattern or "dense", and a scheme.
        scales: [out, groups]; those of `weight_scales(weight, scheme)` when None.
        dtype: Of the weight that the result stands for; that of `weight` when None.
        input_scale: float32 [1], for a static scheme.

    Raises:
        ArgumentError: No scheme, or a weight of another kind; scales of another shape, or one that
            is not finite and above zero.
        FormatError: The weight breaks the pattern, or the input scale does not fit the scheme.

    Example:
        >>> w = torch.tensor([[127.0, 0.0, 0.0, -3.0]])
        >>> quantize_matrix(w, "2:4+int8")
        Quantized(1 x 4, codes=nm, scheme=int8, pattern=2:4, float32, 2564 bytes)
        >>> torch.equal(quantize_matrix(w, "2:4+int8").to_dense(), w)
        True
    """
    form = parse_form(form) if isinstance(form, str) else form
    scheme = form.scheme if isinstance(form, Form) else None
    if scheme is None or not isinstance(form, Form):
        near = f"{form}+int8" if isinstance(form, Form) else "2:4+int8"
        raise ArgumentError(f"form {form}", need="a form with a scheme", hint=near)
    _check_weight(weight)
    if input_scale is not None:
        _check_floats("input_scale", input_scale, (1,))
    stored = _stored_scales(weight, scheme, scales)
    codes = to_codes(weight, expand_scales(stored, weight.shape[1], scheme), scheme.weights)
    matrix = store_matrix(codes.to(code_dtype(scheme)), form.pattern)
    if input_scale is not None:
        input_scale = input_scale.detach().to(weight.device)
    return Quantized.of(matrix, stored, scheme, dtype or weight.dtype, input_scale)


def _stored_scales(weight: Tensor, scheme: Scheme, scales: Tensor | None) -> Tensor:
    """[out, groups] in the dtype that checkpoints have."""
    if scales is None:
        return weight_scales(weight.detach(), scheme).to(scale_dtype(scheme))
    _check_floats("scales", scales, (weight.shape[0], groups_of(weight.shape[1], scheme)))
    stored = scales.detach().to(weight.device, scale_dtype(scheme))
    bad = (~(stored.isfinite() & (stored > 0))).nonzero()
    if bad.numel():  # A code over zero is no number, and that over NaN would be any.
        row, group = bad[0].tolist()
        raise ArgumentError(
            f"scale {float(scales[row, group])} of row {row}, group {group}",
            need=f"a finite number above 0 in {scale_dtype(scheme)}",
            hint="1.0 for a group of zeros, as weight_scales(weight, scheme) has it",
        )
    return stored


def _check_floats(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape:
        return
    what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value)
    raise ArgumentError(
        f"{name} of {what}",
        need=f"a floating tensor {list(shape)}",
        hint="weight_scales(weight, scheme)" if name == "scales" else "torch.tensor([0.1])",
    )


def _check_weight(weight: Tensor) -> None:
    known = isinstance(weight, Tensor) and weight.ndim == 2 and weight.dtype in _FLOATS
    if not known or not weight.numel() or weight.is_meta:
        what = type(weight).__name__
        if isinstance(weight, Tensor):
            what = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        raise ArgumentError(
            f"a weight of {what} to quantise",
            need="[out, k] in float32, bfloat16 or float16, with numbers in it",
            hint="weight.float()",
        )
    bad = (~weight.isfinite()).nonzero()
    if bad.numel():
        row, column = bad[0].tolist()
        raise FormatError(
            f"weight holds {float(weight[row, column])} at row {row}, column {column}",
            need="finite numbers, which codes can stand for",
            hint="repair the weight",
        )
