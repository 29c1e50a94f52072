"""Predicted time of one decode step of a language model: every projection, head and KV cache.

Two times for each part: `time_us` has the fixed costs and reached efficiencies of the best peers of
today (`measure/roofline.py`); `floor_us` is bytes over bandwidth or operations over ceiling with
nothing fixed, which no kernel can be faster than. Norms, rotary embedding, sampling, and the one
row that is read of the embedding are left out: they are the same in every form. Nothing here is
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ArgumentError
from ..formats.scheme import Form, parse_form
from ..plan import Target
from .product import Product, weight_bytes
from .roofline import REACHED, choose, floor_us

_CACHE_BYTES = 2  # keys and values are kept in 16 bits


@dataclass(frozen=True)
class Decoder:
    """What a decode step of a model reads.

    Attributes:
        layers: [out, k] of each projection of the blocks, by name.
        head: [out, k] of the projection to the vocabulary.
        blocks: Blocks with a KV cache each.
        kv_width: Entries of one key in one block: KV heads times their size.
        dtype: `bfloat16` or `float16`: of weights that have no scheme, and of activations.
    """

    layers: Mapping[str, tuple[int, int]]
    head: tuple[int, int]
    blocks: int
    kv_width: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        batch: Sequences that each get one token a step.
        context: Tokens in the cache of each.
    """

    batch: int = 1
    context: int = 2048

    def __post_init__(self) -> None:
        for what, value in (("batch", self.batch), ("context", self.context)):
            if value < 1:
                raise ArgumentError(f"{what} {value}", need="at least 1", hint=f"{what}=1")


@dataclass(frozen=True)
class PartCost:
    """One layer, or one part of a step.

    Attributes:
        time_us: Predicted.
        floor_us: What no kernel can be faster than.
        bytes: Stored weight, or cache read; not what moves besides.
        runs: What is assumed to run: `dense`, `nm` or `bsr`.
        note: What the reader must know, or "".
    """

    time_us: float
    floor_us: float
    bytes: int
    runs: str
    note: str = ""

    def value(self, objective: str) -> float:
        """What a plan with this objective makes small: `time`, `floor` or `bytes`."""
        return {"time": self.time_us, "floor": self.floor_us, "bytes": float(self.bytes)}[objective]


@dataclass(frozen=True)
class DecodeStep:
    """One step in its parts.

    Attributes:
        projections: All projections of the blocks.
        head: The projection to the vocabulary.
        cache: Reading keys and values, and writing those of the new tokens.
    """

    projections: PartCost
    head: PartCost
    cache: PartCost

    @property
    def time_us(self) -> float:
        """Predicted time of the step."""
        return self.projections.time_us + self.head.time_us + self.cache.time_us

    @property
    def floor_us(self) -> float:
        """No kernels of these formats can be faster."""
        return self.projections.floor_us + self.head.floor_us + self.cache.floor_us

    @property
    def weight_bytes(self) -> int:
        """Stored weights of projections and head."""
        return self.projections.bytes + self.head.bytes

    def value(self, objective: str) -> float:
        """The step by `time`, `floor` or `bytes`; bytes are those of the weights."""
        values = {"time": self.time_us, "floor": self.floor_us, "bytes": float(self.weight_bytes)}
        return values[objective]


def layer_cost(
    shape: tuple[int, int], form: Form | str, batch: int, target: Target, dtype: str = "bfloat16"
) -> PartCost:
    """One layer in one form; where dense in the same scheme is faster, that is what runs.

    Args:
        shape: [out, k].
        form: Its form, as a value or as text.
        batch: Rows of x.
        target: The GPU.
        dtype: Of weights without a scheme, and of activations.

    Example:
        >>> from hopsparse.plan import TARGETS
        >>> cost = layer_cost((8192, 8192), "unstructured:0.5", 1, TARGETS["h200"])
        >>> cost.runs, cost.bytes == 8192 * 8192 * (1 + 1 / 8)
        ('dense', True)
    """
    product = Product.of(shape, parse_form(form) if isinstance(form, str) else form, dtype)
    chosen = choose(product, batch, target)
    note = chosen.sparse.note
    if (
        product.fmt != "dense"
        and chosen.chosen is chosen.fallback
        and chosen.sparse.plan != "dense"
    ):
        note = f"{product.fmt} would be slower: runs as the dense product"
    return PartCost(
        time_us=chosen.chosen.time_us,
        floor_us=min(floor_us(product, batch, target), floor_us(product.as_dense(), batch, target)),
        bytes=weight_bytes(product),
        runs=chosen.chosen.plan,
        note=note,
    )


def decode_step(
    model: Decoder, forms: Mapping[str, str], workload: Workload, target: Target
) -> DecodeStep:
    """One token for each sequence of the batch.

    Args:
        model: The model.
        forms: Form of each projection by name; one that is not named is dense.
        workload: Batch and context.
        target: The GPU.

    Raises:
        ArgumentError: A form for a layer that the model does not have, or no form.

    Example:
        >>> from hopsparse.plan import TARGETS
        >>> model = Decoder({"up": (8192, 8192)}, (32000, 8192), 1, 1024)
        >>> dense = decode_step(model, {}, Workload(), TARGETS["h200"])
        >>> sparse = decode_step(model, {"up": "2:4"}, Workload(), TARGETS["h200"])
        >>> dense.time_us > sparse.time_us > sparse.floor_us
        True
    """
    if unknown := sorted(set(forms) - set(model.layers)):
        raise ArgumentError(
            f"a form for {unknown[0]!r}",
            need="layers of the model",
            hint=", ".join(list(model.layers)[:3]),
        )
    known: dict[tuple[tuple[int, int], str], PartCost] = {}
    parts = []
    for name, shape in model.layers.items():
        key = shape, forms.get(name, "dense")
        if key not in known:
            known[key] = layer_cost(*key, workload.batch, target, model.dtype)
        parts.append(known[key])
    return DecodeStep(
        projections=PartCost(
            sum(part.time_us for part in parts),
            sum(part.floor_us for part in parts),
            sum(part.bytes for part in parts),
            "mixed",
        ),
        head=layer_cost(model.head, Form(), workload.batch, target, model.dtype),
        cache=_cache_cost(model, workload, target),
    )


def _cache_cost(model: Decoder, workload: Workload, target: Target) -> PartCost:
    """Attention of a step, as the bytes of its cache; its operations are few beside them."""
    read = 2 * model.blocks * model.kv_width * workload.batch * workload.context * _CACHE_BYTES
    written = 2 * model.blocks * model.kv_width * workload.batch * _CACHE_BYTES
    least_us = 1e6 * (read + written) / target.read_bandwidth
    # No attention was timed: one launch a block, and the bandwidth that the dense product reaches.
    reached = REACHED["dense", "half"]
    return PartCost(
        time_us=model.blocks * reached.fixed_us + least_us / reached.bandwidth,
        floor_us=least_us,
        bytes=read,
        runs="attention",
        note="attention is taken to reach the bandwidth of the dense product",
    )
