"""Formats and kernels for one matrix, best first, from what was counted of its pattern.

Every time here is a prediction. What has a kernel is timed by the model of `roofline`; what has
none gets its floor alone: no kernel of that format can be faster than its bytes over the read
bandwidth, or its operations over the sustained tensor-core ceiling, both measured on one H200.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import ArgumentError
from ..formats import CSR, NM, Bitmask, Dense
from ..formats.bsr import BSR
from ..plan import Structure, Target
from ..plan.structure import percent
from .product import FAMILY, Product, work
from .roofline import REACHED, floor_us, predict

#: Sides of the blocks that are compared as formats.
BSR_SIDES = (16, 32, 64, 128)
#: PyTorch's product, which needs no kernel of ours.
DENSE_KERNEL = "torch.nn.functional.linear"
# cuSPARSE, through torch.sparse: a fixed time, and a time an entry, up to about 100 tokens the
# first and then the second times the tokens. Fitted to the rows of
# benchmarks/results/h200/unstructured_anchors.jsonl; docs/inspect.md says how far off it is.
_CUSPARSE_US, _ENTRY_PS, _ENTRY_TOKEN_PS = 22.0, 57.0, 0.56
_OPERATOR = {"nm": "spmm_nm", "bsr": "spmm_bsr", "csr": "spmm_csr"}


@dataclass(frozen=True)
class Candidate:
    """One way to store the matrix, and what y = x @ w.T would take by it on a GPU.

    Attributes:
        format: A key of `hopsparse.formats.FORMATS`.
        options: What `convert` needs besides: `2:4`, or the block as `64x64`; else "".
        bytes: Stored, in the dtype asked for.
        kernel: What can run it today: an operator of ours, PyTorch's dense product, or "".
        predicted_us: By that kernel; None without one. A model, never a measurement.
        floor_us: What no kernel of this format can be faster than.
        peer_us: What cuSPARSE is predicted to take, for csr; else None.
        note: What the reader must know, or "".
    """

    format: str
    options: str
    bytes: int
    kernel: str
    predicted_us: float | None
    floor_us: float
    peer_us: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """Format and options in one word or two."""
        return f"{self.format} {self.options}".strip()


@dataclass(frozen=True)
class Ranking:
    """The candidates of a matrix at one token count.

    Attributes:
        tokens: Rows of x.
        dtype: Of values, x and y.
        target: Name of the GPU.
        candidates: Those with a kernel by predicted time, then the others by floor.
        left_out: Why each other one is none, by label.
    """

    tokens: int
    dtype: str
    target: str
    candidates: tuple[Candidate, ...]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def rank(
    structure: Structure,
    tokens: int,
    target: Target,
    *,
    dtype: str = "bfloat16",
    kernels: Collection[str] = (),
) -> Ranking:
    """Rank the ways to multiply by a matrix: y = x @ w.T for w [out, k] and x [tokens, k].

    Args:
        structure: What `analyse` counted.
        tokens: Rows of x.
        target: The GPU.
        dtype: `bfloat16` or `float16`: of values, x and y.
        kernels: Operators that have a kernel, such as `spmm_nm`; `hopsparse.ops.plans` knows them.

    Raises:
        ArgumentError: No tokens, or another dtype.

    Example:
        >>> from hopsparse.measure.structure import analyse
        >>> from hopsparse.plan import TARGETS
        >>> found = analyse(CSR.from_dense(torch.eye(4096)))
        >>> [c.label for c in rank(found, 16, TARGETS["h200"], kernels=["spmm_nm"]).candidates[:3]]
        ['nm 2:4', 'dense', 'csr']
    """
    if tokens < 1:
        raise ArgumentError(f"{tokens} tokens", need="at least one", hint="16")
    if FAMILY.get(dtype) != "half":
        raise ArgumentError(f"dtype {dtype!r}", need="bfloat16 or float16", hint="bfloat16")
    found, left_out = [], {}
    for fmt, side in _WAYS:
        reason = _why_not(structure, fmt)
        candidate = _candidate(structure, fmt, side, tokens, target, dtype, kernels)
        if not reason and candidate.bytes > target.memory_bytes:
            reason = f"{candidate.bytes / 1e9:.0f} GB, more than the memory of {target.name}"
        if reason:
            left_out[candidate.label] = reason
        else:
            found.append(candidate)
    found.sort(key=lambda each: (each.predicted_us is None, each.predicted_us or each.floor_us))
    return Ranking(tokens, dtype, target.name, tuple(found), left_out)


_WAYS: tuple[tuple[str, int], ...] = (
    ("dense", 0),
    ("nm", 0),
    *(("bsr", side) for side in reversed(BSR_SIDES)),
    ("bitmask", 0),
    ("csr", 0),
)


@dataclass(frozen=True)
class Storage:
    """The format that `convert --to auto` stores a matrix in.

    Attributes:
        format: A key of `hopsparse.formats.FORMATS`.
        block: Sides of a block, for `bsr`.
        bytes: What it takes.
        why: The reason, as a clause.
    """

    format: str
    block: tuple[int, int] | None
    bytes: int
    why: str


#: What `choose_storage` predicts for.
STORAGE_TOKENS = 16
# A kernel is worth this many times the bytes of the smallest format.
_WORTH = 4


def choose_storage(
    structure: Structure,
    dtype: torch.dtype,
    target: Target,
    *,
    kernels: Collection[str] = (),
    without: Collection[str] = (),
) -> Storage:
    """Choose how to store a matrix, exactly.

    A format with a kernel for `dtype` that is predicted to beat the dense product at
    `STORAGE_TOKENS` tokens is taken, the fastest first, unless it takes more than 4 times the bytes
    of the smallest format. Else bytes decide: without a kernel all formats run as the dense
    product. Of equal sizes the first of nm, bsr (large blocks first), bitmask, csr, dense is taken.

    Args:
        structure: What `analyse` counted.
        dtype: Of the values.
        target: The GPU that is predicted for.
        kernels: Operators that have a kernel.
        without: Formats that are not wanted; not csr.

    Example:
        >>> from hopsparse.measure.structure import analyse
        >>> from hopsparse.plan import TARGETS
        >>> w = torch.kron(torch.eye(4), torch.ones(64, 64))
        >>> choose_storage(analyse(CSR.from_dense(w)), torch.bfloat16, TARGETS["h200"]).block
        (64, 64)
    """
    ways = [way for way in _WAYS if way[0] not in without and not _why_not(structure, way[0])]
    sizes = {way: stored_bytes(structure, *way, dtype) for way in ways}
    fmt, side = best = min(ways, key=lambda way: (sizes[way], way[0] == "dense"))
    word = str(dtype).removeprefix("torch.")
    fast = []
    if FAMILY.get(word) == "half":
        ranking = rank(structure, STORAGE_TOKENS, target, dtype=word, kernels=kernels)
        for each in ranking.candidates:
            if each.predicted_us is None or each.format == "dense":
                break
            if each.format not in without:
                fast.append(each)
    for each in fast:
        if each.bytes <= _WORTH * sizes[best]:
            block = _block(each.options) if each.format == "bsr" else None
            why = (
                f"{each.kernel} runs it, in {each.predicted_us:.1f} us predicted at "
                f"{STORAGE_TOKENS} tokens on {target.name}, faster than dense"
            )
            return Storage(each.format, block, each.bytes, why)
    dense = stored_bytes(structure, "dense", 0, dtype)
    why = f"the fewest bytes, {100 * sizes[best] / dense:.3g} % of dense"
    if fmt == "dense":
        why = f"no format takes fewer bytes at density {structure.density:.2g}"
    elif _OPERATOR.get(fmt) not in kernels:
        why += f"; {_no_kernel(dense, target)}"
    elif FAMILY.get(word) != "half":
        why += f"; {_OPERATOR[fmt]} takes no {word}: runs as the dense product"
    return Storage(fmt, (side, side) if side else None, sizes[best], why)


def stored_bytes(structure: Structure, fmt: str, side: int, dtype: torch.dtype) -> int:
    """Bytes of the matrix in a format, as its parts take them.

    Example:
        >>> from hopsparse.measure.structure import analyse
        >>> matrix = CSR.from_dense(torch.eye(64))
        >>> stored_bytes(analyse(matrix), "csr", 0, torch.float32) == matrix.nbytes
        True
    """
    shape, nnz = structure.shape, structure.nnz
    if fmt == "bsr":
        facts: dict[str, Any] = {"block": f"{side}x{side}", "blocks": structure.block(side).kept}
        specs = BSR.part_specs(shape, dtype, facts)
    elif fmt == "nm":
        specs = NM.part_specs(shape, dtype, {"pattern": "2:4"})
    elif fmt == "csr":
        specs = CSR.part_specs(shape, dtype, {"nnz": nnz})
    elif fmt == "bitmask":
        specs = Bitmask.part_specs(shape, dtype, {"nnz": nnz})
    else:
        specs = Dense.part_specs(shape, dtype, {})
    return sum(math.prod(size) * of.itemsize for size, of in specs.values())


def cusparse_us(nnz: int, tokens: int) -> float:
    """What `torch.sparse` is predicted to take for CSR of 16 bits on an H200, by cuSPARSE.

    Example:
        >>> round(cusparse_us(13_421_773, 16))
        787
    """
    return _CUSPARSE_US + nnz * 1e-6 * max(_ENTRY_PS, _ENTRY_TOKEN_PS * tokens)


def _no_kernel(dense_bytes: int, target: Target) -> str:
    """What becomes of a format without a kernel."""
    if dense_bytes > target.memory_bytes:
        return f"no kernel yet, and the dense matrix does not fit into the memory of {target.name}"
    return "no kernel yet: runs as the dense product"


def _why_not(structure: Structure, fmt: str) -> str:
    """Why a format does not hold the matrix exactly, or ""."""
    if fmt != "nm" or structure.two_four.fits:
        return ""
    assert structure.two_four.first is not None
    row, group = structure.two_four.first
    share, other = structure.two_four.share, structure.reordered
    reason = (
        f"2:4 holds {percent(share)} of the non-zeros; row {row}, group {group} has more than 2"
    )
    if other.fit.fits:
        return f"{reason}; all with its columns reordered"
    if other.fit.share > share:
        return f"{reason}; {percent(other.fit.share)} with its columns reordered"
    return reason


def _candidate(
    structure: Structure,
    fmt: str,
    side: int,
    tokens: int,
    target: Target,
    dtype: str,
    kernels: Collection[str],
) -> Candidate:
    size = stored_bytes(structure, fmt, side, getattr(torch, dtype))
    options = f"{side}x{side}" if side else "2:4" if fmt == "nm" else ""
    kernel = _OPERATOR.get(fmt, "") if _OPERATOR.get(fmt) in kernels else ""
    if fmt == "dense":
        kernel = DENSE_KERNEL
    product = _product(structure, fmt, side, dtype)
    least = (
        floor_us(product, tokens, target)
        if product
        else _entry_floor(structure, fmt, size, tokens, target, dtype)
    )
    timed = kernel and product and (product.fmt, "half") in REACHED
    return Candidate(
        format=fmt,
        options=options,
        bytes=size,
        kernel=kernel,
        predicted_us=predict(product, tokens, target).time_us if timed and product else None,
        floor_us=least,
        peer_us=cusparse_us(structure.nnz, tokens) if fmt == "csr" else None,
        note=""
        if kernel
        else _no_kernel(stored_bytes(structure, "dense", 0, getattr(torch, dtype)), target),
    )


def _product(structure: Structure, fmt: str, side: int, dtype: str) -> Product | None:
    """The product as `roofline` knows it; None for formats of single entries, and for no block."""
    if fmt == "dense":
        return Product(structure.shape, dtype)
    if fmt == "nm":
        return Product(structure.shape, dtype, "nm", "2:4")
    if fmt == "bsr":
        density = structure.block(side).density
        return Product(structure.shape, dtype, "bsr", f"block:{side}x{side}", density)
    return None


def _entry_floor(
    structure: Structure, fmt: str, size: int, tokens: int, target: Target, dtype: str
) -> float:
    """Bytes over bandwidth, and operations over the ceiling of tensor cores.

    A bitmask is unpacked, and multiplied as if dense. Entries of csr cost two operations a token;
    tensor cores cannot read them as they lie, so that their true floor is higher at many tokens.
    """
    out, cols = structure.shape
    dense = work(Product(structure.shape, dtype), tokens)
    used = cols - structure.cols.empty
    moved = size + 2 * tokens * ((used if fmt == "csr" else cols) + out)
    flops = 2.0 * tokens * structure.nnz if fmt == "csr" else dense.flops
    ceiling = target.dense_peak[dtype].sustained
    return 1e6 * max(moved / target.read_bandwidth, flops / ceiling)


def _block(options: str) -> tuple[int, int]:
    rows, _, cols = options.partition("x")
    return int(rows), int(cols)
