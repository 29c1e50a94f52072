"""The hybrid exchange under FSDP2: between shards, or between replicas of a sharded model.

FSDP2 has two places for it. Along one dimension gradients are scattered, and we scatter them. With
replicas beside the shards, the shards are scattered by FSDP over the fast links inside a machine,
and the replicas averaged by us over the slow ones; FSDP's own HSDP averages replicas before it asks
anyone, so the model is sharded along one dimension, and the replicas are given to us.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ..errors import ArgumentError, UnsupportedError
from .average import Part, average
from .collective import Group
from .reduce_scatter import Sharded, scatter_mean
from .state import HybridState, Place

_NEEDED = (
    "set_all_reduce_hook",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
)


@dataclass(frozen=True)
class _Cut:
    """A parameter as FSDP cuts it.

    Attributes:
        name: Its name in the model.
        numel: Its values.
        part: Values of one rank's part, filled up.
        start: The first value of this rank's part.
        own: Values of this rank's part, not filled up.
    """

    name: str
    numel: int
    part: int
    start: int
    own: int


def register_fsdp(
    model: nn.Module, state: HybridState, *, replicas: Group | None = None
) -> HybridState:
    """Let a state reduce the gradients of a model that `fully_shard` was applied to.

    Args:
        model: Sharded along one dimension of a mesh, by the first dimension of each parameter.
        state: What to send. Without replicas it keeps what was not sent of whole parameters, on
            every rank; with them of this rank's shards.
        replicas: Ranks that have the same shards of other replicas; the model starts equal there.
            None: there are none, and gradients are exchanged between the shards.

    Returns:
        The state.

    Raises:
        ArgumentError: `fully_shard` was applied to no module.
        UnsupportedError: Another sharding, or a version of torch that has no hook for it.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        >>> model = fully_shard(nn.Linear(8, 2), mesh=mesh["shard"])
        >>> replicas = mesh["replicate"].get_group()
        >>> state = register_fsdp(model, HybridState(), replicas=replicas)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> model.weight.grad.full_tensor().unique()
        tensor([1.])
        >>> dist.destroy_process_group()
    """
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise ArgumentError(
            f"a {type(model).__name__} without sharded modules",
            need="a model that fully_shard was applied to",
            hint="hopsparse.comm.register for DistributedDataParallel",
        )
    missing = [name for name in _NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise UnsupportedError(
            f"FSDPModule of torch {torch.__version__} without {', '.join(missing)}",
            need="a version that has them",
            hint="torch 2.11 or newer",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shards = _shards(model)
    for module in modules:
        cuts = [_cut(names[id(each)], each) for each in _managed(cast(nn.Module, module))]
        if cuts:
            _hook(module, state, cuts, shards, replicas)
    if replicas is None:
        state.group = shards
        state.place = Place(shards.rank(), shards.size())
    else:
        state.group = replicas
        state.place = Place(replicas.rank(), replicas.size(), shards.rank(), shards.size())
    return state


def _hook(
    module: FSDPModule,
    state: HybridState,
    cuts: Sequence[_Cut],
    shards: Group,
    replicas: Group | None,
) -> None:
    """Have one module's gradients reduced, and nothing multiplied behind our back."""
    module.set_force_sum_reduction_for_comms(True)
    for cut in cuts:
        kept = state.memory.of(cut.name, cut.numel if replicas is None else cut.own)
        kept.start = 0 if replicas is None else cut.start
    if replicas is None:
        module.set_gradient_divide_factor(1.0)
        module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(state, cuts)))
    else:
        # FSDP divides by the shards itself; the mean over the replicas is ours.
        module.set_gradient_divide_factor(float(shards.size()))
        module.set_all_reduce_hook(_AllReduce(state, cuts, replicas))


@dataclass(frozen=True)
class _AllReduce:
    """The mean over replicas of what FSDP has scattered."""

    state: HybridState
    cuts: Sequence[_Cut]
    replicas: Group

    def __call__(self, reduce_output: Tensor) -> None:
        """Average in place."""
        _check(reduce_output.numel(), self.cuts, 1)
        parts, start = [], 0
        for cut in self.cuts:
            parts.append(Part(cut.name, reduce_output[start : start + cut.own]))
            start += cut.part
        average(self.state, parts, self.replicas)


@dataclass(frozen=True)
class _ReduceScatter:
    """What FSDP calls in the place of torch.distributed.reduce_scatter."""

    state: HybridState
    cuts: Sequence[_Cut]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Group,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the mean into `output_tensor`."""
        _check(input_tensor.numel(), self.cuts, group.size())
        gradients = input_tensor.view(group.size(), -1)
        parameters, start = [], 0
        for cut in self.cuts:
            ends = slice(start, start + cut.part)
            given = Sharded(cut.name, gradients[:, ends], cut.numel, output_tensor[ends])
            parameters.append(given)
            start += cut.part
        scatter_mean(self.state, parameters, group)


def _check(numel: int, cuts: Sequence[_Cut], ranks: int) -> None:
    expected = ranks * sum(cut.part for cut in cuts)
    if numel != expected:
        raise UnsupportedError(
            f"FSDP reduces {numel} values of {', '.join(cut.name for cut in cuts)}",
            need=f"all {expected} of them: a gradient for each parameter that is trained",
            hint="model.set_reduce_scatter_unused_params(True), or parameters without gradients "
            "in modules of their own",
        )


def _shards(model: nn.Module) -> Group:
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, DTensor)}
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
        raise UnsupportedError(
            f"parameters on {len(meshes)} meshes of {sorted({each.ndim for each in meshes})} "
            "dimensions",
            need="all of them on one mesh of one dimension",
            hint="fully_shard(module, mesh=mesh['shard']), and replicas="
            "mesh['replicate'].get_group()",
        )
    return next(iter(meshes)).get_group()


def _managed(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a module in the order in which FSDP flattens them: children come first."""
    seen: set[int] = set()

    def below(each: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(id(each))
        for child in each.children():
            if id(child) not in seen and not isinstance(child, FSDPModule):
                yield from below(child)
        for parameter in each.parameters(recurse=False):
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                yield parameter

    yield from below(module)


def _cut(name: str, parameter: nn.Parameter) -> _Cut:
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        raise UnsupportedError(
            f"{name}: {getattr(parameter, 'placements', 'not sharded')}",
            need="parameters that are sharded by their first dimension",
            hint="fully_shard without shard_placement_fn",
        )
    mesh = parameter.device_mesh
    rows, row = parameter.shape[0], math.prod(parameter.shape[1:])
    of_rank = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * of_rank, rows)
    own = min(start + of_rank, rows) - start
    return _Cut(name, rows * row, of_rank * row, start * row, own * row)
