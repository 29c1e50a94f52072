"""select_blocks as torch sees it: one operator with a shape rule, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..score_blocks.dispatch import append_newest
from ..score_blocks.dispatch import traced as score
from ..select.dispatch import traced as select


def run_in_turn(
    q: Tensor,
    kept: list[Tensor],
    lengths: Tensor,
    k: Tensor | None,
    block: int,
    kind: str,
    scale: float,
    sizes: list[int],
) -> list[Tensor]:
    """One operator after the other, on any device: scores [batch, kv_heads, blocks] in between."""
    batch, kv_heads, count = kept[0].shape[:3]
    scores = score(q, kept, lengths, block, kind, scale, False)
    there = row_lengths(lengths, block, kv_heads).flatten()
    ks = None if k is None else k.flatten()
    flat = scores.view(batch * kv_heads, count)
    indices, counts = select(flat, ks, there, "rank", None, 0.0, sizes)
    return [indices.view(batch, kv_heads, sizes[1]), counts.view(batch, kv_heads)]


#: What an operator gives that changes its arguments: torch.compile knows no list of such.
Lists = tuple[Tensor, Tensor]


def append_in_turn(q: Tensor, kept: list[Tensor], keys: Tensor, *asked: Any) -> Lists:
    """The same behind `append_keys`, on any device.

    Args:
        q: As for `run_in_turn`.
        kept: As there; changed in place.
        keys: [batch, new, kv_heads, dim], the last of each sequence.
        asked: What `run_in_turn` takes behind `kept`.
    """
    append_newest(kept, keys, asked[0], asked[2])
    indices, counts = traced(q, kept, *asked)
    return indices, counts


def row_lengths(lengths: Tensor, block: int, kv_heads: int) -> Tensor:
    """int32 [batch, kv_heads]: blocks that each sequence has."""
    there = -(-lengths.clamp(min=0) // block)
    return there[:, None].expand(-1, kv_heads).contiguous()


def _results(q: Tensor, kept: list[Tensor], *arguments: Any) -> list[Tensor]:
    shape, width = kept[0].shape[:2], arguments[-1][1]
    return [
        q.new_empty((*shape, width), dtype=torch.int32),
        q.new_empty(shape, dtype=torch.int32),
    ]


def _results_behind(q: Tensor, kept: list[Tensor], _: Tensor, *arguments: Any) -> Lists:
    indices, counts = _results(q, kept, *arguments)
    return indices, counts


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "select_blocks(Tensor q, Tensor[] kept, Tensor lengths, Tensor? k, SymInt block, str kind, "
    "float scale, SymInt[] sizes) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "append_select_blocks(Tensor q, Tensor(a!)[] kept, Tensor keys, Tensor lengths, Tensor? k, "
    "SymInt block, str kind, float scale, SymInt[] sizes) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("select_blocks", run_in_turn, "CPU")
_LIBRARY.impl("append_select_blocks", append_in_turn, "CPU")
torch.library.register_fake("hopsparse::select_blocks", _results, lib=_LIBRARY)
torch.library.register_fake("hopsparse::append_select_blocks", _results_behind, lib=_LIBRARY)
traced: Callable[..., list[Tensor]] = torch.ops.hopsparse.select_blocks.default
traced_both: Callable[..., Lists] = torch.ops.hopsparse.append_select_blocks.default


def register_on_gpu(name: str, run: Callable[..., Any]) -> None:
    """Say what an operator runs on a GPU; its arguments are those of the CPU."""
    _LIBRARY.impl(name, run, "CUDA")
