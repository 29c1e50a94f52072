"""What is verified of csr_matmul, sddmm_csr and spmm_csr: formats, hard rows, every wide tile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...formats import convert
from ...formats._base import pointers
from ...formats.csr import CSR
from ...formats.pattern import parse_pattern
from ...measure.error import product_bound
from ...verify import Check, Expected, Trial, dense_weight, small_integers, wide_integers
from ...verify.products import bounded_trial, exact_trial
from .._product import Case
from .cases import EDGE, SMOKE, power_law
from .op import csr_matmul, sddmm_csr, spmm_csr
from .packed import Packed, pack
from .wide import CANDIDATES, Config

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Entries of each row, and columns: nothing, ends without any, rows that several warps share.
_ROWS: dict[str, tuple[list[int], int]] = {
    "one-entry": ([1], 1),
    "nothing": ([0, 0, 0], 5),
    "empty-ends": ([0] * 40 + [3] + [0] * 75, 9),
    "short-rows": ([(7 * i) % 5 for i in range(333)], 200),
    "one-huge-row": ([2] * 10 + [3001] + [1] * 30, 4000),
    "huge-rows": ([500, 1, 700, 0, 33, 32, 31, 0, 900], 1000),
}
# Every team of threads, whole and in part: 16 bytes are 4 or 8 features.
_FEATURES = (1, 3, 8, 20, 47, 64, 256, 640)
_TORCH = (torch.int32, torch.int64)
# tokens, out, k of every tile: ragged on all sides; long rows; rows of y that are no whole words.
_WIDE = ((130, 520, 656), (300, 200, 4160), (70, 71, 2064))
# The quick set of a GPU: the most tokens, which two blocks share; parts of k with two ways.
_FIRST_TILES = (Config(256, 1, 1, 2), Config(64, 2, 4))


def checks() -> Iterator[Check]:
    """Every shape of rows by format and dtype; weights of few tokens; a graph."""
    for dtype in _DTYPES:
        name, quick = str(dtype).removeprefix("torch."), dtype != torch.float16
        for rows in _ROWS:
            # Rows that several warps share, of each format and dtype.
            first = rows == "huge-rows"
            for form in ("csr", "csc", "hyb", "torch-int32", "torch-int64"):
                trials = partial(_matmul, rows, form, dtype)
                # Formats differ before the kernel, whatever the dtype.
                few = quick and (form == "csr" or dtype == torch.bfloat16)
                yield Check(
                    "csr_matmul", rows, name, form, trials, _has_work(rows), few, first=first
                )
            for form in ("csr", "torch-int64"):
                trials = partial(_dots, rows, form, dtype)
                yield Check(
                    "sddmm_csr", rows, name, form, trials, _has_work(rows), quick, first=first
                )
        graph = partial(_graph, dtype)
        first = dtype == torch.float32
        yield Check("csr_matmul", "power-law", name, "csr", graph, quick=quick, first=first)
        for case in SMOKE + EDGE:
            trials = partial(_weight, case, dtype)
            kernel = case.tokens > 0
            first = case.name in ("smoke", "three-tokens")
            yield Check("spmm_csr", case.name, name, "csr", trials, kernel, quick, first=first)
    for config in CANDIDATES:
        for dtype in _DTYPES[1:]:
            name = str(dtype).removeprefix("torch.")
            first = dtype == torch.bfloat16 and config in _FIRST_TILES
            trials = partial(_wide_tile, config, dtype)
            tile = f"tile-{config.name}"
            yield Check("spmm_csr", tile, name, "csr", trials, only_gpu=True, first=first)


def _has_work(rows: str) -> bool:
    """Whether there is an entry: without one nothing need be launched."""
    return sum(_ROWS[rows][0]) > 0


def _matrix(rows: str, dtype: torch.dtype) -> CSR:
    """Values of -2 to 2, none zero, at random columns."""
    counts, cols = _ROWS[rows]
    picked = [torch.randperm(cols)[:count].sort().values for count in counts]
    indices = torch.cat(picked).to(torch.int32)
    values = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(0, 4, (len(indices),))]
    return CSR((len(counts), cols), values.to(dtype), indices, pointers(torch.tensor(counts)))


def _stored(a: CSR, form: str, device: torch.device) -> Any:
    on = a.to(device)
    if not form.startswith("torch-"):
        return on if form == "csr" else convert(a, form).to(device)
    wide = getattr(torch, form.removeprefix("torch-"))
    parts = (on.indptr.to(wide), on.indices.to(wide), on.values)
    with warnings.catch_warnings():
        # torch says once in a process that its sparse tensors may change.
        warnings.simplefilter("ignore")
        return torch.sparse_csr_tensor(*parts, size=a.shape, check_invariants=False)


def _matmul(rows: str, form: str, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    a = _matrix(rows, dtype)
    stored, dense = _stored(a, form, device), a.to_dense().to(device)
    for features in _FEATURES:
        x = small_integers((a.shape[1], features), dtype, 1).to(device)
        right = wide_integers(x.T, dense).T
        value = Expected(right.to(dtype).double(), dtype)
        yield Trial(partial(csr_matmul, stored, x), [value])
    x = torch.randn(a.shape[1], 40).to(device, dtype)
    slack = product_bound(x.T, dense, torch.float32, dtype).T
    right = dense.double() @ x.double()
    yield Trial(partial(csr_matmul, stored, x), [Expected(right, dtype, slack)])


def _dots(rows: str, form: str, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    a = _matrix(rows, dtype)
    stored = _stored(a, form, device)
    row = torch.repeat_interleave(torch.arange(a.shape[0]), a.indptr.diff().long()).to(device)
    column = a.indices.long().to(device)
    for features in _FEATURES:
        u = small_integers((a.shape[0], features), dtype, 1).to(device)
        x = small_integers((a.shape[1], features), dtype, 1).to(device)
        right = (u[row].double() * x[column].double()).sum(1)
        run = partial(sddmm_csr, stored, u, x)
        yield Trial(run, [Expected(right.to(dtype).double(), dtype)])


def _graph(dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """Rows and columns of very different degree; sums of 0 and 1."""
    nodes, edges = 2_000, 20_000
    indptr, indices = power_law(nodes, edges)
    a = CSR((nodes, nodes), torch.ones(edges, dtype=dtype), indices, indptr)
    x = (torch.rand(nodes, 64) < 0.02).to(dtype)
    row = torch.repeat_interleave(torch.arange(nodes), indptr.diff().long())
    right = torch.zeros(nodes, 64, dtype=torch.float64).index_add_(
        0, row, x[indices.long()].double()
    )
    value = Expected(right.to(dtype).double(), dtype)
    yield Trial(partial(csr_matmul, a.to(device), x.to(device)), [value])


def _weight(case: Case, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """As many tokens as the case has, and a few more counts where tiles end."""
    dense = dense_weight((case.out, case.k), parse_pattern(case.pattern), dtype, 1).to(device)
    run: Callable[..., Tensor] = partial(spmm_csr, CSR.from_dense(dense))
    for tokens in (case.tokens,) if not case.tokens else (case.tokens, 8, 31, 65, 260):
        x = small_integers((tokens, case.k), dtype, 1).to(device)
        bias = small_integers((case.out,), dtype, 4).to(device)
        yield exact_trial(run, x, dense, bias)
    x = torch.randn(max(1, case.tokens), case.k).to(device, dtype)
    if case.tokens:
        yield bounded_trial(run, x, dense)


def _wide_tile(config: Config, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """More items than one, more steps than a ring has stages; units without values, and full."""
    from .wide_device import multiply_wide

    for tokens, out, k in _WIDE:
        dense = dense_weight((out, k), parse_pattern("unstructured:0.8"), dtype, 1)
        dense[:, 64:192] = 0
        dense[:64, 256:320] = 1
        w = CSR.from_dense(dense.to(device))
        packed = pack(w.indptr, w.indices, w.values, k)
        assert packed is not None  # of a dense matrix no entry repeats
        x = small_integers((tokens, k), dtype, 1).to(device)
        bias = small_integers((out,), dtype, 4).to(device)
        run = partial(_by_tile, multiply_wide, packed, config)
        yield exact_trial(run, x, dense.to(device), bias)
        yield bounded_trial(run, torch.randn(tokens, k).to(device, dtype), dense.to(device))


def _by_tile(
    multiply: Callable[..., Tensor],
    w: Packed,
    config: Config,
    x: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return multiply(w, x, bias, config)
