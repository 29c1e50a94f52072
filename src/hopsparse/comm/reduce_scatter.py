"""The mean of the ranks' gradients, of which each rank gets a part: what FSDP needs.

A parameter is cut as FSDP cuts it: whole rows, as many for each rank, the last filled up with
zeros. Each part is coded for itself and goes to its rank alone, which adds the ranks in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import hybrid_gradient
from ..ops.hybrid_gradient.indices import decode_indices
from .average import agree_once, corrected, finite_flag
from .coding import Layout, add_exact, add_rounded
from .collective import Group, exchange
from .memory import Kept
from .state import HybridState
from .wire import Field, pack, unpack


@dataclass(frozen=True)
class Sharded:
    """A parameter whose mean is shared out.

    Attributes:
        name: Its name.
        gradient: This rank's, [ranks, values of a part]: filled up with zeros at its end.
        numel: Values without those zeros.
        mean: This rank's part of the mean is written here, [values of a part].
    """

    name: str
    gradient: Tensor
    numel: int
    mean: Tensor


@dataclass
class _Coded:
    """A parameter on its way: its parts as they are sent, and as they are kept."""

    kept: Kept
    layout: Layout
    local: Tensor
    velocity: Tensor | None
    tensors: list[list[Tensor]]
    finite: Tensor


def scatter_mean(state: HybridState, parameters: Sequence[Sharded], group: Group) -> None:
    """Give each rank its part of the mean over the ranks, as far as it is sent.

    Args:
        state: What is kept of whole parameters, and what is sent.
        parameters: Of different names; the same on all ranks.
        group: Ranks, in the order of the parts.

    Raises:
        ArgumentError: Ranks that do not agree.
    """
    ranks, counters = group.size(), state.counters
    device = parameters[0].gradient.device
    told = [(each.name, each.numel, f"{each.gradient.dtype}") for each in parameters]
    agree_once(state, told, group, device)
    counters.count(sum(each.numel for each in parameters), ranks, passes=1)
    coded = [_code(state, each, ranks) for each in parameters]
    with counters.timed("quantise_ms"):
        flags = torch.cat([each.finite for each in coded])
        messages = torch.stack(
            [
                pack([flags, *(tensor for each in coded for tensor in each.tensors[to])], device)
                for to in range(ranks)
            ]
        )
    with counters.timed("communicate_ms"):
        received = exchange(messages, group)
    counters.sent_bytes += (ranks - 1) * messages.shape[1]
    with counters.timed("quantise_ms"):
        _add_up(state, parameters, coded, received)


def _code(state: HybridState, given: Sharded, ranks: int) -> _Coded:
    kept = state.memory.of(given.name, given.numel)
    values = given.gradient.shape[1]
    layout = Layout.of(values, state.options, kept.steps, ranks)
    with state.counters.timed("select_ms"):
        whole = given.gradient.reshape(-1)[: given.numel]
        gradient, velocity = corrected(state, kept, whole, ranks)
        parts = torch.zeros(ranks, values, device=gradient.device)
        vector = parts.view(-1)[: given.numel]
        vector.copy_(gradient)
        if kept.residual is not None:
            vector += kept.residual.to(vector.device)
    with state.counters.timed("select_ms"):
        coded = [_part(part, layout, state) for part in parts]
    tensors, rests, finite = zip(*coded, strict=True)
    local = torch.stack(rests)
    return _Coded(kept, layout, local, velocity, list(tensors), torch.stack(finite).amin(0))


def _part(part: Tensor, layout: Layout, state: HybridState) -> tuple[list[Tensor], Tensor, Tensor]:
    """What goes to one rank, what is kept of that, and whether it is finite."""
    if layout.is_dense:
        return [part], torch.zeros(layout.padded, device=part.device), finite_flag(part)
    *exact, codes, scales, rest, finite = hybrid_gradient(
        part, None, layout.k, state.options.remainder, every=layout.every, phase=layout.phase
    )
    return exact + ([codes, scales] if layout.rows else []), rest, finite


def _add_up(
    state: HybridState, parameters: Sequence[Sharded], coded: Sequence[_Coded], received: Tensor
) -> None:
    fields: list[Field] = [(torch.uint8, len(coded))]
    for each in coded:
        fields += each.layout.exact_fields() + each.layout.rounded_fields(each.layout.rows)
    arrived = [unpack(message, fields) for message in received]
    finite = torch.stack([tensors[0] for tensors in arrived]).bool().all(0).tolist()
    first = 1
    for given, each, passed in zip(parameters, coded, finite, strict=True):
        exact = len(each.layout.exact_fields())
        last = first + exact + len(each.layout.rounded_fields(each.layout.rows))
        total = torch.zeros(each.layout.padded, device=received.device)
        for tensors in arrived:
            add_exact(total, tensors[first : first + exact], each.layout)
            add_rounded(total, tensors[first + exact : last], each.layout)
        first = last
        _finish(state, given, each, total.div_(len(arrived)), passed)


def _finish(state: HybridState, given: Sharded, coded: _Coded, mean: Tensor, finite: bool) -> None:
    """Write this rank's part, and keep what was not sent of the whole; nothing if not finite."""
    kept, values = coded.kept, given.gradient.shape[1]
    kept.steps += 1
    if not finite:
        state.counters.skipped += 1
        given.mean.fill_(torch.nan)
        return
    given.mean.copy_(mean[:values])
    if coded.velocity is not None:
        kept.velocity = coded.velocity
        if coded.layout.coder is None and not coded.layout.is_dense:
            # As in average: what waited and was sent has its momentum in it.
            for to, (_, counts, offsets) in enumerate(coded.tensors):
                sent = decode_indices(counts, offsets) + to * values
                kept.velocity[sent[sent < given.numel]] = 0
    if not coded.layout.is_dense and state.options.error_feedback:
        kept.residual = coded.local[:, :values].reshape(-1)[: given.numel].clone()
