"""hopsparse: sparse operators, formats and models for NVIDIA Hopper GPUs.

Every public name is listed here. Importing creates no CUDA context and imports no model library.
"""

from . import formats as formats
from . import nn as nn
from . import ops as ops
from . import prune as prune
from .errors import ArgumentError as ArgumentError
from .errors import CalibrationError as CalibrationError
from .errors import CheckpointError as CheckpointError
from .errors import FormatError as FormatError
from .errors import HopsparseError as HopsparseError
from .errors import UnsupportedError as UnsupportedError
from .errors import VerificationError as VerificationError
from .models.convert import convert_checkpoint as convert_checkpoint
from .models.evaluate import evaluate as evaluate
from .models.load import load as load
from .models.options import Progress as Progress
from .models.options import SparsifyOptions as SparsifyOptions
from .models.register import register as _register
from .models.save import save as save
from .models.sparse24 import export_sparse24 as export_sparse24
from .models.sparse24 import import_sparse24 as import_sparse24
from .models.sparsify import sparsify as sparsify
from .models.sparsify import sparsify_checkpoint as sparsify_checkpoint
from .models.verify import verify_checkpoint as verify_checkpoint
from .prune import Recipe as Recipe
from .version import __version__ as __version__

# from_pretrained of transformers finds our checkpoints, whichever is imported first.
_register()
