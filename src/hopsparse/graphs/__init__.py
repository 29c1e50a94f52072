"""Many launches at the cost of one: functions and models captured into CUDA graphs."""

from .accelerate import accelerate as accelerate
from .captured import Captured as Captured
from .captured import capture as capture
from .fuse import Fused as Fused
from .fuse import fuse_activations as fuse_activations
