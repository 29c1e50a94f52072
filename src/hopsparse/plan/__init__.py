"""What will run, as pure values: which GPU, and which form each layer.

Importing it needs the standard library alone; a `ModelPlan` reads its forms by `hopsparse.formats`.
"""

from .model_plan import OBJECTIVES, ModelPlan
from .solve import Front, Option, Point, Solution, solve
from .target import TARGETS, Peak, Target, mig_slice, target

__all__ = [
    "OBJECTIVES",
    "TARGETS",
    "Front",
    "ModelPlan",
    "Option",
    "Peak",
    "Point",
    "Solution",
    "Target",
    "mig_slice",
    "solve",
    "target",
]
