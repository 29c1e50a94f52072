"""What ranks do in the tests of gradients: functions that a process can be started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from hopsparse.comm import (
    HybridState,
    Link,
    PlannedState,
    aggregate,
    load_state,
    register,
    register_planned,
)
from tests.helpers.ranks import die

#: Odd, empty, without dimension, and with more values than 15 and 16 bits count.
SHAPES = ((), (0,), (1,), (7,), (129,), (3, 5, 7), (33_000,), (300, 301))


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """What a rank has in a step: the same wherever it is computed."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(shape, generator=generator)
    return values * torch.rand(shape, generator=generator).square()


def means(
    rank: int, options: dict[str, Any], shape: tuple[int, ...], steps: int
) -> dict[str, list[Tensor]]:
    """The means of some steps, and what was kept after each."""
    state = HybridState(**options)
    found: dict[str, list[Tensor]] = {"means": [], "residuals": []}
    for step in range(steps):
        found["means"].append(aggregate(gradient(rank, step, shape), state=state))
        kept = state.memory.kept["tensor"].residual
        found["residuals"].append(torch.zeros(shape) if kept is None else kept.view(shape).clone())
    return found


def integers_of(rank: int) -> Tensor:
    """70 blocks of small integers, each with more sevens than are sent exactly."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-7, 8, (70, 128), generator=generator).float()
    values[:, 5:105:5] = 7
    return values


def integers(rank: int) -> dict[str, Tensor]:
    state = HybridState(k=0.001, remainder="int4")
    mean = aggregate(integers_of(rank), state=state)
    residual = state.memory.kept["tensor"].residual
    assert residual is not None
    return {"mean": mean, "residual": residual}


def of_every_shape(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    state = HybridState(checksum=True, **options)
    found = []
    for place, shape in enumerate(SHAPES):
        tensor = gradient(rank, place, shape).to(dtype)
        before = tensor.clone()
        mean = aggregate(tensor, state=state, name=f"{place}")
        assert mean.dtype == dtype
        assert mean.shape == shape
        assert torch.equal(tensor, before)
        found.append(mean)
    turned = gradient(rank, 0, (40, 30)).to(dtype)
    found.append(aggregate(turned.T, state=state, name="turned"))
    return found


class Small(nn.Module):
    """Parameters below and above the least size, of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 24)
        self.unmoved = nn.Parameter(torch.randn(30, 30))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y + 0 * self.unmoved.sum()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(77 * step + rank)
    x = torch.randn(6, 24, generator=generator)
    return x, x.flip(1).square()


def trained(
    rank: int, options: dict[str, Any], bucket_mb: float, steps: int, lr: float = 0.05
) -> dict[str, Any]:
    """Train under DDP; gives the weights, and what was counted."""
    model = Small()
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    state = register(ddp, HybridState(dense_below=100, checksum=True, **options))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=lr)
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return {**dict(model.named_parameters()), "counters": state.counters.facts()}


def channels_last(rank: int) -> Tensor:
    """A gradient in the order of its parameter, which is not that of its dimensions."""
    torch.manual_seed(1)
    model = nn.Conv2d(6, 8, 3, bias=False).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    register(ddp, HybridState())
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-2, 3, (2, 6, 5, 5), generator=generator).float()
    ddp(x).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_contiguous()
    return model.weight.grad.contiguous()


def mismatched(rank: int, options: list[dict[str, Any]]) -> None:
    """Each rank has options of its own."""
    trained(rank, options[rank], 1.0, 2)


def late(rank: int) -> Tensor:
    """Rank 1 reduced this tensor once more than rank 0, alone."""
    state = HybridState()
    if rank == 1:
        state.memory.of("tensor", 5000).steps = 1
    return aggregate(torch.ones(5000), state=state)


def unequal(rank: int) -> None:
    """One weight of rank 1 is changed after the second step."""
    model = Small()
    ddp = DistributedDataParallel(model)
    register(ddp, HybridState(dense_below=100, checksum=True))
    for step in range(4):
        if step == 2 and rank == 1:
            with torch.no_grad():
                model.first.weight[3, 3] += 1e-7
        if step == 3:
            raise AssertionError("nobody noticed")
        x, _ = batch(rank, step)
        ddp(x).sum().backward()


