"""A model of Llama's build for several ranks: each keeps some heads, and a part of each MLP."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from torch import nn

from ..errors import ArgumentError
from ..formats import bounds_of
from ..nn import has_hooks
from .cut import check_layer, whole_of
from .linear import ColumnParallelSparseLinear, RowParallelSparseLinear
from .peers import Peers

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def parallelize(
    model: nn.Module, peers: Peers, *, wide_parts: bool = False, inference: bool = False
) -> list[str]:
    """Let ranks share the linear layers of each block; in place.

    q, k, v, gate and up are cut by rows, o and down by columns: attention keeps whole heads, those
    of q with the one of k and v that they share. All else stays whole on every rank. Every rank
    must hold the same weights when it is called, and make the same calls afterwards.

    Args:
        model: Modules with `q_proj`, `k_proj`, `v_proj`, `o_proj` and `head_dim`, or with
            `gate_proj`, `up_proj` and `down_proj`, anywhere: Llama, Mistral, Qwen. Layers are
            `SparseLinear` in nm format, or `nn.Linear`.
        peers: The ranks.
        wide_parts: As `RowParallelSparseLinear` has it.
        inference: Whether q, k, v, gate and up become plain layers of this rank's rows, which
            `hopsparse.fuse_blocks` may join; gradients behind them would be those of one rank.

    Returns:
        Names of the layers that are shared now.

    Raises:
        ArgumentError: There is nothing to share, a layer is watched by hooks, or sizes do not
            allow it; the model is left as it was.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mlp = nn.Module()
        >>> mlp.gate_proj, mlp.up_proj = nn.Linear(8, 64), nn.Linear(8, 64)
        >>> mlp.down_proj = nn.Linear(64, 8)
        >>> parallelize(nn.Sequential(mlp), Peers())
        ['0.gate_proj', '0.up_proj', '0.down_proj']
        >>> dist.destroy_process_group()
    """
    made: list[tuple[nn.Module, str, str, nn.Module]] = []
    for name, module in model.named_modules():
        for names, bounds_for in ((_ATTENTION, _heads), (_MLP, _features)):
            if not all(isinstance(getattr(module, each, None), nn.Module) for each in names):
                continue
            layers = [_unwatched(getattr(module, each), f"{name}.{each}") for each in names]
            bounds = bounds_for(module, layers, peers)
            for each, layer, where in zip(names, layers, bounds, strict=True):
                shard = _shared(layer, each, where, peers, wide_parts)
                if inference and isinstance(shard, ColumnParallelSparseLinear):
                    shard = shard.shard.requires_grad_(False)
                made.append((module, each, name, shard))
    if not made:
        raise ArgumentError(
            f"a {type(model).__name__} without layers to share",
            need=f"modules with {', '.join(_ATTENTION)} or {', '.join(_MLP)}",
            hint="ColumnParallelSparseLinear.from_layer(layer, peers), one layer at a time",
        )
    for module, each, _, layer in made:
        setattr(module, each, layer)
    return [f"{name}.{each}" if name else each for _, each, name, _ in made]


def _shared(
    layer: Any, name: str, bounds: Sequence[int], peers: Peers, wide_parts: bool
) -> nn.Module:
    if name in (_ATTENTION[-1], _MLP[-1]):
        return RowParallelSparseLinear.from_layer(
            layer, peers, bounds=bounds, wide_parts=wide_parts
        )
    return ColumnParallelSparseLinear.from_layer(layer, peers, bounds=bounds)


def _unwatched(layer: nn.Module, name: str) -> nn.Module:
    if has_hooks(layer):
        raise ArgumentError(
            f"{name}, which is watched by hooks",
            need="layers that nobody watches",
            hint="handle.remove(), and the hook on the new layer",
        )
    return check_layer(layer)


def _heads(attention: Any, layers: Sequence[Any], peers: Peers) -> list[tuple[int, ...]]:
    q, k, _, _ = layers
    size: Any = getattr(attention, "head_dim", None)
    is_size = isinstance(size, int) and size > 0
    if not is_size or k.out_features % size or q.out_features % k.out_features:
        raise ArgumentError(
            f"attention with head_dim {size}, {q.out_features} rows of q and {k.out_features} of k",
            need="whole heads, and as many of q for each of k",
            hint="layers that are not fused: FusedBlocks.undo()",
        )
    of_k = tuple(size * bound for bound in bounds_of(k.out_features // size, peers.ranks, 1))
    times = q.out_features // k.out_features
    of_q = tuple(times * bound for bound in of_k)
    return [of_q, of_k, of_k, of_q]


def _features(mlp: Any, layers: Sequence[Any], peers: Peers) -> list[tuple[int, ...]]:
    gate, up, down = layers
    whole = lcm(whole_of(gate, rows=True), whole_of(up, rows=True), whole_of(down, rows=False))
    return [bounds_of(down.in_features, peers.ranks, whole)] * 3
