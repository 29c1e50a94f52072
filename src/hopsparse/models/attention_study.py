"""What sparse attention sees and misses in a running model, token by token as if generated.

Every query chooses its blocks from what was kept of the keys up to its own token, as it would when
tokens are generated one after the other; but all queries of a window are there at once. Attention
itself is computed densely in float32 and what was not chosen is masked: a measurement, not a use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedError
from ..ops import KeyBlocks, block_masses, missed_mass
from .attention_choice import choose
from .attention_config import AttentionConfig, set_attention

_NAME = "hopsparse_study"
# Queries whose blocks are chosen at once: what is kept of keys is copied for each of them.
_ROWS = 64


@dataclass
class Seen:
    """What the queries of one layer saw, one entry a query and head.

    Attributes:
        recall: Part of the attention mass inside of the chosen blocks.
        bound: Certificate: the most that could be outside.
        tokens: Attended tokens of each query, on average over heads.
        error: Squared distance of outputs to the dense ones.
        size: Squared size of the dense ones.
    """

    recall: list[Tensor] = field(default_factory=list)
    bound: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    error: float = 0.0
    size: float = 0.0


@dataclass
class Study:
    """One run of a model.

    Attributes:
        configs: Each is watched; with `flows` the only one.
        flows: Whether the model goes on with the sparse output; else with the dense one.
        samples: Queries that are watched, evenly over those with more context than the budget.
        seen: By config and layer, where the dense output goes on.
    """

    configs: tuple[AttentionConfig, ...]
    flows: bool = False
    samples: int = 64
    seen: dict[tuple[int, int], Seen] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Outputs [tokens, heads, dim] of one sequence, float32.

        Args:
            layer: Its number.
            q: float32 [heads, tokens, dim].
            keys: float32 [kv_heads, tokens, dim].
            values: As keys.
            scale: Of q.k.
        """
        tokens = q.shape[1]
        out = torch.empty(tokens, q.shape[0], values.shape[2], device=q.device)
        for first in range(0, tokens, _ROWS):
            positions = torch.arange(first, min(first + _ROWS, tokens), device=q.device)
            found = Rows.of(q, keys, values, positions, scale)
            chosen = found.choose(self.configs[0]) if self.flows else found.dense
            out[positions] = chosen.transpose(0, 1)
        if not self.flows:
            for number, config in enumerate(self.configs):
                self._watch(
                    self.seen.setdefault((number, layer), Seen()), config, (q, keys, values), scale
                )
        return out

    def _watch(
        self,
        seen: Seen,
        config: AttentionConfig,
        tensors: tuple[Tensor, Tensor, Tensor],
        scale: float,
    ) -> None:
        tokens = tensors[0].shape[1]
        beyond = tokens - config.budget
        if beyond <= 0:
            return
        count = min(self.samples, beyond)
        every = torch.arange(1, count + 1, device=tensors[0].device) * beyond // count
        for positions in torch.split(config.budget - 1 + every, _ROWS):
            found = Rows.of(*tensors, positions, scale)
            sparse = found.choose(config)
            seen.recall.append(found.recall().flatten().cpu())
            seen.bound.append(found.bound().flatten().cpu())
            seen.tokens.append(found.chosen.sum(-1).float().mean(0).cpu())
            seen.error += float((sparse - found.dense).double().square().sum())
            seen.size += float(found.dense.double().square().sum())


