"""What is sent of a gradient: its largest values exactly, the others rounded, the rest kept."""

from .op import hybrid_gradient

__all__ = ["hybrid_gradient"]
