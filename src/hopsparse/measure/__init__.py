"""How long things take and how wrong they are: today, predicted time on a GPU."""

from .roofline import Choice, Prediction, Product, Total, choose, floor_us, predict, whole_model

__all__ = [
    "Choice",
    "Prediction",
    "Product",
    "Total",
    "choose",
    "floor_us",
    "predict",
    "whole_model",
]
