"""Is what runs here right: operators beside integers and float64, number by number."""

from .check import Check, Expected, Outcome, Trial, first_mismatch, outcome_of
from .inputs import dense_weight, made_once, small_integers, wide_integers

__all__ = [
    "Check",
    "Expected",
    "Outcome",
    "Trial",
    "dense_weight",
    "first_mismatch",
    "made_once",
    "outcome_of",
    "small_integers",
    "wide_integers",
]
