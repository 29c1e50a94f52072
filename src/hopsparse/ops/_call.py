"""What products ask about a call: who records it, and what its epilogue may be, and means."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from ..formats import SparseMatrix
from ..ranges import in_phase
from ._product import decompress, product

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
_PLAIN = (Tensor, torch.nn.Parameter)
_TENSOR_OR_NONE = (type(None), Tensor)

# Asked at every call: looked up once, they take two thirds of the time.
_modes_of_torch, _traces = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_has_transforms, _dual = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad


def check_tensors(op: str, x: object, bias: object = None, residual: object = None) -> None:
    """Refuse by name what is no tensor, before anything asks for its shape.

    Raises:
        ArgumentError: It says which, and what came.
    """
    if isinstance(x, Tensor) and isinstance(bias, _TENSOR_OR_NONE):
        if isinstance(residual, _TENSOR_OR_NONE):
            return
        name, given = "residual", residual
    else:
        name, given = ("bias", bias) if isinstance(x, Tensor) else ("x", x)
    raise ArgumentError(
        f"{op}: {name} of type {type(given).__name__}",
        need="a tensor",
        hint=f"torch.as_tensor({name})",
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors alone: nothing traced, no gradient to keep, no subclass.

    Example:
        >>> is_plain(torch.ones(1)), is_plain(torch.ones(1, requires_grad=True))
        (True, False)
    """
    # Who records would miss a launch.
    if torch.compiler.is_compiling() or _modes_of_torch() > 0 or _traces():
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or (grad and tensor.requires_grad):
            return False
    return True


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether an operator must be seen: something is traced or recorded, or has another class.

    Example:
        >>> is_recorded(torch.ones(1)), is_recorded(torch.ones(1), None)
        (False, False)
    """
    if torch.compiler.is_compiling() or _modes_of_torch() > 0 or _traces():
        return True
    return any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors)


def is_transformed() -> bool:
    """Whether vmap, another transform of torch.func or forward-mode differentiation is at work.

    Their tensors look like any other, and own no memory, or carry a tangent that a kernel drops.
    """
    if torch.compiler.is_compiling():
        return False
    return _has_transforms() or _dual._current_level >= 0


def apply_activation(y: Tensor, activation: str) -> Tensor:
    """One of `ACTIVATIONS`, in the precision of `y`; `gelu` is the one with erf.

    `swiglu` makes silu(gate) * up of eight columns of gate, then eight of up: half as many.
    """
    if activation == "relu":
        return F.relu(y)
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    if activation == "silu":
        return F.silu(y)
    if activation == "swiglu":
        gate, up = y.reshape(*y.shape[:-1], y.shape[-1] // 16, 2, 8).unbind(-2)
        return (F.silu(gate) * up).flatten(-2)
    return y


def finished_product(
    w: SparseMatrix,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 1,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Y = act(alpha * x @ w.T + bias) + residual; sums and epilogue in float32, rounded once."""
    dense, out_dtype = decompress(w), out_dtype or x.dtype
    plain = activation == "none" and alpha == 1 and residual is None
    if plain and out_dtype == x.dtype:
        return product(dense, x, bias)
    wide = _wide_product(dense, x)
    return _finished(wide, bias, activation, alpha, residual).to(out_dtype)


@in_phase("sparse", "reference")
def _wide_product(dense: Tensor, x: Tensor) -> Tensor:
    return F.linear(x.to(torch.float32), dense.to(torch.float32))


@in_phase("epilogue", "reference")
def _finished(
    wide: Tensor, bias: Tensor | None, activation: str, alpha: float, residual: Tensor | None
) -> Tensor:
    wide = wide * alpha
    if bias is not None:
        wide = wide + bias.to(torch.float32)
    wide = apply_activation(wide, activation)
    if residual is not None:
        wide = wide + residual.to(torch.float32)
    return wide


def check_epilogue(
    op: str,
    out: int,
    x: Tensor,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    known: tuple[str, ...] = ACTIVATIONS,
) -> None:
    """Refuse an epilogue that cannot mean anything.

    Raises:
        ArgumentError: No such activation, or a dtype or residual that does not fit.
    """
    if activation not in known:
        raise ArgumentError(
            f"{op}: act={activation!r}",
            need="one of " + ", ".join(known[1:]) + ", or None",
            hint=f"{ACTIVATIONS[1]!r}, or the function applied to the result",
        )
    if out_dtype not in (x.dtype, torch.float32):
        raise ArgumentError(
            f"{op}: out_dtype={out_dtype}",
            need=f"{x.dtype}, as x is, or torch.float32",
            hint=f"the result in torch.float32, .to({out_dtype})",
        )
    shape = (*x.shape[:-1], out)
    if residual is not None and (
        residual.shape != shape or residual.dtype != out_dtype or residual.device != x.device
    ):
        raise ArgumentError(
            f"{op}: residual {list(residual.shape)} of {residual.dtype} on {residual.device}",
            need=f"{list(shape)} of {out_dtype} on {x.device}, as the result is",
            hint="residual.expand(...).to(...), or added to the result",
        )
