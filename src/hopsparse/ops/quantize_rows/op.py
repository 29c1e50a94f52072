"""Rows to codes and a scale each, also behind a norm or a gate: checks, plan, run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from .._product import is_dense, is_hopper, told
from .dispatch import register_on_gpu, run_reference, traced

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
_KINDS: dict[object, str] = {
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    "int4": "int4",
    "int4_in_e4m3": "int4_in_e4m3",
}
_GATES = (None, "halves", "interleaved")
_MOST_EPS = torch.finfo(torch.float32).max
_PLAIN = (Tensor, torch.nn.Parameter)


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype | str,
    *,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Round each row to 8 or 4 bits: symmetric, to nearest, halves to even.

    The largest magnitude of a row becomes the largest code (127, 448 or 7); or all rows share a
    static `scale`, and larger entries are clipped (int4: to -8 and 7). All is float32: what a norm,
    a gate or a residual gives is not rounded to 16 bits in between. One kernel on a Hopper GPU,
    torch elsewhere; without `norm` and `gate` the same bits everywhere, those of `hopsparse.quant`.

    NaN and infinity are not hidden. Without a static scale, the scale of a row that holds one is
    NaN. With one, the code of such an entry is NaN where codes can be (E4M3), and elsewhere the
    scale of its row is NaN. Codes of a row without a scale are 0, in E4M3 NaN. A static scale that
    is not positive and finite counts as NaN.

    Args:
        x: [..., k], bfloat16, float16 or float32, any strides; what is not contiguous is copied.
        dtype: torch.int8, torch.float8_e4m3fn, "int4" or "int4_in_e4m3" (int4, as E4M3 numbers).
        scale: float32 [1], on the device of x; None: one for each row.
        norm: [k], dtype and device of x: weight of an RMSNorm that comes first,
            x * rsqrt(mean(x^2) + eps) * norm (arXiv:1910.07467).
        eps: Of that norm.
        gate: x is [..., 2 k], silu(gate) * up is rounded: "halves", gate before up, or
            "interleaved", each column of gate before its column of up.
        residual: As x. It is added before the norm, and the sum is returned too.

    Returns:
        codes: [..., k] of `dtype`; int4: int8 [..., k / 2], the earlier one in the low bits.
        scales: float32 [..., 1]; 1 for a row of zeros.
        sums: Only with a residual: x + residual, in the dtype of x.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A gradient would be needed; 2^31 rows or over 2^30 columns on a GPU; a
            CUDA graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> codes, scales = quantize_rows(torch.tensor([[254.0, -3.0], [0.0, 0.0]]), torch.int8)
        >>> codes.tolist(), scales.tolist()
        ([[127, -2], [0, 0]], [[2.0], [1.0]])
    """
    kind = _check(x, dtype, gate)
    if scale is not None:
        _check_scale(x, scale)
    if norm is not None or residual is not None:
        _check_norm(x, norm, residual, gate)
    eps = eps if type(eps) is float and 0.0 <= eps <= 1.0 else _checked_eps(eps)
    tensors = (x, scale, norm, residual)
    _refuse_gradients(tensors)
    run = traced
    if _is_plain(tensors):
        run = _run_on_gpu if x.is_cuda else run_reference
    return tuple(run(x, kind, scale, norm, eps, gate, residual))


def _check(x: Tensor, dtype: object, gate: str | None) -> str:
    """The kind of the codes; refuses what x and the two words cannot mean.

    Raises:
        ArgumentError: It says what.
    """
    kind = _KINDS.get(dtype) if isinstance(dtype, torch.dtype | str) else None
    if kind is None:
        raise ArgumentError(
            f"quantize_rows: dtype={dtype!r}",
            need='torch.int8, torch.float8_e4m3fn, "int4" or "int4_in_e4m3"',
            hint="torch.int8",
        )
    if not is_dense(x) or x.dtype not in _INPUTS or x.dim() < 1:
        raise ArgumentError(
            f"quantize_rows: x {told(x)}",
            need="[..., k] in bfloat16, float16 or float32",
            hint="x.float()",
        )
    if gate not in _GATES:
        raise ArgumentError(
            f"quantize_rows: gate={gate!r}",
            need='"halves", "interleaved" or None',
            hint='"halves", for the output of a layer that joins gate and up',
        )
    parts = (2 if gate else 1) * (2 if kind == "int4" else 1)
    if parts > 1 and x.shape[-1] % parts:
        raise ArgumentError(
            f"quantize_rows: rows of {x.shape[-1]} to {kind}, gate={gate!r}",
            need=f"a multiple of {parts}: two codes a byte, and gate and up of one width",
            hint="torch.nn.functional.pad, with zeros",
        )
    return kind


