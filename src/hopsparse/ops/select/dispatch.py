"""select as torch sees it: one operator with a shape rule, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ranges import in_phase
from . import reference


@in_phase("select", "select")
def run_reference(
    scores: Tensor,
    k: Tensor | None,
    lengths: Tensor | None,
    by: str,
    limit: Tensor | None,
    number: float,
    sizes: list[int],
) -> list[Tensor]:
    """`reference.select`, as the operator passes its arguments."""
    return reference.select(scores, k, lengths, by, limit, number, reference.Sizes(*sizes))


def _results(scores: Tensor, *arguments: Any) -> list[Tensor]:
    rows, width = scores.shape[0], arguments[-1][1]
    return [
        scores.new_empty((rows, width), dtype=torch.int32),
        scores.new_empty((rows,), dtype=torch.int32),
    ]


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "select(Tensor scores, Tensor? k, Tensor? lengths, str by, Tensor? limit, float number, "
    "SymInt[] sizes) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("select", run_reference, "CPU")
torch.library.register_fake("hopsparse::select", _results, lib=_LIBRARY)
traced: Callable[..., list[Tensor]] = torch.ops.hopsparse.select.default


def register_on_gpu(run: Callable[..., list[Tensor]]) -> None:
    """Say what the operator runs on a GPU; its arguments are those of `run_reference`."""
    _LIBRARY.impl("select", run, "CUDA")
