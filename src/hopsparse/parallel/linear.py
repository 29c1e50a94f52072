"""Linear layers of which each rank has some rows, or some columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..formats import bounds_of
from ..formats.shards import check_bounds
from ..nn import SparseLinear
from ..nn._parts import checked_act
from ..ops import Plan
from ..ops._call import apply_activation
from ..ops._product import product_plan
from ..ops.spmm_nm.kernel import SWIGLU
from .cut import Layer, check_layer, cut, is_cast, learns, whole_of, write_product
from .exchange import own_columns, replicated, side_by_side, summed
from .peers import Peers


class ColumnParallelSparseLinear(nn.Module):
    """y = x @ w.T + bias of which each rank has some columns: rows of w, and their bias.

    All ranks have the same x. Its gradient is the sum of what the ranks have of it.

    Args:
        shard: This rank's rows of the layer.
        peers: The ranks.
        bounds: First output feature of each rank, and their end; of `act="swiglu"`, of the rows of
            w, which are twice as many.
        gather_output: Whether every rank gets all columns; else it gets its own.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> linear = nn.Linear(8, 64).requires_grad_(False)
        >>> layer = ColumnParallelSparseLinear.from_layer(linear, Peers())
        >>> layer(torch.ones(3, 8)).shape
        torch.Size([3, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, shard: Layer, peers: Peers, bounds: Sequence[int], *, gather_output: bool = False
    ) -> None:
        super().__init__()
        self.shard, self.peers, self.gather_output = check_layer(shard), peers, gather_output
        check_bounds(bounds, bounds[-1] if bounds else 0, peers.ranks)
        self.bounds = tuple(bounds)
        _check_shard(shard.out_features, self.bounds, peers)
        self.in_features, self.out_features = shard.in_features, bounds[-1]

    @classmethod
    def from_layer(
        cls,
        layer: Layer,
        peers: Peers,
        *,
        bounds: Sequence[int] | None = None,
        gather_output: bool = False,
    ) -> Self:
        """Take this rank's rows of a whole layer; nothing is packed again.

        Args:
            layer: A `SparseLinear` in nm format, quantized or not, or an `nn.Linear`, the same on
                every rank; it is left as it is.
            peers: The ranks.
            bounds: First row of each rank, and their end, multiples of 64 but the last; None: as
                equal as they can be.
            gather_output: Whether every rank gets all columns.

        Raises:
            ArgumentError: The layer cannot be cut so, or a rank would have nothing.
        """
        layer = check_layer(layer)
        if bounds is None:
            bounds = bounds_of(layer.out_features, peers.ranks, whole_of(layer, rows=True))
        check_bounds(bounds, layer.out_features, peers.ranks)
        shard = cut(layer, bounds[peers.rank], bounds[peers.rank + 1], rows=True)
        return cls(shard, peers, bounds, gather_output=gather_output)

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] to this rank's columns, or to all of them.

        Raises:
            ArgumentError: `x` does not fit.
        """
        if learns(x, (self.shard,)) or is_cast(x):
            part: Tensor = self.shard(replicated(x, self.peers))
            return side_by_side(part, self._columns, self.peers) if self.gather_output else part
        if not self.gather_output:
            own: Tensor = self.shard(x)
            return own
        _check_x(x, self.in_features, "x.transpose(-1, -2), if x holds tokens along its last side")
        y = x.new_empty((*x.shape[:-1], self._columns[-1]))
        return self.peers.columns_of(
            lambda part: write_product(self.shard, x, part), y, self._columns
        )

    def plan(self, x: Tensor) -> Plan:
        """What `self(x)` runs here without gradients and autocast, and how columns are gathered."""
        own = _plan_of(self.shard, x)
        if not self.gather_output:
            return own
        why = self.peers.why_no_columns(tuple(x.shape[:-1]), self._columns, x.dtype)
        return _with(own, "columns", why, self.peers)

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and this rank's rows."""
        return _told(self, "rows")

    @property
    def _columns(self) -> tuple[int, ...]:
        act = self.shard.act if isinstance(self.shard, SparseLinear) else None
        fold = 2 if act == SWIGLU else 1
        return tuple(bound // fold for bound in self.bounds)


class RowParallelSparseLinear(nn.Module):
    """y = x @ w.T + bias of which each rank adds up a part: some columns of w, and of x.

    Every rank gets the sum. On GPUs that read each other's memory the product writes its part where
    the peers find it, and one kernel adds the parts, the bias and a residual (`Peers`).

    Args:
        shard: This rank's columns of the layer, without a bias.
        peers: The ranks.
        bounds: First input feature of each rank, and their end.
        bias: [out], the same on every rank, added once; or None.
        input_is_split: Whether x holds this rank's columns, as a column-parallel layer gives them.
        wide_parts: Whether parts are float32 until they are added: half of the rounding errors,
            twice the bytes. For 2:4 weights of 16 bits; others round their parts.
        act: Activation behind the sum, as `SparseLinear.act`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> linear = nn.Linear(64, 8).requires_grad_(False)
        >>> layer = RowParallelSparseLinear.from_layer(linear, Peers())
        >>> layer(torch.ones(3, 64)).shape
        torch.Size([3, 8])
        >>> dist.destroy_process_group()
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        shard: Layer,
        peers: Peers,
        bounds: Sequence[int],
        bias: Tensor | None = None,
        *,
        input_is_split: bool = True,
        wide_parts: bool = False,
        act: str | None = None,
    ) -> None:
        super().__init__()
        self.shard, self.peers = check_layer(shard), peers
        if shard.bias is not None or (isinstance(shard, SparseLinear) and shard.act is not None):
            raise ArgumentError(
                "a shard with a bias or an activation of its own",
                need="one without: they come behind the sum",
                hint="RowParallelSparseLinear.from_layer(layer, peers)",
            )
        check_bounds(bounds, bounds[-1] if bounds else 0, peers.ranks)
        self.bounds = tuple(bounds)
        _check_shard(shard.in_features, self.bounds, peers)
        self.in_features, self.out_features = bounds[-1], shard.out_features
        if bias is not None and bias.shape != (self.out_features,):
            raise ArgumentError(
                f"a bias of shape {list(bias.shape)}",
                need=f"[{self.out_features}], one number an output feature",
                hint="bias=None, or that of the whole layer",
            )
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias)
        self.register_parameter("bias", bias)
        self.input_is_split, self.wide_parts = input_is_split, wide_parts
        self.act: str | None = checked_act(act, self)

    @classmethod
    def from_layer(
        cls,
        layer: Layer,
        peers: Peers,
        *,
        bounds: Sequence[int] | None = None,
        input_is_split: bool = True,
        wide_parts: bool = False,
    ) -> Self:
        """Take this rank's columns of a whole layer; nothing is packed again.

        Args:
            layer: A `SparseLinear` in nm format, quantized or not, or an `nn.Linear`, the same on
                every rank; it is left as it is.
            peers: The ranks.
            bounds: First column of each rank, and their end, multiples of
                `formats.whole_columns` but the last; None: as equal as they can be.
            input_is_split: Whether x will hold this rank's columns alone.
            wide_parts: Whether parts are float32 until they are added.

        Raises:
            ArgumentError: The layer cannot be cut so, or a rank would have nothing.
        """
        layer = check_layer(layer)
        if bounds is None:
            bounds = bounds_of(layer.in_features, peers.ranks, whole_of(layer, rows=False))
        check_bounds(bounds, layer.in_features, peers.ranks)
        shard = cut(layer, bounds[peers.rank], bounds[peers.rank + 1], rows=False)
        bias = None
        if layer.bias is not None:
            bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
        act = layer.act if isinstance(layer, SparseLinear) else None
        options = {"input_is_split": input_is_split, "wide_parts": wide_parts}
        return cls(shard, peers, bounds, bias, **options, act=act)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., columns of this rank], or [..., k] where the input is not split, to [..., out].

        Args:
            x: As above.
            residual: As the result, the same on every rank, added behind the sum and the
                activation; or None. With `act="swiglu"` a result has half of the columns.

        Raises:
            ArgumentError: `x` or `residual` does not fit.
        """
        if not self.input_is_split:
            _check_x(
                x, self.in_features, "input_is_split=True, if x holds this rank's columns alone"
            )
            x = own_columns(x, self.bounds, self.peers)
        _check_x(x, self.shard.in_features, "input_is_split=False, if x holds all columns")
        casts = is_cast(x)
        if self.bias is not None and self.bias.dtype != x.dtype and not casts:
            raise ArgumentError(
                f"x of {x.dtype} and a bias of {self.bias.dtype}",
                need="one dtype",
                hint="x.to(layer.bias.dtype), or layer.to(x.dtype)",
            )
        shape = (*x.shape[:-1], self.out_features)
        if residual is not None:
            width = self.out_features // (2 if self.act == SWIGLU else 1)
            _check_residual(residual, (*x.shape[:-1], width), residual.dtype if casts else x.dtype)
        learnt = torch.is_grad_enabled() and residual is not None and residual.requires_grad
        if learnt or casts or learns(x, (self,)):
            y = summed(self.shard(x), self.bias, self.peers)
            y = apply_activation(y, self.act or "none")
            return y if residual is None else y + residual
        behind = None if self.act is None else residual
        inside = residual if behind is None else None
        y = self.peers.sum_of(
            lambda part: write_product(self.shard, x, part),
            x.new_empty(shape),
            self._part_dtype(x.dtype),
            self.bias,
            inside,
        )
        y = apply_activation(y, self.act or "none")
        return y if behind is None else y + behind

    def plan(self, x: Tensor) -> Plan:
        """What `self(x)` runs here without gradients and autocast, and how parts are added."""
        if not self.input_is_split:
            x = x[..., self.bounds[self.peers.rank] : self.bounds[self.peers.rank + 1]]
        shape = (*x.shape[:-1], self.out_features)
        why = self.peers.why_no_sum(shape, x.dtype, self._part_dtype(x.dtype))
        return _with(_plan_of(self.shard, x), "parts", why, self.peers)

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and this rank's columns."""
        return _told(self, "columns")

    def _part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if self.wide_parts else dtype


def _check_shard(side: int, bounds: Sequence[int], peers: Peers) -> None:
    start, stop = bounds[peers.rank], bounds[peers.rank + 1]
    if side != stop - start:
        raise ArgumentError(
            f"a shard of {side} on rank {peers.rank}",
            need=f"{stop - start}, as the bounds {list(bounds)} say",
            hint="from_layer(layer, peers), which cuts it",
        )


def _check_x(x: Tensor, k: int, hint: str) -> None:
    if x.ndim < 1 or x.shape[-1] != k:
        raise ArgumentError(
            f"linear: x of shape {list(x.shape)}",
            need=f"[..., {k}]",
            hint=hint,
        )


def _check_residual(residual: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if residual.shape != shape or residual.dtype != dtype:
        raise ArgumentError(
            f"a residual {list(residual.shape)} of {residual.dtype}",
            need=f"{list(shape)} of {dtype}",
            hint="residual.expand(...).to(x.dtype)",
        )


def _plan_of(shard: Layer, x: Tensor) -> Plan:
    if isinstance(shard, SparseLinear):
        return shard.plan(x)
    name = product_plan("linear", x).name
    return Plan("linear", name, "the shard is dense")


def _with(plan: Plan, what: str, why: str | None, peers: Peers) -> Plan:
    how = f"{what} by the kernel that reads peers' memory"
    if why is not None:
        how = f"{what} by collectives of {peers.backend}: {why}"
    return replace(plan, why=f"{plan.why}; {how}")


def _told(layer: ColumnParallelSparseLinear | RowParallelSparseLinear, what: str) -> str:
    start, stop = layer.bounds[layer.peers.rank], layer.bounds[layer.peers.rank + 1]
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"{what} {start} to {stop} on rank {layer.peers.rank} of {layer.peers.ranks}"
    )
