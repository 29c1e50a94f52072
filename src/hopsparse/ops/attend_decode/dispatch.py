"""attend_decode as torch sees it: one operator with a shape rule, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ranges import in_phase
from .._attention import empty_results
from .._paged import cache_of
from . import reference


@in_phase("sparse", "attend_decode")
def run_reference(
    q: Tensor,
    tensors: list[Tensor],
    indices: Tensor | None,
    counts: Tensor | None,
    block: int,
    scales: list[float],
) -> tuple[Tensor, Tensor]:
    """`reference.attend_decode`, as the operator passes its arguments."""
    cache = cache_of(tensors, scales)
    return reference.attend_decode(q, cache, indices, counts, block, scales[0])


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_decode(Tensor q, Tensor[] tensors, Tensor? indices, Tensor? counts, SymInt block, "
    "float[] scales) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("attend_decode", run_reference, "CPU")
torch.library.register_fake("hopsparse::attend_decode", empty_results, lib=_LIBRARY)
traced: Callable[..., tuple[Tensor, Tensor]] = torch.ops.hopsparse.attend_decode.default


def register_on_gpu(run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Say what the operator runs on a GPU; its arguments are those of `run_reference`."""
    _LIBRARY.impl("attend_decode", run, "CUDA")
