"""How long things take on a GPU, predicted and measured; what a pattern looks like, counted.

What operators need is imported here; `ranking` and `structure`, which read and count whole files,
by those who use them.
"""

from .decode import Decoder, DecodeStep, PartCost, Workload, decode_step, layer_cost
from .product import Product, weight_bytes
from .roofline import Choice, Prediction, Total, choose, floor_us, predict, whole_model

__all__ = [
    "Choice",
    "DecodeStep",
    "Decoder",
    "PartCost",
    "Prediction",
    "Product",
    "Total",
    "Workload",
    "choose",
    "decode_step",
    "floor_us",
    "layer_cost",
    "predict",
    "weight_bytes",
    "whole_model",
]
