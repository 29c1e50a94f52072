"""Causal attention of many queries over chosen blocks of keys in pages."""

from .op import attend_prefill
from .tiles import score_tiles

__all__ = ["attend_prefill", "score_tiles"]
