"""hybrid_gradient as torch sees it: one operator with a shape rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .indices import chunk_count
from .remainder import CODERS

run_reference = reference.hybrid_gradient


def empty_results(
    gradient: Tensor, k: int, remainder: str | None, every: int, phase: int, strip: int = 1
) -> list[Tensor]:
    """Tensors as the operator returns them, of which nothing is written.

    Behind `rest` there is room up to a multiple of `strip` values.
    """
    coder, n = None if remainder is None else CODERS[remainder], gradient.numel()
    rows = reference.rows_of(n, coder, every, phase)
    code_bytes = 0 if coder is None else coder.code_bytes
    values = reference.padded(n, coder)
    rest = gradient.new_empty(-(-max(n, values) // strip) * strip, dtype=torch.float32)
    return [
        gradient.new_empty(k, dtype=torch.float32),
        gradient.new_empty(chunk_count(n), dtype=torch.int32),
        gradient.new_empty(k, dtype=torch.int16),
        gradient.new_empty((rows, code_bytes), dtype=torch.uint8),
        gradient.new_empty(rows, dtype=torch.bfloat16),
        rest[:values],
        gradient.new_empty(1, dtype=torch.uint8),
    ]


def _shapes(
    gradient: Tensor, residual: Tensor | None, k: int, remainder: str | None, every: int, phase: int
) -> list[Tensor]:
    return empty_results(gradient, k, remainder, every, phase)


_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "hybrid_gradient(Tensor gradient, Tensor? residual, int k, str? remainder, int every, "
    "int phase) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("hybrid_gradient", run_reference, "CPU")
torch.library.register_fake("hopsparse::hybrid_gradient", _shapes, lib=_LIBRARY)
traced: Callable[..., list[Tensor]] = torch.ops.hopsparse.hybrid_gradient.default


def register_on_gpu(run: Callable[..., list[Tensor]]) -> None:
    """Say what the operator runs on a GPU; its arguments are those of `run_reference`."""
    _LIBRARY.impl("hybrid_gradient", run, "CUDA")
