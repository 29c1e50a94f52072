"""Rotary positions, and keys and values into their cache, in one launch."""

from .op import rope_append

__all__ = ["rope_append"]
