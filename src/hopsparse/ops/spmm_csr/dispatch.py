"""The operators of a CSR matrix as torch sees them: shape rules, and gradients that are each other.

    y = A @ x       values: sddmm_csr(y', x)     x: A.T @ y'
    y = A.T @ x     values: sddmm_csr(x, y')     x: A @ y'
    y = x @ A.T     values: sddmm_csr(y'.T, x.T) x: (A.T @ y'.T).T
    sddmm_csr(u, x) u: A(y') @ x                 x: A(y').T @ u

A(y') is A with the gradient of the dot products as values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...launch import hold, is_capturing, is_holding
from .._product import COMPUTE_DTYPES, finish_decoding, is_hopper
from . import reference
from .packed import Packed, pack
from .pattern import ByMemory, Pattern, Patterns

#: Most tokens that mma.sync multiplies in tiles, most that wgmma does (wide.cuh), and the least
#: density of a weight for either: below, its few entries may gather faster than all its bits are
#: counted. Estimated: on an H200 tiles take 23 us for a token and 66 for 64 at a density of 0.1,
#: gathers 876, 520 and 329 us for 256 tokens at 0.2, 0.1 and 0.05 (docs/ops/spmm_csr.md). wide.cuh
#: is predicted to be faster than tiles that unpack for 32 tokens each. It was not measured yet.
TILE_TOKENS, WIDE_TOKENS, TILE_DENSITY = 32, 512, 0.03
TILE_DTYPES = (torch.bfloat16, torch.float16)
_PATTERNS = Patterns()
_PACKED = ByMemory["Packed | None"]()
# What captured graphs read: never dropped, whatever becomes of the tensors that it was made of.
_CAPTURED: dict[int, object] = {}


def pattern_of(indptr: Tensor, indices: Tensor, cols: int) -> Pattern:
    """What is known of a matrix; worked out at the first call with its index tensors.

    Raises:
        FormatError: The indices form no matrix of so many columns.
        UnsupportedError: It is not known, and a CUDA graph is being captured.
    """
    found = _PATTERNS.find((indptr, indices), cols)
    if found is None:
        refuse_in_capture(indices)
        found = _PATTERNS.make(indptr, indices, cols)
        finish_decoding(found.schedule.spans)
        _PATTERNS.keep(found, (indptr, indices), cols)  # Last: threads may take it from now on.
    pin(found, indices, lambda: _PATTERNS.find((indptr, indices), cols) is found)
    return found


def _near(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Index tensors as kernels read them; those of torch and of formats are so already."""
    return indptr.contiguous(), indices.contiguous()


def runs_kernel(x: Tensor) -> bool:
    """Whether there is a kernel for this tensor, and something to do."""
    if not x.is_cuda or x.dtype not in COMPUTE_DTYPES or x.numel() == 0:
        return False
    return is_hopper(x.get_device())