def dying(rank: int) -> Tensor:
    """Rank 1 is killed in the third step."""
    state = HybridState()
    for step in range(3):
        if step == 2 and rank == 1:
            die()
        found = aggregate(gradient(rank, step, (9000,)), state=state)
    return found


def infinite(rank: int, value: float) -> dict[str, Any]:
    """In step 1 rank 1 has one value that is no number, in one of two tensors."""
    state = HybridState(k=0.01, momentum=0.5)
    found: dict[str, Any] = {}
    for step in range(3):
        if step == 1:
            kept = state.memory.kept["bad"]
            assert kept.residual is not None
            assert kept.velocity is not None
            before = (kept.residual.clone(), kept.velocity.clone())
        bad, good = gradient(rank, step, (9000,)), gradient(rank, step + 10, (9000,))
        if step == 1 and rank == 1:
            bad[4321] = value
        found[f"bad{step}"] = aggregate(bad, state=state, name="bad")
        found[f"good{step}"] = aggregate(good, state=state, name="good")
        if step == 1:
            assert kept.residual is not None
            assert kept.velocity is not None
            found["kept"] = torch.equal(kept.residual, before[0]) and torch.equal(
                kept.velocity, before[1]
            )
    return {**found, "skipped": state.counters.skipped}


def scaled(rank: int) -> dict[str, Any]:
    """fp32 under a scaler; in step 2 rank 1 overflows."""
    model = Small()
    ddp = DistributedDataParallel(model)
    state = register(ddp, HybridState(dense_below=100, k=0.01))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scales, moved, residual = [], [], torch.zeros(0)
    for step in range(4):
        x, y = batch(rank, step)
        if step == 2 and rank == 1:
            y = y * 1e38
        state.follow_scale(scaler.get_scale())
        before = model.first.weight.detach().clone()
        if step == 3:
            kept = state.memory.kept["second.weight"].residual
            assert kept is not None
            residual = kept.clone()
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(ddp(x), y)).backward()
        scaler.step(optimizer)
        if step == 2:
            kept = state.memory.kept["second.weight"].residual
            assert kept is not None
            unscaled = kept.clone()
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, model.first.weight))
    return {"scales": scales, "moved": moved, "halved": torch.equal(residual, unscaled / 2)}


def with_momentum(rank: int, steps: int) -> list[Tensor]:
    """Means of small integers with momentum 1/2, which float32 holds exactly."""
    state = HybridState(momentum=0.5, dense_below=10_000)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        values = torch.randint(-4, 5, (600,), generator=generator).float()
        found.append(aggregate(values, state=state))
    return found


def masked(rank: int) -> dict[str, Tensor]:
    """Momentum of what was sent is gone, where nothing else is sent."""
    state = HybridState(momentum=0.5, remainder=None, k=0.25, dense_below=0)
    values = torch.tensor([1.0, -8.0, 2.0, 4.0]) * (rank + 1)
    sent = aggregate(values, state=state)
    kept = state.memory.kept["tensor"]
    assert kept.velocity is not None
    return {"sent": sent, "velocity": kept.velocity}


def clipped(rank: int, size: float) -> Tensor:
    """Four values of the same size: their norm is twice that."""
    return aggregate(torch.full((4,), size), state=HybridState(clip=4.0))


def resumable(
    rank: int, folder: Path, steps: int, save_at: int, die_at: int, resume: bool
) -> dict[str, Any]:
    """Train, save once, perhaps die; or begin with what was saved."""
    torch.manual_seed(rank)
    model = Small()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
    options = {"k": 0.02, "every": 3, "warmup": 6, "momentum": 0.5}
    state = register(ddp, HybridState(dense_below=100, **options))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    first = 0
    if resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        everything = {"model": model_state, "optimizer": optimizer_state, "comm": state}
        load(everything, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=everything["model"],
            optim_state_dict=everything["optimizer"],
        )
        first = save_at
    for step in range(first, steps):
        if step == die_at and rank == 1:
            die()
        if step == save_at and not resume:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            everything = {"model": model_state, "optimizer": optimizer_state, "comm": state}
            save(everything, checkpoint_id=folder)
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    kept = {
        name: each.residual for name, each in state.memory.kept.items() if each.residual is not None
    }
    return {
        **dict(model.named_parameters()),
        **{f"kept {name}": each for name, each in kept.items()},
    }


