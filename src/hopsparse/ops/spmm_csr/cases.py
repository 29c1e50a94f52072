"""Named problems of spmm_csr and csr_matmul: what tests check and benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats._base import pointers
from .._product import Case

SMOKE = (Case("smoke", 16, 128, 128, "unstructured:0.9"),)

#: Tokens off every tile, ragged shapes, nearly empty and nearly full.
EDGE = (
    Case("one-token", 1, 256, 256, "unstructured:0.9"),
    Case("three-tokens", 3, 256, 256, "unstructured:0.5"),
    Case("seven-tokens", 7, 256, 256, "unstructured:0.8"),
    Case("seventeen-tokens", 17, 256, 256, "unstructured:0.99"),
    Case("no-tokens", 0, 64, 64, "unstructured:0.9"),
    Case("k-4160", 5, 64, 4160, "unstructured:0.9"),
    Case("k-2064", 5, 64, 2064, "unstructured:0.9"),
    Case("ragged", 9, 71, 53, "unstructured:0.7"),
    Case("one-row", 3, 1, 300, "unstructured:0.9"),
    Case("one-column", 3, 300, 1, "unstructured:0.5"),
    Case("nearly-full", 5, 64, 64, "unstructured:0.01"),
)

#: Projections of Llama-2-7B and Llama-3-8B.
MODEL = (
    Case("llama2-7b-up-prefill", 2048, 11008, 4096, "unstructured:0.9"),
    Case("llama2-7b-down-prefill", 2048, 4096, 11008, "unstructured:0.95"),
    Case("llama3-8b-up-decode", 1, 14336, 4096, "unstructured:0.9"),
)


@dataclass(frozen=True)
class Graph:
    """A graph to aggregate over, as `power_law` draws it.

    Attributes:
        name: Unique.
        nodes: Rows and columns.
        edges: Entries.
        features: Of x, one after the other.
    """

    name: str
    nodes: int
    edges: int
    features: tuple[int, ...]


GRAPHS = (
    Graph("power-law-100k", 100_000, 2_000_000, (16, 64, 256)),
    Graph("power-law-1m", 1_000_000, 20_000_000, (64, 256)),
)

#: Few tokens over unstructured weights.
DECODE = tuple(
    Case(f"16384x4096-{sparsity}-{tokens}", tokens, 16384, 4096, f"unstructured:{sparsity}")
    for sparsity in (0.8, 0.9, 0.95)
    for tokens in (1, 16, 64, 256)
)

#: More of them, which wgmma multiplies; not measured yet.
WIDE = (
    *(
        Case(f"16384x4096-{sparsity}-{tokens}", tokens, 16384, 4096, f"unstructured:{sparsity}")
        for sparsity in (0.5, 0.8)
        for tokens in (128, 512)
    ),
    Case("16384x4096-0.5-256", 256, 16384, 4096, "unstructured:0.5"),
    Case("4096x4096-0.8-256", 256, 4096, 4096, "unstructured:0.8"),
    Case("14336x4096-0.8-256", 256, 14336, 4096, "unstructured:0.8"),
)


def power_law(
    nodes: int, edges: int, *, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Pointers and columns of a random graph whose degrees fall as rank^-0.6, both ways.

    Ranks are shuffled, and those of sources and targets are the same. Columns of a row are sorted,
    and a few repeat.

    Args:
        nodes: Rows and columns.
        edges: Entries.
        device: Where.

    Returns:
        int32 [nodes + 1] and int32 [edges].

    Example:
        >>> indptr, indices = power_law(100, 1000)
        >>> int(indptr[-1]), indices.shape
        (1000, torch.Size([1000]))
    """
    weight = torch.arange(1, nodes + 1, device=device, dtype=torch.float64).pow(-0.6)
    share = weight[torch.randperm(nodes, device=device)].cumsum(0)
    ends = torch.rand(2, edges, device=device, dtype=torch.float64) * share[-1]
    target, source = torch.searchsorted(share, ends, right=True).clamp_(max=nodes - 1)
    key = (target * nodes + source).sort().values
    counts = torch.bincount(key // nodes, minlength=nodes)
    return pointers(counts), (key % nodes).to(torch.int32)
