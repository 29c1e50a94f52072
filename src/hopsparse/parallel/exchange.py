"""Exchanges that autograd sees: each one's backward is the other's forward. Collectives only.

Gradients of gradients are refused: autograd does not see the exchange in a backward, and would
leave out what other ranks have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .peers import Peers


class _Replicated(torch.autograd.Function):
    """What all ranks have and use in parts of their own: their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.add(grad.clone(memory_format=torch.contiguous_format), grad.dtype), None


class _Sum(torch.autograd.Function):
    """The sum of parts, which all ranks have: each part has its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, bias: Tensor | None, peers: Peers) -> Tensor:
        ctx.has_bias = bias is not None
        return peers.add(
            part.detach().clone(memory_format=torch.contiguous_format), part.dtype, bias
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        of_bias = None
        if ctx.has_bias and ctx.needs_input_grad[1]:
            # As torch does for a bias: in float32 or more, rounded once.
            wide = torch.promote_types(grad.dtype, torch.float32)
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=wide).to(grad.dtype)
        return grad, of_bias, None


class _Columns(torch.autograd.Function):
    """Columns of all ranks side by side: each rank has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, bounds: Sequence[int], peers: Peers) -> Tensor:
        ctx.bounds, ctx.rank = bounds, peers.rank
        return peers.beside(part.detach(), bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.bounds[ctx.rank] : ctx.bounds[ctx.rank + 1]], None, None


class _OwnColumns(torch.autograd.Function):
    """This rank's columns of what all ranks have: gradients come side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Sequence[int], peers: Peers) -> Tensor:
        ctx.bounds, ctx.peers = bounds, peers
        return x[..., bounds[peers.rank] : bounds[peers.rank + 1]].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.peers.beside(grad, ctx.bounds), None, None


def replicated(x: Tensor, peers: Peers) -> Tensor:
    """x, whose gradient is the sum of those of all ranks."""
    found: Tensor = _Replicated.apply(x, peers)  # type: ignore[no-untyped-call]
    return found


def summed(part: Tensor, bias: Tensor | None, peers: Peers) -> Tensor:
    """The sum of all ranks' parts [..., out] + bias."""
    found: Tensor = _Sum.apply(part, bias, peers)  # type: ignore[no-untyped-call]
    return found


def side_by_side(part: Tensor, bounds: Sequence[int], peers: Peers) -> Tensor:
    """Columns of all ranks."""
    found: Tensor = _Columns.apply(part, bounds, peers)  # type: ignore[no-untyped-call]
    return found


def own_columns(x: Tensor, bounds: Sequence[int], peers: Peers) -> Tensor:
    """This rank's columns."""
    found: Tensor = _OwnColumns.apply(x, bounds, peers)  # type: ignore[no-untyped-call]
    return found
