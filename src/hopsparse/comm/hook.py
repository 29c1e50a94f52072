"""The ways in: a hook for DDP, and one tensor at a time."""

# Annotations are values here: DDP compares those of a hook with the classes that it knows.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .average import Exchange, Part, average, check_kind, start
from .collective import Group, group_or_world
from .state import HybridState


def hybrid_hook(
    state: HybridState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket of DDP: the largest values exactly, the others rounded or later.

    Between two ranks over gloo the rest of the backward pass goes on while messages are on their
    way. With more ranks the exchange is over when this returns, as it is with a checksum; on a GPU
    the stream waits for it, and the host does not.

    Args:
        state: Bound to the model; the same options on every rank.
        bucket: Gradients, float32, bfloat16 or float16.

    Returns:
        A future with the bucket's buffer.

    Raises:
        ArgumentError: The state is not bound to the model, or is not that of the other ranks.
        VerificationError: With a checksum: replicas are not equal.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(8, 2)
        >>> ddp = DistributedDataParallel(model)
        >>> ddp.register_comm_hook(HybridState(k=0.001).bind(model), hybrid_hook)
        >>> ddp(torch.ones(1, 8)).sum().backward()
        >>> model.weight.grad.unique()
        tensor([1.])
        >>> dist.destroy_process_group()
    """
    parameters = bucket.parameters()
    # The buffer and not its views, which have the strides of parameters: channels last, say.
    pieces = bucket.buffer().split([each.numel() for each in parameters])
    parts = [Part(*pair) for pair in zip(state.names(parameters), pieces, strict=True)]
    exchange, buffer = start(state, parts, group_or_world(state.group)), bucket.buffer()
    if not state.options.checksum and (waiting := _futures(exchange)):
        arrived = torch.futures.collect_all(waiting)
        return arrived.then(lambda _: _finished(exchange, waiting, buffer))
    exchange.finish(parameters)
    return done(buffer)


def _futures(exchange: Exchange) -> list[torch.futures.Future[Any]]:
    """What to wait for before an exchange can be finished by any thread; empty: only by this one.

    Where finishing sends more, every rank must do that in the order of its buckets.
    """
    works = [gathering.work for _, gathering in exchange.sent]
    on_gpu = any(gathering.gathered.is_cuda for _, gathering in exchange.sent)
    if not exchange.is_direct or None in works or on_gpu:
        return []
    return [work.get_future() for work in works]


def _finished(
    exchange: Exchange, waiting: Sequence[torch.futures.Future[Any]], buffer: Tensor
) -> Tensor:
    for each in waiting:
        each.wait()  # they are done; one that failed raises here, and nothing of it is used
    exchange.finish(has_arrived=True)
    return buffer


def done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future of a buffer that is ready when the current stream is."""
    on_gpu: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=on_gpu or None)
    future.set_result(buffer)
    return future


def register(ddp: DistributedDataParallel, state: HybridState) -> HybridState:
    """Bind a state to a model under DDP, and let it reduce the gradients.

    Args:
        ddp: The model; its group is that of the state, where the state has none.
        state: What to send.

    Returns:
        The state.

    Raises:
        ArgumentError: The state knows a parameter with another size.
    """
    if state.group is None:
        state.group = ddp.process_group
    state.bind(ddp)
    ddp.register_comm_hook(state, hybrid_hook)
    return state


def aggregate(
    tensor: Tensor,
    group: Group | None = None,
    *,
    state: HybridState | None = None,
    name: str = "tensor",
) -> Tensor:
    """The mean of a tensor over the ranks, as far as it is sent.

    Args:
        tensor: This rank's, float32, bfloat16 or float16, any shape; as it is afterwards.
        group: Ranks; None: those of the state, else all.
        state: What is kept between calls; None keeps nothing, so that what is not sent is lost.
        name: Under which it is kept; one for each tensor.

    Returns:
        The mean, as `tensor`, bit by bit the same on every rank.

    Raises:
        ArgumentError: Another dtype or layout, or ranks that do not agree.
        UnsupportedError: There is no process group.
        VerificationError: With a checksum: ranks have different results.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> aggregate(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    state = HybridState() if state is None else state
    check_kind(tensor, name)
    mean = tensor.detach().clone(memory_format=torch.contiguous_format)
    average(state, [Part(name, mean)], group_or_world(group or state.group))
    return mean
