"""The mean of the ranks' gradients, in few bytes, bit by bit the same on every rank.

Everything is added in the order of the ranks, and each parameter for itself: what comes out does
not depend on which bucket a parameter is in, nor on which rank adds.

With two ranks everything is in one message to the other. With more, rounded blocks go to the rank
that adds them, which rounds the sum and sends that to all: 2 (n - 1) / n times their bytes instead
of n - 1. What it rounds away it keeps itself, n times, because its part in the mean is 1 / n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops import hybrid_gradient
from ..ops.hybrid_gradient.indices import decode_indices
from .agreement import agree, checksum, compare
from .coding import Layout, add_exact, add_rounded
from .collective import Gathering, Group, gather_later
from .memory import Kept
from .scattered import mean_of_blocks
from .state import HybridState
from .wire import pack, unpack

# Up to so many ranks rounded blocks go to everyone.
_ALL_TO_ALL_ABOVE = 2
# Parameters share a message until they have so many values: while one is sent the next is coded.
# A message more costs what sending 100 kB does at 1 Gbit/s.
_VALUES_A_MESSAGE = 1 << 19


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
        local: float32 [layout.padded]: what was not sent of gradient and residual.
        velocity: Momentum with this gradient in it, or None.
        exact: Tensors of the exact values.
        coded: Tensors of the rounded ones.
        finite: uint8 [1]: 1 where there is no Inf and no NaN in it; not known of other ranks yet.
    """

    part: Part
    kept: Kept
    layout: Layout
    local: Tensor
    velocity: Tensor | None
    exact: list[Tensor]
    coded: list[Tensor]
    finite: Tensor


@dataclass
class Exchange:
    """Parameters whose messages are on their way; `finish` waits for them.

    Attributes:
        state: What is kept.
        parts: What was given.
        group: Ranks.
        sent: Parameters of each message, and where those of all ranks arrive.
    """

    state: HybridState
    parts: Sequence[Part]
    group: Group
    sent: list[tuple[list[Pending], Gathering]]

    @property
    def is_direct(self) -> bool:
        """Whether rounded blocks go to everyone, with the exact values."""
        return self.group.size() <= _ALL_TO_ALL_ABOVE

    def finish(self, parameters: Sequence[Tensor] = (), *, has_arrived: bool = False) -> None:
        """Wait, replace the gradients by their mean, and keep what was not sent.

        Args:
            parameters: What a checksum should compare as well.
            has_arrived: The messages are here. Where a future of gloo says so, its work does not
                know yet, and would be waited for for ever by what the future calls.

        Raises:
            VerificationError: With a checksum: replicas are not equal.
        """
        state, direct = self.state, self.is_direct
        everything = [each for pending, _ in self.sent for each in pending]
        # Where blocks go to everyone they are in the messages.
        means = mean_of_blocks(state, [] if direct else everything, self.group)
        blocks = iter(means or [None] * len(everything))
        for pending, gathering in self.sent:
            with state.counters.timed("communicate_ms"):
                gathered = gathering.gathered if has_arrived else gathering.wait()
            with state.counters.timed("quantise_ms"):
                arrived = [_arrived(row, pending, direct) for row in gathered]
                finite = torch.stack([flags for flags, _ in arrived]).bool().all(0)
                for place, each in enumerate(pending):
                    tensors = [found[place] for _, found in arrived]
                    mean = decoded_mean(each.layout, tensors, next(blocks))
                    _finish(state, each, mean, finite[place])
        if state.options.checksum:
            sums = [checksum([part.gradient for part in self.parts]), checksum(parameters)]
            compare(sums, ["averaged gradients", "parameters"], self.group)


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
    start(state, parts, group).finish(parameters)


def start(state: HybridState, parts: Sequence[Part], group: Group) -> Exchange:
    """Code gradients and send them, one message while the next is coded.

    Args:
        state: What is kept, and what is sent.
        parts: Gradients of different names; the same on all ranks.
        group: Ranks.

    Raises:
        ArgumentError: A gradient that cannot be reduced, or ranks that do not agree.
    """
    told = []
    for part in parts:
        _check(part.gradient, part.name)
        what = f"{list(part.gradient.shape)} {part.gradient.dtype}"
        told.append((part.name, part.gradient.numel(), what))
    exchange = Exchange(state, parts, group, [])
    if not parts:
        return exchange
    agree_once(state, told, group, parts[0].gradient.device)
    ranks, counters = group.size(), state.counters
    counters.count(sum(part.gradient.numel() for part in parts), ranks)
    for few in _messages(parts):
        pending = [prepare(state, part, ranks) for part in few]
        own = [torch.cat([each.finite for each in pending])]
        for each in pending:
            own += each.exact + (each.coded if exchange.is_direct else [])
        with counters.timed("quantise_ms"):
            message = pack(own, own[0].device)
        with counters.timed("communicate_ms"):
            exchange.sent.append((pending, gather_later(message, group)))
        counters.sent_bytes += (ranks - 1) * message.numel()
    return exchange


