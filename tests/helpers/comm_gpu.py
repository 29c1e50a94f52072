"""What ranks do in the tests of gradients over NCCL; rank r has GPU r."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hopsparse.comm import HybridState, aggregate, register, register_fsdp
from tests.helpers.comm_ranks import gradient
from tests.helpers.waiting import nothing_waits

_SIZES = ((300, 200), (200,), (70_001,), (7,))


def means(rank: int, device: str, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """The means of three steps, and what was kept; one gradient in the second is not finite."""
    state, found = HybridState(**options), []
    for step in range(3):
        for number, shape in enumerate(_SIZES):
            given = gradient(rank, 10 * step + number, shape).to(dtype)
            if (step, number, rank) == (1, 0, 1):
                given.view(-1)[5] = torch.inf
            found.append(aggregate(given.to(device), state=state, name=str(number)))
    found += [kept.residual for kept in state.memory.kept.values() if kept.residual is not None]
    return [*found, torch.tensor(state.counters.settle().skipped)]


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64)).to(device)


def trained(rank: int, device: str, bucket_mb: float) -> list[Tensor]:
    """Weights after a few steps under DDP, whose checksums were compared in each."""
    model = _model(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    register(ddp, HybridState(k=0.01, remainder="int4", checksum=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = gradient(rank, step, (16, 256)).to(device)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def without_waiting(rank: int) -> int:
    """How many exchanges were made while a wait for the GPU was an error."""
    state = HybridState(k=0.01, remainder="int4")
    tensor = torch.randn(100_000, device="cuda")
    aggregate(tensor, state=state)  # ranks agree, and kernels are loaded
    with nothing_waits():
        for _ in range(3):
            aggregate(tensor, state=state)
    return state.counters.calls


def sharded(rank: int) -> list[Tensor]:
    """Weights after a few steps under FSDP2."""
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    model = fully_shard(_model("cuda"), mesh=mesh)
    register_fsdp(model, HybridState(k=0.01, remainder="int4", dense_below=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(gradient(rank, step, (16, 256)).cuda()).square().mean().backward()
        optimizer.step()
    return [each.full_tensor() for each in model.parameters()]  # type: ignore[attr-defined]