def _csr_matmul(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    indptr, indices = _near(indptr, indices)
    pattern = pattern_of(indptr, indices, x.shape[0])
    if not runs_kernel(x) or indptr.numel() == 1:
        return reference.csr_matmul(indptr, indices, values, x, bias)
    # Late: a process on the CPU needs neither a compiler nor a driver.
    from .device import Indices, multiply

    return multiply(Indices(indptr, indices, pattern.schedule), values, x, bias)


def _csr_matmul_t(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, cols: int) -> Tensor:
    indptr, indices = _near(indptr, indices)
    pattern = pattern_of(indptr, indices, cols)
    if (across := pattern.transposed) is None:
        refuse_in_capture(indices)
        across = pattern.transpose(indptr, indices)
        finish_decoding(across.schedule.spans)
        pattern.transposed = across
    # At every call: values that are trained change, and by `.data` without a trace.
    ordered = values[across.order]
    if not runs_kernel(x) or cols == 0:
        return reference.csr_matmul(across.indptr, across.indices, ordered, x)
    from .device import Indices, multiply

    return multiply(Indices(across.indptr, across.indices, across.schedule), ordered, x)


def _sddmm_csr(indptr: Tensor, indices: Tensor, u: Tensor, x: Tensor) -> Tensor:
    indptr, indices = _near(indptr, indices)
    pattern = pattern_of(indptr, indices, x.shape[0])
    if not runs_kernel(x) or not indices.numel():
        return reference.sddmm_csr(indptr, indices, u, x)
    from .device import Indices, sample

    return sample(Indices(indptr, indices, pattern.schedule), u, x)


def suits_tiles(entries: int, shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> bool:
    """Whether tensor cores shall multiply so many tokens by a weight, if it may be packed."""
    enough = entries >= TILE_DENSITY * shape[0] * shape[1]
    return dtype in TILE_DTYPES and tokens <= WIDE_TOKENS and enough


def may_pack(indptr: Tensor, indices: Tensor, values: Tensor) -> bool:
    """Whether a weight may be kept in tiles.

    Not where a call would make new tensors of it, nor tensors made in inference mode, of which
    torch counts no changes.
    """
    parts = (indptr, indices, values)
    return all(part.is_contiguous() and not part.is_inference() for part in parts)


def known_packed(
    indptr: Tensor, indices: Tensor, values: Tensor, cols: int
) -> tuple[bool, Packed | None]:
    """Whether a call has tried to pack this weight, and what came of it."""
    parts = (indptr, indices, values)
    return _PACKED.has(parts, cols), _PACKED.find(parts, cols)


def packed_of(indptr: Tensor, indices: Tensor, values: Tensor, cols: int) -> Packed | None:
    """The weight in tiles, packed at the first call with its three tensors."""
    parts = (indptr, indices, values)
    tried, found = known_packed(*parts, cols)
    if not tried:
        refuse_in_capture(indices)
        found = pack(*parts, cols)
        if found is not None:
            finish_decoding(found.values)
        _PACKED.keep(found, parts, cols)
    pin(found, indices, lambda: _PACKED.find(parts, cols) is found)
    return found


def pin(found: object, where: Tensor, is_current: Callable[[], bool]) -> None:
    """Keep what a capture reads for as long as its graph, if one is under way.

    Args:
        found: What is read, or None.
        where: A tensor of the same device.
        is_current: Whether it is still right.
    """
    if found is None:
        return
    if is_holding():
        hold(found, is_current)
    elif is_captured(where):
        _CAPTURED[id(found)] = found


def is_captured(where: Tensor) -> bool:
    """Whether a CUDA graph is captured on the device of this tensor."""
    return where.is_cuda and is_capturing(where.get_device())


def _spmm_csr(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, packs: bool
) -> Tensor:
    tokens, k = x.shape
    shape = (indptr.numel() - 1, k)
    packs = packs and may_pack(indptr, indices, values)
    if packs and runs_kernel(x) and suits_tiles(indices.numel(), shape, tokens, x.dtype):
        pattern_of(indptr, indices, k)  # checks the indices
        packed = packed_of(indptr, indices, values, k)
        if packed is not None:
            return _multiply_packed(packed, x, bias)
    return _csr_matmul(indptr, indices, values, x.T, bias).T.contiguous()


def _multiply_packed(packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] <= TILE_TOKENS:
        from .device import multiply_tiles

        return multiply_tiles(packed, x, bias)
    from .wide_device import multiply_wide

    return multiply_wide(packed, x, bias)


def refuse_in_capture(indices: Tensor) -> None:
    """Refuse to work something out while a CUDA graph is captured, before the stream is touched.

    Raises:
        UnsupportedError: One is.
    """
    if is_captured(indices):
        raise UnsupportedError(
            "a CSR matrix that is new, while a CUDA graph is captured",
            need="a matrix whose indices were used before, forwards and backwards as in the graph",
            hint="make the same call once before the capture",
        )


def _result(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, x.shape[1]))


def _tokens(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, packs: bool
) -> Tensor:
    return x.new_empty((x.shape[0], indptr.shape[0] - 1))


def _result_t(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, cols: int) -> Tensor:
    return x.new_empty((cols, x.shape[1]))


def _dots(indptr: Tensor, indices: Tensor, u: Tensor, x: Tensor) -> Tensor:
    return u.new_empty(indices.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, values, x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        None,
        None,
        sddmm_csr(indptr, indices, grad, x) if needs[2] else None,
        csr_matmul_t(indptr, indices, values, grad, x.shape[0]) if needs[3] else None,
        grad.sum(1) if needs[4] else None,
    )


def _gradients_of_tokens(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, values, x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    turned = grad.T
    return (
        None,
        None,
        sddmm_csr(indptr, indices, turned, x.T) if needs[2] else None,
        csr_matmul_t(indptr, indices, values, turned, x.shape[1]).T if needs[3] else None,
        grad.sum(0) if needs[4] else None,
        None,
    )


def _gradients_t(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, values, x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        None,
        None,
        sddmm_csr(indptr, indices, x, grad) if needs[2] else None,
        csr_matmul(indptr, indices, values, grad, None) if needs[3] else None,
        None,
    )


def _gradients_of_dots(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, u, x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        None,
        None,
        csr_matmul(indptr, indices, grad, x, None) if needs[2] else None,
        csr_matmul_t(indptr, indices, grad, u, x.shape[0]) if needs[3] else None,
    )


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
_LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run, _shape, _backward in (
    (
        "csr_matmul(Tensor indptr, Tensor indices, Tensor values, Tensor x, Tensor? bias) "
        "-> Tensor",
        _csr_matmul,
        _result,
        _gradients,
    ),
    (
        "spmm_csr(Tensor indptr, Tensor indices, Tensor values, Tensor x, Tensor? bias, "
        "bool packs) -> Tensor",
        _spmm_csr,
        _tokens,
        _gradients_of_tokens,
    ),
    (
        "csr_matmul_t(Tensor indptr, Tensor indices, Tensor values, Tensor x, SymInt cols) "
        "-> Tensor",
        _csr_matmul_t,
        _result_t,
        _gradients_t,
    ),
    (
        "sddmm_csr(Tensor indptr, Tensor indices, Tensor u, Tensor x) -> Tensor",
        _sddmm_csr,
        _dots,
        _gradients_of_dots,
    ),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=torch.Tag.pt2_compliant_tag)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"hopsparse::{_name}", _shape, lib=_LIBRARY)
    torch.library.register_autograd(
        f"hopsparse::{_name}", _backward, setup_context=_keep, lib=_LIBRARY
    )

spmm_csr: Callable[..., Tensor] = torch.ops.hopsparse.spmm_csr.default
csr_matmul: Callable[..., Tensor] = torch.ops.hopsparse.csr_matmul.default
csr_matmul_t: Callable[..., Tensor] = torch.ops.hopsparse.csr_matmul_t.default
sddmm_csr: Callable[..., Tensor] = torch.ops.hopsparse.sddmm_csr.default