@dataclass
class Rows:
    """Some queries of one sequence, each with the keys up to its own token."""

    q: Tensor
    values: Tensor
    scores: Tensor
    blocks_of: tuple[Tensor, Tensor]
    scale: float
    dense: Tensor
    chosen: Tensor = field(init=False)
    choice: tuple[KeyBlocks, Tensor, Tensor] = field(init=False)

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Rows:
        """Queries at `positions`, int64 [rows]; the others as for `Study.attend`."""
        group = q.shape[0] // keys.shape[0]
        rows = q[:, positions]
        scores = rows @ keys.repeat_interleave(group, 0).transpose(-1, -2) * scale
        token = torch.arange(keys.shape[1], device=q.device)
        scores = scores.masked_fill(token > positions[:, None], -torch.inf)
        every = values.repeat_interleave(group, 0)
        return cls(rows, every, scores, (keys, positions), scale, scores.softmax(-1) @ every)

    def choose(self, config: AttentionConfig) -> Tensor:
        """Sparse outputs [heads, rows, dim]."""
        keys, positions = self.blocks_of
        blocks = blocks_up_to(keys, positions, config.page)
        lengths = (positions + 1).int()
        queries = self.q.transpose(0, 1).contiguous()
        indices, counts = choose(config, queries, blocks, lengths, self.scale)
        self.choice = (blocks, indices, counts)
        rows, kv_heads, number = len(positions), keys.shape[0], blocks.low.shape[2]
        inside = torch.zeros(rows, kv_heads, number + 1, dtype=torch.bool, device=keys.device)
        inside.scatter_(2, indices.long().where(indices >= 0, number), True)
        tokens = inside[..., :number].repeat_interleave(config.page, 2)[..., : keys.shape[1]]
        tokens = tokens & (torch.arange(keys.shape[1], device=keys.device) < lengths[:, None, None])
        group = self.q.shape[0] // kv_heads
        self.chosen = tokens.transpose(0, 1).repeat_interleave(group, 0)
        return self.scores.masked_fill(~self.chosen, -torch.inf).softmax(-1) @ self.values

    def recall(self) -> Tensor:
        """Mass inside of what was chosen [heads, rows]."""
        weights = self.scores.double().softmax(-1)
        return weights.masked_fill(~self.chosen, 0.0).sum(-1)

    def bound(self) -> Tensor:
        """The certificate of each query [heads, rows]."""
        blocks, indices, counts = self.choice
        lengths = (self.blocks_of[1] + 1).int()
        queries = self.q.transpose(0, 1).contiguous()
        masses = block_masses(queries, blocks, lengths, scale=self.scale)
        lse = self.scores.masked_fill(~self.chosen, -torch.inf).logsumexp(-1)
        return missed_mass(masses, indices, counts, lse=lse.T).T


def blocks_up_to(keys: Tensor, positions: Tensor, page: int) -> KeyBlocks:
    """What is kept of keys when each of some tokens has just come, a sequence for each of them.

    Args:
        keys: [kv_heads, tokens, dim].
        positions: int64 [rows].
        page: Tokens of a block.
    """
    heads, tokens, dim = keys.shape
    count = -(-tokens // page)
    padded = nn.functional.pad(keys, (0, 0, 0, count * page - tokens), mode="constant")
    split = padded.view(heads, count, page, dim)
    running = (split.cummin(2).values, split.cummax(2).values, split.float().cumsum(2))
    block, within = positions // page, positions % page
    row = torch.arange(len(positions), device=keys.device)
    kept = []
    for each in running:
        whole = each[:, :, -1].expand(len(positions), heads, count, dim).clone()
        whole[row, :, block] = each[:, block, within].transpose(0, 1)
        kept.append(whole)
    return KeyBlocks(kept[0], kept[1], kept[2], page)


_RUNNING: list[Study] = []


@contextmanager
def studied(model: nn.Module, study: Study) -> Iterator[None]:
    """Let the attention of a model of transformers be that of a study; then it is as before.

    Raises:
        UnsupportedError: Its attention cannot be exchanged.
    """
    before = getattr(model.config, "_attn_implementation", None)
    try:
        set_attention(model, _NAME)
    except (AttributeError, ValueError, KeyError) as error:
        raise UnsupportedError(
            f"the attention of a {type(model).__name__}",
            need="a model of transformers whose attention is a function of its registry",
            hint="Llama, Qwen or SmolLM2",
        ) from error
    _RUNNING.append(study)
    try:
        yield
    finally:
        _RUNNING.remove(study)
        set_attention(model, str(before or "sdpa"))


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: whole windows of one sequence each, causal."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2] or attention_mask is not None:
        raise UnsupportedError(
            f"a study of {query.shape[0]} sequences, {query.shape[2]} queries, "
            f"{key.shape[2]} keys{'' if attention_mask is None else ', a mask'}",
            need="one whole window without padding or sliding windows",
            hint="a model with full causal attention",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = (query[0].float(), key[0].float(), value[0].float())
    out = _RUNNING[-1].attend(module.layer_idx, *tensors, scale)
    return out.to(query.dtype)[None], None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
