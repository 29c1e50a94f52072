"""Logits of models through a cache of a fixed size, what ran, and how near results must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hopsparse.models.generate import cache_argument

#: Of fused models beside unfused ones, logits of bfloat16 of about 1 and below. Fused kernels round
#: once where two launches round twice, and of rounded inputs the next code may be nearest: a step
#: of 8 bits, which no bound of a single product covers. Kernels have theirs in measure/error.py.
FUSED = {"atol": 0.06, "rtol": 0.1}


@torch.no_grad()
def logits(model: Any, texts: Tensor, steps: Sequence[int], room: int, **more: Any) -> Tensor:
    """Of all tokens, given in pieces of so many through a cache with room."""
    from transformers import StaticCache  # The GPU tier goes without it.

    cache = StaticCache(config=model.config, max_cache_len=room)
    rows, name = [], cache_argument(model)
    for piece in texts.split(list(steps), 1):
        rows.append(model(piece, use_cache=True, **{name: cache}, **more).logits)
    return torch.cat(rows, 1)


def telling(run: Callable[..., Any], name: str, ran: list[str]) -> Callable[..., Any]:
    """A function that says its name whenever it runs."""

    def told(*args: Any, **options: Any) -> Any:
        ran.append(name)
        return run(*args, **options)

    return told


def assert_as_near(found: Tensor, right: Tensor, exact: Tensor) -> None:
    """At most twice as far from float64 as another way of the same dtype, and a rounding of that.

    Both round as often; sums are in another order.
    """
    step = torch.finfo(found.dtype).eps * exact.abs().max()
    allowed = 2 * (right.double() - exact).abs().max() + step
    assert (found.double() - exact).abs().max() <= allowed
