"""Reorder channels inside a block so that N:M keeps more, at no cost when the model runs.

The channels between two layers have no order of their own: rows of what makes them and columns of
what takes them may be permuted together. In a gated MLP those are the rows of gate and up and the
columns of down, all of them freely. In attention they are the rows of v and the columns of o within
a head; query heads that share a value head share its order. Rotary positions tie the channels of q
and k to their places, and the residual stream is shared by all blocks: both stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..formats import NMPattern
from ..prune import Activations, Recipe, spread_columns
from ._family import Channels, Family
from ._watch import watch_inputs


@torch.no_grad()
def permute_block(
    block: nn.Module, path: str, activations: Activations, recipe: Recipe, family: Family
) -> None:
    """Permute the inner channels of a dense block in place; what it computes stays the same.

    Nothing moves where nothing is won.

    Args:
        block: A decoder block of `family`, dense.
        path: Its path in the model, for `recipe.form_of`.
        activations: Its inputs.
        recipe: Says which layers become N:M.
        family: Which layers make and take inner channels.

    Raises:
        UnsupportedError: scipy is not installed.
    """
    wanted = {}
    for channels in family.channels:
        pattern = recipe.form_of(f"{path}.{channels.taker}").pattern
        layers = [block.get_submodule(name) for name in (*channels.makers, channels.taker)]
        linear = all(isinstance(layer, nn.Linear) for layer in layers)
        # A taker that the pattern does not fit stays dense.
        if linear and isinstance(pattern, NMPattern) and not _width(layers[-1]) % pattern.m:
            wanted[channels.taker] = (channels, pattern)
    squares: dict[str, Tensor] = {}

    def look(name: str, rows: Tensor) -> None:
        sums = rows.float().square().sum(0)
        squares[name] = squares[name] + sums if name in squares else sums

    watch_inputs(block, list(wanted), activations, look)
    for taker, (channels, pattern) in wanted.items():
        if taker in squares:
            _permute(block, channels, pattern, squares[taker])


def _width(layer: nn.Module) -> int:
    return cast(nn.Linear, layer).in_features


def _permute(block: nn.Module, channels: Channels, pattern: NMPattern, squares: Tensor) -> None:
    """Reorder what lies between the makers and the taker."""
    makers = [cast(nn.Linear, block.get_submodule(name)) for name in channels.makers]
    taker = cast(nn.Linear, block.get_submodule(channels.taker))
    made, taken = makers[0].out_features, taker.in_features
    width = cast(Any, block.get_submodule(channels.heads)).head_dim if channels.heads else made
    importance = taker.weight.float().square() * squares
    if taken % made or made % width or width % pattern.m:
        return
    heads, sharers = made // width, taken // made
    # [rows, head, sharer, channel] -> for each head the rows of all who share its channels.
    parts = importance.view(-1, heads, sharers, width).permute(1, 2, 0, 3)
    orders = [spread_columns(part.reshape(-1, width), pattern) for part in parts]
    rows = torch.cat([head * width + order for head, order in enumerate(orders)])
    columns = torch.cat([h * width + orders[h // sharers] for h in range(heads * sharers)])
    for maker in makers:
        maker.weight.copy_(maker.weight[rows])
        if maker.bias is not None:
            maker.bias.copy_(maker.bias[rows])
    taker.weight.copy_(taker.weight[:, columns])
