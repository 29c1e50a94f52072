"""The largest scores of each row by exact rank, by mass or by threshold."""

from .op import select

__all__ = ["select"]
