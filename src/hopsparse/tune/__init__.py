"""Which of several kernels is fastest here: measured once, kept, and looked up afterwards.

It knows no operator: an operator gives candidates, and steps that prepare, verify and time one.

    search.search   compiles, verifies and times candidates; the fastest comes first
    store.Store     keeps what was measured, by content, for this machine
    session.tune    both, for all ranks of a distributed job
    classes         which token counts share a winner
"""

from .classes import TokenClass, token_class, token_classes
from .machine import Machine, machine_of
from .search import Ranking, Show, Steps, search
from .session import tune
from .store import Entry, Key, Measured, Store, kernel_hash, version_of

__all__ = [
    "Entry",
    "Key",
    "Machine",
    "Measured",
    "Ranking",
    "Show",
    "Steps",
    "Store",
    "TokenClass",
    "kernel_hash",
    "machine_of",
    "search",
    "token_class",
    "token_classes",
    "tune",
    "version_of",
]
