"""What will run, as pure values: which GPU is planned for. Standard library only."""

from .target import TARGETS, Peak, Target, mig_slice, target

__all__ = ["TARGETS", "Peak", "Target", "mig_slice", "target"]
