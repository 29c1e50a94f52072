"""How long things take on a GPU, predicted and measured, and how wrong they are."""

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
