"""What is verified of spmm_nm_experts: ways of sharing tokens, every tile, activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ....formats.nm import NM
from ....formats.pattern import NMPattern
from ....measure.error import finish_bound
from ....verify import (
    Check,
    Expected,
    Trial,
    dense_weight,
    made_once,
    small_integers,
    wide_integers,
)
from ..kernel import ACTIVATIONS, Config
from ..plan import for_experts
from ..reference import apply_activation
from ..verified import tiles_of_experts
from .op import spmm_nm_experts

_OP = "spmm_nm_experts"
_DTYPES = (torch.bfloat16, torch.float16)
# Tokens of each expert, tokens that none has, out, k: even; some without; one each; one has all;
# none has any; more experts than SMs.
_SHARINGS = {
    "even": ([256, 256], 0, 256, 256),
    "uneven": ([0, 213, 0, 0, 7, 1, 0], 0, 320, 1096),
    "one-each": ([1] * 8, 3, 64, 64),
    "one-has-all": ([0, 0, 300], 5, 192, 512),
    "nobody": ([0, 0], 33, 128, 128),
    "many": ([2] * 150, 0, 64, 448),
}


def checks() -> Iterator[Check]:
    """Every sharing by the tile that is chosen, one of them by every tile, activations."""
    for dtype in _DTYPES:
        for name in _SHARINGS:
            trials = partial(_exact, (name,), None, dtype)
            quick = dtype == torch.bfloat16
            first = name == "uneven" or (quick and name == "nobody")
            yield _check(name, dtype, trials, quick=quick, first=first)
        for config in for_experts():
            trials = partial(_exact, ("uneven", "one-has-all"), config, dtype)
            first = config in tiles_of_experts() and dtype == torch.bfloat16
            yield _check(f"tile-{config.name}", dtype, trials, first=first)
        for act in ACTIVATIONS:
            quick = act == "silu" and dtype == torch.float16
            first = act == "silu" and dtype == torch.bfloat16
            trials = partial(_activated, act, dtype)
            yield _check(f"act-{act}", dtype, trials, quick=quick, first=first)


def _check(
    case: str,
    dtype: torch.dtype,
    trials: partial[Iterator[Trial]],
    quick: bool = False,
    first: bool = False,
) -> Check:
    name, only = str(dtype).removeprefix("torch."), "tile-" in case
    return Check(_OP, case, name, "nm-2:4", trials, quick=quick, only_gpu=only, first=first)


@made_once
def _problem(
    name: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, NM, Tensor, Tensor]:
    """x, w, ends, and the sums in float64; zeros where no expert has the token."""
    counts, nobodys, out, k = _SHARINGS[name]
    dense = dense_weight((len(counts) * out, k), NMPattern(2, 4), dtype).to(device)
    x = small_integers((sum(counts) + nobodys, k), dtype).to(device)
    offs = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    right = torch.zeros(len(x), out, dtype=torch.float64, device=device)
    for expert, (begin, end) in enumerate(pairwise([0, *offs.tolist()])):
        right[begin:end] = wide_integers(x[begin:end], dense.view(len(counts), out, k)[expert])
    return x, NM.from_dense(dense), offs.to(device), right


def _exact(
    names: tuple[str, ...], config: Config | None, dtype: torch.dtype, device: torch.device
) -> Iterator[Trial]:
    for name in names:
        x, w, offs, right = _problem(name, dtype, device)
        run = partial(spmm_nm_experts, w, x, offs, config=config)
        yield Trial(run, [Expected(right.to(dtype).double(), dtype)])


def _activated(act: str, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    x, w, offs, sums = _problem("uneven", dtype, device)
    sums, out = sums.clone(), sums.shape[1]
    bias = torch.randn(len(offs), out).to(device, dtype)
    for expert, (begin, end) in enumerate(pairwise([0, *offs.tolist()])):
        sums[begin:end] += bias[expert].double()
    right = apply_activation(sums, act)
    for kind in (dtype, torch.float32):
        slack = finish_bound(sums.abs(), right, torch.zeros((), device=device), kind)
        run = partial(
            spmm_nm_experts,
            w,
            x,
            offs,
            bias=bias,
            act=None if act == "none" else act,
            out_dtype=kind,
        )
        yield Trial(run, [Expected(right, kind, slack)])
