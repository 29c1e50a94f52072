"""CUDA graphs: work recorded once, and replayed at the cost of one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from ..errors import ArgumentError
from .early import EarlyStarts

Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Graph(Generic[Outputs]):
    """A captured graph.

    Attributes:
        recorded: The graph of torch; its `pool()` may be shared with others.
        outputs: What the captured function returned. A replay writes the same tensors again.
        early: Launches in it that start before the kernel ahead of them has ended.
    """

    recorded: torch.cuda.CUDAGraph
    outputs: Outputs
    early: int = 0

    def replay(self) -> None:
        """Run everything again on torch's current stream, reading the same addresses."""
        self.recorded.replay()


def capture(
    fn: Callable[[], Outputs], *, warmup: int = 3, pool: Any = None, early: bool = False
) -> Graph[Outputs]:
    """Capture what a function does on the current GPU.

    Args:
        fn: Takes nothing; its inputs are tensors that stay where they are. It runs `warmup` + 1
            times. It must not wait for the GPU, nor load kernels in the last run.
        warmup: Runs before the capture, on another stream: they compile, load and plan.
        pool: Memory pool of another graph that never runs at the same time; None for a new one.
        early: Let kernels of hopsparse start before the one ahead has ended, and load their weights
            meanwhile, where `EarlyStarts` saw that the function leaves those weights alone.

    Raises:
        ArgumentError: A negative `warmup`, or one of less than 2 with `early`.
        UnsupportedError: The function wants to load a kernel while it is captured.
    """
    least = 2 if early else 0
    if warmup < least:
        raise ArgumentError(f"warmup {warmup}", need=f"at least {least} runs", hint="3")
    starts, side = EarlyStarts(), _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            with starts.watch() if early else nullcontext():
                fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # What other threads do meanwhile is no part of it, and cannot spoil it.
    captured = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
    with captured, starts.use() if early else nullcontext():
        outputs = fn()
    return Graph(graph, outputs, starts.allowed)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures of a GPU: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
