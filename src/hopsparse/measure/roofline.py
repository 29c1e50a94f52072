"""Predicted time of y = x @ w.T on a GPU: bytes over bandwidth, operations over ceiling.

Everything here is a prediction, and none of it was measured with our kernels: an efficiency says
which part of the card's ceiling the best peer reached in `bfloat16`, `float8` or `int8` on one
H200 (`REACHED`, from the rows of benchmarks/results/h200/peers_anchors.jsonl). The model is
`fixed + max(memory, compute)`; docs/ops/spmm_nm.md says how far it is off those rows, by dtype,
and a test computes that table again. No peer was timed with 4-bit weights: a product that widens
them is taken to reach what the product of its inputs' type reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..plan import Peak, Target
from .product import FAMILY, Product, Work, work

Bound = Literal["memory", "compute"]


@dataclass(frozen=True)
class Reached:
    """What the best peer of today reaches.

    Attributes:
        bandwidth: Part of the read bandwidth.
        compute: Part of the sustained tensor-core ceiling.
        fixed_us: Time beyond both: launch, prologue, epilogue of an otherwise idle card.
    """

    bandwidth: float
    compute: float
    fixed_us: float


# cuBLAS at 4,096 tokens runs at 653 to 684 TFLOP/s in bf16 (ceiling 868.9), 1,172 to 1,245 in fp8
# (1,735.8) and 819 to 885 in int8 (1,881). Its 16-token rows fit 2.5 us + bytes / 4.13 TB/s.
# For 2:4, the best of cuSPARSELt (every algorithm) and CUTLASS at 4,096 tokens: 970 to 1,117
# TFLOP/s in bf16 (1,441.7), 1,755 to 2,232 in fp8 (2,807.8), 1,840 to 2,339 in int8 (3,169.9).
# The CUTLASS rows at 16 tokens fit 5 us + bytes / 4.13 TB/s.
# For blocks, PyTorch's BSR product in bf16: 70 us of host time a call, then 251 TFLOP/s of kept
# blocks at 2,048 tokens (16384 x 4096, blocks of 128, half kept) and 0.4 TB/s at 16.
REACHED = {
    ("dense", "half"): Reached(bandwidth=0.95, compute=0.76, fixed_us=2.5),
    ("dense", "float8"): Reached(bandwidth=0.95, compute=0.69, fixed_us=2.5),
    ("dense", "int8"): Reached(bandwidth=0.95, compute=0.45, fixed_us=2.5),
    ("nm", "half"): Reached(bandwidth=0.95, compute=0.74, fixed_us=5.0),
    ("nm", "float8"): Reached(bandwidth=0.95, compute=0.70, fixed_us=5.0),
    ("nm", "int8"): Reached(bandwidth=0.95, compute=0.65, fixed_us=5.0),
    ("bsr", "half"): Reached(bandwidth=0.09, compute=0.29, fixed_us=70.0),
    ("bsr", "float8"): Reached(bandwidth=0.09, compute=0.29, fixed_us=70.0),
    ("bsr", "int8"): Reached(bandwidth=0.09, compute=0.29, fixed_us=70.0),
}


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of one product; never a measurement.

    Attributes:
        plan: What is assumed to run: `dense`, `nm` or `bsr`.
        bytes: Read and written, weight, activations and result together.
        flops: Operations, counted as if dense over the columns that the kernel walks.
        time_us: Predicted device time.
        bound: What the time is made of, fixed cost aside.
        note: What the reader must know, or "".
    """

    plan: str
    bytes: int
    flops: float
    time_us: float
    bound: Bound
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """The predictions of one product, and which of its plans is faster.

    Attributes:
        dense: The layer as it was: all entries, and no scheme.
        sparse: By the plan of its format.
        fallback: All entries in the scheme of the layer; without a scheme, `dense`.
    """

    dense: Prediction
    sparse: Prediction
    fallback: Prediction

    @property
    def chosen(self) -> Prediction:
        """The faster one: a sparse layer is never slower than dense, it runs as dense instead."""
        return self.sparse if self.sparse.time_us < self.fallback.time_us else self.fallback


