"""Products with a CSR matrix: as a weight, as a graph, and the one that is its gradient."""

from __future__ import annotations

from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError, FormatError, UnsupportedError
from ...formats import HYB, SparseMatrix, convert
from ...formats.csr import CSC, CSR
from ...launch import device_facts
from .._call import check_tensors
from .._product import (
    COMPUTE_DTYPES,
    Plan,
    check_product,
    decompress,
    is_dense,
    product_plan,
    told,
)
from . import dispatch, reference
from .packed import Packed

#: Most tokens for which `spmm_csr` runs a kernel; beyond, it decodes w for a dense product.
#: Estimated: 256 tokens that gather take 329 to 876 us on an H200, and decoding was not timed
#: beside it.
KERNEL_TOKENS = dispatch.WIDE_TOKENS

_TORCH_LAYOUTS = {torch.sparse_csr: CSR, torch.sparse_csc: CSC}
_DECODED = "w is decoded at every call for PyTorch's product"
_NEED = "a CSR, CSC or HYB matrix, or a 2-D torch.sparse_csr or torch.sparse_csc tensor"
# What a HYB matrix became, as long as it lives.
# With the versions of the parts that it was made of.
_CONVERTED: WeakKeyDictionary[HYB, tuple[list[int], CSR]] = WeakKeyDictionary()


