"""What will run, as pure values: which GPU, and which form each layer.

Its modules import the standard library alone, and `ModelPlan` reads forms by `hopsparse.formats`.
torch is loaded all the same: `import hopsparse` registers the operators of exported programs.
"""

from .model_plan import OBJECTIVES, ModelPlan
from .solve import Front, Option, Point, Solution, solve
from .spec import KernelSpec
from .structure import (
    BLOCK_SIDES,
    BlockFill,
    Diagonals,
    LineCounts,
    Reordered,
    Structure,
    TwoFourFit,
)
from .target import TARGETS, Peak, Target, mig_slice, parse_target, target

__all__ = [
    "BLOCK_SIDES",
    "OBJECTIVES",
    "TARGETS",
    "BlockFill",
    "Diagonals",
    "Front",
    "KernelSpec",
    "LineCounts",
    "ModelPlan",
    "Option",
    "Peak",
    "Point",
    "Reordered",
    "Solution",
    "Structure",
    "Target",
    "TwoFourFit",
    "mig_slice",
    "parse_target",
    "solve",
    "target",
]
