"""cuSPARSELt through PyTorch in its strongest form: every algorithm id, and the fastest runs.

For 16 bits that is `peers.CuSPARSELt`, for 8 `coded_peers.CodedCuSPARSELt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UnsupportedError
from .clock import Contender, time_side_by_side
from .error import scaled_bound
from .fault import named, wait_for

# Ids that torch may know and a build may refuse have gaps; after this many there are no more.
_REFUSED_IN_A_ROW = 8
_MOST_IDS = 64
# cuSPARSELt 0.8.0 takes ids past its last one for float16: the kernel then fails with "illegal
# instruction", and the process can use the GPU no more. Of 8 bits it refuses them:
# benchmarks/results/h200/cusparselt_ids.jsonl.
_IDS = {torch.float16: 36, torch.int8: 27, torch.float8_e4m3fn: 25}
# (slices of k, mode): one kernel that adds up, or two.
_SPLITS = tuple((slices, mode) for slices in (2, 4, 8) for mode in (1, 2))
# Tokens are padded to a multiple of this: what torch's own class does for 8- and 16-bit numbers.
_TOKEN_MULTIPLE = 16
_FINALISTS, _ROUNDS, _FINAL_ROUNDS = 4, 5, 25
_ROWS_COMPARED = 256
_SEARCH_S = 120.0  # enough for all of them, or the fastest could be missed


@dataclass(frozen=True)
class Algorithm:
    """How cuSPARSELt is told to compute.

    Attributes:
        id: Its algorithm id.
        split_k: Slices of k.
        split_k_mode: 1: one kernel adds the slices up; 2: a second one does; -1: not split.
        alpha: Whether it multiplies the scales of w, too.
    """

    id: int
    split_k: int = 1
    split_k_mode: int = -1
    alpha: bool = False

    def __str__(self) -> str:
        """The text of tables.

        Example:
            >>> str(Algorithm(3)), str(Algorithm(3, 4, 2)), str(Algorithm(3, alpha=True))
            ('id 3', 'id 3, k in 4, mode 2', 'id 3, alpha')
        """
        split = "" if self.split_k == 1 else f", k in {self.split_k}, mode {self.split_k_mode}"
        return f"id {self.id}{split}{', alpha' * self.alpha}"


class Searched(Protocol):
    """A compressed weight, as the search of the fastest algorithm takes it."""

    @property
    def packed(self) -> Tensor:
        """What `torch._cslt_compress` made."""

    @property
    def out(self) -> int:
        """Rows of the weight."""

    @property
    def split_k(self) -> bool:
        """Whether slices of k are tried."""

    def run(self, x: Any, by: Algorithm) -> Tensor:
        """Multiply x by one algorithm."""

    def forms(self, number: int) -> tuple[Algorithm, ...]:
        """How an algorithm id can be called; the plainest first."""


def why_unavailable() -> str | None:
    """Why cuSPARSELt cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    if not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    return None


def check_available() -> None:
    """Refuse to go on without cuSPARSELt.

    Raises:
        UnsupportedError: See `why_unavailable`.
    """
    if (why := why_unavailable()) is not None:
        raise UnsupportedError(
            f"cuSPARSELt: {why}",
            need="a GPU and a torch with cuSPARSELt",
            hint="the cu130 wheel",
        )


def last_id(dtype: torch.dtype) -> int:
    """The last algorithm id that is tried.

    Example:
        >>> last_id(torch.float16), last_id(torch.int8)
        (35, 26)
    """
    return _IDS.get(dtype, _MOST_IDS) - 1


