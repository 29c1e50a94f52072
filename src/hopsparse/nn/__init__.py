"""Modules: parameters and one operator call."""

from .sparse_linear import SparseLinear as SparseLinear
