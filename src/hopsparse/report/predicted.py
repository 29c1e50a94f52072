"""Predicted time on a GPU for the layers of a report; nothing here is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..measure import Choice, Product, Total, choose, whole_model
from ..plan import TARGETS, Target

#: Token counts of every prediction: one stream decoding, a small batch, a large batch, a prompt.
TOKENS = (1, 16, 256, 4096)

_DTYPE_OF_SIZE = {1: "float8_e4m3fn", 2: "bfloat16"}


@dataclass(frozen=True)
class LayerTimes:
    """One layer at each of `TOKENS`."""

    name: str
    shape: tuple[int, int]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Predicted:
    """All layers of a report on one GPU.

    Attributes:
        target: The GPU.
        layers: Each layer at each token count.
        totals: All layers together at each token count.
        notes: What the reader must know about the plans, each sentence once.
    """

    target: Target
    layers: tuple[LayerTimes, ...]
    totals: tuple[Total, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The totals and notes as JSON values, for `--json`."""
        return {
            "target": self.target.name,
            "measured": False,
            "totals": [
                {
                    "tokens": total.tokens,
                    "dense_us": total.dense_us,
                    "sparse_us": total.sparse_us,
                    "chosen_us": total.chosen_us,
                    "sparse_layers": total.sparse_layers,
                    "layers": total.layers,
                }
                for total in self.totals
            ],
            "notes": list(self.notes),
        }


def predict_layers(
    layers: Sequence[Mapping[str, Any]], target: Target = TARGETS["h200"]
) -> Predicted:
    """Predict every layer of a report, dense and sparse.

    Layers stored in 32 bits are predicted in bfloat16, and a note says so.

    Args:
        layers: The `layers` of a report.
        target: The GPU to predict for.

    Example:
        >>> layer = {"name": "up", "shape": [28672, 8192], "format": "nm", "pattern": "2:4",
        ...          "density": 0.5, "bytes_dense": 28672 * 8192 * 2}
        >>> predicted = predict_layers([layer])
        >>> predicted.totals[0].speedup > 1.5
        True
    """
    products = [product_of(layer) for layer in layers]
    unique = {
        product: tuple(choose(product, tokens, target) for tokens in TOKENS)
        for product in dict.fromkeys(products)
    }
    said = (choice.sparse.note for choices in unique.values() for choice in choices)
    notes = {sentence for note in said for sentence in note.split("; ")} - {""}
    if any(product.scheme for product in products):
        notes.add("a layer that runs dense keeps the numbers of its scheme, which can gain alone")
    if any(_itemsize(layer) > 2 for layer in layers):
        notes.add("32-bit layers are predicted as if stored in bfloat16")
    return Predicted(
        target=target,
        layers=tuple(
            LayerTimes(str(layer["name"]), product.shape, unique[product])
            for layer, product in zip(layers, products, strict=True)
        ),
        totals=tuple(whole_model(products, TOKENS, target)),
        notes=tuple(sorted(notes)),
    )


def product_of(layer: Mapping[str, Any]) -> Product:
    """One layer of a report as the roofline model sees it."""
    out, k = layer["shape"]
    return Product(
        shape=(out, k),
        dtype=_DTYPE_OF_SIZE.get(_itemsize(layer), "bfloat16"),
        fmt=str(layer["format"]),
        pattern=str(layer["pattern"]),
        density=float(layer["density"]),
        scheme=str(layer.get("scheme", "")),
    )


def _itemsize(layer: Mapping[str, Any]) -> int:
    out, k = (int(side) for side in layer["shape"])
    return int(layer["bytes_dense"]) // (out * k)
