"""Fewer bits for weights and inputs: the grids, their scales, and rounding. Knows no kernel."""

from .grid import expand_scales as expand_scales
from .grid import groups_of as groups_of
from .grid import round_to as round_to
from .grid import round_weight as round_weight
from .grid import scale_dtype as scale_dtype
from .grid import to_codes as to_codes
from .grid import weight_scales as weight_scales
