"""hopsparse: sparse operators, formats and models for NVIDIA Hopper GPUs.

Every public name is listed here. Importing creates no CUDA context and imports no model library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import formats as formats
from . import nn as nn
from . import ops as ops
from . import plan as plan
from .errors import ArgumentError as ArgumentError
from .errors import CalibrationError as CalibrationError
from .errors import CheckpointError as CheckpointError
from .errors import CompileError as CompileError
from .errors import DriverError as DriverError
from .errors import FormatError as FormatError
from .errors import GpuLostError as GpuLostError
from .errors import HopsparseError as HopsparseError
from .errors import UnsupportedError as UnsupportedError
from .errors import VerificationError as VerificationError
from .models.register import register as _register
from .plan import ModelPlan as ModelPlan
from .version import __version__ as __version__

# A program that only calls operators pays for them alone: what works on whole models is imported
# when it is first asked for, and `import hopsparse` stays quick.
if TYPE_CHECKING:
    from . import comm as comm
    from . import graphs as graphs
    from . import parallel as parallel
    from . import prune as prune
    from . import quant as quant
    from . import recover as recover
    from .measure import Workload as Workload
    from .models.accelerated import accelerate as accelerate
    from .models.attention_config import AttentionConfig as AttentionConfig
    from .models.budget import Problem as Problem
    from .models.budget import meet_budget as meet_budget
    from .models.budget import solve_within as solve_within
    from .models.convert import convert_checkpoint as convert_checkpoint
    from .models.evaluate import Comparison as Comparison
    from .models.evaluate import Quality as Quality
    from .models.evaluate import compare as compare
    from .models.evaluate import evaluate as evaluate
    from .models.fused import fuse_blocks as fuse_blocks
    from .models.key_blocks_cache import KeyBlocksCache as KeyBlocksCache
    from .models.load import load as load
    from .models.low_rank import load_low_rank as load_low_rank
    from .models.opened import open_model as open_model
    from .models.options import Progress as Progress
    from .models.options import SparsifyOptions as SparsifyOptions
    from .models.quality_budget import QualityBudget as QualityBudget
    from .models.recover import recover_checkpoint as recover_checkpoint
    from .models.recover_texts import RecoverTexts as RecoverTexts
    from .models.save import save as save
    from .models.sensitivity import SensitivityOptions as SensitivityOptions
    from .models.sensitivity import measure_sensitivity as measure_sensitivity
    from .models.sparse24 import export_sparse24 as export_sparse24
    from .models.sparse24 import import_sparse24 as import_sparse24
    from .models.sparsify import sparsify as sparsify
    from .models.sparsify import sparsify_checkpoint as sparsify_checkpoint
    from .models.staged import plan_and_sparsify as plan_and_sparsify
    from .models.staged import sparsify_and_recover as sparsify_and_recover
    from .models.verify import verify_checkpoint as verify_checkpoint
    from .models.vision import sparsify_vision as sparsify_vision
    from .prune import Recipe as Recipe
    from .recover import RecoverOptions as RecoverOptions

_LATER = {
    "measure": ("Workload",),
    "models.accelerated": ("accelerate",),
    "models.attention_config": ("AttentionConfig",),
    "models.budget": ("Problem", "meet_budget", "solve_within"),
    "models.convert": ("convert_checkpoint",),
    "models.evaluate": ("Comparison", "Quality", "compare", "evaluate"),
    "models.fused": ("fuse_blocks",),
    "models.key_blocks_cache": ("KeyBlocksCache",),
    "models.load": ("load",),
    "models.low_rank": ("load_low_rank",),
    "models.opened": ("open_model",),
    "models.options": ("Progress", "SparsifyOptions"),
    "models.quality_budget": ("QualityBudget",),
    "models.recover": ("recover_checkpoint",),
    "models.recover_texts": ("RecoverTexts",),
    "models.save": ("save",),
    "models.sensitivity": ("SensitivityOptions", "measure_sensitivity"),
    "models.sparse24": ("export_sparse24", "import_sparse24"),
    "models.sparsify": ("sparsify", "sparsify_checkpoint"),
    "models.staged": ("plan_and_sparsify", "sparsify_and_recover"),
    "models.verify": ("verify_checkpoint",),
    "models.vision": ("sparsify_vision",),
    "prune": ("Recipe",),
    "recover": ("RecoverOptions",),
}
_FOLDERS = ("comm", "graphs", "parallel", "prune", "quant", "recover")
_HOME = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_FOLDERS})


_TOOLS = {"Any", "TYPE_CHECKING", "import_module"}
__all__ = [name for name in __dir__() if not name.startswith("_") and name not in _TOOLS]

# from_pretrained of transformers finds our checkpoints, whichever is imported first.
_register()
