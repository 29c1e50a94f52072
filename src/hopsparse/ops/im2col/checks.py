"""What is verified of im2col: every number of every window, and zeros beside the images."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional as F

from ...verify import Check, Expected, Trial
from .cases import EDGE, Case
from .op import gather

_DTYPES = (torch.bfloat16, torch.float32, torch.int8)
# The quick set of a GPU: each width of a piece.
_FIRST = ("even-channels", "half-pieces", "two-parts")


def checks() -> Iterator[Check]:
    """Every case and size of numbers, channels-last."""
    for case in EDGE:
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            trials = partial(_gathered, case, dtype)
            quick = dtype == torch.bfloat16
            first = case.name == "stem" or (quick and case.name in _FIRST)
            yield Check("im2col", case.name, name, "", trials, quick=quick, first=first)


def _gathered(case: Case, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    w = case.windows
    x = torch.randint(-99, 100, case.shape)
    # torch's own gathering, in float64, has the channels before the taps.
    columns = F.unfold(x.double(), w.kernel, w.dilation, w.padding, w.stride)
    n, c = case.shape[:2]
    value = columns.view(n, c, w.taps, -1).permute(0, 3, 2, 1).reshape(-1, w.taps * c)
    images = x.to(dtype).to(memory_format=torch.channels_last).to(device)
    yield Trial(partial(gather, images, w), [Expected(value, dtype)])
