"""Quantized layers: products of codes on a GPU that has them, rounded inputs elsewhere."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..formats import NM, Quantized
from ..ops import Plan, Scaling, quantize_rows, spmm_nm_int4, spmm_nm_scaled
from ..ops._product import is_hopper
from ..ops.spmm_nm.int4.ahead import prepare_int4
from ..ops.spmm_nm.int4.op import plan_int4
from ..ops.spmm_nm.op import is_transformed
from ..ops.spmm_nm.scaled.ahead import prepare_scaled
from ..ops.spmm_nm.scaled.op import plan_scaled
from ..quant import fake_inputs, round_inputs

_CODES: dict[str, torch.dtype | str] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": "int4_in_e4m3",  # no product of E4M3 is faster for inputs of half the bytes
}
# Weights and inputs that one kernel multiplies, and the scales it takes.
_PAIRS = {
    ("int8", "int8"): (0,),
    ("fp8", "fp8"): (0,),
    ("fp8", "int4"): (0,),
    ("int4", "none"): (32, 64, 128),
    ("int4", "int8"): (128,),
    ("int4", "fp8"): (128,),
}
_PATTERNS = ("2:4", "1:4")


def takes_codes(form: Quantized, x: Tensor, bias: Tensor | None) -> bool:
    """Whether a layer runs the kernels of 8 and 4 bits.

    The GPU has them, w is 2:4 or 1:4, a kernel takes what the scheme says, and nothing needs a
    gradient or is under torch.func.

    Args:
        form: The weight; its tensors are not read.
        x: Input of the layer.
        bias: Of the layer.
    """
    scheme = form.scheme
    if scheme.group not in _PAIRS.get((scheme.weights, scheme.activations), ()):
        return False
    if not x.is_cuda or not is_hopper(x.get_device()) or form.codes_format != "nm":
        return False
    if x.dtype != form.dtype or x.shape[-1:] != form.shape[1:]:
        return False
    if scheme.activations == "none" and x.dtype == torch.float32:
        return False
    if form.codes_attributes["pattern"] not in _PATTERNS:
        return False
    if is_transformed():
        return False
    learns = x.requires_grad or (bias is not None and bias.requires_grad)
    return not (torch.is_grad_enabled() and learns)


def put_together(layer: nn.Module, form: Quantized) -> Quantized:
    """The weight of a layer, made again only where a part is another tensor.

    Args:
        layer: Has the parts, and keeps what was made as `_assembled`.
        form: The weight without its tensors.
    """
    known = None if torch.compiler.is_compiling() else layer.__dict__["_assembled"]
    buffers = layer._buffers
    if known is None or any(buffers.get(name) is not part for name, part in known.tensors.items()):
        known = form.with_parts({name: getattr(layer, name) for name in form.tensors})
        if not torch.compiler.is_compiling():
            layer.__dict__["_assembled"] = known
    return cast(Quantized, known)


def _nm(w: Quantized) -> NM:
    """The codes of 8 bits, which share the memory of w; made once."""
    if torch.compiler.is_compiling():
        return cast(NM, w.codes())
    if (known := w.__dict__.get("_nm")) is None:
        known = w.__dict__["_nm"] = w.codes()
    return cast(NM, known)


def product_of_codes(
    w: Quantized,
    x: Tensor,
    bias: Tensor | None,
    act: str | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """One launch for inputs of 16 bits; else two: rows of x to codes and scales, and the product.

    Args:
        w: [out, k], codes in NM format.
        x: [..., k], as `takes_codes` allows it.
        bias: [out] or None.
        act: What follows, or None.
        norm: Weight and epsilon of an RMSNorm ahead, where the scheme rounds inputs.
        residual: [..., out] in the dtype of x, added at the end; or None.

    Returns:
        [..., out] in the dtype of x.
    """
    scheme, scales = w.scheme, None
    if scheme.activations != "none":
        static = w.tensors.get("input_scale")
        of_norm, eps = norm or (None, 0.0)
        kind = _CODES[scheme.activations]
        x, scales = quantize_rows(x, kind, scale=static, norm=of_norm, eps=eps)
    if scheme.weights == "int4":
        return spmm_nm_int4(w, x, scales, bias=bias, act=act, residual=residual)
    weight, scaling = _nm(w), _scaling(w, scales)
    return spmm_nm_scaled(
        weight, x, scaling, bias=bias, act=act, residual=residual, out_dtype=w.dtype
    )


def codes_plan(w: Quantized, x: Tensor, bias: Tensor | None) -> Plan | None:
    """What `product_of_codes` runs; None where a layer does not come to it."""
    if not takes_codes(w, x, bias):
        return None
    # As many codes as x will become, of which one is there: a plan reads none.
    codes = x.new_empty((), dtype=_stored(w)).expand(*x.shape[:-1], w.shape[1])
    if w.scheme.weights == "int4":
        told = plan_int4(w, codes, out_dtype=x.dtype)
    else:
        told = plan_scaled(_nm(w), codes, _scaling(w), out_dtype=x.dtype)
    behind = "" if w.scheme.activations == "none" else "quantize_rows, then "
    return Plan("linear", told.name, f"{behind}{told.why}")


def prepare_codes(
    w: Quantized, max_tokens: int, bias: Tensor | None, act: str | None = None
) -> bool:
    """Compile and load what calls without a gradient run up to so many tokens; False if not codes.

    Args:
        w: As for `product_of_codes`.
        max_tokens: Most rows of x, all leading dimensions multiplied.
        bias: [out] or None.
        act: What follows the product.

    Raises:
        ArgumentError: No tokens.
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured.
    """
    k, kind = w.shape[1], w.scheme.activations
    row = torch.zeros(1, k + 1, dtype=w.dtype, device=w.device)
    with torch.no_grad():
        if not takes_codes(w, row[:, :k], bias):
            return False
        if w.scheme.weights == "int4":
            prepare_int4(w, max_tokens, x_dtype=_stored(w), act=act)
        else:
            prepare_scaled(
                *(_nm(w), max_tokens, _scaling(w)), x_dtype=_stored(w), act=act, out_dtype=w.dtype
            )
        # Rows that start on 16 bytes have another kernel than rows that do not.
        for each in (row[:, :k], row[:, 1:]) if kind != "none" else ():
            quantize_rows(each, _CODES[kind], scale=w.tensors.get("input_scale"))
    return True


def _stored(w: Quantized) -> torch.dtype:
    """What x is multiplied as; codes of 4 bits as the numbers of E4M3 that they are."""
    kind = _CODES.get(w.scheme.activations, w.dtype)
    return torch.float8_e4m3fn if isinstance(kind, str) else kind


def _scaling(w: Quantized, x: Tensor | None = None) -> Scaling:
    return Scaling(w=w.tensors["scales"], x=x)


def rounded(x: Tensor, form: Quantized, scale: Tensor | None) -> Tensor:
    """The inputs that a scheme computes with; gradients pass through.

    Args:
        x: [..., in_features].
        form: The weight; its tensors are not read.
        scale: `input_scale` of the layer, where its scheme is static.
    """
    fits = x.ndim > 0 and x.shape[-1] == form.shape[1] and x.dtype == form.dtype
    if not fits or form.scheme.activations == "none":
        return x  # What does not fit is refused where it is multiplied.
    scale = scale if form.scheme.static else None
    if scale is not None and scale.device != x.device:
        return x
    seen = is_transformed() or (torch.is_grad_enabled() and x.requires_grad)
    return (fake_inputs if seen else round_inputs)(x, form.scheme, scale)