def _messages(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbours that share a message."""
    few: list[Part] = []
    for part in parts:
        few.append(part)
        if sum(each.gradient.numel() for each in few) >= _VALUES_A_MESSAGE:
            yield few
            few = []
    if few:
        yield few


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
    numel, options = part.gradient.numel(), state.options
    kept = state.memory.of(part.name, numel)
    layout = Layout.of(numel, options, kept.steps, ranks)
    with state.counters.timed("select_ms"):
        gradient, velocity = corrected(state, kept, part.gradient, ranks)
        if kept.residual is not None:
            # What was loaded lies on the CPU.
            kept.residual = kept.residual.to(gradient.device)
        residual = kept.residual
        if layout.is_dense:
            values = torch.add(gradient, 0 if residual is None else residual).float()
            local = torch.zeros(layout.padded, device=values.device)
            return Pending(part, kept, layout, local, velocity, [values], [], finite_flag(values))
    with state.counters.timed("select_ms"):
        *exact, codes, scales, local, finite = hybrid_gradient(
            gradient, residual, layout.k, options.remainder, every=layout.every, phase=layout.phase
        )
    coded = [codes, scales] if layout.rows else []
    return Pending(part, kept, layout, local, velocity, exact, coded, finite)


def corrected(
    state: HybridState, kept: Kept, gradient: Tensor, ranks: int
) -> tuple[Tensor, Tensor | None]:
    """The gradient as a vector, clipped, with momentum.

    Returns:
        The gradient itself, or float32; and the momentum of the next step, or None.
    """
    options, given = state.options, gradient.detach().flatten()
    if options.clip is not None:
        given = given.float()
        given = given * _clipping(given, options.clip / math.sqrt(ranks))
    if not options.momentum:
        return given, None
    given = given.float()
    if kept.velocity is not None:
        kept.velocity = kept.velocity.to(given.device)
        given = torch.add(given, kept.velocity, alpha=options.momentum)
    return given, given.clone()


def finite_flag(values: Tensor) -> Tensor:
    """uint8 [1]: whether there is no Inf and no NaN in a tensor; nothing waits for it.

    Example:
        >>> finite_flag(torch.tensor([1.0, -torch.inf])), finite_flag(torch.ones(2))
        (tensor([0], dtype=torch.uint8), tensor([1], dtype=torch.uint8))
    """
    if not values.numel():
        return torch.ones(1, dtype=torch.uint8, device=values.device)
    ends = torch.stack(torch.aminmax(values))
    return torch.isfinite(ends).all().to(torch.uint8)[None]


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
        add_rounded(total, tensors[exact_count:], layout)
    total.div_(len(arrived))
    if blocks is not None:
        layout.active(total).add_(blocks)
    return total[: layout.numel]


def _finish(state: HybridState, pending: Pending, mean: Tensor, finite: Tensor) -> None:
    """Write the mean, and keep what was not sent; of a gradient with Inf or NaN keep nothing."""
    kept, layout, gradient = pending.kept, pending.layout, pending.part.gradient
    kept.steps += 1
    residual, velocity = pending.local[: layout.numel], pending.velocity
    if velocity is not None and layout.coder is None and not layout.is_dense:
        # What waited and was sent now has its momentum in it (momentum factor masking,
        # Deep Gradient Compression, section 3.2); a remainder leaves nothing waiting.
        _, counts, offsets = pending.exact
        velocity[decode_indices(counts, offsets)] = 0
    if finite.is_cuda:
        # The host does not wait to see it.
        state.counters.skip_later(~finite)
        mean = torch.where(finite, mean, torch.nan)
        residual = torch.where(finite, residual, 0 if kept.residual is None else kept.residual)
        if velocity is not None:
            velocity = torch.where(finite, velocity, 0 if kept.velocity is None else kept.velocity)
    elif not finite:
        state.counters.skipped += 1
        gradient.fill_(torch.nan)
        return
    gradient.copy_(mean.view(gradient.shape))
    if "residual" in state.options.parts_of(layout.numel):
        kept.residual = residual
    if velocity is not None:
        kept.velocity = velocity
