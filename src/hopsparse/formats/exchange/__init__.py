"""Matrices in files of other programs: Matrix Market, smtx, scipy's npz, and torch files.

They are read as CSR, whatever they hold. No pickle is executed.
"""

from .foreign import FOREIGN as FOREIGN
from .foreign import Foreign as Foreign
from .foreign import foreign_matrices as foreign_matrices
from .limits import MOST_DENSE as MOST_DENSE
from .limits import MOST_ENTRIES as MOST_ENTRIES
from .limits import MOST_SIDE as MOST_SIDE
from .limits import check_size as check_size
