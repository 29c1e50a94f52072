"""CUDA graphs: work recorded once, and replayed at the cost of one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..errors import ArgumentError

Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Graph(Generic[Outputs]):
    """A captured graph.

    Attributes:
        recorded: The graph of torch; its `pool()` may be shared with others.
        outputs: What the captured function returned. A replay writes the same tensors again.
    """

    recorded: torch.cuda.CUDAGraph
    outputs: Outputs

    def replay(self) -> None:
        """Run everything again on torch's current stream, reading the same addresses."""
        self.recorded.replay()


def capture(fn: Callable[[], Outputs], *, warmup: int = 3, pool: Any = None) -> Graph[Outputs]:
    """Capture what a function does on the current GPU.

    Args:
        fn: Takes nothing; its inputs are tensors that stay where they are. It runs `warmup` + 1
            times. It must not wait for the GPU, nor load kernels in the last run.
        warmup: Runs before the capture, on another stream: they compile, load and plan.
        pool: Memory pool of another graph that never runs at the same time; None for a new one.

    Raises:
        ArgumentError: A negative `warmup`.
        UnsupportedError: The function wants to load a kernel while it is captured.
    """
    if warmup < 0:
        raise ArgumentError(f"warmup {warmup}", need="at least 0 runs", hint="3")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        outputs = fn()
    return Graph(graph, outputs)
