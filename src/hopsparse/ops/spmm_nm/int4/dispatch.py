"""spmm_nm_int4 as torch sees it, and as it is on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....formats.quantized import Quantized
from ..._product import product
from ..dispatch import LIBRARY
from ..facts import PlainCall
from ..kernel import Numbers
from ..op import is_recorded, needs_gradient
from ..reference import apply_activation

_PARTS = ("values", "meta", "scales")
_CODES = (torch.int8, torch.float8_e4m3fn)
Added = tuple[Tensor | None, Tensor | None, Tensor | None]  # scale of x, bias, residual


def int4_product(w: Quantized, x: Tensor, added: Added, call: PlainCall) -> Tensor:
    """The product of arguments that were checked.

    Args:
        w: [out, k] of int4 codes.
        x: [..., k] of 16 bits, or of codes.
        added: Scale of x, bias and residual.
        call: The rest.
    """
    tensors = [w.tensors[name] for name in _PARTS]
    # The operator has no gradients: what needs one is traced through instead.
    if is_recorded(*tensors, x, *added) and not needs_gradient(tensors[2], x, *added):
        facts = [str(w.codes_attributes["pattern"]), str(w.scheme), call.activation]
        made: Tensor = _spmm_nm_int4(
            tensors, x, list(added), w.shape[0], facts, w.dtype, call.out_dtype
        )
        return made
    return _chosen(w, x, added, call)


def reference(w: Quantized, x: Tensor, added: Added, call: PlainCall) -> Tensor:
    """In float32: x of 16 bits times the decoded weight, codes times codes and scales."""
    x_scale, bias, residual = added
    if x.dtype == w.dtype:
        plain = call.activation == "none" and residual is None and call.out_dtype == x.dtype
        if plain and x.is_cuda:
            return F.linear(x, w.to_dense(), bias)
        if plain:
            return product(w.to_dense(), x, bias)
        y = F.linear(x.float(), w.to_dense().float())
    else:
        y = F.linear(x.float(), w.to_dense(torch.float32))
    if x_scale is not None:
        y = y * x_scale
    if bias is not None:
        y = y + bias.float()
    y = apply_activation(y, call.activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(call.out_dtype)


def _chosen(w: Quantized, x: Tensor, added: Added, call: PlainCall) -> Tensor:
    from .op import why_no_int4_kernel

    if why_no_int4_kernel(w, x, *added) is not None:
        return reference(w, x, added, call)
    # Here, because a process on the CPU needs neither a compiler nor a driver.
    from .device import run

    return run(w, x, added, call)


def _run(
    parts: Sequence[Tensor],
    x: Tensor,
    added: Sequence[Tensor | None],
    out: int,
    facts: Sequence[str],
    logical: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    pattern, scheme, activation = facts
    attributes = {
        "codes": "nm",
        "scheme": scheme,
        "dtype": str(logical).removeprefix("torch."),
        "pattern": pattern,
    }
    w = Quantized.from_parts((out, x.shape[-1]), dict(zip(_PARTS, parts, strict=True)), attributes)
    x_scale, bias, residual = added
    return _chosen(w, x, (x_scale, bias, residual), PlainCall(activation, out_dtype))


def _result(
    parts: Sequence[Tensor],
    x: Tensor,
    added: Sequence[Tensor | None],
    out: int,
    facts: Sequence[str],
    logical: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out), dtype=out_dtype)


def numbers_of(group: int, x: torch.dtype, out: torch.dtype) -> Numbers:
    """What a call computes with."""
    of_x, of_y = (str(each).removeprefix("torch.") for each in (x, out))
    is_code = x in _CODES
    return Numbers("int4", of_x, of_y, grouped=is_code, fine=group == 32 and not is_code)


LIBRARY.define(
    "spmm_nm_int4(Tensor[] parts, Tensor x, Tensor?[] added, SymInt out, str[] facts, "
    "ScalarType logical, ScalarType out_dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
for _device in ("CUDA", "CPU"):
    LIBRARY.impl("spmm_nm_int4", _run, _device)
torch.library.register_fake("hopsparse::spmm_nm_int4", _result, lib=LIBRARY)
_spmm_nm_int4: Any = torch.ops.hopsparse.spmm_nm_int4.default
