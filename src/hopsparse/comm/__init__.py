"""Gradients over slow links: the largest values exactly, the rest rounded, nothing lost."""

from .checkpoint import load_state as load_state
from .counters import Counters as Counters
from .fsdp import register_fsdp as register_fsdp
from .hook import aggregate as aggregate
from .hook import hybrid_hook as hybrid_hook
from .hook import register as register
from .leave import leave as leave
from .link import Link as Link
from .link import measure_link as measure_link
from .options import HybridOptions as HybridOptions
from .planner import PlannedState as PlannedState
from .planner import planned_hook as planned_hook
from .planner import register_planned as register_planned
from .state import HybridState as HybridState