def _check_scale(x: Tensor, scale: Tensor) -> None:
    fits = is_dense(scale) and scale.dtype == torch.float32 and scale.shape == (1,)
    if not fits or scale.device != x.device:
        raise ArgumentError(
            f"quantize_rows: scale {told(scale)}",
            need=f"[1] of torch.float32 on {x.device}",
            hint="hopsparse.quant.InputPeak().scale(scheme).to(x.device)",
        )


def _check_norm(x: Tensor, norm: Tensor | None, residual: Tensor | None, gate: str | None) -> None:
    if norm is None or gate is not None:
        got = "a residual without a norm" if norm is None else f"a norm and gate={gate!r}"
        raise ArgumentError(
            f"quantize_rows: {got}",
            need="a norm, with a residual or without; or a gate alone",
            hint="two calls, or the sum in torch",
        )
    for name, tensor, shape in (("norm", norm, x.shape[-1:]), ("residual", residual, x.shape)):
        if tensor is not None and not (
            is_dense(tensor)
            and (tensor.shape, tensor.dtype, tensor.device) == (shape, x.dtype, x.device)
        ):
            raise ArgumentError(
                f"quantize_rows: {name} {told(tensor)}",
                need=f"{list(shape)} of {x.dtype} on {x.device}",
                hint=f"{name}.to(x.device, x.dtype)",
            )


def _checked_eps(eps: Any) -> float:
    is_number = isinstance(eps, Real)
    if not is_number or not -_MOST_EPS <= eps <= _MOST_EPS:
        got = f"={eps}" if is_number else f" of type {type(eps).__name__}"
        raise ArgumentError(f"quantize_rows: eps{got}", need="a number of float32", hint="1e-6")
    return float(eps)


def _refuse_gradients(tensors: tuple[Tensor | None, ...]) -> None:
    backward = torch.is_grad_enabled()
    forward = not torch.compiler.is_compiling() and _dual._current_level >= 0
    if not backward and not forward:
        return
    for tensor in tensors:
        if tensor is None:
            continue
        if (backward and tensor.requires_grad) or (forward and _has_tangent(tensor)):
            raise UnsupportedError(
                "quantize_rows: a tensor that requires a gradient",
                need="torch.no_grad(), or tensors that require none",
                hint="hopsparse.quant.fake_inputs, which training sees through",
            )


def _has_tangent(tensor: Tensor) -> bool:
    return _dual.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


# Asked at every call: looked up once, they take two thirds of the time.
_modes_of_torch, _traces = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_has_transforms, _dual = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad


def _is_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether these are tensors alone: nothing traced, transformed or recorded, no subclass."""
    # Who records would miss a launch.
    if torch.compiler.is_compiling() or _modes_of_torch() > 0 or _traces() or _has_transforms():
        return False
    return all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)


def _run_on_gpu(
    x: Tensor,
    kind: str,
    scale: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
) -> list[Tensor]:
    """The kernel where there is one for this GPU, and something to do."""
    if x.numel() == 0 or not is_hopper(x.get_device()):
        return run_reference(x, kind, scale, norm, eps, gate, residual)
    return _run()(x, kind, scale, norm, eps, gate, residual)


register_on_gpu(_run_on_gpu)


@cache
def _run() -> Callable[..., list[Tensor]]:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from .device import run

    return run