@dataclass(frozen=True)
class Total:
    """Predicted time of all layers once, at one token count.

    Attributes:
        tokens: Rows of x.
        dense_us: Every layer dense, and without a scheme.
        sparse_us: Every layer by its sparse plan, even where that is slower.
        chosen_us: Every layer by the faster plan.
        sparse_layers: Layers whose faster plan is a sparse one.
        layers: All layers.
    """

    tokens: int
    dense_us: float
    sparse_us: float
    chosen_us: float
    sparse_layers: int
    layers: int

    @property
    def speedup(self) -> float:
        """Dense time over chosen time; 1 where nothing is gained, never less."""
        return self.dense_us / self.chosen_us if self.chosen_us else 1.0


def predict(product: Product, tokens: int, target: Target) -> Prediction:
    """Predict the time of `product` for `tokens` rows of x, by the plan of its own format.

    Raises:
        ArgumentError: No tokens, or a format and pattern that do not fit together.

    Example:
        >>> from hopsparse.plan import TARGETS
        >>> layer = Product((8192, 28672), "bfloat16", "nm", "2:4")
        >>> predict(layer, 16, TARGETS["h200"]).bound
        'memory'
        >>> predict(layer, 4096, TARGETS["h200"]).bound
        'compute'
    """
    return _time(work(product, tokens), product, target)


def floor_us(product: Product, tokens: int, target: Target) -> float:
    """No kernel of this format can be faster: the ceilings themselves, and nothing fixed.

    The longer of bytes over read bandwidth and operations over the sustained tensor-core ceiling.

    Example:
        >>> from hopsparse.plan import TARGETS
        >>> layer = Product((4096, 4096), "bfloat16", "nm", "2:4")
        >>> round(floor_us(layer, 16, TARGETS["h200"]), 1)
        4.4
    """
    least = work(product, tokens)
    return 1e6 * max(
        least.bytes / target.read_bandwidth,
        least.flops / _peaks(least, target)[product.compute_dtype].sustained,
    )


def choose(product: Product, tokens: int, target: Target) -> Choice:
    """Predict `product` as stored, as dense in its scheme, and as dense without one.

    Example:
        >>> from hopsparse.plan import TARGETS
        >>> choose(Product((576, 576), fmt="nm", pattern="2:4"), 1, TARGETS["h200"]).chosen.plan
        'dense'
    """
    rounded = product.as_dense()
    return Choice(
        dense=predict(replace(rounded, scheme=""), tokens, target),
        sparse=predict(product, tokens, target),
        fallback=predict(rounded, tokens, target),
    )


def whole_model(products: Sequence[Product], tokens: Iterable[int], target: Target) -> list[Total]:
    """Sum the predictions of all products, once for each token count.

    Attention, norms and layers that are not in `products` are not part of the sum.
    """
    totals = []
    for count in tokens:
        # A model repeats a few shapes: predict each once.
        cache = {product: choose(product, count, target) for product in set(products)}
        choices = [cache[product] for product in products]
        totals.append(
            Total(
                tokens=count,
                dense_us=sum(choice.dense.time_us for choice in choices),
                sparse_us=sum(choice.sparse.time_us for choice in choices),
                chosen_us=sum(choice.chosen.time_us for choice in choices),
                sparse_layers=sum(choice.chosen.plan != "dense" for choice in choices),
                layers=len(choices),
            )
        )
    return totals


def _peaks(done: Work, target: Target) -> Mapping[str, Peak]:
    return target.sparse_peak if done.plan == "nm" else target.dense_peak


def _time(done: Work, product: Product, target: Target) -> Prediction:
    reached = REACHED[done.plan, FAMILY[product.compute_dtype]]
    peak = _peaks(done, target)[product.compute_dtype].sustained
    busy = min(1.0, done.tiles / target.sm_count)
    memory_us = 1e6 * done.bytes / (target.read_bandwidth * reached.bandwidth)
    compute_us = 1e6 * done.flops / (peak * reached.compute * busy)
    fixed_us = reached.fixed_us + (done.launches - 1) * target.launch_us
    return Prediction(
        plan=done.plan,
        bytes=done.bytes,
        flops=done.flops,
        time_us=fixed_us + max(memory_us, compute_us),
        bound="memory" if memory_us >= compute_us else "compute",
        note=done.note,
    )
