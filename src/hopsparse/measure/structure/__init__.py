"""What the pattern of a matrix looks like, counted entry by entry in bounded memory."""

from .analyse import analyse, compressed
from .column_order import column_order, fitting_order
from .spy import cell_counts, window

__all__ = ["analyse", "cell_counts", "column_order", "compressed", "fitting_order", "window"]
