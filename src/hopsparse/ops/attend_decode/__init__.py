"""Attention of one query a sequence over chosen blocks of keys in pages."""

from .op import attend_decode

__all__ = ["attend_decode"]
