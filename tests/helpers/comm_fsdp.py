"""What ranks do in the tests of gradients under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hopsparse.comm import HybridState, load_state, register_fsdp
from tests.helpers.comm_ranks import batch


class Uneven(nn.Module):
    """Rows that no number of ranks divides, and a bias with fewer values than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(24, 37)
        self.inner = nn.Sequential(nn.Tanh(), nn.Linear(37, 41), nn.Tanh())
        self.last = nn.Linear(41, 24)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale * self.last(self.inner(self.first(x)))
        return y


def placed(
    replicas: int, shards: int, state: HybridState, dtype: torch.dtype = torch.float32
) -> Uneven:
    """The model on `replicas` x `shards` ranks; without replicas gradients go between shards."""
    mesh = init_device_mesh(
        "cpu", (max(replicas, 1), shards), mesh_dim_names=("replicate", "shard")
    )
    model = Uneven().to(dtype)
    fully_shard(model.inner, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    register_fsdp(model, state, replicas=mesh["replicate"].get_group() if replicas else None)
    return model


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))


def stepped(
    rank: int, replicas: int, shards: int, options: dict[str, Any], steps: int
) -> list[dict[str, Any]]:
    """For each step this rank's gradients, and what it kept after; weights stay as they are."""
    state = HybridState(**options)
    model = placed(replicas, shards, state)
    found = []
    for step in range(steps):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.to_local().clone()
        kept = {
            name: torch.zeros(each.numel) if each.residual is None else each.residual.clone()
            for name, each in state.memory.kept.items()
        }
        found.append({"gradients": gradients, "kept": kept})
    return [*found, {"sent": state.counters.sent_bytes, "dense": state.counters.dense_bytes}]


def masked(rank: int, replicas: int, shards: int) -> dict[str, int]:
    """How many values of each parameter have no momentum after one step, of how many."""
    state = HybridState(momentum=0.5, remainder=None, k=0.25, dense_below=0)
    model = placed(replicas, shards, state)
    loss_of(model, rank, 0).backward()
    found = {}
    for name, each in state.memory.kept.items():
        assert each.velocity is not None
        found[name] = int((each.velocity == 0).sum())
    return found


def low_precision(rank: int, replicas: int, shards: int, dtype: torch.dtype) -> bool:
    """Whether three steps give gradients of this dtype that are all finite and not all zero."""
    model = placed(replicas, shards, HybridState(k=0.05, dense_below=50), dtype)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step, dtype).backward()
    gradients = [each.grad.to_local() for each in model.parameters() if each.grad is not None]  # type: ignore[attr-defined]
    finite = all(bool(torch.isfinite(each).all()) for each in gradients)
    return finite and {each.dtype for each in gradients} == {dtype} and bool(gradients[1].any())


def with_nan(rank: int, replicas: int, shards: int) -> dict[str, Any]:
    """One rank has NaN in one step; it must be gone in the next."""
    state = HybridState(k=0.05, dense_below=50)
    model = placed(replicas, shards, state)
    found: dict[str, Any] = {}
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, rank, step)
        (loss * torch.nan if (step, rank) == (1, 1) else loss).backward()
        gradient = model.last.weight.grad
        assert isinstance(gradient, DTensor)
        found[f"finite{step}"] = bool(torch.isfinite(gradient.to_local()).all())
    return found


def unused(rank: int, with_zeros: bool) -> list[float]:
    """A parameter without a gradient, beside others that have one."""
    model = nn.Linear(8, 8)
    model.extra = nn.Parameter(torch.ones(6))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    register_fsdp(model, HybridState())
    if with_zeros:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    model(torch.ones(1, 8)).sum().backward()
    assert isinstance(model.extra.grad, DTensor)
    return [float(each) for each in model.extra.grad.to_local()]


def native(rank: int) -> None:
    """Replicas and shards on one mesh, as FSDP has it itself."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    register_fsdp(fully_shard(Uneven(), mesh=mesh), HybridState())


def by_columns(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(
        nn.Linear(8, 8, bias=False), mesh=mesh, shard_placement_fn=lambda _: Shard(1)
    )
    register_fsdp(model, HybridState())


def not_sharded(rank: int) -> None:
    register_fsdp(Uneven(), HybridState())


def saved(rank: int, replicas: int, shards: int, folder: Path) -> dict[str, Tensor]:
    state = HybridState(k=0.02, dense_below=50, momentum=0.5)
    model = placed(replicas, shards, state)
    for step in range(2):
        loss_of(model, rank, step).backward()
    save({"comm": state}, checkpoint_id=folder)
    return state.memory.tensors(state.options.parts_of)


def loaded(rank: int, replicas: int, shards: int, folder: Path) -> dict[str, Tensor]:
    state = HybridState(k=0.02, dense_below=50, momentum=0.5)
    model = placed(replicas, shards, state)
    load_state(state, folder)
    tensors = state.memory.tensors(state.options.parts_of)
    found = {key: each.clone() for key, each in tensors.items()}
    loss_of(model, rank, 2).backward()
    return found
