"""rope_append as torch sees it: one operator with a shape rule, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference


def run_reference(
    qkv: Tensor,
    turns: list[Tensor],
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    norms: list[Tensor],
    eps: float,
    count: Tensor | None,
) -> Tensor:
    """`reference.rope_append`, as the operator passes its arguments."""
    weights = (norms[0], norms[1]) if norms else None
    q = reference.rope_append(qkv, (turns[0], turns[1]), (keys, values), ends, weights, eps)
    if count is not None:
        count += qkv.shape[1]
    return q


def _queries(qkv: Tensor, turns: list[Tensor], keys: Tensor, *_: Any) -> Tensor:
    kv_heads, dim = keys.shape[1], keys.shape[3]
    return qkv.new_empty((*qkv.shape[:2], qkv.shape[2] // dim - 2 * kv_heads, dim))


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "rope_append(Tensor qkv, Tensor[] turns, Tensor(a!) keys, Tensor(b!) values, Tensor ends, "
    "Tensor[] norms, float eps, Tensor(c!)? count) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("rope_append", run_reference, "CPU")
torch.library.register_fake("hopsparse::rope_append", _queries, lib=_LIBRARY)
traced: Callable[..., Tensor] = torch.ops.hopsparse.rope_append.default


def register_on_gpu(run: Callable[..., Tensor]) -> None:
    """Say what the operator runs on a GPU; its arguments are those of `run_reference`."""
    _LIBRARY.impl("rope_append", run, "CUDA")
