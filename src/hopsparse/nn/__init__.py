"""Modules: parameters and one operator call."""

from .aggregation import Aggregation as Aggregation
from .pointwise import Pointwise as Pointwise
from .pointwise import pointwise_as_linear as pointwise_as_linear
from .pointwise import restore_convolutions as restore_convolutions
from .sparse_conv import SparseConv as SparseConv
from .sparse_linear import SparseLinear as SparseLinear
