"""Layers that train: a dense weight with zeros that stay zeros, until it is packed again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..formats import NMPattern, Scheme
from ..nn import SparseLinear
from ..prune import keep_mask
from ..quant import Rounding, SharedInput, fake_inputs, fake_weight, weight_scales
from .storage import Storage, stored_entries


class MaskedLinear(nn.Module):
    """The layer of a `SparseLinear`, with its weight [out, k] as a dense trainable parameter.

    Entries that train are the places that the format stores: in `nm`, `bsr` and `bsr24` every slot,
    also one that holds a zero, elsewhere the non-zeros. All others are pruned: they are exact zeros
    and their gradient is zero. In SR-STE mode (`select` was called) pruned entries live on in
    `weight`, are left out of the product, get the gradient of the product without them, and are
    pulled towards zero (arXiv:2102.04010, equation 9).

    A quantized weight trains in float32 and is rounded, like its inputs, in every product; the
    gradient passes the rounding unchanged. Its scales follow the weight when `rescale` is called.
    Rounding is in float32. Under autocast the product takes the rounded numbers, as it takes any
    others, to the nearest of 16 bits, which most codes times scales are not.

    Args:
        sparse: The layer; its bias is shared.
        shared: What layers of a model have in common, so that those that are called with one
            tensor round it once; None: the layer rounds for itself.

    Raises:
        ArgumentError: Its values are not float32.

    Example:
        >>> linear = nn.Linear(8, 2).requires_grad_(False)
        >>> linear.weight.view(-1, 4)[:, 2:] = 0.0
        >>> layer = MaskedLinear(SparseLinear.from_linear(linear))
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> layer.weight.grad[0].tolist()
        [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    pruned: Tensor
    scales: Tensor | None
    input_scale: Tensor | None

    def __init__(self, sparse: SparseLinear, shared: SharedInput | None = None) -> None:
        super().__init__()
        matrix = sparse.matrix
        if matrix.dtype != torch.float32:
            raise ArgumentError(
                f"a sparse weight in {str(matrix.dtype).removeprefix('torch.')}",
                need="float32: small steps vanish in fewer bits",
                hint="hopsparse.load(folder, dtype=torch.float32), or model.float()",
            )
        self.weight = nn.Parameter(matrix.to_dense())
        self.register_parameter("bias", sparse.bias)
        self.register_buffer("pruned", ~stored_entries(matrix), persistent=False)
        self._storage = Storage.of(matrix)
        self.register_buffer("scales", None, persistent=False)
        self.register_buffer("input_scale", self._storage.input_scale, persistent=False)
        self.rescale()
        self._shared = shared
        self._how: Hashable = None
        if self._storage.scheme is not None:
            self._how = Rounding(self._storage.scheme, self.input_scale).key()
        self._decay: float | None = None
        self.train(sparse.training)

    @property
    def pattern(self) -> NMPattern | None:
        """The N:M of an nm weight."""
        return self._storage.pattern

    @property
    def selecting(self) -> bool:
        """Whether pruned entries train on (SR-STE)."""
        return self._decay is not None

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] -> [..., out]."""
        keep: Any = _Kept.apply
        kept: Tensor = keep(self.weight, self.pruned, self.selecting)
        scheme = self._storage.scheme
        if scheme is None:
            return F.linear(x, kept, self.bias)
        rounded = fake_weight(kept, scheme, self.scales)
        return F.linear(self._rounded(x, scheme), rounded, self.bias)

    def _rounded(self, x: Tensor, scheme: Scheme) -> Tensor:
        if self._shared is None:
            return fake_inputs(x, scheme, self.input_scale)
        return self._shared.of(
            x, self._how, lambda each: fake_inputs(each, scheme, self.input_scale)
        )

    @torch.no_grad()
    def rescale(self) -> None:
        """Choose the scales of a quantized weight anew, as `packed` will."""
        if self._storage.scheme is not None:
            kept = self.weight.detach().masked_fill(self.pruned, 0.0)
            self.scales = weight_scales(kept, self._storage.scheme)

    @torch.no_grad()
    def select(self, decay: float) -> None:
        """Prune anew: keep the largest of each group of M, and let the others train on.

        Raises:
            ArgumentError: The weight is not N:M, or holds a NaN.
        """
        if self.pattern is None:
            raise ArgumentError(
                f"masks='sr-ste' for a weight stored as {self._storage.fmt}",
                need="an N:M pattern stored as nm",
                hint="masks='fixed'",
            )
        self._decay = decay
        torch.logical_not(keep_mask(self.weight.abs(), self.pattern), out=self.pruned)

    @torch.no_grad()
    def pull(self) -> None:
        """Add the pull of SR-STE to the gradient: once a step, however many parts it had."""
        if self._decay is not None and self.weight.grad is not None:
            self.weight.grad.add_(self.weight.masked_fill(~self.pruned, 0.0), alpha=self._decay)

    @torch.no_grad()
    def freeze(self) -> None:
        """Keep the present masks from here on; pruned entries become zeros."""
        self._decay = None
        self.clean()

    @torch.no_grad()
    def clean(self) -> None:
        """Make pruned entries +0.0 again, whatever an optimizer did to them; not in SR-STE mode."""
        if self._decay is None:
            self.weight.masked_fill_(self.pruned, 0.0)

    def is_clean(self) -> bool:
        """Whether every pruned entry is +0.0, bit by bit."""
        bits = self.weight.detach().view(torch.int32)
        return not bool((bits[self.pruned] != 0).any())

    @torch.no_grad()
    def packed(self) -> SparseLinear:
        """The layer in its old format with its new weight."""
        weight = self.weight.detach().masked_fill(self.pruned, 0.0)
        return SparseLinear(self._storage.pack(weight), self.bias).train(self.training)

    def extra_repr(self) -> str:
        """Sizes and what trains."""
        out, k = self.weight.shape
        return f"in_features={k}, out_features={out}, {self._storage.fmt}"


class _Kept(torch.autograd.Function):
    """The weight that is multiplied; pruned entries get no gradient, or in SR-STE that of kept."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pruned: Tensor, selecting: bool) -> Tensor:
        ctx.selecting = selecting
        if selecting:
            return weight.masked_fill(pruned, 0.0)
        ctx.save_for_backward(pruned)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.selecting:
            return grads[0], None, None
        (pruned,) = ctx.saved_tensors
        return grads[0].masked_fill(pruned, 0.0), None, None
