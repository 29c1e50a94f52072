"""The best blocks of keys of each sequence: `score_blocks` and `select`, in one launch."""

from .op import BlockBudget, explain_select_blocks, select_blocks

__all__ = ["BlockBudget", "explain_select_blocks", "select_blocks"]
