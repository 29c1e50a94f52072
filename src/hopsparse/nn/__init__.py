"""Modules: parameters and one operator call."""

from .aggregation import Aggregation as Aggregation
from .batch_norm import fold_batch_norms as fold_batch_norms
from .convolution import Convolution as Convolution
from .convolution import convolutions_as_linear as convolutions_as_linear
from .convolution import restore_convolutions as restore_convolutions
from .hooks import has_hooks as has_hooks
from .hooks import uses_of as uses_of
from .normed import after_norm as after_norm
from .normed import rms_eps as rms_eps
from .pointwise import Pointwise as Pointwise
from .pointwise import pointwise_as_linear as pointwise_as_linear
from .residual import plus_residual as plus_residual
from .sparse_conv import SparseConv as SparseConv
from .sparse_linear import SparseLinear as SparseLinear
from .split_linear import SplitLinear as SplitLinear
