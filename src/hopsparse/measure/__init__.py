"""How long things take on a GPU, predicted and measured; what a pattern looks like, counted."""

from .decode import Decoder, DecodeStep, PartCost, Workload, decode_step, layer_cost
from .product import Product, weight_bytes
from .ranking import Candidate, Ranking, choose_storage, rank
from .roofline import Choice, Prediction, Total, choose, floor_us, predict, whole_model
from .structure import analyse

__all__ = [
    "Candidate",
    "Choice",
    "DecodeStep",
    "Decoder",
    "PartCost",
    "Prediction",
    "Product",
    "Ranking",
    "Total",
    "Workload",
    "analyse",
    "choose",
    "choose_storage",
    "decode_step",
    "floor_us",
    "layer_cost",
    "predict",
    "rank",
    "weight_bytes",
    "whole_model",
]
