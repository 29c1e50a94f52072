"""Random 2:4 weights, and what their products must be: float64 and a bound, where every tile is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .clock import copies_to_defeat_l2
from .error import product_bound

# Checked are one row and one column of every such block, all along: no tile of a kernel is as
# small, so that none goes unseen.
_BLOCK = 64
_STORED_BITS_A_WEIGHT = 9  # 2:4 in 16 bits: half the values, and an eighth of their bits again


def cold_weights(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """Random 2:4 weights, as many as it takes to defeat the L2 cache of the generator's GPU."""
    count = cold_copies(shape, _STORED_BITS_A_WEIGHT, generator.device)
    return [random_24(shape, dtype, generator) for _ in range(count)]


def cold_copies(shape: tuple[int, int], bits: int, device: torch.device) -> int:
    """How many weights of so many stored bits an entry defeat the L2 cache of a GPU."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return copies_to_defeat_l2(shape[0] * shape[1] * bits // 8, l2_bytes, most=64)


def random_24(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers, of which the two largest of four are kept; on the generator's device.

    Example:
        >>> weight = random_24((2, 8), torch.float16, torch.Generator().manual_seed(0))
        >>> (weight.view(-1, 4) != 0).sum(1).tolist()
        [2, 2, 2, 2]
    """
    groups = torch.randn(
        shape[0], shape[1] // 4, 4, generator=generator, device=generator.device, dtype=dtype
    )
    largest = groups.abs().topk(2, dim=-1).indices
    kept = torch.zeros_like(groups).scatter_(-1, largest, groups.gather(-1, largest))
    return kept.view(shape)


class Reference:
    """Some rows and some columns of a product in float64, chosen so that they cross every tile.

    Attributes:
        out: Rows of the weight.

    Args:
        x: [tokens, k].
        weight: [out, k].
        seed: Of the choice.

    Example:
        >>> x, weight = torch.ones(3, 4), torch.ones(2, 4)
        >>> Reference(x, weight).excess(x @ weight.T)
        0.0
    """

    def __init__(self, x: Tensor, weight: Tensor, *, seed: int = 2) -> None:
        self.out = weight.shape[0]
        generator = torch.Generator().manual_seed(seed)
        self._rows = one_of_each_block(x.shape[0], generator).to(x.device)
        self._columns = one_of_each_block(weight.shape[0], generator).to(x.device)
        self._by_row = _exact(x[self._rows], weight)
        self._by_column = _exact(x, weight[self._columns])

    def excess(self, y: Tensor) -> float:
        """Largest error of y [tokens, out] as a part of its bound; infinite if y is not finite."""
        if not bool(torch.isfinite(y).all()):
            return float("inf")
        seen = ((y[self._rows], self._by_row), (y[:, self._columns], self._by_column))
        return max(
            float(((part.double() - exact).abs() / bound).max()) for part, (exact, bound) in seen
        )


def first_and_last(x: Tensor, weights: Sequence[Tensor]) -> dict[int, Reference]:
    """References of the first weight, 0, and of the last, -1.

    Of both, because whoever remembers the first would read it from the cache.
    """
    return {index: Reference(x, weights[index]) for index in (0, -1)}


def largest_excess(
    run: Callable[[int], Tensor], references: Mapping[int, Reference], x: Tensor
) -> float:
    """The largest excess of the products that `run` makes of x and the weights of `references`.

    Example:
        >>> x, weights = torch.ones(3, 4), [torch.ones(2, 4), torch.zeros(2, 4)]
        >>> largest_excess(lambda i: x @ weights[i].T, first_and_last(x, weights), x)
        0.0
    """
    worst = 0.0
    for index, reference in references.items():
        # Where the allocator will likely put the result: what is not written shows.
        torch.full((x.shape[0], reference.out), float("nan"), dtype=x.dtype, device=x.device)
        worst = max(worst, reference.excess(run(index)))
    return worst


def _exact(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    exact = x.double() @ weight.double().T
    return exact, product_bound(x, weight, torch.float32, x.dtype)


def one_of_each_block(count: int, generator: torch.Generator) -> Tensor:
    """One index of every `_BLOCK`, at random."""
    starts = torch.arange(0, count, _BLOCK)
    sizes = (count - starts).clamp(max=_BLOCK)
    return starts + (torch.rand(len(starts), generator=generator) * sizes).long()
