"""Dense, bfloat16, hybrid or low rank for each bucket of DDP, from one measurement of the link."""

# Annotations are values here: DDP compares those of a hook with the classes that it knows.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError
from ..units import bytes_text
from .coding import Layout
from .collective import Group, group_or_world
from .hook import done, hybrid_hook
from .link import Link, measure_link
from .options import HybridOptions
from .state import HybridState
from .wire import message_bytes

DENSE, HALF, HYBRID, LOW_RANK = "dense", "bf16", "hybrid", "low-rank"

# What is lossy must be faster than bfloat16 by more than the prediction is off.
_WORTH = 0.9
# Nobody should lose precision for this little: 2 %, or a tenth of a millisecond a bucket.
_PARITY = 1.02
_NEGLIGIBLE_S = 1e-4
_POWER_FIRST_STEP = 2


@dataclass(frozen=True)
class BucketPlan:
    """What one bucket does.

    Attributes:
        method: `dense`, `bf16`, `hybrid` or `low-rank`.
        values: Values of the bucket.
        predicted_ms: Of each method.
    """

    method: str
    values: int
    predicted_ms: Mapping[str, float]

    def describe(self) -> str:
        """One line.

        Example:
            >>> BucketPlan("bf16", 1000, {"dense": 2.0, "bf16": 1.0}).describe()
            '1000 values: bf16 (dense 2.0 ms, bf16 1.0 ms)'
        """
        times = ", ".join(f"{name} {time:.1f} ms" for name, time in self.predicted_ms.items())
        return f"{self.values} values: {self.method} ({times})"


def plan_bucket(
    shapes: Sequence[torch.Size],
    link: Link,
    options: HybridOptions,
    ranks: int,
    rank: int | None = None,
) -> BucketPlan:
    """Choose what a bucket does.

    Dense, unless bfloat16 is faster by more than 2 % and 0.1 ms; hybrid or low rank, where they
    take less than 0.9 of the faster of those and save as much. One rank alone sends nothing,
    whatever noise was measured: dense.

    Args:
        shapes: Of its gradients.
        link: What was measured.
        options: Of the hybrid.
        ranks: Processes.
        rank: Rank of PowerSGD; None: it is no choice.

    Example:
        >>> fast = Link(1e-5, 1e-11, 1e-11, 1e-5, 1e-11, 5e-9, 1e-9)
        >>> plan_bucket([torch.Size([1024, 1024])], fast, HybridOptions(), ranks=2).method
        'dense'
    """
    values = sum(shape.numel() for shape in shapes)
    seconds = {
        DENSE: link.reduce_s + 4 * values * link.reduce_byte_s,
        HALF: (link.half_s or link.reduce_s) + 2 * values * link.half_byte_s,
        HYBRID: _hybrid_s(shapes, link, options, ranks),
    }
    if rank is not None:
        seconds[LOW_RANK] = _low_rank_s(shapes, link, rank)
    saved = seconds[DENSE] - seconds[HALF]
    is_half = seconds[DENSE] > _PARITY * seconds[HALF] and saved > _NEGLIGIBLE_S
    method = HALF if is_half else DENSE
    least = min(seconds[DENSE], seconds[HALF])
    lossy = min((name for name in seconds if name not in (DENSE, HALF)), key=seconds.__getitem__)
    if seconds[lossy] < min(_WORTH * least, least - _NEGLIGIBLE_S):
        method = lossy
    if ranks == 1:
        method = DENSE
    return BucketPlan(method, values, {name: 1e3 * time for name, time in seconds.items()})


def _hybrid_s(
    shapes: Sequence[torch.Size], link: Link, options: HybridOptions, ranks: int
) -> float:
    """Warm-up does not count: it is over soon."""
    exact = rounded = values = 0
    for shape in shapes:
        layout = Layout.of(shape.numel(), options, options.warmup, ranks)
        exact += message_bytes(layout.exact_fields())
        rounded += message_bytes(layout.rounded_fields(layout.rows))
        values += 0 if layout.is_dense else layout.numel
    exchanges = 1 if ranks <= 2 else 3
    of_rounded = ranks - 1 if ranks <= 2 else 2 * (ranks - 1) / ranks
    sent = (ranks - 1) * exact + of_rounded * rounded
    coding = values * link.code_value_s * max(ranks, 2) / 2
    return exchanges * link.gather_s + sent * link.gather_byte_s + coding


def _low_rank_s(shapes: Sequence[torch.Size], link: Link, rank: int) -> float:
    """PowerSGD: three all-reduces, of what is no matrix or too small, of P and of Q."""
    sent, values = 0, 0
    for shape in shapes:
        rows = shape[0] if len(shape) else 1
        columns = shape.numel() // max(rows, 1)
        factors = min(rank, rows, columns) * (rows + columns)
        is_worth = 2 * factors < shape.numel()
        sent += factors if is_worth else shape.numel()
        values += shape.numel() if is_worth else 0
    return 3 * link.reduce_s + 4 * sent * link.reduce_byte_s + values * link.low_rank_value_s * rank


