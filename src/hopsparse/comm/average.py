"""The mean of the ranks' gradients, in few bytes, bit by bit the same on every rank.

Everything is added in the order of the ranks, and each parameter for itself: what comes out does
not depend on which bucket a parameter is in, nor on which rank adds.

With two ranks everything is in one message to the other. With more, rounded blocks go to the rank
that adds them, which rounds the sum and sends that to all: 2 (n - 1) / n times their bytes instead
of n - 1. What it rounds away it keeps itself, n times, because its part in the mean is 1 / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError
from .agreement import agree, checksum, compare
from .coding import Layout, add_exact, rounded, take_exact, take_rounded
from .collective import Group, gather
from .indices import decode_indices
from .memory import Kept
from .scattered import mean_of_blocks
from .state import HybridState
from .wire import pack, unpack

# Up to so many ranks rounded blocks go to everyone.
_ALL_TO_ALL_ABOVE = 2


@dataclass(frozen=True)
class Part:
    """A parameter in an exchange.

    Attributes:
        name: Its name.
        gradient: This rank's, float32, bfloat16 or float16, of any shape, contiguous; the mean
            takes its place.
    """

    name: str
    gradient: Tensor


@dataclass
class Pending:
    """A parameter on its way.

    Attributes:
        part: What was given.
        kept: What is kept of it.
        layout: What is sent of it in this step.
        local: float32 [layout.padded]: gradient and residual, later what was not sent.
        velocity: Momentum with this gradient in it, or None.
        exact: Tensors of the exact values.
        coded: Tensors of the rounded ones.
        is_finite: Whether there is no Inf and no NaN in it; not known of other ranks yet.
    """

    part: Part
    kept: Kept
    layout: Layout
    local: Tensor
    velocity: Tensor | None
    exact: list[Tensor]
    coded: list[Tensor]
    is_finite: bool


def average(
    state: HybridState, parts: Sequence[Part], group: Group, parameters: Sequence[Tensor] = ()
) -> None:
    """Replace gradients by their mean over the ranks, as far as it is sent.

    Args:
        state: What is kept, and what is sent.
        parts: Gradients of different names; the same on all ranks.
        group: Ranks.
        parameters: What a checksum should compare as well.

    Raises:
        ArgumentError: A gradient that cannot be reduced, or ranks that do not agree.
        VerificationError: With a checksum: replicas are not equal.
    """
    if not parts:
        return
    device = parts[0].gradient.device
    told = []
    for part in parts:
        _check(part.gradient, part.name)
        what = f"{list(part.gradient.shape)} {part.gradient.dtype}"
        told.append((part.name, part.gradient.numel(), what))
    agree_once(state, told, group, device)
    counters, ranks = state.counters, group.size()
    counters.count(sum(part.gradient.numel() for part in parts), ranks)
    pending = [prepare(state, part, ranks) for part in parts]
    direct = ranks <= _ALL_TO_ALL_ABOVE
    with counters.timed("select_ms"):
        flags = torch.tensor([each.is_finite for each in pending], dtype=torch.uint8, device=device)
        own = [flags]
        for each in pending:
            own += each.exact + (each.coded if direct else [])
        message = pack(own, device)
    with counters.timed("communicate_ms"):
        gathered = gather(message, group)
    counters.sent_bytes += (ranks - 1) * message.numel()
    blocks = [] if direct else mean_of_blocks(state, pending, group)
    with counters.timed("quantise_ms"):
        arrived = [_arrived(row, pending, direct) for row in gathered]
        finite = torch.stack([flags for flags, _ in arrived]).bool().all(0).tolist()
        for place, each in enumerate(pending):
            tensors = [found[place] for _, found in arrived]
            mean = decoded_mean(each.layout, tensors, blocks[place] if blocks else None)
            _finish(state, each, mean, bool(finite[place]))
    if state.options.checksum:
        sums = [checksum([part.gradient for part in parts]), checksum(parameters)]
        compare(sums, ["averaged gradients", "parameters"], group)


def agree_once(
    state: HybridState, told: Sequence[tuple[str, int, str]], group: Group, device: torch.device
) -> None:
    """The first time that these parameters come together: are they the same on every rank?

    Args:
        state: Its options are compared too.
        told: Name and size of each parameter, and what else there is to say of it.
        group: Ranks.
        device: Where messages are.

    Raises:
        ArgumentError: They are not.
    """
    named = "\n".join(f"{name} {what}" for name, _, what in told)
    if named in state.agreed:
        return
    facts = [f"{key} = {value}" for key, value in state.options.facts().items()]
    for name, numel, what in told:
        facts.append(f"{name} {what}, step {state.memory.of(name, numel).steps}")
    agree(facts, group, device)
    state.agreed.add(named)


def check_kind(gradient: Tensor, name: str) -> None:
    """Refuse what cannot be averaged.

    Raises:
        ArgumentError: Another dtype, or a sparse tensor.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if gradient.layout != torch.strided or gradient.dtype not in dtypes:
        raise ArgumentError(
            f"{name}: a gradient of {gradient.dtype}, {gradient.layout}",
            need="float32, bfloat16 or float16, strided",
            hint="nn.Embedding without sparse=True; a float32 copy of another dtype",
        )


