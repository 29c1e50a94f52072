"""attend_prefill as torch sees it: an operator and its gradient, with shape rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...ranges import in_phase
from .._attention import empty_results
from .._paged import cache_of
from . import gradient, reference


@in_phase("sparse", "attend_prefill")
def run_reference(
    q: Tensor,
    starts: Tensor,
    tensors: list[Tensor],
    indices: Tensor | None,
    counts: Tensor | None,
    block: int,
    scales: list[float],
) -> tuple[Tensor, Tensor]:
    """`reference.attend_prefill`, as the operator passes its arguments."""
    cache = cache_of(tensors, scales)
    return reference.attend_prefill(q, starts, cache, indices, counts, block, scales[0])


@in_phase("sparse", "attend_prefill")
def run_gradient_reference(
    given: list[Tensor],
    kept: list[Tensor],
    starts: Tensor,
    tensors: list[Tensor],
    lists: list[Tensor],
    block: int,
    scales: list[float],
    of_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradient.attend_prefill_gradient`, as the operator passes its arguments.

    Args:
        given: Gradients of the output and of the LSE.
        kept: q, the output and the LSE.
        starts: int32 [batch + 1].
        tensors: The cache.
        lists: Nothing, indices, or indices and counts.
        block: Tokens of a block.
        scales: Of q.k, keys and values.
        of_keys: Whether gradients of keys and values are wanted; empty tensors otherwise.
    """
    cache = cache_of(tensors, scales)
    every, own = both_of(lists), (given[0], given[1])
    found = gradient.attend_prefill_gradient(
        own, (kept[0], kept[1], kept[2]), starts, cache, every, block, scales[0]
    )
    return found if of_keys else (found[0], tensors[0].new_empty(0), tensors[1].new_empty(0))


def both_of(lists: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Indices and counts of what an operator was passed."""
    indices, counts = (*lists, None, None)[:2]
    return indices, counts


def _empty_gradients(
    given: list[Tensor],
    kept: list[Tensor],
    starts: Tensor,
    tensors: list[Tensor],
    lists: list[Tensor],
    block: int,
    scales: list[float],
    of_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_q = kept[0].new_empty(kept[0].shape)
    sizes = [each.shape if of_keys else (0,) for each in tensors[:2]]
    return of_q, tensors[0].new_empty(sizes[0]), tensors[1].new_empty(sizes[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, starts, tensors, indices, counts, block, scales = inputs
    ctx.save_for_backward(q, *output, starts, *tensors, indices, counts)
    ctx.block, ctx.scales = block, scales


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[object, ...]:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "attend_prefill: a gradient of its gradient",
            need="create_graph=False",
            hint="torch's scaled_dot_product_attention, for second derivatives",
        )
    q, out, lse, starts, *tensors, indices, counts = ctx.saved_tensors
    _, _, (of_keys, of_values, *_), *_ = ctx.needs_input_grad
    found = traced_gradient(
        [grad, grad_lse],
        [q, out, lse],
        starts,
        tensors,
        [each for each in (indices, counts) if each is not None],
        ctx.block,
        ctx.scales,
        of_keys or of_values,
    )
    pools = [
        each if wanted else None
        for each, wanted in zip(found[1:], (of_keys, of_values), strict=True)
    ]
    of_q = found[0] if ctx.needs_input_grad[0] else None
    return of_q, None, [*pools, None, None], None, None, None, None


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_prefill(Tensor q, Tensor starts, Tensor[] tensors, Tensor? indices, Tensor? counts, "
    "SymInt block, float[] scales) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "attend_prefill_gradient(Tensor[] given, Tensor[] kept, Tensor starts, Tensor[] tensors, "
    "Tensor[] lists, SymInt block, float[] scales, bool of_keys) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("attend_prefill", run_reference, "CPU")
_LIBRARY.impl("attend_prefill_gradient", run_gradient_reference, "CPU")
torch.library.register_fake("hopsparse::attend_prefill", empty_results, lib=_LIBRARY)
torch.library.register_fake("hopsparse::attend_prefill_gradient", _empty_gradients, lib=_LIBRARY)
torch.library.register_autograd(
    "hopsparse::attend_prefill", _backward, setup_context=_setup_context, lib=_LIBRARY
)
traced: Callable[..., tuple[Tensor, Tensor]] = torch.ops.hopsparse.attend_prefill.default
traced_gradient: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    torch.ops.hopsparse.attend_prefill_gradient.default
)


def register_on_gpu(
    run: Callable[..., tuple[Tensor, Tensor]],
    run_gradient: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Say what the operators run on a GPU; arguments are those that the CPU's take."""
    _LIBRARY.impl("attend_prefill", run, "CUDA")
    _LIBRARY.impl("attend_prefill_gradient", run_gradient, "CUDA")
