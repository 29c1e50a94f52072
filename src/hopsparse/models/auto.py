"""Which format a matrix is stored in when nobody says: the one that its pattern asks for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import HopsparseError
from ..formats import CSR, NM, Quantized, SparseMatrix
from ..formats.exchange import MOST_DENSE
from ..measure.ranking import choose_storage
from ..measure.structure import analyse
from ..ops.plans import plans
from ..plan import TARGETS, Structure, Target

#: The word that asks for it.
AUTO = "auto"
#: Formats that a matrix reaches by a dense copy.
BY_DENSE = ("nm", "bsr", "bsr24", "dense")


@dataclass(frozen=True)
class Chosen:
    """A format, and why.

    Attributes:
        format: A key of `hopsparse.formats.FORMATS`.
        block: Sides of a block, for bsr.
        why: As a clause.
    """

    format: str
    block: tuple[int, int] | None
    why: str


def kernels() -> frozenset[str]:
    """The operators that have a kernel in this version.

    Example:
        >>> "spmm_nm" in kernels()
        True
    """
    return frozenset(plans())


def choose(
    name: str,
    item: SparseMatrix | Tensor,
    *,
    folder: bool,
    target: Target = TARGETS["h200"],
    structure: Structure | None = None,
) -> Chosen:
    """Choose the format of a matrix.

    A matrix that is `nm` already stays so: it has a kernel, whatever its N:M. Quantized codes that
    fit 2:4 become `nm`, whose kernels are the only ones that take codes. For all others see
    `hopsparse.measure.ranking.choose_storage`.

    Args:
        name: Of the matrix, for errors.
        item: A stored matrix, or a dense one.
        folder: Whether it goes into a checkpoint, which has no name for a sparse layer that is
            stored dense.
        target: The GPU that is predicted for.
        structure: What `analyse` counted of it, where that is known already.

    Raises:
        FormatError: No matrix that can be stored; the message names it.
        UnsupportedError: It is larger than what is counted.

    Example:
        >>> import torch
        >>> choose("w", torch.eye(256), folder=False).format
        'csr'
    """
    try:
        matrix = item if isinstance(item, SparseMatrix) else CSR.from_dense(item)
        codes = matrix.codes() if isinstance(matrix, Quantized) else matrix
        if isinstance(codes, NM):
            return Chosen("nm", None, f"it is nm {codes.pattern} already, which has a kernel")
        structure = structure or analyse(codes)
    except HopsparseError as error:
        raise type(error)(f"{name}: {error.got}", need=error.need, hint=error.hint) from error
    if isinstance(matrix, Quantized) and structure.two_four.fits:
        return Chosen("nm", None, "its codes fit 2:4, and the kernels of codes take nothing else")
    without = set(BY_DENSE) if structure.shape[0] * structure.shape[1] > MOST_DENSE else set()
    if folder and not isinstance(matrix, Quantized):
        without.add("dense")
    found = choose_storage(structure, codes.dtype, target, kernels=kernels(), without=without)
    return Chosen(found.format, found.block, found.why)
