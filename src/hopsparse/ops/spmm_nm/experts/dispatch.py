"""spmm_nm_experts as torch sees it, and what it means: one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....formats.nm import NM
from ....formats.pattern import NMPattern
from ..._product import decompress
from ..dispatch import LIBRARY
from ..facts import PlainCall
from ..kernel import fold_of
from ..op import is_recorded, needs_gradient
from ..reference import apply_activation


def by_experts(w: NM, x: Tensor, offs: Tensor, bias: Tensor | None, call: PlainCall) -> Tensor:
    """The product of arguments that were checked.

    Args:
        w: [experts * out, k].
        x: [tokens, k].
        offs: int32 [experts].
        bias: [experts, out] or None.
        call: The rest.
    """
    # The operator has no gradients: what needs one is traced through instead.
    if is_recorded(w.values, x, offs, bias) and not needs_gradient(w.values, x, bias):
        parts = [w.values, w.meta]
        facts = [str(w.pattern), call.activation]
        made: Tensor = _spmm_nm_experts(parts, x, offs, bias, w.shape[0], facts, call.out_dtype)
        return made
    return _chosen(w, x, offs, bias, call)


def reference(w: NM, x: Tensor, offs: Tensor, bias: Tensor | None, call: PlainCall) -> Tensor:
    """Sums and epilogue in float32, rounded once. Reads `offs` on the host."""
    experts = len(offs)
    dense = decompress(w).view(experts, -1, w.shape[1]).to(torch.float32)
    tokens, ends = len(x), [min(max(end, 0), len(x)) for end in offs.tolist()]
    pieces, begin = [], 0
    for expert, end in enumerate(ends):
        rows = x[begin : max(begin, end)].to(torch.float32)
        of_expert = None if bias is None else bias[expert].to(torch.float32)
        pieces.append(apply_activation(F.linear(rows, dense[expert], of_expert), call.activation))
        begin = max(begin, end)
    width = dense.shape[1] // fold_of(call.activation)
    pieces.append(x.new_zeros((tokens - begin, width), dtype=torch.float32))
    return torch.cat(pieces).to(call.out_dtype)


def _chosen(w: NM, x: Tensor, offs: Tensor, bias: Tensor | None, call: PlainCall) -> Tensor:
    from .op import why_no_experts_kernel

    if why_no_experts_kernel(w, x, bias) is not None:
        return reference(w, x, offs, bias, call)
    # Here, because a process on the CPU needs neither a compiler nor a driver.
    from .device import run

    return run(w, x, offs, bias, call)


def _run(
    parts: Sequence[Tensor],
    x: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    rows: int,
    facts: Sequence[str],
    out_dtype: torch.dtype,
) -> Tensor:
    values, meta = parts
    n, m = (int(each) for each in facts[0].split(":"))
    w = NM((rows, x.shape[-1]), values, meta, NMPattern(n, m))
    return _chosen(w, x, offs, bias, PlainCall(facts[1], out_dtype))


def _result(
    parts: Sequence[Tensor],
    x: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    rows: int,
    facts: Sequence[str],
    out_dtype: torch.dtype,
) -> Tensor:
    width = rows // offs.shape[0] // fold_of(facts[1])
    return x.new_empty((x.shape[0], width), dtype=out_dtype)


LIBRARY.define(
    "spmm_nm_experts(Tensor[] parts, Tensor x, Tensor offs, Tensor? bias, SymInt rows, "
    "str[] facts, ScalarType out_dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
for _device in ("CUDA", "CPU"):
    LIBRARY.impl("spmm_nm_experts", _run, _device)
torch.library.register_fake("hopsparse::spmm_nm_experts", _result, lib=LIBRARY)
_spmm_nm_experts: Any = torch.ops.hopsparse.spmm_nm_experts.default
