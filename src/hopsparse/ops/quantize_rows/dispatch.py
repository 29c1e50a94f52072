"""quantize_rows as torch sees it: one operator with a shape rule, for torch.compile and export.

Its dispatch costs more than the launch, so a call that needs none of it goes past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from . import reference


def run_reference(
    x: Tensor,
    kind: str,
    scale: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
) -> list[Tensor]:
    """`reference.quantize_rows`, as the operator passes its arguments."""
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
    dtype = torch.float8_e4m3fn if kind in ("fp8", "int4_in_e4m3") else torch.int8
    codes = x.new_empty((*x.shape[:-1], stored), dtype=dtype)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    sums = x.new_empty(x.shape)  # contiguous, as the kernel writes them
    return [codes, scales] if residual is None else [codes, scales, sums]


def _mapped(info: Any, in_dims: Any, *arguments: Any) -> tuple[list[Tensor], list[int]]:
    """The rule of vmap: one more dimension of rows."""
    x, kind, scale, norm, eps, gate, residual = arguments
    x_dim, _, scale_dim, norm_dim, _, _, residual_dim = in_dims
    if scale_dim is not None or norm_dim is not None:
        raise UnsupportedError(
            "quantize_rows: vmap over the weights of the norm, or over scales",
            need="one for all rows",
            hint="a call for each",
        )
    rows = _batched(x, x_dim, info.batch_size)
    added = None if residual is None else _batched(residual, residual_dim, info.batch_size)
    results = traced(rows, kind, scale, norm, eps, gate, added)
    return results, [0] * len(results)


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "quantize_rows(Tensor x, str kind, Tensor? scale, Tensor? norm, float eps, str? gate, "
    "Tensor? residual) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("quantize_rows", run_reference, "CPU")
torch.library.register_fake("hopsparse::quantize_rows", _results, lib=_LIBRARY)
torch.library.register_vmap("hopsparse::quantize_rows", _mapped, lib=_LIBRARY)
traced: Callable[..., list[Tensor]] = torch.ops.hopsparse.quantize_rows.default


def register_on_gpu(run: Callable[..., list[Tensor]]) -> None:
    """Say what the operator runs on a GPU; its arguments are those of `run_reference`."""
    _LIBRARY.impl("quantize_rows", run, "CUDA")
