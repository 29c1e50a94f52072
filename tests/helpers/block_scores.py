"""Blocks of keys to score, and what scores may be: of the kernel, and of its text on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hopsparse.measure.block_error import mass_error, score_error, shared_error
from hopsparse.ops import KeyBlocks, append_keys
from hopsparse.ops.score_blocks import reference
from hopsparse.ops.score_blocks.layout import by_tensor_cores

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Problem:
    """Queries, blocks of keys, and the keys themselves."""

    q: Tensor
    blocks: KeyBlocks
    lengths: Tensor
    keys: Tensor

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.blocks.low, self.blocks.high, self.blocks.total

    @property
    def scale(self) -> float:
        return reference.default_scale(self.q.shape[2])


def problem(
    shape: tuple[int, int, int],
    lengths: list[int],
    *,
    block: int = 16,
    count: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype | None = None,
) -> Problem:
    """Random keys of (heads of keys, query heads for each, dim); what no sequence has is NaN."""
    kv_heads, group, dim = shape
    batch, most = len(lengths), -(-max(lengths) // block) if count is None else count
    keys = torch.randn(batch, kv_heads, max(most, 1) * block, dim)
    keys = (keys + torch.linspace(-1, 1, keys.shape[2])[:, None]).to(dtype)
    blocks = KeyBlocks.empty((batch, kv_heads, most, dim), block=block, dtype=dtype)
    for each in (blocks.low, blocks.high, blocks.total):
        each.fill_(NAN)
    held = torch.tensor(lengths).int()
    append_keys(blocks, keys[:, :, : most * block].transpose(1, 2), torch.zeros_like(held), held)
    q = torch.randn(batch, kv_heads * group, dim).to(q_dtype or dtype)
    return Problem(q, blocks, held, keys)


def ranges_of(p: Problem, tensor: bool) -> tuple[reference.Ranges, Tensor]:
    """Ranges of the reference, and how far another evaluation in float32 may be from them."""
    found = reference.ranges(p.q, p.kept, p.blocks.block, p.lengths, p.scale)
    batch, heads, dim = p.q.shape
    kv_heads = p.blocks.low.shape[1]
    largest = torch.maximum(p.blocks.low.double().abs(), p.blocks.high.double().abs())
    q = (p.q.double().abs() * p.scale).view(batch, kv_heads, heads // kv_heads, dim)
    return found, score_error((q @ largest.transpose(-1, -2)).view(batch, heads, -1), dim * tensor)


def assert_per_head(got: Tensor, p: Problem, kind: str, fused: bool = False) -> None:
    """Scores of query heads are as near to the reference as float32 allows, and bounds hold.

    Args:
        got: What the kernel gave.
        p: Of what.
        kind: "bound", "mean" or "mass".
        fused: It was the kernel of float32 products; else the one that a call runs.
    """
    found, off = ranges_of(p, not fused and by_tensor_cores(p.q, p.kept, kind))
    there = (found.counts > 0).expand(got.shape)
    assert (got[~there] == -INF).all()
    low, high = found.low.double(), found.high.double()
    value = got.double()
    if kind == "mass":
        wide = replace(found, low=low - off, high=high + off, mean=found.mean.double() + off)
        tight = replace(found, low=low + off, high=high - off, mean=found.mean.double() - off)
        # Above, the slack may be larger as well; below, smaller.
        most = reference.log_masses(replace(wide, slack=found.slack.double() + off))[0]
        least = reference.log_masses(replace(tight, slack=found.slack.double() - off))[0]
        lost = mass_error(low, high, found.counts)
        assert (value <= most + lost)[there].all()
        assert (value >= least - lost)[there].all()
    else:
        wanted = high if kind == "bound" else found.mean.double()
        assert ((value - wanted).abs() <= off)[there].all()
    exact = exact_scores(p)
    if kind == "bound":
        assert (value >= exact.amax(-1))[there].all()
    if kind == "mass":
        assert (value >= exact.logsumexp(-1))[there].all()


def exact_scores(p: Problem) -> Tensor:
    """float64 [batch, heads, blocks, block]; -inf where no key is."""
    batch, heads, dim = p.q.shape
    kv_heads, count = p.blocks.low.shape[1:3]
    # The kernels take scale q in float32, which is half a unit off.
    q = (p.q.float() * p.scale).double().view(batch, kv_heads, heads // kv_heads, dim)
    keys = p.keys[:, :, : count * p.blocks.block].double()
    scores = (q @ keys.transpose(-1, -2)).view(batch, heads, -1)
    seen = torch.arange(scores.shape[-1]) < p.lengths[:, None]
    return scores.masked_fill(~seen[:, None], -INF).view(batch, heads, count, p.blocks.block)


def assert_shared(got: Tensor, per_head: Tensor, kv_heads: int) -> None:
    """The largest part of any query head's mass, of the scores that the kernel itself gave."""
    batch, heads, count = per_head.shape
    scores = per_head.double()
    whole = scores.logsumexp(-1, keepdim=True)
    whole = whole.where(whole.isfinite(), 0.0)
    there = scores > -INF
    error = shared_error(scores.where(there, 0.0), whole).where(there, 0.0)
    groups = (batch, kv_heads, heads // kv_heads, count)
    wanted = (scores - whole).view(groups).amax(2)
    assert got.shape == wanted.shape
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got == INF, wanted == INF)
    assert torch.equal(got == -INF, wanted == -INF)
    finite = wanted.isfinite()
    bound = error.view(groups).amax(2)
    assert ((got.double() - wanted).abs() <= bound)[finite].all()