def saving(rank: int, folder: Path) -> dict[str, Tensor]:
    """Three steps, then a checkpoint; gives what this rank kept."""
    state = HybridState(k=0.01, momentum=0.5, warmup=9)
    for step in range(3):
        aggregate(gradient(rank, step, (9000,)), state=state)
        aggregate(gradient(rank, step, (70,)), state=state, name="small")
    state.follow_scale(256.0)
    save({"comm": state}, checkpoint_id=folder)
    return state.memory.tensors(state.options.parts_of)


def loading(rank: int, folder: Path, name: str = "comm", numel: int = 9000) -> dict[str, Tensor]:
    """Take it over; gives what this rank has now, and the mean of one step more."""
    state = HybridState(k=0.01, momentum=0.5, warmup=9, checksum=True)
    for parameter, size in (("tensor", numel), ("small", 70)):
        state.memory.of(parameter, size)
    load_state(state, folder, name=name)
    assert state.loss_scale == 256.0
    found = state.memory.tensors(state.options.parts_of)
    found = {key: value.clone() for key, value in found.items()}
    return {**found, "mean": aggregate(gradient(rank, 3, (9000,)), state=state)}


def loading_as_torch_does(rank: int, folder: Path) -> None:
    state = HybridState(k=0.01, momentum=0.5)
    for parameter, size in (("tensor", 9000), ("small", 70)):
        state.memory.of(parameter, size)
    load({"comm": state}, checkpoint_id=folder)


# Costs of a link that make each of the choices for a bucket of 1,000 values or more.
LINKS = {
    "dense": Link(1e-5, 1e-9, 1e-9, 1e-5, 1e-9, 1e-6, 1e-6),
    "bf16": Link(1e-5, 1e-6, 1e-6, 1e-5, 1e-6, 1e-3, 1e-3),
    "hybrid": Link(1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-9, 1e-2),
    "low-rank": Link(1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-3, 1e-9),
}


def planned(rank: int, method: str, nan_at: int) -> dict[str, Any]:
    """Train as if the link were such; the plan is made anew when buckets are."""
    model = Small()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    state = HybridState(dense_below=100, k=0.02)
    plan = PlannedState(state, rank=2 if method == "low-rank" else None)
    plan.link = LINKS[method]
    register_planned(ddp, plan)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses, finite = [], []
    for step in range(6):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        (loss * torch.nan if (step, rank) == (nan_at, 1) else loss).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        finite.append(all(bool(torch.isfinite(each).all()) for each in gradients))
        if finite[-1]:
            optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "weights": dict(model.named_parameters()),
        "finite": finite,
        "losses": losses,
        "methods": sorted({each.method for each in plan.plans.values()}),
        "counters": state.counters.facts(),
        "described": plan.describe(),
    }


def measured(rank: int, folder: Path) -> dict[str, Any]:
    """A link that is measured, saved, and taken over."""
    found = []
    for _ in range(2):
        plan = PlannedState(HybridState())
        ddp = DistributedDataParallel(Small())
        register_planned(ddp, plan)
        if found:
            load({"comm": plan}, checkpoint_id=folder)
        ddp(batch(rank, 0)[0]).sum().backward()
        if not found:
            save({"comm": plan}, checkpoint_id=folder)
        assert plan.link is not None
        found.append(plan.link.to_tensor())
    return {"before": found[0], "after": found[1]}


def refused(rank: int, kind: str) -> Tensor:
    """Gradients that cannot be reduced."""
    tensors = {
        "double": torch.ones(3, dtype=torch.float64),
        "sparse": torch.eye(3).to_sparse(),
        "integers": torch.ones(3, dtype=torch.int64),
    }
    return aggregate(tensors[kind])