def padded(tokens: int) -> int:
    """Rows of x that cuSPARSELt is given for so many.

    Example:
        >>> padded(1), padded(16), padded(17)
        (16, 16, 32)
    """
    return -(-tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE


def multiplied(
    packed: Tensor,
    x: Tensor,
    by: Algorithm,
    *,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One call: alpha * (x @ w.T) + bias.

    Args:
        packed: w [out, k], compressed.
        x: [tokens, k]; padded, if need be.
        by: The algorithm.
        bias: [out] or None.
        alpha: float32 [out], or None. One number would be read by the host.
        out_dtype: Of 8 bits: bfloat16, float16; int32 of int8; float32 of E4M3. None: that of x.

    Returns:
        [tokens, out].
    """
    tokens = x.shape[0]
    missing = padded(tokens) - tokens
    if missing:
        # torch does not pad all 8-bit floats; zeros are zeros in all of them.
        raw = x.view(torch.int8) if x.itemsize == 1 else x
        x = F.pad(raw, (0, 0, 0, missing)).view(x.dtype)
    y = torch._cslt_sparse_mm(
        packed,
        x.t(),
        bias=bias,
        alpha=alpha,
        out_dtype=out_dtype,
        transpose_result=True,
        alg_id=by.id,
        split_k=by.split_k,
        split_k_mode=by.split_k_mode,
    )
    return y[:tokens].contiguous() if missing else y


def fastest(product: Searched, x: Any, codes: Tensor, problem: tuple[Any, ...]) -> Algorithm:
    """The fastest algorithm of a problem, measured once.

    Args:
        product: The compressed weight.
        x: What it multiplies.
        codes: The tensor in x.
        problem: Everything that the choice may depend on: sides, tokens as padded, dtypes, options.

    Raises:
        UnsupportedError: No algorithm takes the problem.
        GpuLostError: A kernel of one failed; it names the algorithm.
    """
    if problem not in _FASTEST:
        _FASTEST[problem] = _search(product, x, codes)
    return _FASTEST[problem]


_FASTEST: dict[tuple[Any, ...], Algorithm] = {}


def _search(product: Searched, x: Any, codes: Tensor) -> Algorithm:
    """Time every algorithm in a cold L2 cache, and the finalists again, in more rounds.

    A call of float16 takes the host 0.15 s: copies of the weight, and calls that are repeated in a
    graph, would take minutes.
    """

    def ranked(by: list[Algorithm], rounds: int) -> list[Algorithm]:
        contenders = [Contender(_told(each, codes), [partial(product.run, x, each)]) for each in by]
        timings = time_side_by_side(
            contenders,
            rounds=rounds,
            flush_l2=True,
            warm_s=0.02,
            budget_s=_SEARCH_S,
            device=codes.device,
        )
        timed = [pair for pair in zip(timings, by, strict=True) if not pair[0].error]
        return [each for _, each in sorted(timed, key=lambda pair: pair[0].us)]

    first = ranked(_accepted(product, x, codes), _ROUNDS)[:_FINALISTS]
    if product.split_k:
        first += [
            Algorithm(each.id, *split, alpha=each.alpha) for each in first[:2] for split in _SPLITS
        ]
    final = ranked(first, _FINAL_ROUNDS)
    if not final:
        raise UnsupportedError(
            f"cuSPARSELt: no algorithm for x {list(codes.shape)} of {codes.dtype} "
            f"and {product.out} rows",
            need="out and k that are multiples of 16, of 8-bit numbers of 32",
            hint="the dense product",
        )
    return final[0]


def _accepted(product: Searched, x: Any, codes: Tensor) -> list[Algorithm]:
    """Every algorithm that runs; a kernel that fails ends the search, a refusal does not."""
    found: list[Algorithm] = []
    refused = 0
    for number in range(last_id(codes.dtype) + 1):
        before, plain = len(found), None
        for form in product.forms(number):
            try:
                with named(_told(form, codes), wait_for(codes.device)):
                    y = product.run(x, form)
            except RuntimeError:
                continue
            # An id that takes alpha, and does something else with it, is none.
            if plain is None or _agree(y, plain):
                found.append(form)
            plain = y if plain is None else plain
        refused = refused + 1 if len(found) == before else 0
        if refused == _REFUSED_IN_A_ROW:
            break
    return found


def _agree(y: Tensor, other: Tensor) -> bool:
    """Whether some rows of two results differ by no more than the two roundings of each."""
    some = slice(None, None, -(-len(y) // _ROWS_COMPARED))
    exact, one = other[some].double(), torch.ones(1, dtype=torch.float64, device=other.device)
    off = (y[some].double() - exact).abs()
    return bool((off <= scaled_bound(exact, 0 * one, one, y.dtype, 4)).all())


def _told(algorithm: Algorithm, codes: Tensor) -> str:
    return f"cuSPARSELt, {algorithm}, x {list(codes.shape)} of {codes.dtype},"
