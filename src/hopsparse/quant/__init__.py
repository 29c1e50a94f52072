"""Fewer bits for weights and inputs: the grids, their scales, and rounding. Knows no kernel."""

from .fake import fake_inputs as fake_inputs
from .fake import fake_weight as fake_weight
from .grid import code_dtype as code_dtype
from .grid import expand_scales as expand_scales
from .grid import groups_of as groups_of
from .grid import round_to as round_to
from .grid import round_weight as round_weight
from .grid import scale_dtype as scale_dtype
from .grid import to_codes as to_codes
from .grid import weight_scales as weight_scales
from .inputs import InputPeak as InputPeak
from .inputs import Rounding as Rounding
from .inputs import SharedInput as SharedInput
from .inputs import input_scales as input_scales
from .inputs import measure_scales as measure_scales
from .inputs import round_inputs as round_inputs
from .inputs import rounded_inputs as rounded_inputs
from .matrix import quantize_matrix as quantize_matrix
from .matrix import store_matrix as store_matrix
