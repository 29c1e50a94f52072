"""How much of attention lies in each block of keys: bounds, estimates and a certificate."""

from .certificate import missed_mass, select_certified
from .key_blocks import KeyBlocks, append_keys
from .op import Masses, block_masses, explain_scores, score_blocks

__all__ = [
    "KeyBlocks",
    "Masses",
    "append_keys",
    "block_masses",
    "explain_scores",
    "missed_mass",
    "score_blocks",
    "select_certified",
]