def spmm_csr(w: CSR, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a compressed-row weight: y = x @ w.T + bias.

    Differentiable in x, bias and the kept values; one graph under torch.compile. On a Hopper GPU up
    to 512 tokens run on tensor cores, where w is of 16 bits and keeps 3 % or more: the first call
    packs it, and what it made is kept until a part of w is freed or changed (edits through `.data`
    go unseen), but not of values that require a gradient. Else calls of up to 512 tokens run the
    kernel of `csr_matmul` on x.T; all others decode w at every call. `SparseLinear` decodes once.

    Args:
        w: [out, k], float32, bfloat16 or float16.
        x: [..., k], dtype and device of w, any strides, any number of tokens, also none.
        bias: [out], dtype and device of w, or None.

    Returns:
        [..., out], dtype and device of x.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype, or indices that form no matrix.
        UnsupportedError: Values are 8-bit; or a CUDA graph is being captured, and w is decoded or
            was not used before.

    Example:
        >>> w = CSR.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0]]))
        >>> spmm_csr(w, torch.ones(1, 2))
        tensor([[5., 0.]])
    """
    check_tensors("spmm_csr", x, bias)
    check_product("spmm_csr", w, x, bias, CSR)
    if _gathers(w, x):
        tokens = x.reshape(-1, w.shape[1])
        # Values that are trained change at every step, and packing takes longer than a product.
        packs = not w.values.requires_grad
        y = dispatch.spmm_csr(w.indptr, w.indices, w.values, tokens, bias, packs)
        return y.view(*x.shape[:-1], w.shape[0])
    if x.device.type == "cpu":
        return reference.spmm_csr(w, x, bias)
    return F.linear(x, decompress(w), bias)


def plan(w: CSR, x: Tensor) -> Plan:
    """What `spmm_csr(w, x)` will run."""
    if _gathers(w, x):
        return Plan("spmm_csr", "kernel", _token_kernel(w, x.numel() // w.shape[1], x))
    if not dispatch.runs_kernel(x):
        return product_plan("spmm_csr", x)
    return Plan("spmm_csr", "dense", f"more than {KERNEL_TOKENS} tokens; {_DECODED}")


def plan_kept(w: CSR, x: Tensor) -> Plan:
    """What a layer runs that may keep the decoded weight."""
    from .layers import told as told_of_tiles

    if (tiles := told_of_tiles(w, x)) is not None:
        return Plan("spmm_csr", "kernel", tiles)
    if x.device.type == "cpu":
        return product_plan("spmm_csr", x)
    return Plan("spmm_csr", "dense", f"a layer keeps it; {_DECODED}")


def _gathers(w: CSR, x: Tensor) -> bool:
    return dispatch.runs_kernel(x) and x.numel() <= KERNEL_TOKENS * w.shape[1]


def _token_kernel(w: CSR, tokens: int, x: Tensor) -> str:
    from .tiles import tile_spec, token_tiles

    parts = (w.indptr, w.indices, w.values)
    packs = not w.values.requires_grad and dispatch.may_pack(*parts)
    suits = packs and dispatch.suits_tiles(w.indices.numel(), w.shape, tokens, x.dtype)
    tried, packed = dispatch.known_packed(*parts, w.shape[1])
    if not suits or (tried and packed is None):
        return f"{_kernel_name(w.indptr, w.indices, x, tokens)}, on x.T"
    dtype = str(x.dtype).removeprefix("torch.")
    kept = "w is packed at the first call"
    if packed is not None:
        kept = f"w is packed once and kept, {packed.nbytes} bytes"
    if tokens <= dispatch.TILE_TOKENS:
        name = f"tiles {dtype}, {8 * token_tiles(tokens)} tokens"
        if packed is not None:
            name = tile_spec(dtype, token_tiles(tokens), packed.room).name
        return f"{name}; {kept}"
    return f"{_wide_kernel(packed, tokens, x, dtype)}; {kept}"


def _wide_kernel(packed: Packed | None, tokens: int, x: Tensor, dtype: str) -> str:
    """The kernel for many tokens, whose tile follows from the packed weight."""
    from .wide import wide_spec
    from .wide_cost import choose

    if packed is None:
        return f"wide {dtype}, predicted to be faster than gathers"
    found = choose(packed.shape, tokens, packed.nbytes, device_facts(x.get_device()).sm_count)
    name = wide_spec(found.config, dtype, packed.room).name
    return f"{name}, predicted to take {found.us:.0f} us"


def csr_matmul(a: SparseMatrix | Tensor, x: Tensor, *, values: Tensor | None = None) -> Tensor:
    """Multiply a sparse matrix by rows of features, y = a @ x: what a graph layer aggregates with.

    Row r of y is the sum of the rows of x that row r of a names, each times its value. Indices of a
    are used in place, int32 or int64. Entries may be in any order and repeat: each counts. What is
    worked out of the indices (a check of all of them, how they are cut, at the first backward the
    transposed matrix) is kept until they are freed, so a first call waits for the GPU.

    Sums are float32 (float64 for float64, which the CPU alone takes), always in the same order:
    equal calls give equal bits on a Hopper GPU and on the CPU. Other GPUs add by atomics.
    Differentiable in x and the values.

    Args:
        a: [rows, k]: `CSR`; a `torch.sparse_csr` tensor; `CSC` or `torch.sparse_csc`, transposed
            once; or `HYB`, converted to CSR once, whose values get no gradient.
        x: [k, features], dtype and device of a, any strides; what has no neighbouring features is
            copied.
        values: [nnz] in the order in which a stores its own, to be used in their place.

    Returns:
        [rows, features], contiguous.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Indices form no matrix of that shape.
        UnsupportedError: A dtype without a kernel; values of HYB that require a gradient; or a CUDA
            graph is being captured, and these indices were not used before.

    Example:
        >>> a = CSR.from_dense(torch.tensor([[0.0, 2.0], [1.0, 1.0]]))
        >>> csr_matmul(a, torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
        tensor([[ 6., 60.],
                [ 4., 40.]])
    """
    found = _operand("csr_matmul", a, values)
    _check_features("csr_matmul", "x", x, found.shape[1], found.values)
    parts = (found.indptr, found.indices, found.values)
    if found.by_columns:
        # Its columns are the rows of the transposed matrix, which has the same three parts.
        return dispatch.csr_matmul_t(*parts, x, found.shape[0])
    return dispatch.csr_matmul(*parts, x, None)


def sddmm_csr(a: CSR | Tensor, u: Tensor, x: Tensor) -> Tensor:
    """Dot products u[row] . x[column] at the entries of a matrix: (u @ x.T) sampled at a.

    Edge scores of graph attention, and the gradient of the values of `csr_matmul`. Indices are used
    in place, in any order. Sums are float32. Differentiable in u and x.

    Args:
        a: `CSR` or `torch.sparse_csr` [rows, k]; its values are not read.
        u: [rows, features], any strides.
        x: [k, features], dtype and device of u.

    Returns:
        [nnz], in the order of the entries of a, dtype of u.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Indices form no matrix of that shape.
        UnsupportedError: As for `csr_matmul`.

    Example:
        >>> a = CSR.from_dense(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
        >>> sddmm_csr(a, torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
        tensor([ 5.,  6., 10.])
    """
    found = _operand("sddmm_csr", a, None)
    if found.by_columns or isinstance(a, HYB):
        raise ArgumentError(
            "sddmm_csr: a matrix that is not stored by rows",
            need="a CSR matrix or a torch.sparse_csr tensor",
            hint='hopsparse.formats.convert(a, "csr")',
        )
    _check_features("sddmm_csr", "u", u, found.shape[0], None)
    _check_features("sddmm_csr", "x", x, found.shape[1], u)
    if u.shape[1] != x.shape[1] or found.indices.device != u.device:
        raise ArgumentError(
            f"sddmm_csr: u {told(u)}, x {told(x)}, indices on {found.indices.device}",
            need="as many features in both, on the device of the matrix",
            hint="u @ weight first, where they differ",
        )
    return dispatch.sddmm_csr(found.indptr, found.indices, u, x)


def plan_matmul(a: SparseMatrix | Tensor, x: Tensor) -> Plan:
    """What `csr_matmul(a, x)` will run.

    Example:
        >>> plan_matmul(CSR.from_dense(torch.eye(2)), torch.ones(2, 1)).describe()
        'csr_matmul runs reference: x is on the CPU; entries are gathered piece by piece'
    """
    found = _operand("csr_matmul", a, None)
    if dispatch.runs_kernel(x):
        name = _kernel_name(found.indptr, found.indices, x, x.shape[1])
        turned = "; by columns: transposed once" if found.by_columns else ""
        return Plan("csr_matmul", "kernel", name + turned)
    where = "x is on the CPU" if x.device.type == "cpu" else f"no kernel for {told(x)}"
    return Plan("csr_matmul", "reference", f"{where}; entries are gathered piece by piece")


class _Operand(NamedTuple):
    """A matrix as its three parts; `by_columns` they are those of its columns."""

    shape: tuple[int, int]
    indptr: Tensor
    indices: Tensor
    values: Tensor
    by_columns: bool


def _operand(op: str, a: SparseMatrix | Tensor, values: Tensor | None) -> _Operand:
    """The parts of any matrix that is accepted.

    Raises:
        ArgumentError, FormatError, UnsupportedError: It is not.
    """
    if isinstance(a, HYB):
        a = _converted(op, a)
    if isinstance(a, CSR | CSC):
        if not torch.compiler.is_compiling():
            a._check_parts()
        found = _Operand(a.shape, a.indptr, a.indices, a.values, isinstance(a, CSC))
    elif isinstance(a, Tensor) and a.layout in _TORCH_LAYOUTS and a.ndim == 2 and not a.dense_dim():
        by_columns = a.layout is torch.sparse_csc
        indptr = a.ccol_indices() if by_columns else a.crow_indices()
        indices = a.row_indices() if by_columns else a.col_indices()
        found = _Operand((a.shape[0], a.shape[1]), indptr, indices, a.values(), by_columns)
    else:
        raise ArgumentError(
            f"{op}: a matrix {told(a)}", need=_NEED, hint="CSR.from_dense(a), or a.to_sparse_csr()"
        )
    lines = found.shape[1] if found.by_columns else found.shape[0]
    if found.indptr.numel() != lines + 1 or found.indices.shape != found.values.shape:
        raise FormatError(
            f"{op}: {found.indptr.numel()} pointers, {found.indices.numel()} indices and "
            f"{found.values.numel()} values for a matrix of {list(found.shape)}",
            need=f"{lines + 1} pointers, and a value for each index",
            hint="read the matrix again",
        )
    if values is None:
        return found
    own = found.values
    if not is_dense(values) or values.shape != own.shape or values.device != own.device:
        raise ArgumentError(
            f"{op}: values {told(values)}",
            need=f"{list(own.shape)} on {own.device}, one number an entry",
            hint="sddmm_csr(a, u, x), which gives them in that order",
        )
    return found._replace(values=values)


def _converted(op: str, a: HYB) -> CSR:
    if any(part.requires_grad for part in (a.ell_values, a.tail_values)):
        raise UnsupportedError(
            f"{op}: values of HYB that require a gradient",
            need="values without, or another format",
            hint='hopsparse.formats.convert(a, "csr")',
        )
    # Without a count of changes, as in inference mode, a matrix is converted at every call.
    parts = a.parts().values()
    counted = not any(part.is_inference() for part in parts)
    versions = [part._version for part in parts] if counted else []
    known = _CONVERTED.get(a)
    if known is not None and counted and known[0] == versions:
        return known[1]
    dispatch.refuse_in_capture(a.ell_values)
    with torch.inference_mode(False), torch.no_grad():
        made = cast(CSR, convert(a, "csr"))
    _CONVERTED[a] = versions, made
    return made


def _check_features(op: str, name: str, x: Tensor, rows: int, like: Tensor | None) -> None:
    """Refuse features that do not fit a side of the matrix, or the dtype of its values."""
    if not is_dense(x) or x.ndim != 2 or x.shape[0] != rows:
        raise ArgumentError(
            f"{op}: {name} {told(x)}",
            need=f"[{rows}, features], a row for each {'row' if name == 'u' else 'column'} of a",
            hint="x.unsqueeze(1) for one feature, x.T where features come first",
        )
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise ArgumentError(
            f"{op}: {name} {told(x)}",
            need=f"{like.dtype} on {like.device}",
            hint=f"{name}.to({like.dtype})",
        )
    if x.dtype not in COMPUTE_DTYPES and not (x.dtype == torch.float64 and x.device.type != "cuda"):
        raise UnsupportedError(
            f"{op}: {name} of {x.dtype}",
            need="float32, bfloat16 or float16; on the CPU also float64",
            hint=f"{name}.float()",
        )


def _kernel_name(indptr: Tensor, indices: Tensor, x: Tensor, features: int) -> str:
    """The kernel that is launched for an x of so many features, as benchmarks name it."""
    from .plan import spec_for, team_for

    size = x.element_size()
    aligned = features * size % 16 == 0
    if aligned and x.ndim == 2 and x.shape[1] == features and x.stride(1) == 1:
        aligned = (x.data_ptr() | x.stride(0) * size) % 16 == 0
    team = team_for(features, size, vector=aligned)
    dtype = str(x.dtype).removeprefix("torch.")
    return spec_for("multiply", dtype, team, (indptr.element_size(), indices.element_size())).name
