"""quantize_rows as torch sees it: one operator with a shape rule, for torch.compile and export.

Its dispatch costs more than the launch, so a call that needs none of it goes past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference


def _run_on_cpu(
    x: Tensor,
    kind: str,
    scale: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
) -> list[Tensor]:
    return reference.quantize_rows(
        x, kind, scale=scale, norm=norm, eps=eps, gate=gate, residual=residual
    )


def _results(
    x: Tensor,
    kind: str,
    scale: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
) -> list[Tensor]:
    k = x.shape[-1] // 2 if gate else x.shape[-1]
    stored = k // 2 if kind == "int4" else k
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    codes = x.new_empty((*x.shape[:-1], stored), dtype=dtype)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    sums = x.new_empty(x.shape)  # contiguous, as the kernel writes them
    return [codes, scales] if residual is None else [codes, scales, sums]


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "quantize_rows(Tensor x, str kind, Tensor? scale, Tensor? norm, float eps, str? gate, "
    "Tensor? residual) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("quantize_rows", _run_on_cpu, "CPU")
torch.library.register_fake("hopsparse::quantize_rows", _results, lib=_LIBRARY)
traced = torch.ops.hopsparse.quantize_rows.default


def register_on_gpu(run: Callable[..., list[Tensor]]) -> None:
    """Say what the operator runs on a GPU; its arguments are those of `_run_on_cpu`."""
    _LIBRARY.impl("quantize_rows", run, "CUDA")
