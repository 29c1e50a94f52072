"""2:4 matrices in which every kind of group occurs, for the tests of whoever packs them."""

from __future__ import annotations

import torch
from torch import Tensor

from hopsparse.formats import NM
from tests.helpers.matrices import bits, random_bits

#: Which of four columns are live: the 11 sets of at most two.
MASKS = torch.tensor([[m >> i & 1 for i in range(4)] for m in range(16) if m.bit_count() <= 2])


def two_four(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """All 11 masks; any bits where they are live (NaN, infinities, denormals), else both zeros."""
    make = torch.Generator().manual_seed(seed)
    live = MASKS[torch.randint(len(MASKS), (rows, -(-cols // 4)), generator=make)]
    live = live.flatten(1)[:, :cols].bool()
    zero = torch.where(torch.rand(rows, cols, generator=make) < 0.5, 0.0, -0.0).to(dtype)
    return torch.where(live, bits(random_bits((rows, cols), dtype, make)), bits(zero)).view(dtype)


def assert_same_bits(got: NM, want: NM) -> None:
    """Both parts agree in every bit; they may be on different devices."""
    assert (got.shape, got.pattern, got.dtype) == (want.shape, want.pattern, want.dtype)
    for name, part in want.parts().items():
        other = got.parts()[name].cpu()
        assert other.shape == part.shape
        assert torch.equal(other.view(torch.uint8), part.cpu().view(torch.uint8)), name
