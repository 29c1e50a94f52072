"""Layers whose packed weight is shared by ranks: by rows, or by columns; PyTorch's process groups.

One rank holds rows of q, k, v, gate and up, and the columns of o and down that go with them. So a
block of a Llama meets twice: where o and where down have sums that only all ranks together know.
"""

from .linear import ColumnParallelSparseLinear as ColumnParallelSparseLinear
from .linear import RowParallelSparseLinear as RowParallelSparseLinear
from .model import parallelize as parallelize
from .peers import Peers as Peers