def _check(gradient: Tensor, name: str) -> None:
    check_kind(gradient, name)
    if not gradient.is_contiguous():
        raise ArgumentError(
            f"{name}: a gradient with strides {gradient.stride()}",
            need="a contiguous one, which the mean can be written to",
            hint="aggregate(tensor.contiguous())",
        )


def prepare(state: HybridState, part: Part, ranks: int) -> Pending:
    """Add up what this rank has to send, and code it."""
    numel = part.gradient.numel()
    kept = state.memory.of(part.name, numel)
    layout = Layout.of(numel, state.options, kept.steps, ranks)
    with state.counters.timed("select_ms"):
        local, velocity = accumulated(state, kept, part.gradient, ranks, layout.padded)
        finite = is_finite(local)
        if not finite:
            local.zero_()  # every rank says what it cannot send; the message stays as long
        exact = take_exact(local, layout)
    with state.counters.timed("quantise_ms"):
        coded = take_rounded(local, layout)
    return Pending(part, kept, layout, local, velocity, exact, coded, finite)


def accumulated(
    state: HybridState, kept: Kept, gradient: Tensor, ranks: int, padded: int
) -> tuple[Tensor, Tensor | None]:
    """The gradient, clipped, with momentum and with what was not sent before.

    Returns:
        float32 [padded], and the momentum of the next step, or None.
    """
    options, numel, device = state.options, gradient.numel(), gradient.device
    local = torch.empty(padded, device=device)
    vector = local[:numel]
    local[numel:] = 0
    residual = None if kept.residual is None else kept.residual.to(device)
    given, velocity = gradient.detach().flatten(), None
    if options.clip is None and not options.momentum:
        # Most calls come here: one pass over the data.
        torch.add(given, 0 if residual is None else residual, out=vector)
        return local, None
    vector.copy_(given)
    if options.clip is not None:
        vector.mul_(_clipping(vector, options.clip / math.sqrt(ranks)))
    if options.momentum:
        if kept.velocity is not None:
            vector.add_(kept.velocity.to(device), alpha=options.momentum)
        velocity = vector.clone()
    if residual is not None:
        vector.add_(residual)
    return local, velocity


def is_finite(values: Tensor) -> bool:
    """Whether there is no Inf and no NaN in a tensor, without a second one.

    Example:
        >>> is_finite(torch.tensor([1.0, -torch.inf])), is_finite(torch.ones(2))
        (False, True)
    """
    if not values.numel():
        return True
    return bool(torch.isfinite(torch.stack([values.amax(), values.amin()])).all())


def _clipping(vector: Tensor, most: float) -> Tensor:
    """What makes the norm of a gradient `most` at most; NaN where there is NaN or Inf in it."""
    if not vector.numel():
        return torch.ones((), device=vector.device)
    # Squares of large float32 numbers overflow where the numbers do not.
    largest = vector.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    parts = torch.linalg.vector_norm(vector / largest)
    factor = torch.clamp(most / largest / parts.clamp(min=1.0), max=1.0)
    return torch.where(torch.isfinite(largest), factor, torch.nan)


def _arrived(
    message: Tensor, pending: Sequence[Pending], direct: bool
) -> tuple[Tensor, list[list[Tensor]]]:
    """A rank's message: which parameters are finite, and the tensors of each."""
    fields = [(torch.uint8, len(pending))]
    of_each = []
    for each in pending:
        mine = each.layout.exact_fields()
        mine += each.layout.rounded_fields(each.layout.rows) if direct else []
        fields += mine
        of_each.append(len(mine))
    flags, *tensors = unpack(message, fields)
    found = []
    for count in of_each:
        found.append(tensors[:count])
        tensors = tensors[count:]
    return flags, found


def decoded_mean(layout: Layout, arrived: Sequence[list[Tensor]], blocks: Tensor | None) -> Tensor:
    """The mean of a parameter, float32 [numel]; `blocks` is that of rounded blocks, if known."""
    total = torch.zeros(layout.padded, device=arrived[0][0].device)
    exact_count = len(layout.exact_fields())
    for tensors in arrived:
        add_exact(total, tensors[:exact_count], layout)
        if layout.coder is not None and len(tensors) > exact_count:
            layout.active(total).add_(rounded(tensors[exact_count:], layout.coder))
    total.div_(len(arrived))
    if blocks is not None:
        layout.active(total).add_(blocks)
    return total[: layout.numel]


def _finish(state: HybridState, pending: Pending, mean: Tensor, is_finite: bool) -> None:
    """Write the mean, and keep what was not sent; of a gradient with Inf or NaN keep nothing."""
    kept, layout, gradient = pending.kept, pending.layout, pending.part.gradient
    kept.steps += 1
    if not is_finite:
        state.counters.skipped += 1
        gradient.fill_(torch.nan)
        return
    gradient.copy_(mean.view(gradient.shape))
    if "residual" in state.options.parts_of(layout.numel):
        kept.residual = pending.local[: layout.numel]
    if pending.velocity is not None:
        kept.velocity = pending.velocity
        if layout.coder is None and not layout.is_dense:
            # What waited and was sent now has its momentum in it (momentum factor masking,
            # Deep Gradient Compression, section 3.2); a remainder leaves nothing waiting.
            _, counts, offsets = pending.exact
            kept.velocity[decode_indices(counts, offsets)] = 0
