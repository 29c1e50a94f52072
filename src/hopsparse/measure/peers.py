"""What users have today for y = x @ w.T + bias: cuBLAS, and cuSPARSELt in its strongest form.

A peer has `NAME`; `available()`, which says why it cannot run here; `prepare(weight, bias)`, which
makes a function of x; and `describe(product, x)`, which says what that runs. `benchmarks/rivals`
has more of them in the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UnsupportedError
from .clock import Contender, copies_to_defeat_l2, time_side_by_side
from .fault import named, wait_for

Product = Callable[[Tensor], Tensor]

# Ids that torch may know and a build may refuse have gaps; after this many there are no more.
_REFUSED_IN_A_ROW = 8
_MOST_IDS = 64
# cuSPARSELt 0.8.0 takes ids past its last one for float16: the kernel then fails with "illegal
# instruction", and the process can use the GPU no more.
_IDS = {torch.float16: 36}
# (slices of k, mode): one kernel that adds up, or two.
_SPLITS = tuple((slices, mode) for slices in (2, 4, 8) for mode in (1, 2))
# Tokens are padded to a multiple of this: what torch's own class does for 16-bit numbers.
_TOKEN_MULTIPLE = 16
_FINALISTS = 4
_SEARCH_S = 120.0  # enough for all of them, or the fastest could be missed


class CuBLAS:
    """The dense product, as `torch.nn.functional.linear` runs it."""

    NAME = "cublas"

    @staticmethod
    def available() -> str | None:
        """None: torch always has it."""
        return None

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None = None) -> Product:
        """Make the product of x [tokens, k] for a weight [out, k] and a bias [out] or None.

        Example:
            >>> CuBLAS.prepare(torch.ones(2, 4))(torch.ones(1, 4))
            tensor([[4., 4.]])
        """
        return partial(_linear, weight, bias)

    @staticmethod
    def describe(product: Product, x: Tensor) -> str:
        """What runs; cuBLAS chooses for itself."""
        return "dense"


class CuSPARSELt:
    """The 2:4 product of cuSPARSELt by the algorithm that is fastest for the problem."""

    NAME = "cusparselt"

    @staticmethod
    def available() -> str | None:
        """Why it cannot run here, or None."""
        if not torch.cuda.is_available():
            return "no GPU"
        if not torch.backends.cusparselt.is_available():
            return f"torch {torch.__version__} was built without cuSPARSELt"
        return None

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None = None, *, split_k: bool = False) -> Fastest:
        """Compress a weight; the algorithm is chosen at the first call, once a problem.

        Args:
            weight: [out, k] on a GPU, 2:4, bfloat16 or float16.
            bias: [out] or None.
            split_k: Try slices of k with the best algorithms too.

        Raises:
            UnsupportedError: See `available`, or no algorithm takes the problem.
        """
        if (why := CuSPARSELt.available()) is not None:
            raise UnsupportedError(
                f"cuSPARSELt: {why}",
                need="a GPU and a torch with cuSPARSELt",
                hint="the cu130 wheel",
            )
        return Fastest(torch._cslt_compress(weight), weight.shape[0], bias, split_k)

    @staticmethod
    def describe(product: Fastest, x: Tensor) -> str:
        """The algorithm that was chosen for as many tokens."""
        return str(product.algorithm(x))


PEERS = (CuBLAS, CuSPARSELt)


@dataclass(frozen=True)
class Algorithm:
    """How cuSPARSELt is told to compute.

    Attributes:
        id: Its algorithm id.
        split_k: Slices of k.
        split_k_mode: 1: one kernel adds the slices up; 2: a second one does; -1: not split.
    """

    id: int
    split_k: int = 1
    split_k_mode: int = -1

    def __str__(self) -> str:
        """The text of tables.

        Example:
            >>> str(Algorithm(3)), str(Algorithm(3, 4, 2))
            ('id 3', 'id 3, k in 4, mode 2')
        """
        if self.split_k == 1:
            return f"id {self.id}"
        return f"id {self.id}, k in {self.split_k}, mode {self.split_k_mode}"


@dataclass(frozen=True, eq=False)
class Fastest:
    """A compressed weight, multiplied by the algorithm that measured fastest.

    Attributes:
        packed: What `torch._cslt_compress` made.
        out: Rows of the weight.
        bias: [out] or None.
        split_k: Whether slices of k are tried.
    """

    packed: Tensor
    out: int
    bias: Tensor | None
    split_k: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, k]; returns [tokens, out]."""
        return self.run(x, self.algorithm(x))

    def algorithm(self, x: Tensor) -> Algorithm:
        """The fastest algorithm for as many tokens as x has; measured once a problem."""
        padded = -(-x.shape[0] // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        problem = (self.out, padded, x.shape[1], x.dtype, self.bias is not None, self.split_k)
        if problem not in _FASTEST:
            _FASTEST[problem] = _search(self, x)
        return _FASTEST[problem]

    def run(self, x: Tensor, by: Algorithm) -> Tensor:
        """Multiply x [tokens, k] by one algorithm."""
        tokens = x.shape[0]
        missing = -tokens % _TOKEN_MULTIPLE
        wide = F.pad(x, (0, 0, 0, missing)) if missing else x
        y = torch._cslt_sparse_mm(
            self.packed,
            wide.t(),
            bias=self.bias,
            transpose_result=True,
            alg_id=by.id,
            split_k=by.split_k,
            split_k_mode=by.split_k_mode,
        )
        return y[:tokens].contiguous() if missing else y


_FASTEST: dict[tuple[Any, ...], Algorithm] = {}


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def _search(product: Fastest, x: Tensor) -> Algorithm:
    """Time every algorithm once, in a cold L2 cache; the finalists again, on copies of the weight.

    A call of float16 takes the host 0.15 s, so that all of them on copies would take minutes.

    Raises:
        UnsupportedError: None of them takes the problem.
        GpuLostError: A kernel of one failed; it names the algorithm.
    """
    properties = torch.cuda.get_device_properties(x.device)
    count = copies_to_defeat_l2(product.packed.nbytes, properties.L2_cache_size, most=16)
    copies = [product, *(_copied(product) for _ in range(count - 1))]

    def ranked(by: list[Algorithm], on: Sequence[Fastest], **how: Any) -> list[Algorithm]:
        contenders = [
            Contender(_told(each, x), [partial(copy.run, x, each) for copy in on]) for each in by
        ]
        timings = time_side_by_side(
            contenders, warm_s=0.02, budget_s=_SEARCH_S, device=x.device, **how
        )
        timed = [pair for pair in zip(timings, by, strict=True) if not pair[0].error]
        return [each for _, each in sorted(timed, key=lambda pair: pair[0].us)]

    first = ranked(_accepted(product, x), [product], rounds=5, flush_l2=True)[:_FINALISTS]
    if product.split_k:
        first += [Algorithm(each.id, *split) for each in first[:2] for split in _SPLITS]
    final = ranked(first, copies, rounds=11, min_ms=1.0)
    if not final:
        raise UnsupportedError(
            f"cuSPARSELt: no algorithm for x {list(x.shape)} of {x.dtype} and {product.out} rows",
            need="out and k that are multiples of 16",
            hint="the dense product",
        )
    return final[0]


def _accepted(product: Fastest, x: Tensor) -> list[Algorithm]:
    """Every algorithm id that runs; a kernel that fails ends the search, a refusal does not."""
    found, refused = [], 0
    for number in range(_IDS.get(x.dtype, _MOST_IDS)):
        try:
            with named(_told(Algorithm(number), x), wait_for(x.device)):
                product.run(x, Algorithm(number))
        except RuntimeError:
            refused += 1
            if refused == _REFUSED_IN_A_ROW:
                break
        else:
            found.append(Algorithm(number))
            refused = 0
    return found


def _told(algorithm: Algorithm, x: Tensor) -> str:
    return f"cuSPARSELt, {algorithm}, x {list(x.shape)} of {x.dtype},"


def _copied(product: Fastest) -> Fastest:
    return Fastest(product.packed.clone(), product.out, product.bias, product.split_k)