class PlannedState:
    """A state for `planned_hook`: a hybrid one, and what is better where the link is fast.

    The link is measured in the first step, and kept in checkpoints, so that a resumed run plans
    the same. What low rank keeps is PyTorch's, by number of the bucket, and is not saved.

    Args:
        state: Of the hybrid buckets; its `counters` count all.
        rank: Consider PowerSGD of this rank too. None: do not.

    Raises:
        ArgumentError: Momentum correction or clipping, which only hybrid buckets would have.

    Example:
        >>> PlannedState(HybridState()).describe()
        'nothing planned yet'
    """

    def __init__(self, state: HybridState, *, rank: int | None = None) -> None:
        options = state.options
        if options.momentum or options.clip is not None:
            raise ArgumentError(
                f"momentum = {options.momentum}, clip = {options.clip} in a plan",
                need="gradients that mean the same in every bucket",
                hint="hybrid_hook, which does it for all of them",
            )
        if rank is not None and rank < 1:
            raise ArgumentError(f"rank = {rank}", need="1 or more, or None", hint="rank=2")
        self.state = state
        self.rank = rank
        self.link: Link | None = None
        self.plans: dict[str, BucketPlan] = {}
        self._power: PowerSGDState | None = None
        self._seen: dict[str, int] = {}

    def describe(self) -> str:
        """The link, and what each bucket does and why."""
        if self.link is None:
            return "nothing planned yet"
        lines = [
            f"link: {bytes_text(self.link.bytes_per_s)}/s, {1e3 * self.link.gather_s:.2f} ms; "
            f"coding: {1e-6 / self.link.code_value_s:.0f} M values/s"
        ]
        for plan in self.plans.values():
            lines.append(plan.describe())
        if all(plan.method in (DENSE, HALF) for plan in self.plans.values()):
            lines.append("the link is so fast that coding would take longer than it saves")
        return "\n".join(lines)

    def plan(self, bucket: Any, group: Group) -> BucketPlan:
        """What a bucket does; all ranks must ask together when it is new."""
        parameters = bucket.parameters()
        key = "\n".join(self.state.names(parameters))
        if self.link is None:
            device = bucket.buffer().device
            self.link = measure_link(group, self.state.options, device)
        if key not in self.plans:
            shapes = [each.shape for each in parameters]
            self.plans[key] = plan_bucket(
                shapes, self.link, self.state.options, group.size(), self.rank
            )
        self._seen[key] = self._seen.get(key, 0) + 1
        return self.plans[key]

    def power(self, bucket: Any, group: Group) -> PowerSGDState | None:
        """PyTorch's state; None the first time that a bucket is seen: DDP makes others after."""
        if self._seen["\n".join(self.state.names(bucket.parameters()))] < _POWER_FIRST_STEP:
            return None
        if self._power is None:
            # Without the epsilon a parameter without gradient makes its bucket NaN.
            self._power = PowerSGDState(
                group, self.rank or 1, _POWER_FIRST_STEP, orthogonalization_epsilon=1e-8
            )
        # It counts steps by the last bucket, which may not be one of its own.
        self._power.iter = max(self._power.iter, _POWER_FIRST_STEP)
        return self._power

    def state_dict(self) -> dict[str, Tensor]:
        """What `HybridState.state_dict` gives, and the link; zeros where none was measured."""
        nothing = torch.zeros(len(fields(Link)), dtype=torch.float64)
        link = nothing if self.link is None else self.link.to_tensor()
        return {**self.state.state_dict(), "link": link}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: It is of another rank or number of ranks.
        """
        self.state.load_state_dict(state)
        if bool(state["link"].any()):
            self.link = Link.from_tensor(state["link"])


def planned_hook(
    planned: PlannedState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of DDP as its plan says.

    Args:
        planned: Its state is bound to the model.
        bucket: Gradients.

    Returns:
        A future of the bucket's buffer; finished, unless it is of low rank.

    Raises:
        ArgumentError: The state is not bound to the model, or is not that of the other ranks.
        VerificationError: With a checksum: replicas are not equal.
    """
    group = group_or_world(planned.state.group)
    method = planned.plan(bucket, group).method
    if method == HYBRID:
        return hybrid_hook(planned.state, bucket)
    counters, buffer, ranks = planned.state.counters, bucket.buffer(), group.size()
    if method == LOW_RANK:
        power = planned.power(bucket, group)
        if power is not None:
            return _low_rank(planned, power, bucket)
    counters.count(buffer.numel(), ranks)
    with counters.timed("communicate_ms"):
        sent = buffer.bfloat16() if method == HALF else buffer
        dist.all_reduce(sent.div_(ranks), group=group)
        if sent is not buffer:
            buffer.copy_(sent)
    counters.sent_bytes += 2 * (ranks - 1) / ranks * sent.nbytes
    return done(buffer)


def _low_rank(
    planned: PlannedState, power: PowerSGDState, bucket: Any
) -> torch.futures.Future[Tensor]:
    """PyTorch's hook; of a result with Inf or NaN nothing is kept."""
    counters, ranks = planned.state.counters, group_or_world(planned.state.group).size()
    counters.count(bucket.buffer().numel(), ranks)
    before = power.total_numel_after_compression
    future: torch.futures.Future[Tensor] = powerSGD_hook(power, bucket)
    sent = power.total_numel_after_compression - before
    counters.sent_bytes += 2 * (ranks - 1) / ranks * bucket.buffer().element_size() * sent
    with counters.timed("communicate_ms"):
        result = future.wait()
    if not bool(torch.isfinite(result).all()):
        counters.skipped += len(bucket.parameters())
        for kept in (power.error_dict, power.p_memory_dict, power.q_memory_dict):
            kept.pop(bucket.index(), None)
    return done(result)


def register_planned(ddp: DistributedDataParallel, planned: PlannedState) -> PlannedState:
    """Bind a planned state to a model under DDP, and let it reduce the gradients.

    Args:
        ddp: The model; its group is that of the state, where the state has none.
        planned: What to choose from.

    Returns:
        The planned state.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(8, 2))
        >>> planned = register_planned(ddp, PlannedState(HybridState()))
        >>> ddp(torch.ones(1, 8)).sum().backward()
        >>> [plan.method for plan in planned.plans.values()]
        ['dense']
        >>> dist.destroy_process_group()
    """
    if planned.state.group is None:
        planned.state.group = ddp.process_group
    planned.state.bind(ddp)
    ddp.register_comm_hook(planned, planned_hook)
    return planned
