"""score_blocks and append_keys as torch sees them: operators, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ranges import in_phase
from . import reference


@in_phase("select", "score_blocks")
def run_reference(
    q: Tensor,
    kept: list[Tensor],
    lengths: Tensor,
    block: int,
    kind: str,
    scale: float,
    per_head: bool,
) -> Tensor:
    """Scores by the reference, as the operator passes its arguments: low, high and total."""
    low, high, total = kept
    found = reference.ranges(q, (low, high, total), block, lengths, scale)
    scores = reference.score(found, kind)
    return scores if per_head else reference.shared(scores, low.shape[1])


def append_reference(
    low: Tensor,
    high: Tensor,
    total: Tensor,
    keys: Tensor,
    starts: Tensor,
    counts: Tensor | None,
    block: int,
) -> None:
    """`reference.append`, as the operator passes its arguments."""
    reference.append((low, high, total), keys, starts, counts, block)


def append_and_score(q: Tensor, kept: list[Tensor], keys: Tensor, *asked: Any) -> Tensor:
    """Both operators in turn, on any device.

    Args:
        q: As for `run_reference`.
        kept: As there; changed in place.
        keys: [batch, new, kv_heads, dim], the last of each sequence.
        asked: What `run_reference` takes behind `kept`.
    """
    append_newest(kept, keys, asked[0], asked[1])
    return traced(q, kept, *asked)


def append_newest(kept: list[Tensor], keys: Tensor, lengths: Tensor, block: int) -> None:
    """Take in the last keys of sequences, whose lengths count them, on any device."""
    traced_append(*kept, keys, lengths - keys.shape[1], None, block)


def _scores(q: Tensor, kept: list[Tensor], *arguments: Any) -> Tensor:
    heads = q.shape[1] if arguments[-1] else kept[0].shape[1]
    return q.new_empty((q.shape[0], heads, kept[0].shape[2]), dtype=torch.float32)


def _scores_behind(q: Tensor, kept: list[Tensor], _: Tensor, *arguments: Any) -> Tensor:
    return _scores(q, kept, *arguments)


def _nothing(*_: Any) -> None:
    return None


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "score_blocks(Tensor q, Tensor[] kept, Tensor lengths, SymInt block, str kind, float scale, "
    "bool per_head) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "append_keys(Tensor(a!) low, Tensor(b!) high, Tensor(c!) total, Tensor keys, Tensor starts, "
    "Tensor? counts, SymInt block) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "append_score_blocks(Tensor q, Tensor(a!)[] kept, Tensor keys, Tensor lengths, SymInt block, "
    "str kind, float scale, bool per_head) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("score_blocks", run_reference, "CPU")
_LIBRARY.impl("append_keys", append_reference, "CPU")
_LIBRARY.impl("append_score_blocks", append_and_score, "CPU")
torch.library.register_fake("hopsparse::score_blocks", _scores, lib=_LIBRARY)
torch.library.register_fake("hopsparse::append_keys", _nothing, lib=_LIBRARY)
torch.library.register_fake("hopsparse::append_score_blocks", _scores_behind, lib=_LIBRARY)
traced: Callable[..., Tensor] = torch.ops.hopsparse.score_blocks.default
traced_append: Callable[..., None] = torch.ops.hopsparse.append_keys.default
traced_both: Callable[..., Tensor] = torch.ops.hopsparse.append_score_blocks.default


def register_on_gpu(name: str, run: Callable[..., Any]) -> None:
    """Say what an operator runs on a GPU; its arguments are those of the reference."""
    _LIBRARY.impl(name, run, "CUDA")
