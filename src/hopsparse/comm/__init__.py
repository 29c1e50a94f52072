"""Gradients over slow links: the largest values exactly, the rest rounded, nothing lost."""

from .checkpoint import load_state as load_state
from .counters import Counters as Counters
from .fsdp import register_fsdp as register_fsdp
from .hook import aggregate as aggregate
from .hook import hybrid_hook as hybrid_hook
from .hook import register as register
from .options import HybridOptions as HybridOptions
from .state import HybridState as HybridState
