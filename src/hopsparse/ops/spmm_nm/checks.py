"""What is verified of spmm_nm: cases, every tile, epilogues and strides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...formats._windows import windows_of
from ...formats.nm import NM
from ...formats.pattern import NMPattern, parse_pattern
from ...measure.error import gated_bound, unit_roundoff
from ...verify import Check, Expected, Trial, dense_weight, made_once, small_integers, wide_integers
from ...verify.products import bounded_trial, epilogue_trial, exact_trial, strided
from .._product import Case
from .cases import EDGE, SMOKE
from .kernel import ACTIVATIONS, SWIGLU, Config
from .op import spmm_nm
from .plan import CANDIDATES, tiles
from .reference import apply_activation
from .scaled.op import interleave_gate_up
from .verified import TILES

_OP = "spmm_nm"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TWO_FOUR = NMPattern(2, 4)
# The quick set of a GPU: each pattern of each dtype; k in parts, rows of y that are no whole lines.
_FIRST = ("smoke", "1:4", "4:6", "6:8-ragged")
_FIRST_OF_KERNELS = ("k-4160", "ragged")
# tokens, out, k: one tile; ragged on all sides; rows of y that are no whole lines; more tiles than
# blocks that run at once, so that a block goes from one to the next.
_SHAPES = ((256, 256, 256), (513, 1032, 1096), (70, 70, 2064), (2049, 2064, 400))


def checks() -> Iterator[Check]:
    """Every case, dtype, tile and epilogue."""
    for case in SMOKE + EDGE:
        pattern = parse_pattern(case.pattern)
        assert isinstance(pattern, NMPattern)
        for dtype in _DTYPES:
            # Other patterns, float32 and no tokens have no kernel, and the plan says so.
            kernel = dtype.itemsize == 2 and windows_of(pattern) == 1 and case.tokens > 0
            trials = partial(_of_case, case, pattern, dtype)
            quick, first = dtype != torch.float16, case.name in _FIRST
            first |= dtype == torch.bfloat16 and case.name in _FIRST_OF_KERNELS
            yield _check(case.name, dtype, trials, kernel, str(pattern), quick, first)
    for dtype in _DTYPES[:2]:
        is_first = dtype == torch.bfloat16
        yield _check("strides", dtype, partial(_strides, dtype), quick=True, first=is_first)
        for config in CANDIDATES:
            trials = partial(_of_tile, config, dtype)
            first = is_first and config in TILES
            yield _check(f"tile-{config.name}", dtype, trials, first=first)
        for act in ACTIVATIONS:
            trials = partial(_epilogues, act, dtype)
            quick = act == "gelu"
            yield _check(f"act-{act}", dtype, trials, quick=quick, first=quick and is_first)
    for config in tiles(SWIGLU):
        trials = partial(_swiglu, config)
        first = config is CANDIDATES[0]
        yield _check(f"tile-{config.name}-swiglu", torch.bfloat16, trials, first=first)


def _check(
    case: str,
    dtype: torch.dtype,
    trials: partial[Iterator[Trial]],
    kernel: bool = True,
    pattern: str = "2:4",
    quick: bool = False,
    first: bool = False,
) -> Check:
    name, form, only = str(dtype).removeprefix("torch."), f"nm-{pattern}", "tile-" in case
    return Check(_OP, case, name, form, trials, kernel, quick, only_gpu=only, first=first)


def _of_case(
    case: Case, pattern: NMPattern, dtype: torch.dtype, device: torch.device
) -> Iterator[Trial]:
    """Exact with a bias, then random numbers in bound."""
    dense = dense_weight((case.out, case.k), pattern, dtype).to(device)
    w = NM.from_dense(dense, pattern)
    x = small_integers((case.tokens, case.k), dtype).to(device)
    bias = small_integers((case.out,), dtype, 9).to(device)
    yield exact_trial(partial(spmm_nm, w), x, dense, bias)
    dense = (dense * torch.rand(dense.shape).to(device)).to(dtype)
    x = torch.randn(x.shape).to(device, dtype)
    yield bounded_trial(partial(spmm_nm, NM.from_dense(dense, pattern)), x, dense)


def _of_tile(config: Config, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    for shape in _SHAPES:
        w, x, right = _of_integers(shape, dtype, device)
        yield Trial(partial(spmm_nm, w, x, config=config), [right])


@made_once
def _of_integers(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[NM, Tensor, Expected]:
    tokens, out, k = shape
    dense = dense_weight((out, k), _TWO_FOUR, dtype).to(device)
    x = small_integers((tokens, k), dtype).to(device)
    right = wide_integers(x, dense).to(dtype).double()
    return NM.from_dense(dense), x, Expected(right, dtype)


def _epilogues(act: str, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    for out in (192, 70):
        dense = dense_weight((out, 128), _TWO_FOUR, dtype).to(device)
        x = small_integers((45, 128), dtype).to(device)
        for kind in (dtype, torch.float32):
            run = partial(spmm_nm, NM.from_dense(dense))
            yield epilogue_trial(run, x, dense, act, kind, apply_activation)


def _swiglu(config: Config, device: torch.device) -> Iterator[Trial]:
    for tokens, half, k in ((101, 144, 640), (33, 1032, 256)):
        parts = [dense_weight((half, k), _TWO_FOUR, torch.bfloat16).to(device) for _ in range(2)]
        x = small_integers((tokens, k), torch.bfloat16).to(device)
        w = NM.from_dense(interleave_gate_up(*parts))
        yield Trial(
            partial(spmm_nm, w, x, act=SWIGLU, alpha=1 / 16, config=config),
            [_folded(*(wide_integers(x, part) / 16 for part in parts))],
        )


def _folded(gate: Tensor, up: Tensor) -> Expected:
    """Of sides that are exact in float32."""
    right, dtype = F.silu(gate) * up, torch.bfloat16
    slack = gated_bound(gate) * right.abs()
    end = unit_roundoff(dtype) * (right.abs() + slack) + torch.finfo(dtype).tiny
    return Expected(right, dtype, slack + end)


def _strides(dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    dense = dense_weight((256, 256), _TWO_FOUR, dtype, 1).to(device)
    for x in strided(256, dtype, device):
        yield exact_trial(partial(spmm_nm, NM.from_dense(dense)), x, dense)
