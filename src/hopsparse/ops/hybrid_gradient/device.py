"""hybrid_gradient on a GPU: twelve launches that are the same for all data, and no wait."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import Bound, KnownLaunches, current_stream, kernel_for
from ...ranges import in_phase
from . import plan
from .dispatch import empty_results

#: Dtypes of gradients as `plan` says them.
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

_BOUND = KnownLaunches()


@in_phase("select", "hybrid_gradient")
def run(
    gradient: Tensor, residual: Tensor | None, k: int, remainder: str | None, every: int, phase: int
) -> list[Tensor]:
    """The results of the operator, of arguments that were checked.

    Args:
        gradient: [n] on a Hopper GPU, not empty, any stride.
        residual: float32 [n], or None.
        k: How many values are taken exactly.
        remainder: A word of `plan.REMAINDERS`.
        every: Of how many blocks one is rounded.
        phase: The first of those.

    Raises:
        UnsupportedError: No driver; or a graph is captured and a kernel is not loaded yet.
        CompileError: A kernel does not compile.
    """
    gradient = gradient.contiguous()
    residual = None if residual is None else residual.contiguous()
    # A warp writes 512 values at a time, whatever the blocks are.
    results = empty_results(gradient, k, remainder, every, phase, plan.STRIP)
    n = gradient.numel()
    workspace = gradient.new_empty(plan.Workspace.of(n).nbytes, dtype=torch.uint8)
    enqueue(results, workspace, gradient, residual, k, remainder, every, phase)
    return results


def enqueue(
    results: list[Tensor],
    workspace: Tensor,
    gradient: Tensor,
    residual: Tensor | None,
    k: int,
    remainder: str | None,
    every: int,
    phase: int,
) -> None:
    """Put the kernels on torch's current stream. Nothing waits for them, and nothing is checked.

    Args:
        results: What `run` returns; all is written. The memory behind `rest` goes on to a multiple
            of `plan.STRIP` values, and starts on 16 bytes, as codes do.
        workspace: uint8, as long as `plan.Workspace` says, on 16 bytes; all is written.
        gradient: As for `run`, like all the rest; contiguous.
        residual: float32 [n], contiguous, or None.
        k: How many values are taken.
        remainder: A word of `plan.REMAINDERS`.
        every: Of how many blocks one is rounded.
        phase: The first of those.
    """
    args = arguments(results, workspace, gradient, residual)
    choose(args, k, remainder, every, phase)
    device, dtype = gradient.get_device(), NAMES[gradient.dtype]
    stream = current_stream(device)
    # All that the launches depend on, and nothing else.
    key = (bytes(args), dtype, remainder, device, stream)
    histograms = args.histogram
    for step in plan.STEPS:
        bound = _BOUND.get((step, *key))
        if bound is None:
            step.aim(args, histograms)
            made = _bind(step, args, dtype, remainder, device)
            bound = _BOUND.keep((step, *key), made)
        bound()


def arguments(
    results: list[Tensor], workspace: Tensor, gradient: Tensor, residual: Tensor | None
) -> plan.Args:
    """Addresses, and what follows from them."""
    n, at, state = gradient.numel(), plan.Workspace.of(gradient.numel()), workspace.data_ptr()
    kept = 0 if residual is None else residual.data_ptr()
    parts = (state, state + at.histogram, state + at.tiles, state + at.held)
    vector = gradient.data_ptr() % (4 * gradient.element_size()) == 0 and kept % 16 == 0
    addresses = [each.data_ptr() for each in results]
    return plan.Args(gradient.data_ptr(), kept, *addresses, *parts, n, vector=vector)


def choose(args: plan.Args, k: int, remainder: str | None, every: int, phase: int) -> None:
    """Say what is to be done with what is there."""
    args.k, args.every, args.phase = k, every, phase
    args.blocks = -(-args.n // plan.REMAINDERS[remainder][1])
    args.samples, args.stride, args.wanted_samples = plan.sampling(args.n, k)


def _bind(
    step: plan.Step, args: plan.Args, dtype: str, remainder: str | None, device: int
) -> Bound:
    """A launch with its arguments; compiles and loads its kernel where that was not done yet."""
    spec = plan.spec_for(step.entry, dtype, remainder)
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    blocks = plan.blocks_for(step.entry, args.n)
    return kernel.bind(blocks, bytes(args), current_stream(device))
