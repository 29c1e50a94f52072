"""y = act(alpha * x @ w.T + bias) + residual for a weight in NM format: checks, plan, run."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...formats._windows import windows_of
from ...formats.nm import NM
from ...tune import machine_of
from .._product import Plan, check_inputs, check_weight
from . import reference
from .cost import Problem
from .kernel import ACTIVATIONS, Config
from .plan import choose, tuned

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def spmm_nm(
    w: NM,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    alpha: float = 1.0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """Multiply by a 2:4 (or other N:M) weight: y = act(alpha * x @ w.T + bias) + residual.

    On a Hopper GPU a 2:4 weight of 16-bit values runs as one kernel, whatever the shape; all else
    decodes w at every call, which `plan` says. Differentiable in x, bias, residual and the kept
    values; gradients run dense, and where there is one to keep, `act` and `residual` are applied
    after the kernel. One graph under torch.compile.

    Args:
        w: [out, k], float32, bfloat16 or float16.
        x: [..., k], dtype and device of w, any strides, any number of tokens, also none. Rows that
            do not start on 16 bytes, or whose columns are no neighbours, are copied.
        bias: [out], dtype and device of w, or None.
        act: `relu`, `gelu` (with erf), `gelu_tanh`, `silu` or None.
        alpha: What the product is multiplied by, before the bias.
        residual: [..., out], device of x, in the dtype of the result, or None.
        out_dtype: Dtype of the result: that of x, or float32. None is that of x.
        config: The tile of the kernel; None chooses one.

    Returns:
        [..., out], contiguous.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype.
        UnsupportedError: Values are 8-bit; or a CUDA graph is being captured, and the kernel is not
            loaded yet.

    Example:
        >>> w = NM.from_dense(torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, -1.0, 0.0, 0.0]]))
        >>> spmm_nm(w, torch.ones(1, 4), act="relu")
        tensor([[3., 0.]])
    """
    check_weight("spmm_nm", w, NM)
    check_inputs("spmm_nm", w, x, bias)
    activation, out_dtype = act or "none", out_dtype or x.dtype
    check_epilogue(w.shape[0], x, activation, residual, out_dtype)
    if not has_kernel(w, x):
        return reference.spmm_nm(
            w,
            x,
            bias,
            activation=activation,
            alpha=alpha,
            residual=residual,
            out_dtype=out_dtype,
        )
    return run_kernel(
        w,
        x,
        bias,
        activation=activation,
        alpha=alpha,
        residual=residual,
        out_dtype=out_dtype,
        config=config,
    )


def run_kernel(
    w: NM,
    x: Tensor,
    bias: Tensor | None,
    *,
    activation: str = "none",
    alpha: float = 1.0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """`spmm_nm` where `has_kernel`, of arguments that were checked."""
    # Here, because a process on the CPU needs neither a compiler nor a driver.
    from .device import Epilogue
    from .dispatch import spmm_nm_kernel

    return spmm_nm_kernel(
        w.values,
        w.meta,
        x,
        w.shape[0],
        Epilogue(out_dtype or x.dtype, activation, residual is not None),
        bias=bias,
        residual=residual,
        alpha=alpha,
        config=config,
    )


def plan(w: NM, x: Tensor) -> Plan:
    """What `spmm_nm(w, x)` will run."""
    if x.device.type == "cpu":
        return Plan("spmm_nm", "reference", "x is on the CPU; w is decoded at every call")
    if (reason := why_no_kernel(w, x)) is not None:
        return Plan("spmm_nm", "dense", f"{reason}; w is decoded at every call")
    tokens, sms = x.numel() // max(1, x.shape[-1]), _sm_count(x.device.index)
    problem, dtype = Problem(max(1, tokens), *w.shape), str(w.dtype).removeprefix("torch.")
    machine = machine_of(x.device.index)
    config = choose(problem, sms, dtype=dtype, machine=machine)
    how = "predicted" if tuned(problem, dtype, machine) is None else "tuned"
    return Plan("spmm_nm", "kernel", f"wgmma.sp, tile {config.name}, {how}; gradients run dense")


def has_kernel(w: NM, x: Tensor) -> bool:
    """Whether the kernel can run; all else decodes w and multiplies densely."""
    return x.device.type == "cuda" and why_no_kernel(w, x) is None


def why_no_kernel(w: NM, x: Tensor) -> str | None:
    """What keeps the kernel from running on a GPU, as a clause; None if nothing does."""
    if w.dtype not in _KERNEL_DTYPES:
        return f"values are {str(w.dtype).removeprefix('torch.')}, and the kernel takes 16 bits"
    if windows_of(w.pattern) != 1:
        return f"{w.pattern} needs x gathered for each window"
    if not _is_hopper(x.device.index):
        return "the GPU is no H100 or H200"
    return None


def check_epilogue(
    out: int, x: Tensor, activation: str, residual: Tensor | None, out_dtype: torch.dtype
) -> None:
    """Refuse an epilogue that cannot mean anything.

    Raises:
        ArgumentError: No such activation, or a dtype or residual that does not fit.
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(
            f"spmm_nm: act={activation!r}",
            need="one of " + ", ".join(ACTIVATIONS[1:]) + ", or None",
            hint=f"{ACTIVATIONS[1]!r}, or the function applied to the result",
        )
    if out_dtype not in (x.dtype, torch.float32):
        raise ArgumentError(
            f"spmm_nm: out_dtype={out_dtype}",
            need=f"{x.dtype}, as x is, or torch.float32",
            hint=f"the result in torch.float32, .to({out_dtype})",
        )
    shape = (*x.shape[:-1], out)
    if residual is not None and (
        residual.shape != shape or residual.dtype != out_dtype or residual.device != x.device
    ):
        raise ArgumentError(
            f"spmm_nm: residual {list(residual.shape)} of {residual.dtype} on {residual.device}",
            need=f"{list(shape)} of {out_dtype} on {x.device}, as the result is",
            hint="residual.expand(...).to(...), or added to the result",
        )


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
