"""What the pattern of a matrix looks like, counted entry by entry in bounded memory."""

from .analyse import analyse
from .column_order import column_order
from .spy import cell_counts
from .strips import MOST_ENTRIES, MOST_SIDE, check_size

__all__ = ["MOST_ENTRIES", "MOST_SIDE", "analyse", "cell_counts", "check_size", "column_order"]
